"""Stable-Baselines3's algorithms, wrappers and callbacks on remote envs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, VecTransposeImage

from plugrl_bridges.sb3 import PlugRemoteVecEnv, make_vec_env
from tests.support import CountingEnv, DictEnv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stable_baselines3.common.base_class import BaseAlgorithm

    Remote = Callable[..., PlugRemoteVecEnv]


def small() -> dict[str, Any]:
    return {"policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 0}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class CameraEnv(gym.ObservationWrapper[Any, Any, Any]):
    """Observe a uint8 picture alone, channels first or last."""

    def __init__(self, env: gym.Env[Any, Any], *, channels_first: bool = False) -> None:
        super().__init__(env)
        self.channels_first = channels_first
        self.observation_space = gym.spaces.Box(0, 255, (3, 36, 40) if channels_first else (36, 40, 3), np.uint8)

    def observation(self, observation: Any) -> Any:
        picture = np.zeros((36, 40, 3), np.uint8)
        picture[int(observation[2]), 0] = (1, 2, 3)
        return picture.transpose(2, 0, 1) if self.channels_first else picture


def on_policy(kind: type[A2C | PPO], env: Any, policy: str = "MlpPolicy", **more: Any) -> BaseAlgorithm:
    settings: dict[str, Any] = {**small(), "n_steps": 16, **more}
    if kind is PPO:
        settings |= {"batch_size": 16, "n_epochs": 1}
    return kind(policy, env, **settings)


@pytest.mark.parametrize("kind", [PPO, A2C])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_on_policy_algorithms_learn(remote: Remote, kind: type[A2C | PPO], env_id: str) -> None:
    model = on_policy(kind, make_vec_env(remote(lambda: gym.make(env_id), envs=2)))
    assert model.learn(256).num_timesteps >= 256


OFF_POLICY: list[tuple[Any, str]] = [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1")]


@pytest.mark.parametrize(("kind", "env_id"), OFF_POLICY)
def test_off_policy_algorithms_learn(remote: Remote, kind: Any, env_id: str) -> None:
    env = make_vec_env(remote(lambda: gym.make(env_id), envs=2))
    model = kind("MlpPolicy", env, learning_starts=50, batch_size=16, buffer_size=1000, **small())
    model.learn(200)
    assert model.num_timesteps >= 200
    assert model.replay_buffer.size() >= 100


def test_the_replay_buffer_has_the_terminal_observation_not_the_reset_one(remote: Remote) -> None:
    env = make_vec_env(remote(lambda: CountingEnv(truncate=True), envs=2))
    model = SAC("MlpPolicy", env, learning_starts=1000, buffer_size=100, **small())
    model.learn(40)
    buffer = model.replay_buffer
    assert buffer is not None
    next_observations: Any = buffer.next_observations
    for at in range(20):
        assert next_observations[at, :, 2].tolist() == [at % 5 + 1] * 2
    assert buffer.timeouts[:20].sum() == 2 * 4


def test_learning_twice_goes_on(remote: Remote) -> None:
    model = on_policy(A2C, make_vec_env(remote(envs=2)))
    model.learn(64)
    model.learn(64, reset_num_timesteps=False)
    assert model.num_timesteps == 128


def test_a_policy_of_pictures_and_states(remote: Remote) -> None:
    env = remote(lambda: DictEnv(CountingEnv()), envs=2)
    settings = {"features_extractor_kwargs": {"cnn_output_dim": 4}, "net_arch": [8]}
    model = on_policy(PPO, make_vec_env(env), "MultiInputPolicy", policy_kwargs=settings)
    model.learn(32)
    assert isinstance(model.get_env(), VecTransposeImage)


@pytest.mark.parametrize("channels_first", [False, True])
def test_pictures_of_either_channel_order_arrive_unchanged_and_train(remote: Remote, *, channels_first: bool) -> None:
    env = remote(lambda: CameraEnv(CountingEnv(), channels_first=channels_first), envs=2)
    first = env.reset()
    assert isinstance(first, np.ndarray)
    assert first.dtype == np.uint8
    assert (first[0, :, 0, 0] if channels_first else first[0, 0, 0]).tolist() == [1, 2, 3]
    model = on_policy(A2C, make_vec_env(env), "CnnPolicy", n_steps=4,
                      policy_kwargs={"features_extractor_kwargs": {"features_dim": 4}})  # fmt: skip
    model.learn(16)


def test_vec_transpose_image_sees_the_terminal_picture(remote: Remote) -> None:
    env = VecTransposeImage(remote(lambda: CameraEnv(CountingEnv(length=2)), envs=1))
    env.reset()
    env.step(np.zeros((1, 1), np.float32))
    observations, _, _, infos = env.step(np.zeros((1, 1), np.float32))
    assert isinstance(observations, np.ndarray)
    assert observations[0, :, 0, 0].tolist() == [1, 2, 3]
    assert infos[0]["terminal_observation"].shape == (3, 36, 40)
    assert infos[0]["terminal_observation"][:, 2, 0].tolist() == [1, 2, 3]


def test_vec_normalize(remote: Remote) -> None:
    env = VecNormalize(make_vec_env(remote(envs=2)))
    on_policy(PPO, env).learn(64)
    assert env.ret_rms.count > 64
    assert env.get_original_reward().tolist() in ([[float(t)] * 2 for t in range(1, 6)])


def test_vec_frame_stack(remote: Remote) -> None:
    env = VecFrameStack(make_vec_env(remote(lambda: CountingEnv(tag=9), envs=1)), 3)
    env.reset()
    for number in range(1, 7):
        observations, _, dones, infos = env.step(np.zeros((1, 1), np.float32))
        assert isinstance(observations, np.ndarray)
        times = observations[0].reshape(3, 3)[:, 2].tolist()
        assert times == ([0, 0, 0] if dones[0] else [max(0, number % 5 - 2), max(0, number % 5 - 1), number % 5])
        if dones[0]:
            assert infos[0]["terminal_observation"].reshape(3, 3)[:, 2].tolist() == [3, 4, 5]


def test_evaluate_policy_sees_whole_episodes(remote: Remote) -> None:
    env = make_vec_env(remote(envs=2))
    model = on_policy(A2C, env)
    model.learn(32)  # ends in mid-episode; the evaluation's reset is a real one
    rewards, lengths = evaluate_policy(model, env, n_eval_episodes=6, return_episode_rewards=True)
    assert (rewards, lengths) == ([15.0] * 6, [5] * 6)


def test_eval_callback_with_a_second_remote_env(remote: Remote, tmp_path: Path) -> None:
    train, test = make_vec_env(remote(envs=2)), make_vec_env(remote(envs=1))
    callback = EvalCallback(test, n_eval_episodes=2, eval_freq=16, log_path=str(tmp_path), verbose=0)
    on_policy(PPO, train).learn(64, callback=callback)
    assert callback.last_mean_reward == 15
    assert len(callback.evaluations_timesteps) == 2


def test_checkpoint_callback_and_loading(remote: Remote, tmp_path: Path) -> None:
    env = make_vec_env(remote(envs=2))
    on_policy(PPO, env).learn(64, callback=CheckpointCallback(16, str(tmp_path)))
    path = tmp_path / "rl_model_64_steps.zip"
    PPO.load(path, env=env, device="cpu").learn(32)
    env.close()


@pytest.mark.parametrize("seed", [0])
def test_an_algorithms_seed_gives_the_same_run_again(remote: Remote, seed: int) -> None:
    def run() -> Any:
        env = make_vec_env(remote(lambda: gym.make("Pendulum-v1"), envs=2))
        model = on_policy(PPO, env, seed=seed)
        model.learn(64)
        env.close()
        return [parameter.detach().numpy().tobytes() for parameter in model.policy.parameters()]

    assert run() == run()
