"""A single remote env: Gymnasium's registry, the checkers of Gymnasium and Stable-Baselines3, the rules of an Env."""

from __future__ import annotations

import ssl
import warnings
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_of_sb3

from plugrl_bridges.errors import ConnectTimeout, EnvPoisoned
from plugrl_bridges.gym import RemoteEnv
from tests.support import STOP, ClientThread, CountingEnv, Puppet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.remote_vector import MakeVector

    Remote = Callable[..., gym.Env[Any, Any]]

REMOTE = "plugrl_bridges:PlugRL/Remote-v0"


def pendulum() -> gym.Env[Any, Any]:
    return gym.make("Pendulum-v1")


def pendulum_in_a_dict() -> gym.Env[Any, Any]:
    inner = pendulum()
    space = gym.spaces.Dict({"x": gym.spaces.Box(-1.0, 1.0, (2,), np.float32), "all": inner.observation_space})
    return gym.wrappers.TransformObservation(inner, lambda seen: {"x": seen[:2], "all": seen}, space)


@pytest.fixture
def remote() -> Iterator[Remote]:
    """Make a single env by its id, with a client."""
    closing: list[Callable[[], object]] = []

    def start(make: Callable[[], Any] = CountingEnv, **options: Any) -> gym.Env[Any, Any]:
        env: gym.Env[Any, Any] = gym.make(REMOTE, port=0, connect_timeout=20.0, **options)
        inner: Any = env.unwrapped
        closing.extend((env.close, ClientThread(make, url=inner.url).stop))
        return env

    yield start
    for close in closing:
        close()


