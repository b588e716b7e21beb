"""The claim that all leans on: the trainer cannot tell. Final weights equal an in-process run's, byte for byte."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import msgpack
import pytest
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, VecNormalize
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from plugrl_bridges.sb3 import PlugRemoteVecEnv
from tests.identical.weights import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_ENVS = 16
PPO_SETTINGS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {
        "steps": 20_480,
        "n_steps": 256,
        "gamma": 0.9,
        "use_sde": True,
        "sde_sample_freq": 4,
        "n_epochs": 2,
    },
    "HalfCheetah-v5": {"steps": 8_192, "n_steps": 128, "n_epochs": 2},
    "CartPole-v1": {"steps": 8_192, "n_steps": 64, "n_epochs": 2},
}
CASES = [
    pytest.param(commands, procs, seed, reuse, id=f"{name}-{seed}{reuse}")
    for name, commands, procs in (
        ("one client of 16", 1, 1),
        ("two clients of 8", 2, 1),
        ("sixteen clients of 1", 1, 16),
    )
    for seed in (0, 1, 2)
    for reuse in ("--reuse", "--no-reuse")
    if procs == 1 or (reuse == "--reuse") == (seed != 1)  # sixteen processes take their time to start
]


def local_env(env_id: str, num_envs: int = NUM_ENVS) -> DummyVecEnv:
    return DummyVecEnv([lambda: gym.make(env_id)] * num_envs)


class Remote:
    """Hold a remote env and the processes of its clients; they must all hear the stop."""

    def __init__(
        self, env_id: str, commands: int = 1, procs: int = 1, *, num_envs: int = NUM_ENVS, args: Sequence[str] = ()
    ) -> None:
        self.env = PlugRemoteVecEnv(port=0, num_envs=num_envs, connect_timeout=90)
        command = [sys.executable, "-m", "plugrl_bridges.client", "--env-id", env_id, "--url", self.env.url, "--quiet"]
        command += ["--num-envs", str(num_envs // commands), "--num-procs", str(procs), *args]
        self.clients = [
            subprocess.Popen([*command, "--rank", str(rank)], stderr=subprocess.DEVNULL)
            for rank in reversed(range(commands))  # their ranks decide, not their arrival
        ]

    def __enter__(self) -> PlugRemoteVecEnv:
        return self.env

    def __exit__(self, *_: object) -> None:
        self.env.close()
        assert [client.wait(60) for client in self.clients] == [0] * len(self.clients)


def train_ppo(env: VecEnv, env_id: str, seed: int) -> str:
    settings = dict(PPO_SETTINGS[env_id])
    steps = settings.pop("steps")
    return digest(PPO("MlpPolicy", VecMonitor(env), seed=seed, device="cpu", **settings).learn(steps))


@cache
def in_process(env_id: str, seed: int) -> str:
    env = local_env(env_id)
    try:
        return train_ppo(env, env_id, seed)
    finally:
        env.close()


@pytest.mark.parametrize(("commands", "procs", "seed", "reuse"), CASES)
@pytest.mark.parametrize("env_id", list(PPO_SETTINGS))
def test_ppo_ends_with_the_weights_of_the_in_process_run(
    env_id: str, commands: int, procs: int, seed: int, reuse: str
) -> None:
    with Remote(env_id, commands, procs, args=[reuse]) as env:
        assert train_ppo(env, env_id, seed) == in_process(env_id, seed)


def test_other_seeds_end_with_other_weights() -> None:
    assert len({in_process("CartPole-v1", seed) for seed in (0, 1, 2)}) == 3


def _train_with_evaluation(env: VecEnv, evaluation: VecEnv) -> tuple[str, list[float]]:
    callback = EvalCallback(VecMonitor(evaluation), n_eval_episodes=8, eval_freq=128, verbose=0)
    model = PPO("MlpPolicy", VecMonitor(env), seed=0, device="cpu", n_steps=64, n_epochs=2)
    model.learn(16_384, callback=callback)
    return digest(model), [callback.best_mean_reward, callback.last_mean_reward]


@pytest.mark.filterwarnings("ignore:Training and eval env are not of the same type")
def test_evaluation_on_a_second_remote_env_changes_nothing() -> None:
    with Remote("CartPole-v1") as env, Remote("CartPole-v1", num_envs=4, args=["--seed", "100"]) as evaluation:
        remote = _train_with_evaluation(env, evaluation)
    own_evaluation = local_env("CartPole-v1", 4)
    own_evaluation.seed(100)
    assert remote == _train_with_evaluation(local_env("CartPole-v1"), own_evaluation)


def _train_normalized(env: VecEnv) -> str:
    normalized = VecNormalize(VecMonitor(env))
    model = PPO("MlpPolicy", normalized, seed=0, device="cpu", n_steps=64, n_epochs=2).learn(4_096)
    assert isinstance(normalized.obs_rms, RunningMeanStd)
    return digest(model) + repr(normalized.obs_rms.mean) + repr(normalized.ret_rms.var)


def test_running_normalisation_ends_with_the_same_statistics() -> None:
    with Remote("Pendulum-v1") as env:
        remote = _train_normalized(env)
    assert remote == _train_normalized(local_env("Pendulum-v1"))


def _train_dqn(env: VecEnv) -> str:
    return digest(DQN("MlpPolicy", env, seed=1, device="cpu", learning_starts=200, buffer_size=5_000).learn(1_600))


def _train_sac(env: VecEnv) -> str:
    return digest(SAC("MlpPolicy", env, seed=1, device="cpu", learning_starts=100, buffer_size=5_000).learn(600))


@pytest.mark.parametrize(
    ("train", "env_id"), [(_train_dqn, "CartPole-v1"), (_train_sac, "Pendulum-v1")], ids=["DQN", "SAC"]
)
def test_off_policy_algorithms_end_with_the_same_weights(train: Callable[[VecEnv], str], env_id: str) -> None:
    with Remote(env_id, num_envs=4) as env:
        remote = train(env)
    assert remote == train(local_env(env_id, 4))


def test_a_second_learn_resets_the_envs_as_in_process() -> None:
    def train(env: VecEnv) -> str:
        model = PPO("MlpPolicy", VecMonitor(env), seed=3, device="cpu", n_steps=32, n_epochs=1)
        return digest(model.learn(1_024).learn(1_024))

    with Remote("CartPole-v1") as env:
        remote = train(env)
    assert remote == train(local_env("CartPole-v1"))


MALFORMED = {
    "bytes that are no msgpack": b"\xc1\xc1",
    "a feedback before an infer": msgpack.packb({"message_type": "feedback"}),
    "an infer without env_indices": msgpack.packb({"message_type": "infer", "data": {}}),
    "no map": msgpack.packb([1, 2, 3]),
    "a text frame": "hello",
}


def _pester(url: str, over: threading.Event, closes: list[tuple[int, str]]) -> None:
    """Connect again and again, and send one malformed message after another."""
    while not over.is_set():
        for message in MALFORMED.values():
            with connect(url, compression=None) as websocket:
                websocket.recv()
                websocket.send(message)
                try:
                    websocket.recv()
                except ConnectionClosed as closed:
                    if closed.rcvd is not None:
                        closes.append((closed.rcvd.code, closed.rcvd.reason))


def test_weights_are_the_same_while_another_connection_sends_garbage() -> None:
    over = threading.Event()
    closes: list[tuple[int, str]] = []
    with Remote("CartPole-v1", 2) as env:
        pest = threading.Thread(target=_pester, args=(env.url, over, closes), daemon=True)
        pest.start()
        try:
            weights = train_ppo(env, "CartPole-v1", 0)
        finally:
            over.set()
            pest.join(30)
    assert weights == in_process("CartPole-v1", 0)
    assert len(closes) >= len(MALFORMED)
    assert set(closes) == {(1001, "plugrl-server-resync")}
