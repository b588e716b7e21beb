"""Envs and vector envs for the tests of the ledger: one that counts, and wrappers that inject one fault."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnvWrapper

from plugrl_bridges.ledger import LedgerEnv
from plugrl_bridges.ledger.schema import Flag

if TYPE_CHECKING:
    from collections.abc import Callable

    from stable_baselines3.common.vec_env import VecEnv

Returned = tuple[Any, Any, Any, list[dict[str, Any]]]


class CountingEnv(gym.Env[Any, Any]):
    """Show numbers that occur once only; every third episode terminates, the others are truncated."""

    def __init__(self, number: int = 0, length: int = 5, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), dtype)
        self.action_space = spaces.Box(-10, 10, (2,), np.float32)
        self._seen = 1000.0 * number
        self._length = length
        self._t = self._episode = 0

    def _observe(self) -> Any:
        self._seen += 1.0009765625  # exact in float32, not in float16
        return np.array([self._seen, -self._seen, 0.5], self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._t = 0
        self._episode += 1
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        ended = self._t >= self._length
        terminated = ended and self._episode % 3 == 0
        return self._observe(), float(action[0]) + 0.1, terminated, ended and not terminated, {}


class HangingEnv(CountingEnv):
    """Never come back from one step, and leave the file ``arrived`` to say so.

    Args:
        number: As of `CountingEnv`; episodes are longer by it.
        hangs_at: Number of the step over all episodes, from 1; 0: none.
        arrived: The file.
    """

    def __init__(self, number: int, hangs_at: int, arrived: str) -> None:
        super().__init__(number, 5 + number)
        self._left, self._arrived = hangs_at, arrived

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        if not self._left:
            Path(self._arrived).touch()
            threading.Event().wait()
        return super().step(action)


def make_recorded(folder: str, env_index: int, hangs_at: int = 0, arrived: str = "") -> LedgerEnv:
    """Make env ``env_index`` of a client process, with its ledger; the last of two hangs if one is to."""
    return LedgerEnv(HangingEnv(env_index, hangs_at * env_index, arrived), folder, env_index=env_index)


def forget_losses(path: Path) -> None:
    """Change a trainer's ledger, as if the bridge did not say which ends it made up."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE steps SET flags = flags & ~?", (int(Flag.LOST),))


class MixedEnv(gym.Env[Any, Any]):
    """Have an observation of many kinds, a large image among them, and an action of two kinds."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (32, 32, 3), np.uint8),
                "inner": spaces.Dict({"mode": spaces.Discrete(3), "flags": spaces.MultiBinary(4)}),
                "words": spaces.Text(5, charset="ab"),
                "x": spaces.Box(-1, 1, (2,), np.float64),
            }
        )
        self.action_space = spaces.Dict({"go": spaces.Discrete(2), "where": spaces.Box(-1, 1, (2,), np.float32)})
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.observation_space.seed(seed)
        self._t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self.observation_space.sample(), float(action["go"]), self._t >= 4, False, {}


class FaultyVecEnv(VecEnvWrapper):
    """Stand for a boundary that spoils one thing, in one vector step.

    Args:
        venv: Below it, the truth.
        at: Number of the vector step, from 1.
        spoil: Given what the step returned; gives what the trainer gets.
        skip: Row whose env is not stepped.
    """

    def __init__(
        self, venv: VecEnv, at: int, spoil: Callable[[Returned], Returned] = lambda returned: returned
    ) -> None:
        super().__init__(venv)
        self._at, self._spoil = at, spoil
        self._steps = 0

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        self._steps += 1
        returned = self.venv.step_wait()
        return self._spoil(returned) if self._steps == self._at else returned
