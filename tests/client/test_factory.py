"""Factories, usable and not [FactoryError]: the text says what is wrong, before anything connects."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest

from plugrl_bridges.client import EnvClient, env_factory, gym_factory
from plugrl_bridges.client.envs import EnvList
from plugrl_bridges.client.factory import build_batch
from plugrl_bridges.client.vector_env import VectorBatch
from plugrl_bridges.errors import FactoryError, SpaceError
from plugrl_bridges.ledger import LedgerEnv, LedgerReader
from plugrl_bridges.place import place_of_new_envs
from tests.client.scripted import CountEnv

if TYPE_CHECKING:
    from pathlib import Path

    from plugrl_bridges.wire.codec import Value

MODULE = """
import gymnasium, os
class Home:
    @staticmethod
    def make(): return gymnasium.make("CartPole-v1")
def make(**kwargs): return gymnasium.make("CartPole-v1", **kwargs)
def numbered(*, env_index, gain=1):
    env = gymnasium.make("CartPole-v1")
    env.number = gain * env_index
    return env
class Numbered(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(0, 1)
    def __init__(self, env_index=-1): self.number = env_index
gymnasium.register("Numbered-v0", "my_envs:Numbered")
def raising(): raise RuntimeError("no simulator\\nmore")
def wrong(): return 5
number = 3
gymnasium.register("Mine-v0", "gymnasium.envs.classic_control:CartPoleEnv")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_envs.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "broken_envs.py").write_text("import nowhere_at_all\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_envs", "broken_envs"):
        sys.modules.pop(name, None)
    gymnasium.registry.pop("Mine-v0", None)
    gymnasium.registry.pop("Numbered-v0", None)


def test_gym_ids() -> None:
    assert gym_factory("Pendulum-v1", {"g": 9.0})().unwrapped.g == 9.0  # type: ignore[union-attr]
    assert gym_factory("my_envs:Mine-v0")().spec.id == "Mine-v0"  # type: ignore[union-attr]


def test_functions_are_found_from_the_current_directory() -> None:
    assert env_factory("my_envs:make", {"render_mode": "rgb_array"})().render_mode == "rgb_array"
    assert isinstance(env_factory("my_envs:Home.make")(), gymnasium.Env)


@pytest.mark.parametrize(
    ("kwargs", "numbers"), [({}, [0, 1, 2]), ({"env_index": 5}, [5, 5, 5])], ids=["given", "chosen by the user"]
)
def test_who_asks_for_env_index_is_given_the_envs_number(kwargs: dict[str, Any], numbers: list[int]) -> None:
    for make_env in (gym_factory("my_envs:Numbered-v0", kwargs), env_factory("my_envs:numbered", kwargs)):
        batch = build_batch(make_env, 3)
        assert isinstance(batch, EnvList)
        assert [env.get_wrapper_attr("number") for env in batch._envs] == numbers
        batch.close()
    batch = build_batch(env_factory("my_envs:numbered", {"gain": 10}), 2)
    assert isinstance(batch, EnvList)
    assert [env.get_wrapper_attr("number") for env in batch._envs] == [0, 10]


def test_env_index_is_not_forced_on_anybody() -> None:
    made: list[dict[str, int]] = []

    def make(**anything: int) -> gymnasium.Env[Any, Any]:
        made.append(anything)
        return gymnasium.make("CartPole-v1")

    build_batch(make, 2).close()
    assert made == [{}, {}]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("my_envs", "package.module:function"),
        (":make", "package.module:function"),
        ("no_such_module:make", "no module 'no_such_module'"),
        ("my_envs.sub:make", "importing my_envs.sub failed|no module 'my_envs.sub'"),
        ("my_envs:nothing", "no 'nothing'"),
        ("my_envs:number", "expected a function, got a int"),
        ("broken_envs:make", "importing broken_envs failed: ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_paths_that_lead_nowhere(path: str, text: str) -> None:
    with pytest.raises(FactoryError, match=text):
        env_factory(path)


@pytest.mark.parametrize("env_id", ["NoSuchEnv-v0", "no_such_module:Id-v0", "", "not an id"])
def test_ids_that_nobody_registered(env_id: str) -> None:
    with pytest.raises(FactoryError):
        gym_factory(env_id)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: 5, "returned a builtins.int, expected a gymnasium.Env"),
        (lambda: [CountEnv()], "returned a builtins.list"),
        (lambda: 1 / 0, "the env factory failed: ZeroDivisionError"),
    ],
)
def test_factories_that_make_no_env(make: Value, text: str) -> None:
    with pytest.raises(FactoryError, match=text):
        EnvClient(make, url="ws://127.0.0.1:1").run()


def test_envs_with_different_spaces() -> None:
    sizes = iter((1, 2))

    def make() -> gymnasium.Env[Any, Any]:
        env = CountEnv()
        env.action_space = gymnasium.spaces.Box(-1, 1, (next(sizes),), np.float32)
        return env

    with pytest.raises(FactoryError, match="env 1 has"):
        build_batch(make, 2)


def test_spaces_that_cannot_travel() -> None:
    env = CountEnv()
    env.action_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2)})
    with pytest.raises(SpaceError):
        EnvClient(lambda: env, url="ws://127.0.0.1:1").run()


@pytest.mark.skipif(gymnasium.__version__.startswith("1.0."), reason="no usable autoreset mode")
def test_build_batch_makes_the_right_kind() -> None:
    assert isinstance(build_batch(CountEnv, None), EnvList)
    assert build_batch(CountEnv, 3).num_envs == 3

    def vector() -> Value:
        return gymnasium.vector.SyncVectorEnv([CountEnv] * 2)

    batch = build_batch(vector, None)
    assert isinstance(batch, VectorBatch)
    assert batch.num_envs == 2
    with pytest.raises(FactoryError, match="vector env of 2 envs, but num_envs is 3"):
        build_batch(vector, 3)


def test_a_factory_that_returns_the_same_env_again_is_refused() -> None:
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(FactoryError, match="same CartPole-v1 object more than once"):
        EnvClient(lambda: env, num_envs=2, connect_timeout=0.1).run()


def test_ledgers_of_a_factory_know_rank_and_number(tmp_path: Path) -> None:
    folder = tmp_path / "ledgers"
    batch = build_batch(lambda: LedgerEnv(CountEnv(), f"{folder}/"), 3, rank=2)
    batch.reset([0, 1, 2])
    batch.close()
    [path] = folder.iterdir()
    assert LedgerReader(path).envs == [(2, 0), (2, 1), (2, 2)]
    assert place_of_new_envs() == (0, 0)


@pytest.mark.parametrize("inside", [True, False])
def test_ledgers_inside_a_vector_env_are_not_what_is_verified(caplog: pytest.LogCaptureFixture, inside: bool) -> None:
    def one() -> Any:
        return LedgerEnv(CountEnv(), None) if inside else CountEnv()

    build_batch(lambda: gymnasium.vector.SyncVectorEnv([one, one]), None, verify=True).close()
    assert ("wrappers between the two are not checked" in caplog.text) is inside
