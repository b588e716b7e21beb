"""A reaching task as a vision-language-action policy sees it: two cameras, the hand's position, and an instruction.

    plugrl-env-client --env-factory camera_text_env:make --num-envs 4      (in this folder)

The hand is a white square on a table; two coloured marks lie there, and the instruction says which one to reach.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

COLOURS = {"red": (220, 40, 40), "blue": (40, 80, 230)}
SIDE, WRIST_SIDE = 48, 16
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class ReachEnv(gym.Env[dict[str, Any], np.ndarray[Any, Any]]):
    """Reach the mark that the instruction names; an action moves the hand by at most 0.1 in each direction."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "camera": gym.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8),
                "wrist": gym.spaces.Box(0, 255, (WRIST_SIDE, WRIST_SIDE, 3), np.uint8),
                "hand": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
                "instruction": gym.spaces.Text(32, charset=LETTERS),
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.hand = np.zeros(2, np.float32)
        self.marks = dict(zip(COLOURS, self.np_random.uniform(-0.9, 0.9, (2, 2)), strict=True))
        self.wanted = str(self.np_random.choice(list(COLOURS)))
        return self._observe(), {}

    def step(self, action: np.ndarray[Any, Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.hand = np.clip(self.hand + 0.1 * np.clip(action, -1, 1), -1, 1).astype(np.float32)
        distance = float(np.abs(self.hand - self.marks[self.wanted]).max())
        return self._observe(), -distance, distance < 0.06, False, {"is_success": distance < 0.06}

    def _observe(self) -> dict[str, Any]:
        camera = np.full((SIDE, SIDE, 3), 90, np.uint8)
        for name, place in self.marks.items():
            self._draw(camera, place, COLOURS[name])
        row, column = self._pixel(self.hand)
        half = WRIST_SIDE // 2
        wrist = np.pad(camera, ((half, half), (half, half), (0, 0)))[
            row : row + WRIST_SIDE, column : column + WRIST_SIDE
        ]
        self._draw(camera, self.hand, (255, 255, 255))
        return {
            "camera": camera, "wrist": wrist, "hand": self.hand.copy(), "instruction": f"reach the {self.wanted} mark",
        }  # fmt: skip

    def _draw(self, picture: np.ndarray[Any, Any], place: Any, colour: tuple[int, int, int]) -> None:
        row, column = self._pixel(place)
        picture[max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3] = colour

    def _pixel(self, place: Any) -> tuple[int, int]:
        column, row = ((np.asarray(place) + 1) / 2 * (SIDE - 1)).round().astype(int)
        return int(row), int(column)


def make() -> gym.Env[Any, Any]:
    """Give one environment, for --env-factory."""
    return gym.wrappers.TimeLimit(ReachEnv(), max_episode_steps=40)
