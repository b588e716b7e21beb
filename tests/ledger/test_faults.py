"""Every kind of fault is found, and named where it was made: vector step, env, episode, step, field, both values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper

from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv, compare
from tests.ledger.envs import CountingEnv, FaultyVecEnv, Returned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plugrl_bridges.ledger import Comparison

NUM_ENVS, STEPS, LENGTH = 3, 23, 5


class SkippingEnv(LedgerEnv):
    """Leave one step out on its way to the env, below the ledger of the env; a stale result stands for it."""

    skip_at: int | None = None
    twice_at: int | None = None
    action_at: int | None = None
    reset_at: int | None = None
    _count = 0
    _last: Any = None

    def step(self, action: Any) -> Any:
        self._count += 1
        if self._count == self.skip_at:
            return self._last
        if self._count == self.action_at:
            action = np.clip(action, -0.25, 0.25)
        self._last = super().step(action)
        if self._count == self.twice_at:
            self._last = super().step(action)
        if self._count == self.reset_at:
            super().reset()
        return self._last


def make(folder: Path, number: int, faults: dict[str, int]) -> LedgerEnv:
    env = SkippingEnv(CountingEnv(number, LENGTH), folder / "envs.ledger", env_index=number)
    if number == 1:
        for name, at in faults.items():
            setattr(env, name, at)
    return env


def run(folder: Path, at: int, spoil: Callable[[Returned], Returned] = lambda r: r, **faults: int) -> Comparison:
    venv = DummyVecEnv([partial(make, folder, number, faults) for number in range(NUM_ENVS)])
    env: VecEnvWrapper = LedgerVecEnv(FaultyVecEnv(venv, at, spoil), folder / "trainer.ledger")
    rng = np.random.default_rng(0)
    env.reset()
    for _ in range(STEPS):
        env.step(rng.uniform(-1, 1, (NUM_ENVS, 2)).astype(np.float32))
    env.close()
    return compare(folder / "trainer.ledger", [folder / "envs.ledger"])


def located(found: Comparison) -> tuple[int, int, int, int, str]:
    assert found.first is not None
    first = found.first
    return first.vector_step, first.slot.number, first.episode, first.step, first.field


def of_observation(change: Callable[[Any], None]) -> Callable[[Returned], Returned]:
    def spoil(returned: Returned) -> Returned:
        observation, *others = returned
        observation = observation.copy()
        change(observation)
        return (observation, *others)

    return spoil


def zero_cell(observation: Any) -> None:
    observation[1, 0] = 0.0


def swap(observation: Any) -> None:
    observation[[1, 2]] = observation[[2, 1]]


def half(observation: Any) -> None:
    observation[1] = observation[1].astype(np.float16)


def test_no_fault_no_difference(tmp_path: Path) -> None:
    found = run(tmp_path, 0)
    assert found.equal
    assert found.first is None
    assert found.notes == []
    assert found.env_steps == NUM_ENVS * STEPS
    assert found.episodes == NUM_ENVS * (1 + STEPS // LENGTH)


@pytest.mark.parametrize(
    ("change", "first", "cells"),
    [(zero_cell, (1, "obs[0]"), 1), (swap, (1, "obs[0]"), 4), (half, (1, "obs[0]"), 2)],
    ids=["zero", "swap", "f16"],
)
@pytest.mark.parametrize("at", [7, 10], ids=["obs", "reset_obs"])
def test_observation(
    tmp_path: Path, change: Callable[[Any], None], first: tuple[int, str], cells: int, at: int
) -> None:
    found = run(tmp_path, at, of_observation(change))
    field = "obs" if at == 7 else "reset_obs"
    assert located(found) == (at, first[0], at // LENGTH, at % LENGTH, field)
    assert found.first is not None
    assert found.first.cell == first[1]
    assert found.first.trainer != found.first.env
    assert sum(each.cells for each in found.differences) == cells
    assert {each.field for each in found.differences} == {field}
    assert [each.slot.number for each in found.differences] == ([1, 2] if change is swap else [1])


def test_both_values_are_told(tmp_path: Path) -> None:
    found = run(tmp_path, 7, of_observation(zero_cell))
    assert found.first is not None
    # Before it: the resets and steps of two episodes, 6 observations and 3.
    assert (found.first.trainer, found.first.env) == (0.0, np.float32(1000 + 9 * 1.0009765625))
    assert "env 1 (rank 0, index 1), episode 1, step 2 (vector step 7), obs: obs[0] is 0.0 at the trainer" in str(found)


def test_terminal_observation(tmp_path: Path) -> None:
    def spoil(returned: Returned) -> Returned:
        infos = [dict(info) for info in returned[3]]
        infos[1]["terminal_observation"] = np.zeros(3, np.float32)
        return (*returned[:3], infos)

    found = run(tmp_path, 10, spoil)
    assert located(found) == (10, 1, 1, 5, "terminal_obs")
    assert found.first is not None
    assert found.first.cells == 3


def test_terminal_observation_that_is_missing(tmp_path: Path) -> None:
    def spoil(returned: Returned) -> Returned:
        infos = [dict(info) for info in returned[3]]
        del infos[1]["terminal_observation"]
        return (*returned[:3], infos)

    found = run(tmp_path, 10, spoil)
    assert located(found) == (10, 1, 1, 5, "terminal_obs")
    assert "terminal observation is absent at the trainer" in str(found)


def test_reward(tmp_path: Path) -> None:
    def spoil(returned: Returned) -> Returned:
        rewards = returned[1].copy()
        rewards[1] = np.float16(rewards[1])
        return (returned[0], rewards, *returned[2:])

    found = run(tmp_path, 8, spoil)
    assert located(found) == (8, 1, 1, 3, "reward")


def test_reward_that_lost_its_sign(tmp_path: Path) -> None:
    """Zeros of both signs are equal as numbers, not as bits: what is compared is bits."""

    class Nothing(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return (observation, -0.0, *rest)

    def spoil(returned: Returned) -> Returned:
        return (returned[0], np.abs(returned[1]), *returned[2:])

    for at in (0, 3):
        folder = tmp_path / str(at)
        venv = DummyVecEnv([lambda folder=folder: LedgerEnv(Nothing(), f"{folder}/envs/")])  # type: ignore[misc]
        env = LedgerVecEnv(FaultyVecEnv(venv, at, spoil), folder / "trainer.ledger")
        env.reset()
        for _ in range(8):
            env.step(np.zeros((1, 2), np.float32))
        env.close()
        found = compare(folder / "trainer.ledger", [folder / "envs"])
        assert found.equal is (at == 0), str(found)
        if found.first is not None:
            assert located(found) == (3, 0, 0, 3, "reward")
            assert (str(found.first.trainer), str(found.first.env)) == ("0.0", "-0.0")


def test_spurious_terminated(tmp_path: Path) -> None:
    def spoil(returned: Returned) -> Returned:
        dones, infos = returned[2].copy(), [dict(info) for info in returned[3]]
        dones[1] = True
        infos[1] |= {"TimeLimit.truncated": False, "terminal_observation": returned[0][1]}
        return (returned[0], returned[1], dones, infos)

    found = run(tmp_path, 8, spoil)
    assert located(found) == (8, 1, 1, 3, "terminated")


def test_dropped_truncated(tmp_path: Path) -> None:
    def spoil(returned: Returned) -> Returned:
        dones, infos = returned[2].copy(), [dict(info) for info in returned[3]]
        dones[1] = False
        returned[0][1] = infos[1].pop("terminal_observation")
        return (returned[0], returned[1], dones, infos)

    found = run(tmp_path, 10, spoil)
    assert located(found) == (10, 1, 1, 5, "truncated")


def test_end_of_the_wrong_kind(tmp_path: Path) -> None:
    def spoil(returned: Returned) -> Returned:
        infos = [dict(info) for info in returned[3]]
        infos[1]["TimeLimit.truncated"] = False
        return (*returned[:3], infos)

    found = run(tmp_path, 10, spoil)
    assert located(found) == (10, 1, 1, 5, "terminated")


@pytest.mark.parametrize("at", [3, 8, 9])
def test_skipped_step(tmp_path: Path, at: int) -> None:
    found = run(tmp_path, 0, skip_at=at)
    assert located(found) == (at, 1, at // LENGTH, at % LENGTH, "step_count")
    assert found.first is not None
    assert (found.first.trainer, found.first.env) == ("made", None)


def test_step_taken_twice(tmp_path: Path) -> None:
    found = run(tmp_path, 0, twice_at=8)
    assert located(found)[:2] == (8, 1)


def test_action_changed_on_its_way(tmp_path: Path) -> None:
    found = run(tmp_path, 0, action_at=8)
    assert located(found) == (8, 1, 1, 3, "action")
    assert found.first is not None
    assert abs(found.first.env) == 0.25


def test_reset_that_nobody_asked_for(tmp_path: Path) -> None:
    found = run(tmp_path, 0, reset_at=8)
    assert located(found)[1:3] == (1, 1)
    assert found.first is not None
    assert (found.first.field, found.first.trainer, found.first.env) == ("reset_obs", None, "made")


def test_steps_that_the_trainer_never_saw(tmp_path: Path) -> None:
    env = LedgerEnv(CountingEnv(), tmp_path / "env.ledger")
    venv = LedgerVecEnv(DummyVecEnv([lambda: env]), tmp_path / "trainer.ledger")
    venv.reset()
    venv.step(np.zeros((1, 2), np.float32))
    env.step(np.zeros(2, np.float32))
    venv.close()
    found = compare(tmp_path / "trainer.ledger", [tmp_path / "env.ledger"])
    assert located(found) == (1, 0, 0, 2, "step_count")
