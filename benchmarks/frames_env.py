"""Own the synthetic camera env of the benchmarks: 84x84x4 uint8 frames that cost next to nothing to make."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

__all__ = ["FramesEnv", "make"]

_LENGTH = 200
_STORED = 8


class FramesEnv(gym.Env[NDArray[np.uint8], np.int64]):
    """Show one of eight stored frames per step; an episode has 200 steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = spaces.Discrete(4)
        self._frames = np.random.default_rng(0).integers(0, 256, (_STORED, 84, 84, 4), np.uint8)
        self._t = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._t = 0
        return self._frames[0], {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Show the next frame."""
        self._t += 1
        return self._frames[self._t % _STORED], float(action), False, self._t >= _LENGTH, {}


def make() -> FramesEnv:
    """Make one env, for ``--env-factory benchmarks.frames_env:make``."""
    return FramesEnv()
