"""What people run into with episodes, terminal data, seeds, spaces and actions (rows 12 to 25), with SB3's env."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.sb3 import PlugRemoteVecEnv, make_vec_env
from tests.support import ACTIONS, ClientThread, CountingEnv, DictEnv, Puppet, bridge, knows_reset
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Remote = Callable[..., PlugRemoteVecEnv]


def act(env: Any) -> Any:
    return env.step(np.full((env.num_envs, 1), 0.5, np.float32))


def test_row_12_a_five_step_episode_of_return_15_is_that_everywhere(make_env: Remote, tmp_path: Path) -> None:
    """In the episode log, in the trainer's monitor, in a monitor at the client, and in the client's own summary."""
    path = tmp_path / "episodes.csv"
    remote = make_env(episode_log=path)
    inside: list[Monitor[Any, Any]] = []

    def make() -> gym.Env[Any, Any]:
        inside.append(Monitor(CountingEnv()))
        return inside[-1]

    client = ClientThread(make, num_envs=2, url=remote.url)
    env = make_vec_env(remote)
    env.reset()
    seen = [
        (info["episode"]["r"], info["episode"]["l"]) for _ in range(15) for info in act(env)[3] if "episode" in info
    ]
    env.close()
    assert seen == [(15, 5)] * 6
    with path.open(newline="") as file:
        assert [(float(row["return"]), int(row["length"])) for row in csv.DictReader(file)] == seen
    for monitor in inside:
        assert list(zip(monitor.get_episode_rewards(), monitor.get_episode_lengths(), strict=True)) == [(15, 5)] * 3
    summary = client.join()
    assert (summary.episodes, summary.mean_return) == (6, 15)


def test_row_15_the_clients_env_sees_exactly_one_reset_per_episode(remote: Remote) -> None:
    made = CountingEnv()
    env = remote(lambda: made)
    env.reset()
    for _ in range(12):
        act(env)
    assert len(made.seeds) == 1 + 2  # the first, and one for each of two ended episodes
    assert made.episode == 2


@pytest.mark.parametrize("wrapper", [Monitor, gym.wrappers.RecordEpisodeStatistics])
def test_row_16_a_monitor_on_both_sides_counts_once(remote: Remote, wrapper: Any) -> None:
    env = make_vec_env(remote(lambda: wrapper(CountingEnv()), envs=2))
    env.reset()
    for number in range(1, 11):
        for info in act(env)[3]:
            assert ("episode" in info) == (number % 5 == 0)
            if "episode" in info:
                assert (info["episode"]["r"], info["episode"]["l"]) == (15, 5)


@pytest.mark.parametrize("make", [CountingEnv, lambda: DictEnv(CountingEnv())], ids=["Box", "Dict"])
def test_row_17_final_and_reset_observation_are_both_delivered_and_differ(remote: Remote, make: Any) -> None:
    env = remote(make, envs=2)
    env.reset()
    for number in range(1, 11):
        observations, _, _, infos = act(env)
        for slot, info in enumerate(infos):
            assert ("terminal_observation" in info) == (number % 5 == 0)
            if "terminal_observation" in info:
                last, first = info["terminal_observation"], observations
                last, first = (last["state"], first["state"]) if isinstance(first, dict) else (last, first)
                assert last.tolist() == [0, number // 5 - 1, 5]
                assert first[slot].tolist() == [0, number // 5, 0]


@pytest.mark.parametrize("truncate", [False, True])
def test_row_18_a_time_limit_is_no_termination(remote: Remote, *, truncate: bool) -> None:
    env = remote(lambda: CountingEnv(truncate=truncate))
    env.reset()
    flags = [act(env)[3][0]["TimeLimit.truncated"] for _ in range(5)]
    assert flags == [False, False, False, False, truncate]


def test_row_18_a_lost_client_is_truncated(make_env: Remote) -> None:
    env = make_env(num_envs=1, action_space=ACTIONS)
    puppet = Puppet(env.url).infer()
    env.reset()
    task = Task(lambda: act(env))
    puppet.action()
    puppet.leave()
    Puppet(env.url).infer()
    assert task.result()[3][0]["TimeLimit.truncated"] is True


@pytest.mark.parametrize(("kind", "more"), [(PPO, {"batch_size": 24}), (A2C, {})])
def test_row_19_an_algorithms_seed_reaches_env_i_as_seed_plus_i_once(
    remote: Remote, kind: type[PPO | A2C], more: dict[str, Any]
) -> None:
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(CountingEnv())
        return made[-1]

    kind("MlpPolicy", remote(make, envs=3), seed=0, n_steps=8, device="cpu", **more).learn(24)
    assert [env.seeds[:2] for env in made] == [[i, None] for i in range(3)]
    assert all(seed is None for env in made for seed in env.seeds[2:])


def test_row_19_a_list_of_seeds_is_accepted() -> None:
    with bridge(num_envs=2) as env:
        puppet = Puppet(env.url, (1, 2)).infer(env_spec=knows_reset())
        task = Task(lambda: env.reset([40, 2]))
        assert puppet.obey_reset()["seed"] == [40, 2]
        task.result()


def test_row_20_options_are_one_shot(remote: Remote) -> None:
    made = CountingEnv(length=2)
    env = remote(lambda: made)
    options = {"level": 3}
    env.set_options(options)
    env.reset()
    for _ in range(4):
        act(env)
    env.reset()
    assert made.options == [{"level": 3}, None, None, None]
    assert options == {"level": 3}


@pytest.mark.parametrize(
    "make",
    [
        CountingEnv,
        lambda: DictEnv(CountingEnv()),
        lambda: gym.make("CartPole-v1"),
        lambda: gym.make("Taxi-v4"),
        lambda: gym.make("FrozenLake-v1"),
    ],
    ids=["Box", "Dict", "CartPole", "Taxi", "FrozenLake"],
)
def test_row_22_and_25_a_run_equals_that_of_local_envs(remote: Remote, make: Any) -> None:
    mine, local = remote(make, envs=2), DummyVecEnv([make, make])
    for env in (mine, local):
        env.seed(3)
    assert repr(mine.observation_space) == repr(local.observation_space)
    check_same(mine.reset(), local.reset())
    mine.action_space.seed(5)
    for _ in range(30):
        actions = np.array([mine.action_space.sample() for _ in range(2)])
        (ours, *our_rest, our_infos), (theirs, *their_rest, their_infos) = mine.step(actions), local.step(actions)
        check_same(ours, theirs)
        check_same(our_rest, their_rest)
        for one, other in zip(our_infos, their_infos, strict=True):
            assert one.keys() == other.keys()
            check_same(one.get("terminal_observation"), other.get("terminal_observation"))


def check_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            check_same(left, right)
    else:
        assert (np.asarray(one).dtype, np.shape(one)) == (np.asarray(other).dtype, np.shape(other))
        np.testing.assert_array_equal(one, other)


def test_row_24_what_the_trainer_sends_is_what_the_env_gets_and_nan_is_never_sent(remote: Remote) -> None:
    made = CountingEnv()
    env = remote(lambda: made)
    env.reset()
    for value in (0.1, -2.0, 1e30, np.inf):
        env.step(np.array([[value]], np.float32))
        assert made.actions[-1].tolist() == [np.float32(value)]
        assert made.actions[-1].dtype == np.float32
    with pytest.raises(ValueError, match="slot 0 holds NaN"):
        env.step(np.array([[np.nan]], np.float32))
    assert len(made.actions) == 4


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Taxi-v4"])
def test_row_25_a_policy_acts_on_envs_that_take_integers_alone(remote: Remote, env_id: str) -> None:
    A2C("MlpPolicy", remote(lambda: gym.make(env_id), envs=2), device="cpu", seed=0).learn(60)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Discrete(3, start=7),
        gym.spaces.MultiDiscrete([2, 5]),
        gym.spaces.MultiBinary(4),
    ],
    ids=str,
)
def test_row_25_a_policys_actions_are_of_the_envs_space(remote: Remote, space: gym.spaces.Space[Any]) -> None:
    made = CountingEnv(action_space=space)
    A2C("MlpPolicy", remote(lambda: made), device="cpu", seed=0).learn(20)
    assert len(made.actions) == 20
    if isinstance(space, gym.spaces.Discrete):
        assert all(np.ndim(action) == 0 and isinstance(action, (int, np.integer)) for action in made.actions)
    else:
        assert all(space.contains(action) for action in made.actions)