def warnings_of(check: Callable[[], object]) -> set[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check()
    return {str(each.message) for each in seen}


# The registry -------------------------------------------------------------------------------------------------------


def test_gymnasium_makes_one_that_waits_for_nobody() -> None:
    env = gym.make(REMOTE, port=0, connect_timeout=0.1)
    inner = env.unwrapped
    assert isinstance(inner, RemoteEnv)
    assert inner.url == f"ws://127.0.0.1:{inner.port}"
    assert env.spec is not None
    assert env.spec.id == "PlugRL/Remote-v0"
    with pytest.raises(ConnectTimeout, match=rf"--num-envs 1 --url {inner.url}"):
        env.reset()
    with pytest.raises(AttributeError, match="'RemoteEnv' has no attribute 'gravity'"):
        inner.gravity  # noqa: B018
    env.close()


def test_options_that_cannot_be_copied_are_taken() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    env = gym.make(REMOTE, port=0, ssl=context)
    envs: Any = gym.make_vec(REMOTE, num_envs=2, port=0, ssl=context)
    assert env.unwrapped.url.startswith("wss://")  # type: ignore[attr-defined]
    assert envs.url.startswith("wss://")
    env.close()
    envs.close()


# The checkers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pendulum, pendulum_in_a_dict, lambda: gym.make("FrozenLake-v1")])
@pytest.mark.parametrize("check", [check_env, check_env_of_sb3], ids=["Gymnasium", "Stable-Baselines3"])
def test_a_checker_finds_nothing_that_it_does_not_find_in_the_env_itself(
    remote: Remote, make: Callable[[], Any], check: Any
) -> None:
    found = warnings_of(lambda: check(remote(make).unwrapped))
    # Pictures would need pygame here; the remote env has none.
    skip = {"skip_render_check": True}
    assert found <= warnings_of(lambda: check(make(), **skip))


# The rules of an Env ------------------------------------------------------------------------------------------------


def test_an_episode_after_another(remote: Remote) -> None:
    made = CountingEnv(length=2)
    env = remote(lambda: made)
    observation, info = env.reset(seed=4, options={"level": 1})
    assert (observation.tolist(), info) == ([0, 0, 0], {"began": 0})
    assert env.observation_space.contains(observation)
    action = env.action_space.sample()
    observation, reward, terminated, truncated, info = env.step(action)
    assert (observation.tolist(), reward, terminated, truncated, info) == ([0, 0, 1], 1.0, False, False, {"t": 1})
    assert [type(each) for each in (reward, terminated, truncated, info)] == [float, bool, bool, dict]
    assert made.actions[0].tolist() == action.tolist()
    assert env.step(action)[0].tolist() == [0, 0, 2]  # the terminal one
    observation, info = env.reset()
    assert (observation.tolist(), info) == ([0, 1, 0], {"began": 1})
    assert made.seeds == [4, None]
    assert made.options == [{"level": 1}, None]


def test_a_step_after_the_end_needs_a_reset(remote: Remote) -> None:
    made = CountingEnv(length=2, truncate=True)
    env = remote(lambda: made)
    env.reset()
    action = np.zeros(1, np.float32)
    env.step(action)
    assert env.step(action)[2:4] == (False, True)
    for _ in range(2):
        with pytest.raises(ResetNeeded, match="have ended"):
            env.step(action)
    assert len(made.actions) == 2
    assert env.reset()[0].tolist() == [0, 1, 0]
    assert env.step(action)[1] == 1.0


def test_a_reset_in_the_middle_of_an_episode_begins_another(remote: Remote) -> None:
    made = CountingEnv()
    env = remote(lambda: made)
    env.reset()
    env.step(np.zeros(1, np.float32))
    options = {"level": 3}
    assert env.reset(options=options)[0].tolist() == [0, 1, 0]
    assert options == {"level": 3}
    assert env.reset()[0].tolist() == [0, 2, 0]
    assert made.options == [None, {"level": 3}, None]


def test_a_step_before_the_first_reset(remote: Remote) -> None:
    env = remote()
    assert env.action_space.shape == (1,)
    with pytest.raises(ResetNeeded):  # Gymnasium's own wrapper
        env.step(np.zeros(1, np.float32))
    with pytest.raises(EnvPoisoned, match="call reset"):
        env.unwrapped.step(np.zeros(1, np.float32))
    env.reset()
    env.step(np.zeros(1, np.float32))


@pytest.mark.parametrize(
    ("action", "text"), [([np.nan], "holds NaN"), ([0.0, 1.0], "the action has shape"), (0.5, "the action has shape")]
)
def test_a_bad_action_is_refused_and_nothing_is_sent(remote: Remote, action: Any, text: str) -> None:
    made = CountingEnv()
    env = remote(lambda: made)
    env.reset()
    with pytest.raises(ValueError, match=text):
        env.step(np.array(action, np.float32))
    assert made.actions == []
    assert env.step(np.zeros(1, np.float32))[1] == 1.0


def test_it_cannot_be_rendered(remote: Remote) -> None:
    env = remote()
    env.reset()
    with pytest.raises(NotImplementedError, match=r"'render'.*at the client"):
        env.unwrapped.render()
    assert env.metadata["render_modes"] == []


def test_close_is_idempotent_and_heard(make_vector: MakeVector) -> None:
    env: Any = make_vector(
        RemoteEnv, observation_space=CountingEnv().observation_space, action_space=CountingEnv().action_space
    )
    puppet = Puppet(env.url).infer()
    env.reset()
    env.close()
    env.close()
    assert puppet.close_seen() == STOP
    for call in (env.reset, lambda: env.step(np.zeros(1, np.float32))):
        with pytest.raises(EnvPoisoned, match="closed"):
            call()


def test_gymnasiums_wrappers_go_around_it(remote: Remote) -> None:
    env = gym.wrappers.RecordEpisodeStatistics(gym.wrappers.TimeLimit(gym.wrappers.ClipAction(remote()), 3))
    for _ in range(2):
        env.reset()
        while not (step := env.step(np.array([9.0], np.float32)))[2] and not step[3]:
            pass
        assert (step[2], step[3]) == (False, True)
        assert (step[4]["episode"]["r"], step[4]["episode"]["l"]) == (6.0, 3)
