"""Observations that are too large to be copied at each step, where a trainer writes into what it got."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from plugrl_bridges.gym import AutoresetMode, PlugRLVectorEnv
from tests.support import ClientThread


class Images(gym.Env[Any, Any]):
    """Show one number in a whole image; an episode has as many steps as it is told."""

    def __init__(self, length: int) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (160, 160, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(2)
        self._length, self._t = length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._t = 0
        return np.full((160, 160, 3), 100, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return np.full((160, 160, 3), self._t + int(action), np.uint8), 1.0, False, self._t >= self._length, {}


@pytest.mark.parametrize("verify", [False, True])
def test_masked_reset_hands_over_what_the_envs_gave(verify: bool) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, autoreset_mode=AutoresetMode.DISABLED, verify=verify, timeout=20)
    clients = [
        ClientThread(partial(Images, length), url=env.url, rank=rank, group_num_envs=2, verify=verify)
        for rank, length in enumerate((2, 5))
    ]
    try:
        observation, _ = env.reset()
        for _ in range(2):
            observation, *_ = env.step(np.zeros(2, np.int64))
        observation[:] = 7
        observation, _ = env.reset(options={"reset_mask": np.array([True, False])})
        assert [np.unique(image).tolist() for image in observation] == [[100], [2]]
    finally:
        env.close()
        for client in clients:
            client.stop()


@pytest.mark.parametrize("verify", [False, True])
def test_slot_that_a_masked_reset_leaves_out_begins_with_its_first_observation(verify: bool) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, autoreset_mode=AutoresetMode.NEXT_STEP, verify=verify, timeout=20)
    clients = [
        ClientThread(partial(Images, 2), url=env.url, rank=rank, group_num_envs=2, verify=verify) for rank in range(2)
    ]
    try:
        env.reset()
        for _ in range(2):
            env.step(np.zeros(2, np.int64))
        observation, _ = env.reset(options={"reset_mask": np.array([True, False])})
        assert [np.unique(image).tolist() for image in observation] == [[100], [2]]
        observation[:] = 7
        observation, rewards, *_ = env.step(np.zeros(2, np.int64))
        assert [np.unique(image).tolist() for image in observation] == [[1], [100]]
        assert rewards.tolist() == [1, 0]
    finally:
        env.close()
        for client in clients:
            client.stop()
