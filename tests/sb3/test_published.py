"""The form in which published experiment scripts call the env, with the clients that are out there."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO

from plugrl_bridges.errors import SpaceError
from plugrl_bridges.sb3 import PlugRLVecEnv
from tests.foreign_client import ForeignClient
from tests.support import STOP, ClientThread, CountingEnv, DictEnv, Puppet
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ACTION_SPACE = gym.spaces.Box(-2, 2, (1,), np.float32)
STEPS = 11
TEXTS: dict[str, Any] = {
    "array": lambda n: np.array([f"task {i}" for i in range(n)]),
    "list": lambda n: [f"task {i}" for i in range(n)],
    "one str": "pick up the cube",
    "empty": "",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand where the script stands: it names ``episodes.csv`` without a folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def publish() -> Iterator[Callable[..., PlugRLVecEnv]]:
    made: list[PlugRLVecEnv] = []

    def make(**changes: Any) -> PlugRLVecEnv:
        settings: dict[str, Any] = {
            "num_envs": 16, "action_space": ACTION_SPACE, "port": 0, "host": "127.0.0.1", "episode_log": "episodes.csv",
            "timeout": 60, **changes,
        }  # fmt: skip
        made.append(PlugRLVecEnv(**settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "episodes.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def clients_of(env: PlugRLVecEnv, connections: int, **options: Any) -> list[ForeignClient]:
    tags = np.arange(16.0).reshape(connections, -1)
    return [ForeignClient(env.url, [CountingEnv(float(tag)) for tag in own], **options).start() for own in tags]


@pytest.mark.parametrize("connections", [1, 16])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("reward_dtype", ["<f4", "<f8"])
def test_sixteen_envs_on_one_connection_or_on_sixteen(
    folder: Path,
    publish: Callable[..., PlugRLVecEnv],
    connections: int,
    text: Any,
    reward_dtype: str,
) -> None:
    env = publish()
    clients = clients_of(env, connections, text=text, reward_dtype=reward_dtype)
    observations = env.reset()
    assert isinstance(observations, np.ndarray)
    assert sorted(observations[:, 0].tolist()) == list(range(16))
    order = observations[:, 0].copy()
    for number in range(1, STEPS + 1):
        observations, rewards, dones, infos = env.step(np.full((16, 1), number, np.float32))
        assert isinstance(observations, np.ndarray)
        assert observations[:, 0].tolist() == order.tolist()
        t = (number - 1) % 5 + 1
        assert rewards.tolist() == [t] * 16
        assert dones.tolist() == [t == 5] * 16
        assert all(("terminal_observation" in info) == (t == 5) for info in infos)
    env.close()
    for client in clients:
        client.join()
        assert client.close == STOP
        assert [action.tolist() for action in client.actions[:2]] == [[[[k]] * (16 // connections)] for k in (1.0, 2.0)]
    assert [(row["return"], row["length"]) for row in rows(folder)] == [("15.0", "5")] * 32


def test_a_client_that_goes_without_a_close_frame_is_lost_and_replaced(
    folder: Path, publish: Callable[..., PlugRLVecEnv]
) -> None:
    env = publish(num_envs=1)
    first = ForeignClient(env.url, [CountingEnv(1)], say_goodbye=False, max_steps=2).start()
    env.reset()
    second = ForeignClient(env.url, [CountingEnv(2)]).start()  # a spare
    env.step(np.zeros((1, 1), np.float32))
    observations, rewards, dones, infos = env.step(np.zeros((1, 1), np.float32))
    assert isinstance(observations, np.ndarray)
    assert (observations.tolist(), rewards.tolist(), dones.tolist()) == ([[2, 0, 0]], [2], [True])
    assert infos[0]["client_lost"]
    assert infos[0]["terminal_observation"].tolist() == [1, 0, 2]
    first.join()
    env.close()
    second.join()
    assert [(row["return"], row["length"], row["end"]) for row in rows(folder)] == [("3.0", "2", "lost")]


def test_a_policy_learns_from_a_foreign_client(folder: Path, publish: Callable[..., PlugRLVecEnv]) -> None:
    env = publish()
    [client] = clients_of(env, 1)
    PPO("MlpPolicy", env, n_steps=8, batch_size=64, n_epochs=1, device="cpu", seed=0).learn(256)
    env.close()
    client.join()
    assert len(client.actions) >= 16
    assert len(rows(folder)) == 48


# Pictures and states ------------------------------------------------------------------------------------------------


def camera_and_states(observations: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    n = len(observations)
    pictures = np.zeros((n, 40, 36, 3), np.uint8)
    pictures[:, 0, 0, 0] = [observation[2] for observation in observations]
    return (
        {"front": pictures, "wrist": pictures[:, ::2].copy()},
        {"joints": np.array(observations, np.float64), "gripper": np.ones((n, 1), np.float32)},
    )


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({"image_key": "front"}, (40, 36, 3)),
        ({"image_key": "wrist"}, (20, 36, 3)),
        ({"state_key": "joints"}, (3,)),
    ],
    ids=str,
)
def test_one_entry_of_a_mixed_observation_can_be_surfaced(
    folder: Path, publish: Callable[..., PlugRLVecEnv], keys: dict[str, str], shape: tuple[int, ...]
) -> None:
    env = publish(num_envs=2, **keys)
    client = ForeignClient(env.url, [CountingEnv(1), CountingEnv(2)], observe=camera_and_states).start()
    observations = env.reset()
    assert env.observation_space.shape == shape
    assert isinstance(observations, np.ndarray)
    assert observations.shape == (2, *shape)
    observations, _, _, _ = env.step(np.zeros((2, 1), np.float32))
    assert isinstance(observations, np.ndarray)
    assert (observations[0, 0, 0, 0] if len(shape) == 3 else observations[0, 2]) == 1
    assert observations.dtype == (np.uint8 if len(shape) == 3 else np.float64)
    env.close()
    client.join()
    assert folder.exists()


@pytest.mark.parametrize(
    ("keys", "entries"),
    [
        ({}, ["front", "gripper", "joints", "wrist"]),
        ({"image_key": "front", "state_key": "joints"}, ["front", "joints"]),
    ],
    ids=str,
)
def test_several_entries_are_a_dict(
    folder: Path, publish: Callable[..., PlugRLVecEnv], keys: dict[str, str], entries: list[str]
) -> None:
    env = publish(num_envs=2, **keys)
    client = ForeignClient(env.url, [CountingEnv(1), CountingEnv(2)], observe=camera_and_states).start()
    observations = env.reset()
    assert isinstance(observations, dict)
    assert sorted(observations) == entries
    infos: list[dict[str, Any]] = []
    for _ in range(5):
        observations, _, _, infos = env.step(np.zeros((2, 1), np.float32))
    assert isinstance(observations, dict)
    assert observations["joints"].tolist() == [[1, 1, 0], [2, 1, 0]]
    assert sorted(infos[0]["terminal_observation"]) == entries
    assert infos[0]["terminal_observation"]["joints"].tolist() == [1, 0, 5]
    assert infos[0]["terminal_observation"]["front"][0, 0, 0] == 5
    env.close()
    client.join()
    assert folder.exists()


@pytest.mark.parametrize(
    ("keys", "kind"), [({"image_key": "camera"}, "Box"), ({"state_key": "state"}, "Box"),
                       ({"image_key": "camera", "state_key": "state"}, "Dict")], ids=str
)  # fmt: skip
def test_keys_choose_from_an_announced_space_too(keys: dict[str, str], kind: str) -> None:
    env = PlugRLVecEnv(port=0, **keys)  # type: ignore[arg-type]
    client = ClientThread(lambda: DictEnv(CountingEnv(4)), url=env.url)
    try:
        observations = env.reset()
        assert type(env.observation_space).__name__ == kind
        observations = env.step(np.zeros((1, 1), np.float32))[0]
        state = observations["state"] if isinstance(observations, dict) else observations
        assert np.asarray(state).ravel()[-1] == 1
    finally:
        env.close()
        client.join()


def test_clients_that_do_not_fit_a_given_space_show_in_the_error() -> None:
    env = PlugRLVecEnv(
        num_envs=1, port=0, observation_space=ACTION_SPACE, action_space=ACTION_SPACE, connect_timeout=20
    )
    puppet = Puppet(env.url).infer()
    with pytest.raises(
        SpaceError, match=rf"{puppet.address} does not fit: .*\[5\.2\].*has shape \[3\], expected \[1\]"
    ):
        env.reset()
    env.close()


def test_a_key_that_the_client_does_not_send_is_an_error_that_says_what_it_sends(
    folder: Path, publish: Callable[..., PlugRLVecEnv]
) -> None:
    env = publish(num_envs=1, image_key="rear")
    Puppet(env.url).infer()
    with pytest.raises(Exception, match=r"no entry 'rear': it sends \['obs'\]"):
        env.reset()
    assert folder.exists()


def test_a_discrete_action_reaches_a_foreign_client_as_something_to_round(
    folder: Path, publish: Callable[..., PlugRLVecEnv]
) -> None:
    env = publish(num_envs=2, action_space=gym.spaces.Discrete(3, start=1))
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    task = Task(lambda: env.step(np.array([1, 3])))
    action = puppet.step()
    assert (action.shape, action.dtype) == ((1, 2, 1), np.dtype("<i8"))
    assert [round(float(action[0, i][0])) for i in range(2)] == [1, 3]
    task.result()
    assert folder.exists()
