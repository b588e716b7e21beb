"""Which entries of the clients' observations a policy sees, and as what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import plugrl_bridges
from plugrl_bridges.client import env_factory
from plugrl_bridges.errors import SpaceError
from plugrl_bridges.rlinf.observations import Observations
from plugrl_bridges.rlinf.options import ObservationNames
from plugrl_bridges.spaces import ObservationLayout
from tests.support import CountingEnv

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.rlinf import PlugRLEnv

CONFIGS = Path(plugrl_bridges.__file__).parent / "rlinf" / "config"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def camera(side: int = 4, channels: int = 3) -> gym.spaces.Box:
    return gym.spaces.Box(0, 255, (side, side, channels), np.uint8)


SPACE = gym.spaces.Dict(
    {
        "front": camera(6),
        "hand": camera(),
        "left": camera(),
        "right": camera(),
        "joints": gym.spaces.Box(-9, 9, (2, 2), np.float64),
        "gripper": gym.spaces.Discrete(3),
        "task": gym.spaces.Text(12),
        "hint": gym.spaces.Text(12),
    }
)
LAYOUT = ObservationLayout(SPACE)


def arrays() -> list[Any]:
    """Give three envs' observations: whatever it is, env i's has the value i."""
    found = LAYOUT.allocate(3)
    for leaf, array in zip(LAYOUT.leaves, found, strict=True):
        for env in range(3):
            array[env] = f"{leaf.name} {env}" if leaf.dtype.kind == "U" else env
    return found


def seen(**names: Any) -> dict[str, Any]:
    return Observations(LAYOUT, ObservationNames.from_config(names)).of(arrays())


def test_images_states_and_text_have_the_shapes_and_types_of_a_policy() -> None:
    found = seen(main_image="front", wrist_image="hand", extra_view_images=["left", "right"], task_text="task")
    shapes = {key: tuple(value.shape) for key, value in found.items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "states": (3, 5), "main_images": (3, 6, 6, 3), "wrist_images": (3, 4, 4, 3),
        "extra_view_images": (3, 2, 4, 4, 3),
    }  # fmt: skip
    assert {found[key].dtype for key in shapes} == {torch.float32, torch.uint8}
    assert found["states"].dtype == torch.float32
    assert found["states"].tolist() == [[env] * 5 for env in range(3)]
    for key in ("main_images", "wrist_images", "extra_view_images"):
        assert [int(found[key][env].unique()) for env in range(3)] == [0, 1, 2]
    assert found["task_descriptions"] == ["task 0", "task 1", "task 2"]


def test_states_are_joined_in_the_order_that_is_asked_for() -> None:
    layout = ObservationLayout(gym.spaces.Dict({"a": gym.spaces.Box(-9, 9, (1,)), "b": gym.spaces.Box(-9, 9, (2,))}))
    values = [np.array([[1.0]]), np.array([[2.0, 3.0]])]
    both, turned, one = (
        Observations(layout, ObservationNames.from_config({"states": states})) for states in (None, ["b", "a"], "b")
    )
    assert both.of(values)["states"].tolist() == [[1, 2, 3]]
    assert turned.of(values)["states"].tolist() == [[2, 3, 1]]
    assert one.of(values)["states"].tolist() == [[2, 3]]
    assert (both.states_width, one.states_width) == (3, 2)


def test_the_only_image_is_the_main_one() -> None:
    layout = ObservationLayout(camera())
    found = Observations(layout, ObservationNames()).of([np.zeros((2, 4, 4, 3), np.uint8)])
    assert list(found) == ["main_images"]


def test_a_text_may_be_told_by_the_config() -> None:
    assert seen(main_image="front", task_text="hint")["task_descriptions"] == ["hint 0", "hint 1", "hint 2"]
    layout = ObservationLayout(gym.spaces.Box(-1, 1, (2,)))
    names = ObservationNames.from_config({"task_description": "stand up"})
    assert Observations(layout, names).of([np.zeros((2, 2))])["task_descriptions"] == ["stand up", "stand up"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({}, r"several images \['front', 'hand', 'left', 'right'\]: say which is the main one"),
        ({"main_image": "front"}, r"several texts \['hint', 'task'\]: say which is the task's"),
        ({"main_image": "back"}, r"have no 'back'; they have \['front', "),
        ({"main_image": "joints"}, r"'joints' has the shape \[2, 2\], an image has \[h, w, c\]"),
        ({"main_image": "front", "states": ["task"]}, "'task' is text"),
        ({"main_image": "front", "task_text": "joints"}, "'joints' must be a Text entry"),
        (
            {"main_image": "front", "task_text": "task", "extra_view_images": ["front", "left"]},
            "differ in their shapes",
        ),
    ],
)
def test_names_that_do_not_fit_are_told(names: dict[str, Any], text: str) -> None:
    with pytest.raises(SpaceError, match=text):
        seen(**names)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"camera": "front"}, r"unknown keys \['camera'\]; known are \['states', "),
        ({"states": ["a", "a"]}, r"observation.states must be a list of different names"),
        ({"main_image": 3}, "observation.main_image must be a str or null, got int 3"),
    ],
)
def test_names_that_are_none_are_told(names: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        ObservationNames.from_config(names)


def test_text_and_images_cross_with_the_final_observation(remote: Callable[..., PlugRLEnv]) -> None:
    class Seeing(gym.ObservationWrapper[Any, Any, Any]):
        def __init__(self, env: CountingEnv) -> None:
            super().__init__(env)
            self.observation_space = gym.spaces.Dict(
                {"view": camera(), "task": gym.spaces.Text(20, charset="step 0123456789")}
            )

        def observation(self, observation: Any) -> Any:
            return {"view": np.full((4, 4, 3), observation[2], np.uint8), "task": f"step {int(observation[2])}"}

    env = remote(lambda index: Seeing(CountingEnv(index, length=index + 2)))
    env.reset()
    act = np.zeros((2, 1, 1), np.float32)
    env.chunk_step(act)
    [observation], _, _, _, [info] = env.chunk_step(act)
    assert observation["task_descriptions"] == ["step 0", "step 2"]
    assert info["final_observation"]["task_descriptions"] == ["step 2", "step 2"]
    assert [int(each.unique()) for each in observation["main_images"]] == [0, 2]
    assert [int(each.unique()) for each in info["final_observation"]["main_images"]] == [2, 2]


def test_a_policy_that_looks_reads_and_acts_in_chunks(
    remote: Callable[..., PlugRLEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Solve the example by what a policy is handed: it reads the colour, finds it in the picture, and goes there."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        overrides = ["+env@env.train=plugrl_camera_text", "+actor.model.num_action_chunks=4"]
        config = compose(overrides=[*overrides, "+algorithm.reward_type=chunk_level"])
    node: Any = OmegaConf.to_container(config.env.train, resolve=True)
    node.update(port=0, seed=3)
    make = env_factory("camera_text_env:make")
    env = remote(lambda _: make(), envs=4, **node)
    observation, _ = env.reset()
    assert set(observation) == {"states", "main_images", "wrist_images", "task_descriptions"}
    assert observation["main_images"].shape == (4, 48, 48, 3)
    ended = successes = 0
    for _ in range(40):
        observations, rewards, terminations, truncations, infos = env.chunk_step(_look_and_act(observation))
        observation = observations[-1]
        assert (rewards[:, :-1] == 0).all()
        assert not (terminations | truncations)[:, :-1].any()
        done = (terminations | truncations)[:, -1]
        if done.any():
            episode = infos[-1]["final_info"]["episode"]
            ended += int(done.sum())
            successes += int(episode["success_once"][done].sum())
            assert (episode["episode_len"][done] <= 40).all()
    assert ended > 20
    assert successes >= 0.9 * ended


def _look_and_act(observation: dict[str, Any]) -> Any:
    actions = np.zeros((4, 4, 2), np.float32)
    for env, text in enumerate(observation["task_descriptions"]):
        picture = observation["main_images"][env].numpy().astype(int)
        colour = {"red": (220, 40, 40), "blue": (40, 80, 230)}[text.split()[2]]
        rows, columns = np.nonzero((picture == colour).all(axis=-1))
        if not len(rows):  # the hand lies on it
            continue
        target = np.array([columns.mean(), rows.mean()]) / 47 * 2 - 1
        hand = observation["states"][env].numpy()
        for step in range(4):
            move = np.clip((target - hand) / 0.1, -1, 1)
            actions[env, step] = move
            hand = hand + 0.1 * move
    return actions
