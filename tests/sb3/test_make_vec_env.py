"""SB3's ``make_vec_env`` for remote envs: each argument honoured, or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from plugrl_bridges.sb3 import PlugRemoteVecEnv, make_vec_env
from plugrl_bridges.transport import Listener
from tests.support import ClientThread, CountingEnv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Remote = Callable[..., PlugRemoteVecEnv]


def free_port() -> int:
    listener = Listener("127.0.0.1", 0)
    listener.close()
    return listener.port


def act(env: Any) -> Any:
    return env.step(np.zeros((env.num_envs, 1), np.float32))


def test_it_monitors_the_env_once(remote: Remote) -> None:
    env = make_vec_env(remote(envs=2))
    assert isinstance(env, VecMonitor)
    env.reset()
    for number in range(1, 11):
        infos = act(env)[3]
        for info in infos:
            assert ("episode" in info) == (number % 5 == 0)
            if "episode" in info:
                assert (info["episode"]["r"], info["episode"]["l"]) == (15, 5)


def test_the_mean_episode_reward_is_in_the_log(remote: Remote, tmp_path: Path) -> None:
    model = PPO("MlpPolicy", make_vec_env(remote(envs=2)), n_steps=16, batch_size=32, n_epochs=1, device="cpu")
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(64)
    model.logger.close()
    head, *rows = (tmp_path / "progress.csv").read_text().splitlines()
    columns = dict(zip(head.split(","), rows[-1].split(","), strict=True))
    assert float(columns["rollout/ep_rew_mean"]) == 15
    assert float(columns["rollout/ep_len_mean"]) == 5


def test_without_an_env_it_makes_one_of_the_keyword_arguments() -> None:
    port = free_port()
    clients = [ClientThread(CountingEnv, url=f"ws://127.0.0.1:{port}") for _ in range(2)]
    env = make_vec_env(n_envs=2, vec_env_kwargs={"port": port, "connect_timeout": 20})
    assert env.num_envs == 2
    assert isinstance(env.unwrapped, PlugRemoteVecEnv)
    env.close()
    assert [client.join().reason for client in clients] == ["server stop"] * 2


def test_a_class_of_ones_own_is_made() -> None:
    class Mine(PlugRemoteVecEnv):
        pass

    port = free_port()
    client = ClientThread(CountingEnv, url=f"ws://127.0.0.1:{port}")
    env = make_vec_env(vec_env_cls=Mine, vec_env_kwargs={"port": port})
    assert isinstance(env.unwrapped, Mine)
    env.close()
    client.join()


@pytest.mark.parametrize(("seed", "start", "expected"), [(None, 0, [None]), (3, 0, [3]), (3, 4, [7])])
def test_seed_and_start_index_reach_the_first_reset(
    remote: Remote, seed: int | None, start: int, expected: list[int | None]
) -> None:
    made = CountingEnv()
    env = make_vec_env(remote(lambda: made), seed=seed, start_index=start)
    env.reset()
    assert made.seeds == expected


def test_monitor_dir_and_monitor_kwargs(remote: Remote, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "logs"
    env = make_vec_env(remote(envs=2), monitor_dir=folder, monitor_kwargs={"info_keywords": ("t",)})
    env.reset()
    for _ in range(5):
        act(env)
    env.close()
    head, names, *rows = (folder / "monitor.csv").read_text().splitlines()
    assert head.startswith("#")
    assert names == "r,l,t,t"  # the time, and the info's own t
    assert [[float(text) for text in row.split(",")][:2] for row in rows] == [[15, 5]] * 2


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("wrapper_class", gym.Wrapper, "--env-factory"),
        ("wrapper_kwargs", {"a": 1}, "--env-factory"),
        ("env_kwargs", {"g": 9.8}, "--env-kwargs"),
    ],
)
def test_what_belongs_to_the_client_is_refused_by_name(name: str, value: object, instead: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} cannot be honoured for remote environments: .*{instead}"):
        make_vec_env(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, 1.5, True, "0"])
def test_a_bad_start_index_is_named(value: Any) -> None:
    with pytest.raises(ValueError if value == -1 else TypeError, match=r"^start_index"):
        make_vec_env(start_index=value)


@pytest.mark.parametrize("value", [DummyVecEnv, 3])
def test_another_class_of_vec_env_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^vec_env_cls must be PlugRemoteVecEnv"):
        make_vec_env(vec_env_cls=value)


@pytest.mark.parametrize("value", ["CartPole-v1", gym.make])
def test_an_env_id_is_sent_to_the_client(value: Any) -> None:
    with pytest.raises(TypeError, match=r"env must be a PlugRemoteVecEnv.*plugrl-env-client --env-id"):
        make_vec_env(value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"n_envs": 3}, "n_envs is 3, but env has 2 envs"),
        ({"vec_env_cls": PlugRemoteVecEnv}, "vec_env_cls cannot be honoured for an env that is already made"),
        ({"vec_env_kwargs": {"port": 1}}, "vec_env_kwargs cannot be honoured for an env that is already made"),
    ],
)
def test_what_contradicts_the_env_is_refused(remote: Remote, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_vec_env(remote(envs=2), **given)


def test_the_number_of_envs_may_be_said_twice(remote: Remote) -> None:
    assert make_vec_env(remote(envs=2), n_envs=2).num_envs == 2


def test_n_envs_that_contradicts_vec_env_kwargs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"n_envs is 4, but vec_env_kwargs has num_envs=2"):
        make_vec_env(n_envs=4, vec_env_kwargs={"port": 0, "num_envs": 2})


def test_a_fault_in_monitor_kwargs_leaves_the_callers_env_open(remote: Callable[..., PlugRemoteVecEnv]) -> None:
    env = remote()
    with pytest.raises(TypeError):
        make_vec_env(env, monitor_kwargs={"no_such_argument": 1})
    assert env.reset() is not None
