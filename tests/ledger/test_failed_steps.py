"""A vector step that fails at the trainer, which goes on: what the envs did in it is no difference, all else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVectorEnv, compare
from plugrl_bridges.ledger.schema import Flag

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plugrl_bridges.ledger import Comparison

ENVS = 3


class FailingEnv(gym.Env[Any, Any]):
    """Show numbers at random, and fail in the steps named; episodes have 5 steps."""

    def __init__(self, number: int, failing: set[int]) -> None:
        self.observation_space: Any = spaces.Box(-1, 1, (2,), np.float64)
        self.action_space: Any = spaces.Discrete(3)
        self._rng = np.random.default_rng(number)
        self._failing, self._steps, self._length = failing, 0, 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002 - Gymnasium's
        self._length = 0
        return self._rng.uniform(-1, 1, 2), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002 - Gymnasium's
        self._steps += 1
        if self._steps in self._failing:
            raise RuntimeError("a sensor failed")
        self._length += 1
        return self._rng.uniform(-1, 1, 2), self._rng.uniform(), self._length == 5, False, {}


class SpoilingVectorEnv(gym.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Change an observation of row 0 in one step, counting those that did not fail."""

    def __init__(self, env: Any, at: int) -> None:
        super().__init__(env)
        self._left = at

    def step(self, actions: Any) -> Any:
        returned = self.env.step(actions)
        self._left -= 1
        if not self._left:
            returned[0][0, 1] = 7.0
        return returned


def run(
    folder: Path, mode: AutoresetMode, failing: Callable[[int], set[int]], *, retry: bool = False, spoil: int = 0
) -> tuple[Comparison, int]:
    """Go on after each step that failed, by a reset or by another step; tell how many did."""
    folder.mkdir(exist_ok=True)
    makers = [
        lambda number=number: LedgerEnv(
            FailingEnv(number, failing(number)), folder / f"env{number}.ledger", env_index=number
        )
        for number in range(ENVS)
    ]
    inner = SpoilingVectorEnv(SyncVectorEnv(makers, autoreset_mode=mode), spoil)
    env = LedgerVectorEnv(inner, folder / "trainer.ledger")
    env.action_space.seed(0)
    env.reset()
    failed = 0
    for _ in range(60):
        try:
            _, _, ended, _, _ = env.step(env.action_space.sample())
        except RuntimeError:
            failed += 1
            if not retry:
                env.reset()
            continue
        if mode is AutoresetMode.DISABLED and ended.any():
            env.reset(options={"reset_mask": ended})
    env.close()
    return compare(folder / "trainer.ledger", [folder / f"env{number}.ledger" for number in range(ENVS)]), failed


def without_outcome(path: Path) -> int:
    return LedgerReader(path).count("flags & ?", (int(Flag.FAILED),))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_what_envs_did_in_a_step_that_failed_is_no_difference(tmp_path: Path, mode: AutoresetMode) -> None:
    for number in range(10):
        rng = np.random.default_rng(number)
        at = [set(rng.integers(2, 60, 3).tolist()) for _ in range(ENVS)]
        found, failed = run(tmp_path / str(number), mode, at.__getitem__)
        assert failed >= 3
        assert found.equal, str(found)
        assert found.env_steps > ENVS * (60 - failed) * 0.6, "and all else was compared"
        path = tmp_path / str(number) / "trainer.ledger"
        assert LedgerReader(path).closed
        assert without_outcome(path) == failed * ENVS


def test_a_trainer_that_takes_another_step(tmp_path: Path) -> None:
    found, failed = run(tmp_path, AutoresetMode.NEXT_STEP, lambda number: {4} if number == 1 else set(), retry=True)
    assert failed == 1
    assert found.equal, str(found)


@pytest.mark.parametrize("spoil", [8, 9, 10, 11, 30])
def test_a_fault_near_a_step_that_failed(tmp_path: Path, spoil: int) -> None:
    """The tenth step fails, so that the tenth that did not is the one behind it."""
    found, failed = run(tmp_path, AutoresetMode.SAME_STEP, lambda number: {10} if number == 2 else set(), spoil=spoil)
    assert failed == 1
    assert found.first is not None
    assert (found.first.slot.number, found.first.vector_step) == (0, spoil), str(found)


def test_no_failed_step_is_written_of_other_runs(tmp_path: Path) -> None:
    found, failed = run(tmp_path, AutoresetMode.SAME_STEP, lambda _: set())
    assert (found.equal, failed) == (True, 0)
    assert not without_outcome(tmp_path / "trainer.ledger")
