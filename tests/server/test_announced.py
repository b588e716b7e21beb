"""What a client says of its envs, and holding it against what is in use."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.server.announced import Announced
from plugrl_bridges.spaces import space_to_wire

Box = gym.spaces.Box
Discrete = gym.spaces.Discrete


def test_a_client_without_env_spec_announces_nothing() -> None:
    nothing = Announced.from_wire(None)
    assert nothing == Announced()
    assert nothing.spec is None


def test_everything_that_is_announced_is_known() -> None:
    observation, action = Box(-1, 1, (3,), np.float32), Discrete(4)
    announced = Announced.from_wire(
        {
            "observation_space": space_to_wire(observation),
            "action_space": space_to_wire(action),
            "env_id": "CartPole-v1",
            "render_mode": "rgb_array",
            "max_episode_steps": 500,
            "rank": 2,
            "group_num_envs": 8,
            "features": ["seeded-reset"],
            "client": "mine",
            "client_version": "1.2",
            "something_new": 3,
        }
    )
    assert announced.observation_space == observation
    assert announced.action_space == action
    assert announced.spec is not None
    assert (announced.spec.id, announced.spec.max_episode_steps) == ("CartPole-v1", 500)
    assert (announced.render_mode, announced.rank, announced.group_num_envs) == ("rgb_array", 2, 8)
    assert announced.features == {"seeded-reset"}
    assert announced.client == "mine 1.2"


@pytest.mark.parametrize(
    "wrong",
    [
        {"env_id": 3},
        {"render_mode": 3},
        {"max_episode_steps": "long"},
        {"rank": True},
        {"rank": 1.0},
        {"group_num_envs": "8"},
        {"features": "seeded-reset"},
        {"features": [1]},
        {"client": 3},
        {"client_version": 3},
    ],
    ids=str,
)
def test_a_key_of_the_wrong_type_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match=next(iter(wrong))) as raised:
        Announced.from_wire(wrong)
    assert raised.value.clause == "env-spec"


@pytest.mark.parametrize(
    "space", [3, {}, {"type": "Box"}, {"type": "Secret"}, {"type": "Discrete", "n": -1, "start": 0}]
)
def test_a_space_that_is_none_is_refused(space: Any) -> None:
    for key in ("observation_space", "action_space"):
        with pytest.raises(RemoteProtocolError, match="env_spec"):
            Announced.from_wire({key: space})


def test_an_env_id_that_gymnasium_cannot_read_gives_no_spec() -> None:
    assert Announced.from_wire({"env_id": "not an id!"}).spec is None


SAME = [
    (Box(-1, 1, (3,), np.float32), Box(-9, 9, (3,), np.float64)),
    (Discrete(3), Discrete(3, start=1)),
]
DIFFERENT = [
    (Box(-1, 1, (3,), np.float32), Box(-1, 1, (4,), np.float32)),
    (Discrete(3), Discrete(4)),
    (Discrete(3), Box(-1, 1, (1,), np.float32)),
    (gym.spaces.Dict({"a": Discrete(2)}), gym.spaces.Dict({"b": Discrete(2)})),
]


@pytest.mark.parametrize(("own", "used"), SAME)
def test_other_bounds_and_dtypes_are_said_and_admitted(own: Any, used: Any) -> None:
    texts: list[str] = []
    Announced(action_space=own).check_against(used, used, texts.append)
    assert len(texts) == 1
    assert "announces the action space" in texts[0]


@pytest.mark.parametrize(("own", "used"), DIFFERENT)
@pytest.mark.parametrize("which", ["observation", "action"])
def test_another_build_is_refused(own: Any, used: Any, which: str) -> None:
    announced = Announced(**{f"{which}_space": own})
    with pytest.raises(SpaceError, match=f"its {which} space"):
        announced.check_against(used, used, lambda _: None)


def test_the_same_spaces_are_nothing_to_speak_of() -> None:
    texts: list[str] = []
    space = Box(-1, 1, (3,), np.float32)
    Announced(observation_space=space).check_against(space, Discrete(2), texts.append)
    assert texts == []


@pytest.mark.parametrize("wrong", [{"rank": -1}, {"group_num_envs": 0}, {"group_num_envs": 10**15}], ids=str)
def test_a_number_that_would_cost_memory_or_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError, match=next(iter(wrong))):
        Announced.from_wire(wrong)


def test_features_that_are_nil_are_none() -> None:
    assert Announced.from_wire({"features": None}).features == frozenset()
