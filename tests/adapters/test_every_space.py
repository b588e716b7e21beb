"""One table of cases for all adapters: a scripted env driven here and from afar gives the same, step by step."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.gym import PlugRLVectorEnv, RemoteEnv
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from tests.adapters.equality import assert_same
from tests.adapters.scripted import ACTION_SPACES, OBSERVATION_SPACES, ScriptedEnv
from tests.support import ClientThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_ENVS = 3
STEPS = 500
CASES = [
    *((observation, "box-f4") for observation in OBSERVATION_SPACES),
    *(("box-f4", action) for action in ACTION_SPACES if action != "box-f4"),
]
MODES = list(AutoresetMode)


def by_index(make: Callable[[int], ScriptedEnv]) -> Callable[..., ScriptedEnv]:
    """Make a factory of it that a client gives the env's number."""

    def factory(env_index: int) -> ScriptedEnv:
        return make(env_index)

    return factory


@contextlib.contextmanager
def clients(url: str, make: Callable[[int], ScriptedEnv], num_envs: int, *, together: bool) -> Iterator[None]:
    """Serve envs 0, 1, … from one connection, or from one each."""
    if together:
        threads = [ClientThread(by_index(make), num_envs=num_envs, url=url)]
    else:
        threads = [
            ClientThread(functools.partial(make, index), num_envs=1, url=url, rank=index, group_num_envs=num_envs)
            for index in range(num_envs)
        ]
    try:
        yield
    finally:
        for thread in threads:
            thread.stop()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize(("observation", "action"), CASES)
def test_a_gymnasium_trainer_sees_what_sync_vector_env_would_show(
    observation: str, action: str, mode: AutoresetMode
) -> None:
    make = functools.partial(ScriptedEnv, observation, action)
    local = SyncVectorEnv([functools.partial(make, index) for index in range(NUM_ENVS)], autoreset_mode=mode)
    together = mode is not AutoresetMode.NEXT_STEP
    with (
        contextlib.closing(PlugRLVectorEnv(port=0, num_envs=NUM_ENVS, autoreset_mode=mode)) as mine,
        clients(mine.url, make, NUM_ENVS, together=together),
    ):
        assert mine.metadata["autoreset_mode"] is mode
        for name in (
            "num_envs",
            "observation_space",
            "action_space",
            "single_observation_space",
            "single_action_space",
        ):
            assert getattr(mine, name) == getattr(local, name), name
        assert_same(mine.reset(seed=7), local.reset(seed=7), "reset")
        local.action_space.seed(3)
        ends = 0
        for t in range(STEPS):
            actions = local.action_space.sample()
            step = local.step(actions)
            assert_same(mine.step(actions), step, f"step {t}")
            done = step[2] | step[3]
            ends += int(done.sum())
            if mode is AutoresetMode.DISABLED and done.any():
                again = mine.reset(options={"reset_mask": done.copy()})
                assert_same(again, local.reset(options={"reset_mask": done.copy()}), f"reset after step {t}")
            if t == STEPS // 2:  # seeds and options in the middle of a run
                once: dict[str, Any] = {"seed": [11, 5, 8], "options": {"level": 2}}
                assert_same(mine.reset(**once), local.reset(**once), "the second reset")
        assert ends > STEPS / 4


def sb3_takes(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return all(not isinstance(inner, (spaces.Dict, spaces.Tuple, spaces.Text)) for inner in space.spaces.values())
    return not isinstance(space, (spaces.Text, spaces.Tuple))


@pytest.mark.parametrize(("observation", "action"), [case for case in CASES if sb3_takes(OBSERVATION_SPACES[case[0]])])
def test_a_stable_baselines3_trainer_sees_what_dummy_vec_env_would_show(observation: str, action: str) -> None:
    make = functools.partial(ScriptedEnv, observation, action)
    local = DummyVecEnv([functools.partial(make, index) for index in range(NUM_ENVS)])
    with (
        contextlib.closing(PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS)) as mine,
        clients(mine.url, make, NUM_ENVS, together=True),
    ):
        assert mine.observation_space == local.observation_space
        assert mine.action_space == local.action_space
        for env in (mine, local):
            env.seed(7)
        assert_same(plain(mine.reset()), plain(local.reset()), "reset")
        local.action_space.seed(3)
        for t in range(STEPS):
            actions = np.array([local.action_space.sample() for _ in range(NUM_ENVS)])
            one, other = mine.step(actions), local.step(actions)
            for at in range(3):
                assert_same(plain(one[at]), plain(other[at]), f"step {t}, {at}")
            for mine_info, local_info in zip(one[3], other[3], strict=True):
                assert_same(plain(mine_info), plain(local_info), f"infos of step {t}")


def plain(value: Any) -> Any:
    """Make an SB3 observation or info comparable: SB3 gives an OrderedDict, and infos with arrays in them."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray) and value.size < 100:
        return value.tolist()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.item() if isinstance(value, np.generic) else value


@pytest.mark.parametrize(("observation", "action"), CASES)
def test_a_single_env_is_what_the_env_itself_would_be(observation: str, action: str) -> None:
    make = functools.partial(ScriptedEnv, observation, action)
    local = make(0)
    with contextlib.closing(RemoteEnv(port=0)) as mine, clients(mine.url, make, 1, together=True):
        assert mine.observation_space == local.observation_space
        assert mine.action_space == local.action_space
        assert_same(as_wire(mine.reset(seed=7)), as_wire(local.reset(seed=7)), "reset")
        local.action_space.seed(3)
        for t in range(STEPS):
            action_taken = local.action_space.sample()
            step = local.step(action_taken)
            assert_same(as_wire(mine.step(action_taken)), as_wire(step), f"step {t}")
            if step[2] or step[3]:
                assert_same(as_wire(mine.reset()), as_wire(local.reset()), f"reset after step {t}")
            elif t % 50 == 49:  # options, in the middle of an episode
                again = local.reset(options={"level": t})
                assert_same(as_wire(mine.reset(options={"level": t})), as_wire(again), f"reset after step {t}")


def as_wire(value: Any) -> Any:
    """Take off what a single env's info and Discrete observation lose on the wire: that a scalar was one of NumPy's."""
    if isinstance(value, dict):
        return {key: as_wire(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(as_wire(inner) for inner in value)
    return value.item() if isinstance(value, (np.generic, np.ndarray)) and not value.shape else value
