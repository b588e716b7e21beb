"""What a reset of some envs hands the others again: the trainer acts on it, so it must be what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from click.testing import CliRunner
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVectorEnv, compare
from plugrl_bridges.ledger.cli import main
from plugrl_bridges.ledger.schema import Flag
from tests.ledger.envs import CountingEnv, MixedEnv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class SpoilingVectorEnv(gym.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Spoil what one reset with a mask returns; the observations are those that were returned before."""

    def __init__(self, env: Any, at: int, spoil: Callable[[Any], None]) -> None:
        super().__init__(env)
        self._left, self._spoil = at, spoil

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        returned = self.env.reset(seed=seed, options=options)
        if options is not None:
            self._left -= 1
            if not self._left:
                self._spoil(returned[0])
        return returned


def run(folder: Path, make: Callable[[int], gym.Env[Any, Any]], at: int, spoil: Callable[[Any], None]) -> Any:
    makers = [
        lambda number=number: LedgerEnv(make(number), folder / "env.ledger", env_index=number) for number in range(2)
    ]
    inner = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    env = LedgerVectorEnv(SpoilingVectorEnv(inner, at, spoil), folder / "trainer.ledger")
    env.action_space.seed(0)
    env.reset()
    for _ in range(12):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if (terminated | truncated).any():
            env.reset(options={"reset_mask": terminated | truncated})
    env.close()
    return compare(folder / "trainer.ledger", [folder / "env.ledger"])


def again(path: Path) -> int:
    return LedgerReader(path).count("flags & ?", (int(Flag.AGAIN),))


def spoil_row_1(observation: Any) -> None:
    observation[1, 2] = -0.5


def test_a_row_that_is_not_reset_and_changes_is_a_difference(tmp_path: Path) -> None:
    # Env 0's episodes have 3 steps, env 1's have 4: the first two resets are behind steps 3 and 4.
    found = run(tmp_path, lambda number: CountingEnv(number, 3 + number), 1, spoil_row_1)
    assert found.first is not None
    first = found.first
    assert (first.slot.number, first.episode, first.step, first.vector_step) == (1, 0, 3, 3)
    assert (first.field, first.cell, first.trainer, first.env) == ("obs", "obs[2]", -0.5, 0.5)
    assert again(tmp_path / "trainer.ledger") == 1
    reader = LedgerReader(tmp_path / "trainer.ledger")
    assert sorted(each.length for each in reader.episodes()) == [3] * 4 + [4] * 3
    shown = CliRunner().invoke(main, ["show", "--events", "20", str(tmp_path / "trainer.ledger")]).output
    assert shown.count("handed over again, otherwise than before -> [1004 -1004 -0.5]") == 1


def test_the_first_observation_of_an_episode_too(tmp_path: Path) -> None:
    makers = [
        lambda number=number: LedgerEnv(CountingEnv(number), tmp_path / "env.ledger", env_index=number)
        for number in range(2)
    ]
    inner = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
    env = LedgerVectorEnv(SpoilingVectorEnv(inner, 2, spoil_row_1), tmp_path / "trainer.ledger")
    env.reset()
    env.step(env.action_space.sample())
    env.reset(options={"reset_mask": np.array([False, True])})
    env.reset(options={"reset_mask": np.array([True, False])})
    env.step(env.action_space.sample())
    env.close()
    found = compare(tmp_path / "trainer.ledger", [tmp_path / "env.ledger"])
    assert found.first is not None
    first = found.first
    assert (first.slot.number, first.episode, first.step, first.vector_step, first.field) == (1, 1, 0, 1, "obs")


def leave(observation: Any) -> None:
    """Change nothing."""


@pytest.mark.parametrize("env", [CountingEnv, lambda _: MixedEnv()], ids=["plain", "digested"])
def test_what_is_the_same_is_not_written_again(tmp_path: Path, env: Callable[[int], gym.Env[Any, Any]]) -> None:
    found = run(tmp_path, env, 0, leave)
    assert found.equal, str(found)
    assert not again(tmp_path / "trainer.ledger")


def test_a_digested_entry_that_changes(tmp_path: Path) -> None:
    class Longer(MixedEnv):
        def __init__(self, number: int) -> None:
            super().__init__()
            self._t = 0
            self.number = number

        def step(self, action: Any) -> Any:
            *returned, truncated, info = super().step(action)
            returned[2] = self._t >= 4 + self.number
            return (*returned, truncated, info)

    def invert(observation: Any) -> None:
        observation["image"][1] ^= 1

    found = run(tmp_path, Longer, 1, invert)
    assert found.first is not None
    assert (found.first.slot.number, found.first.vector_step, found.first.field) == (1, 4, "obs")
    assert found.first.cell == "digest of image"
