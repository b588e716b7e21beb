"""The contract of a Gymnasium vector env: stepping, what may be asked, close, wrappers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode as GymnasiumsMode
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import vector as wrappers

import plugrl_bridges
from plugrl_bridges.errors import ConnectTimeout, EnvPoisoned, StepTimeout
from plugrl_bridges.gym import AutoresetMode, PlugRLVectorEnv
from tests.adapters.equality import assert_same
from tests.remote_vector import MODES, SPACES, act
from tests.support import ACTIONS, OBSERVATIONS, STOP, ClientThread, CountingEnv, DictEnv, Puppet, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remote_vector import MakeVector

# Before and after the clients ---------------------------------------------------------------------------------------


def test_port_and_url_can_be_read_before_a_client_is_there(make_vector: MakeVector) -> None:
    env = make_vector()
    assert isinstance(env, VectorEnv)
    assert env.port > 0
    assert env.url == f"ws://127.0.0.1:{env.port}"
    assert (env.client_losses, env.closed, env.spec, env.render_mode) == (0, False, None, None)
    assert repr(env) == f"PlugRLVectorEnv({env.url}, waiting for clients)"
    client = ClientThread(CountingEnv, num_envs=2, url=env.url)
    assert env.num_envs == 2  # waits
    assert repr(env) == f"PlugRLVectorEnv({env.url}, num_envs=2)"
    env.close()
    assert client.join().reason == "server stop"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_envs", 2),
        ("single_observation_space", OBSERVATIONS),
        ("single_action_space", ACTIONS),
        ("observation_space", batch_space(OBSERVATIONS, 2)),
        ("action_space", batch_space(ACTIONS, 2)),
    ],
)
def test_what_only_clients_can_tell_is_waited_for(remote_vector: MakeVector, name: str, value: Any) -> None:
    assert getattr(remote_vector(envs=2), name) == value


def test_clients_that_do_not_come_are_a_connect_timeout(make_vector: MakeVector) -> None:
    with pytest.raises(ConnectTimeout, match="plugrl-env-client"):
        make_vector(num_envs=1, connect_timeout=0.1).reset()


def test_an_unknown_attribute_waits_for_nobody(make_vector: MakeVector) -> None:
    with pytest.raises(AttributeError, match="'PlugRLVectorEnv' has no attribute 'gravity'"):
        make_vector().gravity  # noqa: B018


def test_spec_and_render_mode_are_those_of_the_remote_env(remote_vector: MakeVector) -> None:
    env = remote_vector(lambda: gym.make("CartPole-v1", render_mode="rgb_array"))
    env.reset()
    assert (env.spec.id, env.spec.max_episode_steps, env.render_mode) == ("CartPole-v1", 500, "rgb_array")
    env.spec = gym.spec("Pendulum-v1")  # as make_vec does
    assert env.spec.id == "Pendulum-v1"


def test_gymnasium_makes_one(make_vector: MakeVector) -> None:
    def make(**options: Any) -> Any:
        return gym.make_vec("plugrl_bridges:PlugRL/Remote-v0", **options)

    env = make_vector(make, num_envs=2)
    assert type(env) is PlugRLVectorEnv
    assert env.spec.id == "PlugRL/Remote-v0"
    client = ClientThread(CountingEnv, num_envs=2, url=env.url)
    assert env.reset()[0].tolist() == [[0, 0, 0]] * 2
    env.close()
    client.join()
    assert make_vector(make, num_envs=None)._lockstep.options.num_envs is None


def test_the_root_has_it_too() -> None:
    assert plugrl_bridges.PlugRLVectorEnv is PlugRLVectorEnv


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_neither_pickled_nor_copied(make_vector: MakeVector, how: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="neither pickled nor copied"):
        how(make_vector())


# The autoreset mode -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_mode_is_given_in_any_form_and_told_as_gymnasiums_own_enum(
    make_vector: MakeVector, mode: AutoresetMode
) -> None:
    own = GymnasiumsMode[mode.name]
    for given in (mode, own, mode.name, mode.value, mode.name.lower()):
        env = make_vector(autoreset_mode=given)
        assert env.metadata["autoreset_mode"] is own
        assert env._lockstep.options.autoreset_mode is mode


def test_same_step_is_the_default(make_vector: MakeVector) -> None:
    assert make_vector().metadata["autoreset_mode"] is GymnasiumsMode.SAME_STEP


@pytest.mark.parametrize("nonsense", ["sometimes", "", None, 3, OBSERVATIONS], ids=repr)
def test_a_mode_that_is_none_is_refused_by_name(nonsense: object) -> None:
    with pytest.raises(ValueError, match=r"^autoreset_mode must be one of SAME_STEP, NEXT_STEP, DISABLED, got"):
        PlugRLVectorEnv(port=0, autoreset_mode=nonsense)


def test_a_bad_argument_is_named_and_nothing_is_left_open() -> None:
    with pytest.raises(ValueError, match=r"^timeout"):
        PlugRLVectorEnv(port=0, timeout=0)
    gc.collect()  # a socket that was left would warn


# Stepping -----------------------------------------------------------------------------------------------------------


def test_types_of_a_step(remote_vector: MakeVector) -> None:
    env = remote_vector(envs=3)
    observations, infos = env.reset()
    assert env.observation_space.contains(observations)
    assert infos["began"].tolist() == [0, 0, 0]
    observations, rewards, terminations, truncations, infos = act(env)
    assert env.observation_space.contains(observations)
    assert (rewards.dtype, terminations.dtype, truncations.dtype) == (np.float64, np.bool_, np.bool_)
    assert type(infos) is dict
    assert infos["t"].tolist() == [1, 1, 1]


def test_a_step_in_two_halves(remote_vector: MakeVector) -> None:
    env = remote_vector(envs=2)
    env.reset()
    with pytest.raises(NoAsyncCallError, match="call step_async"):
        env.step_wait()
    env.step_async(np.zeros((2, 1), np.float32))
    for call in (env.step_async, env.step):
        with pytest.raises(AlreadyPendingCallError, match="call step_wait"):
            call(np.zeros((2, 1), np.float32))
    assert env.step_wait()[1].tolist() == [1, 1]
    with pytest.raises(NoAsyncCallError):
        env.step_wait(timeout=1.0)
    assert act(env)[1].tolist() == [2, 2]


def test_a_half_of_a_step_that_times_out_says_who_is_missing_and_poisons(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=2, on_client_loss="raise", **SPACES)
    quick, slow = (Puppet(env.url, (tag,)).infer(env_spec={"rank": tag}) for tag in (0, 1))
    env.reset()
    env.step_async(np.zeros((2, 1), np.float32))
    quick.step()
    slow.action()
    with pytest.raises(
        StepTimeout, match=r"took longer than 0\.3 s: 1 of 2 envs answered; missing: .*slots 1"
    ) as raised:
        env.step_wait(timeout=0.3)
    assert slow.address in str(raised.value)
    with pytest.raises(EnvPoisoned, match="StepTimeout"):
        env.reset()


def test_a_reset_in_the_middle_of_a_step_waits_for_it(remote_vector: MakeVector) -> None:
    env = remote_vector()
    env.reset()
    env.step_async(np.zeros((1, 1), np.float32))
    assert env.reset()[0].tolist() == [[0, 1, 0]]
    assert act(env)[1].tolist() == [1]


def test_a_step_before_the_first_reset_is_refused(remote_vector: MakeVector) -> None:
    env = remote_vector()
    with pytest.raises(EnvPoisoned, match="call reset"):
        act(env)
    env.reset()
    act(env)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_nan_is_never_sent_and_the_slot_is_named(remote_vector: MakeVector, mode: AutoresetMode) -> None:
    made: list[CountingEnv] = []

    def make() -> CountingEnv:
        made.append(CountingEnv())
        return made[-1]

    env = remote_vector(make, envs=3, together=False, autoreset_mode=mode)
    env.reset()
    with pytest.raises(ValueError, match="the action for slot 1 holds NaN; it is not sent"):
        env.step(np.array([[0], [np.nan], [0]], np.float32))
    with pytest.raises(ValueError, match="actions have shape"):
        env.step(np.zeros((2, 1), np.float32))
    assert act(env)[1].tolist() == [1, 1, 1]
    assert [len(each.actions) for each in made] == [1, 1, 1]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("make", [CountingEnv, lambda: DictEnv(CountingEnv())], ids=["Box", "Dict"])
def test_what_is_returned_belongs_to_the_caller(remote_vector: MakeVector, make: Any, mode: AutoresetMode) -> None:
    env = remote_vector(make, envs=2, together=mode is not AutoresetMode.NEXT_STEP, autoreset_mode=mode)
    kept: list[tuple[Any, str]] = []

    def take(value: Any) -> Any:
        kept.append((value, str(value)))
        return value

    take(env.reset())
    for t in range(1, 13):
        step = take(act(env))
        if mode is AutoresetMode.DISABLED and t % 5 == 0:
            take(env.reset(options={"reset_mask": step[2]}))
    for value, text in kept:
        assert str(value) == text  # no later step wrote into it
        scribble(value)
    # What the trainer writes does not come back: the next terminal observation is the env's.
    while not (step := act(env))[2].all():
        pass
    final = step[4]["final_obs"][0] if mode is AutoresetMode.SAME_STEP else step[0]
    final = final["state"] if isinstance(final, dict) else final
    assert final.reshape(-1, 3)[0].tolist() == [0, 2, 5]


def scribble(value: Any) -> None:
    """Write into every array of it."""
    if isinstance(value, (dict, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            scribble(each)
    elif value is not None and value.dtype == object:
        scribble(tuple(value))
    elif value is not None:
        assert value.flags.writeable
        value[...] = 1


# What may be asked --------------------------------------------------------------------------------------------------


def test_what_is_known_of_the_envs_can_be_asked(remote_vector: MakeVector) -> None:
    env = remote_vector(lambda: gym.make("CartPole-v1", render_mode="rgb_array"), envs=2)
    assert env.get_attr("render_mode") == ("rgb_array",) * 2  # waits for the clients
    assert env.call("render_mode") == ("rgb_array",) * 2
    assert [spec.id for spec in env.get_attr("spec")] == ["CartPole-v1"] * 2
    assert env.get_attr("action_space") == (gym.spaces.Discrete(2),) * 2
    assert env.get_attr("observation_space") == (env.single_observation_space,) * 2


REFUSED: dict[str, tuple[Callable[[PlugRLVectorEnv], object], type[Exception], str]] = {
    "get_attr": (lambda env: env.get_attr("gravity"), AttributeError, "'gravity'.*known here are"),
    "set_attr": (lambda env: env.set_attr("gravity", [3]), AttributeError, "'gravity'.*--env-kwargs"),
    "call of an attribute": (lambda env: env.call("gravity"), NotImplementedError, "'gravity'.*--env-factory"),
    "call": (lambda env: env.call("jump", 3, high=True), NotImplementedError, "'jump'.*--env-factory"),
    "call of a known name": (lambda env: env.call("spec", 3), NotImplementedError, "'spec'"),
    "render": (lambda env: env.render(), NotImplementedError, "'render'.*at the client"),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_cross_the_boundary_is_refused_with_what_to_do(
    remote_vector: MakeVector, call: Callable[[PlugRLVectorEnv], object], error: type[Exception], text: str
) -> None:
    env = remote_vector()
    env.reset()
    with pytest.raises(error, match=text):
        call(env)
    assert act(env)[1].tolist() == [1]  # nothing is broken


# The end ------------------------------------------------------------------------------------------------------------


def test_close_is_idempotent_takes_anything_frees_the_port_and_is_heard(make_vector: MakeVector) -> None:
    env = make_vector()
    clients = [ClientThread(CountingEnv, url=env.url) for _ in range(2)]
    env.reset()
    env.close(terminate=True, timeout=3)
    env.close()
    assert env.closed
    assert [client.join().reason for client in clients] == ["server stop"] * 2
    assert make_vector(port=env.port).port == env.port
    for call in (env.reset, lambda: act(env), lambda: env.step_async(np.zeros((1, 1), np.float32))):
        with pytest.raises(EnvPoisoned, match="closed"):
            call()


def test_closing_before_any_client_came(make_vector: MakeVector) -> None:
    env = make_vector()
    env.close()
    with pytest.raises(EnvPoisoned, match="closed"):
        env.reset()
    with pytest.raises(EnvPoisoned, match="closed"):
        env.num_envs  # noqa: B018


def test_closing_in_the_middle_of_a_step(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=1, **SPACES)
    puppet = Puppet(env.url).infer()
    env.reset()
    env.step_async(np.zeros((1, 1), np.float32))
    env.close()
    assert puppet.close_seen() == STOP


def test_an_env_that_is_dropped_without_close_says_stop() -> None:
    env = PlugRLVectorEnv(port=0, num_envs=1, **SPACES)
    puppet = Puppet(env.url).infer()
    env.reset()
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None
    assert puppet.close_seen() == STOP


# Gymnasium's own wrappers -------------------------------------------------------------------------------------------


WRAPPERS: dict[str, tuple[AutoresetMode, Callable[[Any], Any]]] = {
    "RecordEpisodeStatistics": (AutoresetMode.SAME_STEP, wrappers.RecordEpisodeStatistics),
    "RecordEpisodeStatistics, next step": (AutoresetMode.NEXT_STEP, wrappers.RecordEpisodeStatistics),
    "NormalizeReward": (AutoresetMode.SAME_STEP, wrappers.NormalizeReward),
    "NormalizeReward, next step": (AutoresetMode.NEXT_STEP, wrappers.NormalizeReward),
    "ClipAction": (AutoresetMode.SAME_STEP, wrappers.ClipAction),
    "RescaleAction": (
        AutoresetMode.SAME_STEP,
        lambda env: wrappers.RescaleAction(env, np.full(1, -1, np.float32), np.full(1, 1, np.float32)),
    ),
    "ClipReward": (AutoresetMode.SAME_STEP, lambda env: wrappers.ClipReward(env, 0.0, 2.0)),
    # Gymnasium's wrappers of observations take no env in SAME_STEP.
    "NormalizeObservation": (AutoresetMode.NEXT_STEP, wrappers.NormalizeObservation),
    "FlattenObservation": (AutoresetMode.NEXT_STEP, wrappers.FlattenObservation),
    "DtypeObservation": (AutoresetMode.NEXT_STEP, lambda env: wrappers.DtypeObservation(env, np.float64)),
    "several": (
        AutoresetMode.NEXT_STEP,
        lambda env: wrappers.NormalizeReward(
            wrappers.NormalizeObservation(wrappers.RecordEpisodeStatistics(wrappers.ClipAction(env)))
        ),
    ),
}


@pytest.mark.parametrize(("mode", "wrap"), WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapper_does_to_it_what_it_does_to_local_envs(
    make_vector: MakeVector, mode: AutoresetMode, wrap: Callable[[Any], Any]
) -> None:
    local = wrap(SyncVectorEnv([CountingEnv] * 2, autoreset_mode=GymnasiumsMode[mode.name]))
    bare = make_vector(num_envs=2, autoreset_mode=mode)
    clients = [ClientThread(CountingEnv, url=bare.url, rank=rank, group_num_envs=2) for rank in (0, 1)]
    mine = wrap(bare)
    results: list[list[Any]] = []
    for env in (mine, local):
        steps = [env.reset()]
        for value in np.linspace(-3, 3, 14):
            *step, infos = env.step(np.full((2, 1), value, np.float32))
            infos.get("episode", {}).pop("t", None)  # the time differs
            steps.append((*step, infos))
        results.append(steps)
        env.close()
    assert_same(tuple(results[0]), tuple(results[1]))
    for client in clients:
        client.join()


def test_infos_as_a_list_are_those_of_local_envs(remote_vector: MakeVector) -> None:
    mine = wrappers.DictInfoToList(remote_vector(envs=2, autoreset_mode="NEXT_STEP", together=False))
    local = wrappers.DictInfoToList(SyncVectorEnv([CountingEnv] * 2, autoreset_mode=GymnasiumsMode.NEXT_STEP))
    assert mine.reset()[1] == local.reset()[1]
    for _ in range(13):
        assert act(mine)[4] == act(local)[4]


def test_a_wrapper_that_asks_for_another_mode_is_told_ours(make_vector: MakeVector) -> None:
    with pytest.raises((ValueError, AssertionError), match="NEXT_STEP"):
        wrappers.NormalizeObservation(make_vector())


def test_the_order_of_slots_is_that_of_ranks(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=3, **SPACES)
    for rank in (2, 0, 1):
        Puppet(env.url, (rank,)).infer(env_spec={"rank": rank})
    assert env.reset()[0][:, 0].tolist() == [0, 1, 2]


def test_chunks_of_actions_are_one_step(remote_vector: MakeVector) -> None:
    env = remote_vector(envs=2, action_horizon=4)
    assert env.single_action_space.shape == (4, 1)
    assert env.action_space.shape == (2, 4, 1)
    env.reset()
    observations, rewards, *_ = env.step(np.zeros((2, 4, 1), np.float32))
    assert (observations[:, 2].tolist(), rewards.tolist()) == ([4, 4], [10, 10])


def test_two_threads_do_not_disturb_a_waiting_step(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=1, **SPACES)
    puppet = Puppet(env.url).infer()
    env.reset()
    task = Task(lambda: act(env))
    puppet.action()
    wait_until(lambda: env._lockstep.stepping)
    with pytest.raises(AlreadyPendingCallError):
        act(env)
    puppet.t += 1
    puppet.feed_back(2.0).infer()
    assert task.result()[1].tolist() == [2]
