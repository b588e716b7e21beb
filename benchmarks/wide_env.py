"""Own the batched simulator of the benchmarks and tests: n envs as NumPy arrays, stepped without a loop over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

__all__ = ["WIDTH", "WideEnv", "make"]

WIDTH = 17
_SHORTEST, _LONGEST = 200, 1000


class WideEnv(VectorEnv[NDArray[np.float32], NDArray[np.float32], NDArray[Any]]):
    """Move points; step t pays t; env i's episodes end, truncated, after a length of its own.

    Args:
        num_envs: Rows.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._lengths = _SHORTEST + np.arange(num_envs) % (_LONGEST - _SHORTEST)
        self._t = np.zeros(num_envs, np.int64)
        self._points = np.zeros((num_envs, WIDTH), np.float32)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode in every row."""
        self._t[:] = 0
        self._points[:] = 0.0
        return self._points.copy(), {}

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Move every row."""
        self._t += 1
        self._points[:, :4] += actions
        self._points[:, 4] = self._t
        rewards = self._t.astype(np.float64)
        truncated = self._t >= self._lengths
        infos: dict[str, Any] = {"t": self._t.copy()}
        if truncated.any():
            final = np.full(self.num_envs, None)
            for row in np.flatnonzero(truncated).tolist():
                final[row] = self._points[row].copy()
            infos |= {"final_obs": final, "_final_obs": truncated.copy()}
            infos |= {"final_info": {"t": self._t.copy()}, "_final_info": truncated.copy()}
            self._t[truncated] = 0
            self._points[truncated] = 0.0
        return self._points.copy(), rewards, np.zeros(self.num_envs, np.bool_), truncated, infos


def make(num_envs: int) -> WideEnv:
    """Make one, for ``--env-factory benchmarks.wide_env:make --env-kwargs '{"num_envs": 4096}'``."""
    return WideEnv(num_envs)
