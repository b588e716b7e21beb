"""A policy is trained through C++ clients, and the trainer cannot tell them from Gymnasium's own environments."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from plugrl_bridges.plot import read_episodes
from plugrl_bridges.sb3 import PlugRemoteVecEnv, make_vec_env
from tests.identical.weights import digest, one_thread

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["one_thread"]

NUM_ENVS = 16
LIMIT = 200
STEPS = 8_192
"""Of all envs together: 512 of each, two whole episodes and a part."""
SETTINGS: dict[str, Any] = {
    "n_steps": 256, "gamma": 0.9, "gae_lambda": 0.95, "n_epochs": 2, "learning_rate": 1e-3, "clip_range": 0.2,
    "use_sde": True, "sde_sample_freq": 4, "device": "cpu",
}  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def counts(line: str) -> dict[str, float]:
    return {key: float(value) for key, _, value in (part.partition("=") for part in line.split())}


def test_both_sides_of_sixteen_processes_count_the_same(pendulum: Path, tmp_path: Path) -> None:
    log = tmp_path / "episodes.csv"
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS, episode_log=log)
    command = [str(pendulum), "--url", env.url, "--quiet"]
    clients = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(NUM_ENVS)
    ]
    try:
        PPO("MlpPolicy", make_vec_env(env), seed=0, **SETTINGS).learn(STEPS)
    finally:
        env.close()
        lines = [client.communicate(timeout=60)[0] for client in clients]
    assert [client.returncode for client in clients] == [0] * NUM_ENVS
    slots = read_episodes(log)
    assert sorted(slots) == list(range(NUM_ENVS))
    for rank, line in enumerate(lines):
        counted, returns = counts(line), [episode.ret for episode in slots[rank]]
        assert counted["steps"] == STEPS // NUM_ENVS
        assert counted["episodes"] == len(returns) == STEPS // NUM_ENVS // LIMIT
        assert counted["last_ten_mean"] == pytest.approx(np.mean(returns[-10:]), rel=1e-12)
        assert {episode.length for episode in slots[rank]} == {LIMIT}


def train(env: VecEnv, seed: int) -> str:
    return digest(PPO("MlpPolicy", env, seed=seed, **SETTINGS).learn(STEPS))


def train_remote(program: Path, seed: int) -> str:
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS)
    command = [str(program), "--url", env.url, "--num-envs", str(NUM_ENVS), "--quiet"]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        return train(env, seed)
    finally:
        env.close()
        assert client.wait(60) == 0


def test_one_process_of_sixteen_gives_the_weights_of_gymnasium(pendulum: Path) -> None:
    """The trainer seeds the resets, so that another seed gives other weights."""
    remote = train_remote(pendulum, 3)
    assert train(DummyVecEnv([lambda: gym.make("Pendulum-v1")] * NUM_ENVS), 3) == remote
    assert train_remote(pendulum, 4) != remote
