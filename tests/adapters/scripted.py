"""One scripted env for every kind of space: what it observes is drawn from a seeded space, whoever steps it."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

CHARSET = "abcdefghij 0123456789äß"

OBSERVATION_SPACES: dict[str, spaces.Space[Any]] = {
    "box-f4": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "box-f8": spaces.Box(-5.0, 5.0, (2, 2), np.float64),
    "box-f2": spaces.Box(-5.0, 5.0, (4,), np.float16),
    "box-i8": spaces.Box(-9, 9, (2, 1, 3), np.int64),
    "box-i1": spaces.Box(-100, 100, (5,), np.int8),
    "box-u2": spaces.Box(0, 60000, (2,), np.uint16),
    "box-bool": spaces.Box(0, 1, (3,), np.bool_),
    "box-0d": spaces.Box(-1.0, 1.0, (), np.float32),
    "box-unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "image-hwc": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "image-chw": spaces.Box(0, 255, (3, 36, 40), np.uint8),
    "image-grey": spaces.Box(0, 255, (84, 84, 1), np.uint8),
    "discrete": spaces.Discrete(7),
    "discrete-start": spaces.Discrete(5, start=-2),
    "multi-discrete": spaces.MultiDiscrete([3, 4, 2]),
    "multi-binary": spaces.MultiBinary(6),
    "multi-binary-2d": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(12, charset=CHARSET),
    "dict": spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (36, 36, 3), np.uint8),
            "state": spaces.Box(-1.0, 1.0, (4,), np.float64),
            "mode": spaces.Discrete(3),
        }
    ),
    "dict-nested": spaces.Dict(
        {
            "arm": spaces.Dict({"joints": spaces.Box(-3.0, 3.0, (6,), np.float32), "gripper": spaces.Discrete(2)}),
            "task": spaces.Text(8, charset=CHARSET),
            "pair": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0.0, 1.0, (1,), np.float32))),
        }
    ),
    "tuple": spaces.Tuple((spaces.Discrete(4), spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.MultiDiscrete([2, 5]))),
}
ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "box-f4": spaces.Box(-2.0, 2.0, (2,), np.float32),
    "box-f8": spaces.Box(-2.0, 2.0, (1, 3), np.float64),
    "box-unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "discrete": spaces.Discrete(4),
    "discrete-start": spaces.Discrete(3, start=5),
    "multi-discrete": spaces.MultiDiscrete([3, 5]),
    "multi-binary": spaces.MultiBinary(3),
}


class ScriptedEnv(gym.Env[Any, Any]):
    """Draw everything from generators that its reset's seed (or else the episode before) decides.

    Args:
        observation: Key of `OBSERVATION_SPACES`.
        action: Key of `ACTION_SPACES`.
        env_index: Decides the first seed, the lengths of episodes and how they end.
    """

    def __init__(self, observation: str = "box-f4", action: str = "box-f4", env_index: int = 0) -> None:
        self.observation_space = copy.deepcopy(OBSERVATION_SPACES[observation])
        self.action_space = ACTION_SPACES[action]
        self.index = env_index
        self.episode, self.t = -1, 0
        self.rng = np.random.default_rng(env_index)
        self.observation_space.seed(env_index)
        self.kinds: set[str] = set()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.rng = np.random.default_rng(seed)
            self.observation_space.seed(seed)
            self.episode = -1  # a seed decides all that comes
        self.episode, self.t = self.episode + 1, 0
        info: dict[str, Any] = {"began": self.episode, "options": str(options or None)}
        if self.episode % 2:
            info["odd"] = np.array([self.episode, self.index], np.float32)
        return self.observation_space.sample(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        # An action of the wrong type or value shows in the reward, and one of the wrong dtype in the info.
        assert self.action_space.contains(action) or not isinstance(self.action_space, spaces.Discrete), action
        self.t += 1
        over = self.t >= 3 + (self.index + self.episode) % 4
        reward = float(np.sum(np.asarray(action, np.float64)) + self.rng.normal())
        info: dict[str, Any] = {
            "t": self.t,
            "x": float(self.rng.normal()),
            "half": np.float32(self.rng.normal()),
            "flag": bool(self.t % 2),
            "vector": self.rng.normal(size=2),
            "note": "step" * (1 + self.t % 2),
            "dtype": str(np.asarray(action).dtype),
            "nested": {"depth": {"t": self.t}, "name": f"env {self.index}"},
        }
        if self.t % 3 == self.index % 3:
            info["sometimes"] = self.t * 1.5
        terminated = over and self.episode % 3 != 1
        truncated = over and self.episode % 3 != 0
        return self.observation_space.sample(), reward, terminated, truncated, info
