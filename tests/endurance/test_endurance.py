"""Long runs leave nothing behind: memory, descriptors and threads stay as they were."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import psutil
import pytest

from plugrl_bridges.client import EnvClient
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from tests.foreign_client import ForeignClient

if TYPE_CHECKING:
    from pathlib import Path

NUM_ENVS = 16
STEPS = 100_000
WARM_UP = 5_000
MIB = 1 << 20

FACTORY = """
import gymnasium as gym
import numpy as np

class Cheap(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (17,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (6,), np.float32)

    def __init__(self):
        self.t = 0
        self.observation = np.zeros(17)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observation, {}

    def step(self, action):
        self.t += 1
        return self.observation, 1.0, False, self.t >= 97, {"t": self.t}
"""


@pytest.mark.timeout(600)
def test_a_hundred_thousand_vector_steps_grow_neither_process(tmp_path: Path) -> None:
    (tmp_path / "cheap_env.py").write_text(FACTORY)
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS)
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-factory", "cheap_env:Cheap", "--quiet"]
    client = subprocess.Popen([*command, "--num-envs", str(NUM_ENVS), "--url", env.url], cwd=tmp_path)
    processes = [psutil.Process(), psutil.Process(client.pid)]
    actions = np.zeros((NUM_ENVS, 6), np.float32)
    env.reset()
    for _ in range(WARM_UP):
        env.step(actions)
    gc.collect()
    before = [process.memory_info().rss for process in processes]
    descriptors = [process.num_fds() for process in processes]
    for _ in range(STEPS):
        env.step(actions)
    gc.collect()
    growth = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    assert descriptors == [process.num_fds() for process in processes]
    env.close()
    assert client.wait(30) == 0
    assert max(growth) <= 10 * MIB, f"trainer and client grew by {[round(g / MIB, 1) for g in growth]} MiB"


def _one_life() -> None:
    env = PlugRemoteVecEnv(port=0)
    client = EnvClient(lambda: gym.make("CartPole-v1"), num_envs=2, url=env.url)
    thread = threading.Thread(target=client.run, daemon=True)
    thread.start()
    env.reset()
    env.step(np.zeros(2, np.int64))
    env.close()
    thread.join(20)
    assert not thread.is_alive()


def test_fifty_lives_leave_no_descriptor_and_no_thread() -> None:
    process = psutil.Process()
    for _ in range(5):
        _one_life()
    gc.collect()
    before = process.num_fds(), threading.active_count()
    for _ in range(50):
        _one_life()
    gc.collect()
    assert (process.num_fds(), threading.active_count()) == before


def test_a_dropped_env_stops_its_clients_and_leaves_nothing() -> None:
    process = psutil.Process()
    clients: list[ForeignClient] = []

    def life() -> None:
        env: Any = PlugRemoteVecEnv(port=0, action_space=gym.spaces.Discrete(2))
        clients.append(ForeignClient(env.url, [gym.make("CartPole-v1")]).start())
        env.reset()
        del env
        gc.collect()
        clients[-1].join()

    life()
    before = process.num_fds(), threading.active_count()
    for _ in range(5):
        life()
    assert (process.num_fds(), threading.active_count()) == before
    assert {client.close for client in clients} == {(1001, "plugrl-server-stop")}
