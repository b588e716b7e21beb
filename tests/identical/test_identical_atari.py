"""Images: a CnnPolicy on stacked Atari frames ends with the weights of the in-process run, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from examples.sb3_atari import NUM_ENVS, digest, make_env, stack, train
from plugrl_bridges.sb3 import PlugRemoteVecEnv

ROOT = Path(__file__).resolve().parents[2]
FRAMES = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
STEPS = 2_048


def train_on(env: VecEnv, seed: int) -> str:
    stacked = stack(env)
    assert stacked.observation_space == FRAMES
    try:
        return digest(train(stacked, steps=STEPS, seed=seed, n_steps=64, n_epochs=2))
    finally:
        stacked.close()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stacked_frames_of_remote_envs_give_the_weights_of_the_in_process_run(seed: int) -> None:
    remote = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS, connect_timeout=90)
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-factory", "examples.sb3_atari:make_env"]
    command += ["--num-envs", str(NUM_ENVS), "--url", remote.url, "--quiet"]
    client = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        weights = train_on(remote, seed)
    finally:
        remote.close()
        status = client.wait(60)
    assert status == 0
    assert weights == train_on(DummyVecEnv([make_env] * NUM_ENVS), seed)
