"""Stable-Baselines3's contract of a ``VecEnv``, to the letter."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from plugrl_bridges.errors import EnvPoisoned, SpaceError
from plugrl_bridges.sb3 import PlugRemoteVecEnv, PlugRLVecEnv
from tests.support import ACTIONS, OBSERVATIONS, STOP, ClientThread, CountingEnv, DictEnv, Puppet, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    Remote = Callable[..., PlugRemoteVecEnv]


def act(env: VecEnv, value: float = 0.5) -> Any:
    return env.step(np.full((env.num_envs, 1), value, np.float32))


# Shapes, types, ownership -------------------------------------------------------------------------------------------


def test_it_is_a_vec_env_of_the_announced_spaces(remote: Remote) -> None:
    env = remote(envs=3)
    assert isinstance(env, VecEnv)
    assert env.num_envs == 3
    assert env.observation_space == OBSERVATIONS
    assert env.action_space == ACTIONS
    assert env.unwrapped is env
    assert PlugRLVecEnv is PlugRemoteVecEnv


def test_reset_and_step_have_the_types_of_a_dummy_vec_env(remote: Remote) -> None:
    mine, local = remote(envs=2), DummyVecEnv([CountingEnv, CountingEnv])
    first, expected = mine.reset(), local.reset()
    assert isinstance(first, np.ndarray)
    assert isinstance(expected, np.ndarray)
    assert (first.shape, first.dtype) == (expected.shape, expected.dtype)
    for _ in range(12):
        ours, theirs = act(mine), act(local)
        for one, other in zip(ours[:3], theirs[:3], strict=True):
            assert type(one) is type(other)
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(one, other)
        for info, other_info in zip(ours[3], theirs[3], strict=True):
            assert info.keys() == other_info.keys()
            assert info["TimeLimit.truncated"] == other_info["TimeLimit.truncated"]
            np.testing.assert_array_equal(
                info.get("terminal_observation", 0), other_info.get("terminal_observation", 0)
            )
        assert mine.reset_infos == local.reset_infos


@pytest.mark.parametrize("make", [CountingEnv, lambda: DictEnv(CountingEnv())], ids=["Box", "Dict"])
def test_arrays_are_writable_native_and_never_written_again(remote: Remote, make: Any) -> None:
    env = remote(make, envs=2)
    kept: list[Any] = [env.reset()]
    for _ in range(8):
        observations, rewards, dones, _ = act(env)
        kept.append(observations)
        rewards += 1000  # as SB3 does, in place
        dones[:] = True
    arrays = [each["state"] if isinstance(each, dict) else each for each in kept]
    assert [array[0].tolist() for array in arrays] == [
        [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3], [0, 0, 4], [0, 1, 0], [0, 1, 1], [0, 1, 2], [0, 1, 3],
    ]  # fmt: skip
    for each in kept:
        for array in each.values() if isinstance(each, dict) else [each]:
            assert array.flags.writeable
            assert array.flags.c_contiguous
            assert array.dtype.isnative
            array[:] = 0  # the next step must not mind
    assert act(env)[1].tolist() == [4, 4]


def test_rewards_are_float32_and_dones_bool(remote: Remote) -> None:
    env = remote()
    env.reset()
    _, rewards, dones, infos = act(env)
    assert (rewards.dtype, dones.dtype) == (np.float32, np.bool_)
    assert type(infos) is list
    assert type(infos[0]) is dict


# Ends of episodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("kind", ["Box", "Dict"])
def test_terminal_observation_and_time_limit_on_done_rows_and_nowhere_else(
    remote: Remote, kind: str, *, truncate: bool
) -> None:
    lengths = iter([2, 3])

    def make() -> gym.Env[Any, Any]:
        env = CountingEnv(length=next(lengths), truncate=truncate)
        return env if kind == "Box" else DictEnv(env)

    env = remote(make, envs=2)
    env.reset()
    ends = 0
    for number in range(1, 13):
        observations, _, dones, infos = act(env)
        assert dones.tolist() == [number % 2 == 0, number % 3 == 0]
        for slot, (done, info) in enumerate(zip(dones, infos, strict=True)):
            assert ("terminal_observation" in info) == done
            assert info["TimeLimit.truncated"] is bool(done and truncate)
            assert "client_lost" not in info
            if done:
                ends += 1
                last, first = info["terminal_observation"], observations
                if kind == "Dict":
                    assert last.keys() == {"camera", "state"}
                    assert last["camera"].shape == (36, 36, 3)
                    assert (last["camera"] != first["camera"][slot]).any()
                    last, first = last["state"], first["state"]
                assert last.tolist()[2] == [2, 3][slot]
                assert first[slot].tolist()[2] == 0
    assert ends == 10


def test_both_flags_at_once_are_no_time_limit(make_env: Remote) -> None:
    env = make_env(num_envs=1, action_space=ACTIONS)
    puppet = Puppet(env.url).infer()
    env.reset()
    task = Task(lambda: act(env))
    puppet.action()
    puppet.feed_back(terminated=np.array([True]), truncated=np.array([True])).infer()
    _, _, dones, infos = task.result()
    assert dones.tolist() == [True]
    assert infos[0]["TimeLimit.truncated"] is False
    assert "terminal_observation" in infos[0]


def test_a_terminal_observation_of_the_clients_own_does_not_pass_for_one(make_env: Remote) -> None:
    env = make_env(num_envs=1, action_space=ACTIONS)
    puppet = Puppet(env.url).infer()
    env.reset()
    task = Task(lambda: act(env))
    puppet.step(info={"terminal_observation": np.zeros((1, 3)), "TimeLimit.truncated": np.array([True])})
    assert task.result()[3] == [{"TimeLimit.truncated": False}]


def test_reset_infos_are_those_of_the_resets(remote: Remote) -> None:
    env = remote(lambda: CountingEnv(length=2), envs=2)
    env.reset()
    assert env.reset_infos == [{"began": 0}, {"began": 0}]
    act(env)
    assert env.reset_infos == [{"began": 0}, {"began": 0}]
    act(env)
    assert env.reset_infos == [{"began": 1}, {"began": 1}]


def test_infos_of_the_step_arrive_as_they_were(remote: Remote) -> None:
    class Talkative(CountingEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            observation, reward, terminated, truncated, _ = super().step(action)
            info = {"n": 3, "x": 0.5, "ok": True, "word": "left", "v": np.arange(3), "in": {"side": 2}}
            if self.t % 2:
                info["odd"] = self.t
            return observation, reward, terminated, truncated, info

    env = remote(Talkative, envs=2)
    env.reset()
    for number in (1, 2):
        for info in act(env)[3]:
            assert (info["n"], info["x"], info["ok"], info["word"], info["in"]) == (3, 0.5, True, "left", {"side": 2})
            assert info["v"].tolist() == [0, 1, 2]
            assert ("odd" in info) == (number == 1)


def test_a_lost_client_is_truncated_and_says_so(make_env: Remote) -> None:
    env = make_env(num_envs=1, action_space=ACTIONS)
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    task = Task(lambda: act(env))
    puppet.action()
    puppet.vanish()
    Puppet(env.url, (2,)).infer()
    observations, rewards, dones, infos = task.result()
    assert (rewards.tolist(), dones.tolist()) == ([0], [True])
    assert infos[0]["client_lost"] is True
    assert infos[0]["TimeLimit.truncated"] is True
    assert infos[0]["terminal_observation"].tolist() == [1, 0, 0]
    assert observations.tolist() == [[2, 0, 0]]
    assert env.client_losses == 1


# Seeds and options --------------------------------------------------------------------------------------------------


def test_a_seed_reaches_env_i_as_seed_plus_i_exactly_once(remote: Remote) -> None:
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(CountingEnv())
        return made[-1]

    env = remote(make, envs=3)
    assert list(env.seed(7)) == [7, 8, 9]
    env.reset()
    env.reset()
    assert [each.seeds for each in made] == [[7 + i, None] for i in range(3)]


def test_seeding_with_none_asks_for_nothing(remote: Remote) -> None:
    env = remote()
    env.seed(3)
    assert list(env.seed(None)) == [None]
    env.reset()
    assert env.reset_infos == [{"began": 0}]


@pytest.mark.parametrize("form", ["dict", "list"])
def test_options_are_used_once_and_the_callers_are_never_changed(remote: Remote, form: str) -> None:
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(CountingEnv(length=1))
        return made[-1]

    env = remote(make, envs=2)
    options: Any = {"map": {"size": 3}} if form == "dict" else [{"map": {"size": 3}}, {"map": {"size": 4}}]
    before = repr(options)
    env.set_options(options)
    env.reset()
    act(env)
    env.reset()
    sizes = [3, 3] if form == "dict" else [3, 4]
    assert [each.options for each in made] == [[{"map": {"size": size}}, None, None] for size in sizes]
    assert repr(options) == before


def test_bad_options_are_refused(remote: Remote) -> None:
    env = remote(envs=2)
    with pytest.raises(ValueError, match="one dict per env, 2, got 1"):
        env.set_options([{}])
    with pytest.raises(TypeError, match="options must be"):
        env.set_options(3)  # type: ignore[arg-type]


# What cannot cross --------------------------------------------------------------------------------------------------


def test_what_is_known_of_the_envs_can_be_asked(remote: Remote) -> None:
    env = remote(lambda: gym.make("CartPole-v1", render_mode="rgb_array"), envs=2)
    env.reset()
    assert env.get_attr("render_mode") == ["rgb_array"] * 2
    assert env.render_mode == "rgb_array"
    assert env.get_attr("action_space", [1]) == [gym.spaces.Discrete(2)]
    assert [spec.id for spec in env.get_attr("spec")] == ["CartPole-v1"] * 2
    assert env.get_attr("spec", 0)[0].max_episode_steps == 500
    assert env.has_attr("observation_space")


REFUSED: dict[str, tuple[Callable[[VecEnv], object], type[Exception], str]] = {
    "get_attr": (lambda env: env.get_attr("gravity"), AttributeError, "'gravity'.*known here are"),
    "set_attr": (lambda env: env.set_attr("gravity", 3), AttributeError, "'gravity'.*--env-kwargs"),
    "env_method": (lambda env: env.env_method("jump", 3), NotImplementedError, "'jump'.*--env-factory"),
    "get_images": (lambda env: env.get_images(), NotImplementedError, "render at the client"),
    "unknown": (lambda env: env.gravity, AttributeError, "no attribute 'gravity'"),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_cross_the_boundary_is_refused_with_what_to_do(
    remote: Remote, call: Callable[[VecEnv], object], error: type[Exception], text: str
) -> None:
    env = remote()
    env.reset()
    with pytest.raises(error, match=text):
        call(env)
    assert not env.has_attr("gravity")
    act(env)  # nothing is broken


def test_no_env_is_wrapped_on_this_side(remote: Remote) -> None:
    env = remote(envs=2)
    env.reset()
    assert env.env_is_wrapped(gym.Wrapper) == [False, False]
    assert env.env_is_wrapped(gym.Wrapper, [0]) == [False]


def test_nested_observations_are_refused_since_sb3_takes_none(make_env: Remote) -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Dict({"b": OBSERVATIONS})})
    env = make_env(num_envs=1, observation_space=space, action_space=ACTIONS)
    Puppet(env.url, state="a/b").infer()
    for _ in range(2):
        with pytest.raises(SpaceError, match=r"no nested observation spaces.*flatten them at the client"):
            env.reset()


# Before the clients come --------------------------------------------------------------------------------------------


def test_port_and_url_can_be_read_before_a_client_is_there(make_env: Remote) -> None:
    env = make_env()
    assert env.port > 0
    assert env.url == f"ws://127.0.0.1:{env.port}"
    assert env.client_losses == 0
    assert repr(env) == f"<PlugRemoteVecEnv {env.url} waiting for clients>"
    client = ClientThread(CountingEnv, num_envs=2, url=env.url)
    assert env.num_envs == 2  # waits
    assert repr(env) == f"<PlugRemoteVecEnv {env.url} 2 envs>"
    env.close()
    assert client.join().reason == "server stop"


@pytest.mark.parametrize(
    "name", ["num_envs", "observation_space", "action_space", "render_mode", "metadata", "reset_infos"]
)
def test_what_only_clients_can_tell_is_waited_for(remote: Remote, name: str) -> None:
    assert hasattr(remote(), name)


def test_closing_before_any_client_came(make_env: Remote) -> None:
    env = make_env()
    env.close()
    env.close()
    with pytest.raises(EnvPoisoned, match="closed"):
        env.reset()


# Actions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_is_never_sent_and_the_slot_is_named(remote: Remote, dtype: Any) -> None:
    env = remote(envs=3)
    env.reset()
    with pytest.raises(ValueError, match="the action for slot 1 holds NaN; it is not sent"):
        env.step(np.array([[0], [np.nan], [0]], dtype))
    assert act(env)[1].tolist() == [1, 1, 1]


SPACES: list[tuple[Any, Any, type]] = [
    (gym.spaces.Discrete(4), [3], np.integer),
    (gym.spaces.Discrete(4, start=5), [8], np.integer),
    (gym.spaces.MultiDiscrete([3, 4]), [[2, 3]], np.ndarray),
    (gym.spaces.MultiBinary(3), [[1, 0, 1]], np.ndarray),
    (gym.spaces.Box(-1, 1, (2, 2), np.float32), [[[0.5, -0.5], [1, -1]]], np.ndarray),
    (gym.spaces.Box(-1, 1, (2,), np.float64), [[0.1, 0.2]], np.ndarray),
]


@pytest.mark.parametrize(("space", "action", "kind"), SPACES, ids=str)
def test_an_action_reaches_the_env_in_the_type_of_its_space(
    remote: Remote,
    space: Any,
    action: Any,
    kind: type,
) -> None:
    made = CountingEnv(action_space=space)
    env = remote(lambda: made)
    env.reset()
    env.step(np.array(action, space.dtype))
    [got] = made.actions
    assert isinstance(got, (kind, int) if kind is np.integer else kind)
    assert space.contains(got)
    np.testing.assert_array_equal(got, action[0])


# The end ------------------------------------------------------------------------------------------------------------


def test_an_env_that_is_dropped_without_close_says_stop() -> None:
    env = PlugRemoteVecEnv(port=0, num_envs=1, action_space=ACTIONS)
    puppet = Puppet(env.url).infer()
    env.reset()
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None
    assert puppet.close_seen() == STOP


def test_close_frees_the_port_and_the_env_is_used_up(remote: Remote, make_env: Remote) -> None:
    env = remote()
    env.reset()
    env.close()
    again = make_env(port=env.port)
    assert again.port == env.port
    for call in (env.reset, lambda: act(env), env.step_wait):
        with pytest.raises(EnvPoisoned, match="closed"):
            call()


def test_a_bad_argument_is_named_and_nothing_is_left_open() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"^timeout"):
            PlugRemoteVecEnv(port=0, timeout=0)
        gc.collect()


def test_a_step_that_is_begun_elsewhere_is_waited_for_by_reset(remote: Remote) -> None:
    made = CountingEnv()
    env = remote(lambda: made)
    env.reset()
    env.step_async(np.zeros((1, 1), np.float32))
    np.testing.assert_array_equal(env.reset(), [[0, 1, 0]])
    wait_until(lambda: made.t == 0)
    assert act(env)[1].tolist() == [1]


def test_what_is_known_of_the_envs_waits_for_the_clients(remote: Callable[..., PlugRemoteVecEnv]) -> None:
    assert remote(envs=2).get_attr("render_mode") == [None, None]


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_neither_pickled_nor_copied(make_env: Callable[..., PlugRemoteVecEnv], how: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="neither pickled nor copied"):
        how(make_env())


def test_an_info_of_the_env_cannot_pass_for_a_lost_client(remote: Callable[..., PlugRemoteVecEnv]) -> None:
    class Liar(CountingEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return (*super().step(action)[:4], {"client_lost": True, "true": 1})

    env = remote(Liar)
    env.reset()
    infos = env.step(np.zeros((1, 1), np.float32))[3]
    assert infos == [{"true": 1, "TimeLimit.truncated": False}]
