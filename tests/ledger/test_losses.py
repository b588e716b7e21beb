"""Clients that are lost at any point: ends that the bridge makes up are no differences, and what is one is still found.

The bridge is a `VecEnv` here whose envs are "killed" within a process, so that every point of a vector step is a case;
``test_kill`` does it to real processes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv, compare
from tests.ledger.envs import CountingEnv, FaultyVecEnv, forget_losses

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import gymnasium as gym

    from plugrl_bridges.ledger import Comparison
    from tests.ledger.envs import Returned

NUM_ENVS, STEPS = 3, 30


class SameEnv(CountingEnv):
    """Always show the same, so that only actions and rewards tell one step from the next."""

    def _observe(self) -> Any:
        return np.ones(3, np.float32)


class KilledVecEnv(DummyVecEnv):
    """Stand for a bridge and its one client, which is killed at some vector steps.

    Args:
        make: Makes env k of a client.
        folder: Of the envs' ledgers.
        kills: Vector step, from 1, to how many envs have made their step by then; more than there are: the client is
            lost when the episodes that ended are to begin anew.
    """

    def __init__(self, make: Callable[[int], gym.Env[Any, Any]], folder: Path, kills: dict[int, int]) -> None:
        self._make, self._folder, self._kills = make, folder, kills
        self._lives = self._count = 0
        super().__init__([partial(self._one, number) for number in range(NUM_ENVS)])
        self._last: list[Any] = []

    def _one(self, number: int) -> LedgerEnv:
        return LedgerEnv(self._make(number), self._folder / f"{self._lives}.ledger", env_index=number)

    def kill(self) -> None:
        writer = self.envs[0]._writer  # type: ignore[attr-defined]
        assert writer is not None
        writer._waiting.clear()
        writer.close(whole=False)
        self._lives += 1
        self.envs = [self._one(number) for number in range(NUM_ENVS)]

    def reset(self) -> Any:
        self._last = [env.reset()[0] for env in self.envs]
        return np.stack(self._last)

    def step_wait(self) -> Any:
        self._count += 1
        kill_at = self._kills.get(self._count)
        made = [env.step(action) for env, action in zip(self.envs[:kill_at], self.actions, strict=False)]
        if kill_at is not None and kill_at <= NUM_ENVS:
            self.kill()
            infos: list[dict[str, Any]] = [
                {"TimeLimit.truncated": True, "terminal_observation": last, "client_lost": True} for last in self._last
            ]
            return self.reset(), np.zeros(NUM_ENVS, np.float32), np.ones(NUM_ENVS, bool), infos
        dones = np.array([terminated or truncated for _, _, terminated, truncated, _ in made])
        infos = [{"TimeLimit.truncated": truncated and not terminated} for _, _, terminated, truncated, _ in made]
        finals = [observation for observation, *_ in made]
        self._last = list(finals)
        if kill_at is not None:
            self.kill()
            self.reset()
        for row in range(NUM_ENVS):
            if kill_at is not None:
                dones[row] = infos[row]["client_lost"] = True
                infos[row]["TimeLimit.truncated"] |= not (made[row][2] or made[row][3])
            elif dones[row]:
                self._last[row] = self.envs[row].reset()[0]
            if dones[row]:
                infos[row]["terminal_observation"] = finals[row]
        return np.stack(self._last), np.array([each[1] for each in made], np.float32), dones, infos


def run(
    folder: Path,
    make: Callable[[int], gym.Env[Any, Any]],
    kills: dict[int, int],
    at: int = 0,
    spoil: Callable[[Returned], Returned] = lambda returned: returned,
) -> Callable[[], Comparison]:
    (folder / "envs").mkdir(parents=True)
    bridge = FaultyVecEnv(KilledVecEnv(make, folder / "envs", kills), at, spoil)
    env = LedgerVecEnv(bridge, folder / "trainer.ledger")
    rng = np.random.default_rng(0)
    env.reset()
    for _ in range(STEPS):
        env.step(rng.uniform(-1, 1, (NUM_ENVS, 2)).astype(np.float32))
    env.close()
    return partial(compare, folder / "trainer.ledger", [folder / "envs"])


def lengths(number: int, kind: type[CountingEnv]) -> CountingEnv:
    return kind(number, 3 + number)


@pytest.mark.parametrize("kind", [CountingEnv, SameEnv])
@pytest.mark.parametrize("made", range(NUM_ENVS + 2))
def test_a_loss_at_any_point_is_no_difference(tmp_path: Path, kind: type[CountingEnv], made: int) -> None:
    for at in range(1, 16):
        folder = tmp_path / str(at)
        compared = run(folder, partial(lengths, kind=kind), {at: made})
        found = compared()
        assert found.equal, (at, str(found))
        assert found.env_steps + found.not_compared == NUM_ENVS * STEPS
        assert found.not_compared <= NUM_ENVS * (5 + NUM_ENVS), "nothing but the episodes in which it was lost"
        forget_losses(folder / "trainer.ledger")
        found = compared()
        assert found.first is not None, "an end that is made up is one, if it is not said to be"
        assert at - 1 <= found.first.vector_step <= at  # what is reset again at once does not count


@pytest.mark.parametrize("kind", [CountingEnv, SameEnv])
def test_losses_one_after_another(tmp_path: Path, kind: type[CountingEnv]) -> None:
    rng = np.random.default_rng(1)
    for number in range(40):
        kills = {int(at): int(rng.integers(0, NUM_ENVS + 2)) for at in rng.integers(1, STEPS + 1, 6)}
        found = run(tmp_path / str(number), partial(lengths, kind=kind), kills)()
        assert found.equal, (kills, str(found))


def test_a_fault_behind_a_loss_is_found(tmp_path: Path) -> None:
    def zero(returned: Returned) -> Returned:
        returned[0][1, 0] = 0.0
        return returned

    def end(returned: Returned) -> Returned:
        returned[2][1] = True
        returned[3][1] |= {"TimeLimit.truncated": True, "terminal_observation": returned[0][1]}
        return returned

    make = partial(lengths, kind=CountingEnv)
    for at, spoil, field in [
        (8, zero, "reset_obs"),
        (9, zero, "obs"),
        (9, end, "truncated"),
    ]:
        for made in range(NUM_ENVS + 2):
            found = run(tmp_path / f"{at} {made} {spoil.__name__}", make, {8: made}, at, spoil)()
            assert found.first is not None
            assert (found.first.slot.number, found.first.vector_step) == (1, at), (made, str(found))
            assert found.first.field == field, (made, str(found))


def test_a_client_that_comes_back_goes_on_with_its_episode(tmp_path: Path) -> None:
    """Whether the action of the step in which it was lost had reached it or not."""

    class Interrupted(FaultyVecEnv):
        count = 0

        def step_wait(self) -> Any:
            self.count += 1
            venv: Any = self.venv
            if self.count not in {4, 8}:
                return super().step_wait()
            reached = self.count == 8
            last = venv.envs[0].step(venv.actions[0])[0][None] if reached else venv.buf_obs[None].copy()
            infos = [{"TimeLimit.truncated": True, "terminal_observation": last[0], "client_lost": True}]
            return last, np.zeros(1, np.float32), np.ones(1, bool), infos

    for kind in (CountingEnv, SameEnv):
        folder = tmp_path / kind.__name__
        inner = DummyVecEnv([lambda kind=kind, folder=folder: LedgerEnv(kind(0, 30), f"{folder}/envs/")])  # type: ignore[misc]
        env = LedgerVecEnv(Interrupted(inner, 0), folder / "trainer.ledger")
        rng = np.random.default_rng(0)
        env.reset()
        for _ in range(20):
            env.step(rng.uniform(-1, 1, (1, 2)).astype(np.float32))
        env.close()
        found = compare(folder / "trainer.ledger", [folder / "envs"])
        assert found.equal, str(found)
        assert (found.lost_steps, found.env_steps + found.not_compared) == (2, 20)
        forget_losses(folder / "trainer.ledger")
        assert not compare(folder / "trainer.ledger", [folder / "envs"]).equal
