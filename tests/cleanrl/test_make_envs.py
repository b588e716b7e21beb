"""`make_envs` under the logging loops of CleanRL-style scripts, in each dialect: every episode once, and rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode as GymnasiumsMode
from gymnasium.wrappers import vector as wrappers

from plugrl_bridges.cleanrl import make_envs
from plugrl_bridges.gym import InfoDialect, PlugRLVectorEnv
from tests.remote_vector import SPACES, act
from tests.support import CountingEnv, Puppet, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.remote_vector import MakeVector

    Loop = Callable[[dict[str, Any]], list[tuple[int, float, int]]]

STEPS = 24
# Slot 0 has episodes of 2 steps (1 + 2), slot 1 of 3 (1 + 2 + 3).
EPISODES = {0: (3.0, 2), 1: (6.0, 3)}


def loop_of_0_29(infos: dict[str, Any]) -> list[tuple[int, float, int]]:
    """Log as scripts for 0.29 do: a list of dicts or None."""
    found = []
    if "final_info" in infos:
        for slot, info in enumerate(infos["final_info"]):
            if info and "episode" in info:
                found.append((slot, float(info["episode"]["r"][0]), int(info["episode"]["l"][0])))
    return found


def loop_of_1_x(infos: dict[str, Any]) -> list[tuple[int, float, int]]:
    """Log as scripts for 1.x do whose vector env is in SAME_STEP: arrays with masks under ``final_info``."""
    found = []
    if "final_info" in infos:
        record = infos["final_info"]["episode"]
        for slot in np.flatnonzero(infos["final_info"]["_episode"]):
            found += [(int(slot), float(record["r"][slot]), int(record["l"][slot]))]
    return found


def loop_of_1_x_next_step(infos: dict[str, Any]) -> list[tuple[int, float, int]]:
    """Log as scripts for 1.x do whose vector env is in NEXT_STEP: arrays with masks at the top."""
    found = []
    if "episode" in infos:
        record = infos["episode"]
        for slot in np.flatnonzero(infos["_episode"]):
            found += [(int(slot), float(record["r"][slot]), int(record["l"][slot]))]
    return found


LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "0.29": (loop_of_0_29, {"info_dialect": "0.29"}),
    "1.x, same step": (loop_of_1_x, {"info_dialect": "1.x"}),
    "1.x, next step": (loop_of_1_x_next_step, {"info_dialect": "1.x", "autoreset_mode": "NEXT_STEP"}),
}
each_loop = pytest.mark.parametrize(("loop", "options"), LOOPS.values(), ids=LOOPS)


class Doubling(gym.Wrapper[Any, Any, Any, Any]):
    """Pay double, above a record of what was paid: a client's own record is another than the bridge's count."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, 2 * float(reward), *rest


def counting(env_index: int) -> Any:
    return CountingEnv(env_index, length=2 + env_index, truncate=bool(env_index))


def recorded(env_index: int) -> Any:
    return gym.wrappers.RecordEpisodeStatistics(counting(env_index))


def doubled(env_index: int) -> Any:
    return Doubling(recorded(env_index))


class Recorder029(gym.Wrapper[Any, Any, Any, Any]):
    """Record as ``RecordEpisodeStatistics`` of Gymnasium 0.29 does: arrays of one number each."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated or truncated:
            t = info["t"]
            record = {"r": np.array([t * (t + 1) / 2]), "l": np.array([t]), "t": np.array([0.5])}
            info["episode"] = {key: value.astype(np.float32) for key, value in record.items()}
        return observation, reward, terminated, truncated, info


def recorded_by_0_29(env_index: int) -> Any:
    return Recorder029(counting(env_index))


@each_loop
@pytest.mark.parametrize("make", [counting, recorded, doubled, recorded_by_0_29])
def test_a_scripts_loop_logs_every_episode_once(
    remote_vector: MakeVector, loop: Loop, options: dict[str, Any], make: Any
) -> None:
    envs = remote_vector(make, 2, together="autoreset_mode" not in options, kind=make_envs, **options)
    envs.reset(seed=1)
    found: list[tuple[int, float, int]] = []
    ends = 0
    for _ in range(STEPS):
        _, _, terminations, truncations, infos = act(envs)
        logged = loop(infos)
        assert [slot for slot, *_ in logged] == np.flatnonzero(terminations | truncations).tolist()
        found += logged
        ends += len(logged)
    assert {(slot, (ret, length)) for slot, ret, length in found} == set(EPISODES.items())
    per_episode = [2, 3] if "autoreset_mode" not in options else [3, 4]  # steps, with the one that resets
    assert ends == sum(STEPS // steps for steps in per_episode)


@each_loop
def test_the_record_has_the_types_that_gymnasium_gives_it(
    remote_vector: MakeVector, loop: Loop, options: dict[str, Any]
) -> None:
    envs = remote_vector(counting, 2, together="autoreset_mode" not in options, kind=make_envs, **options)
    envs.reset()
    infos: dict[str, Any] = {}
    while not loop(infos):
        infos = act(envs)[4]
    if loop is loop_of_0_29:
        record = infos["final_info"][0]["episode"]
        assert [record[key].dtype for key in "rlt"] == [np.float32, np.int32, np.float32]
        assert [record[key].shape for key in "rlt"] == [(1,)] * 3
        assert infos["final_info"].dtype == object
        assert infos["final_info"][1] is None
    else:
        record = infos.get("final_info", infos)["episode"]
        assert [record[key].dtype for key in "rlt"] == [np.float64, np.int64, np.float64]
        assert [record[key].shape for key in "rlt"] == [(2,)] * 3
    assert record["t"][0] >= 0


@each_loop
def test_an_episode_that_a_lost_client_cut_short_is_logged_too(
    make_vector: MakeVector, loop: Loop, options: dict[str, Any]
) -> None:
    envs = make_vector(make_envs, num_envs=1, **SPACES, **options)
    puppet = Puppet(envs.url).infer()
    envs.reset()
    for reward in (1.0, 2.0):
        task = Task(lambda: act(envs))
        puppet.step(reward)
        task.result()
    puppet.vanish()
    wait_until(lambda: envs.client_losses == 1)
    Puppet(envs.url, (2,)).infer()
    assert loop(act(envs)[4]) == [(0, 3.0, 2)]


@each_loop
def test_behind_gymnasiums_own_recorder(remote_vector: MakeVector, loop: Loop, options: dict[str, Any]) -> None:
    """Not needed; under a key of its own it finds the same in every dialect."""
    bare = remote_vector(counting, 2, together="autoreset_mode" not in options, kind=make_envs, **options)
    envs = wrappers.RecordEpisodeStatistics(bare, stats_key="again")
    envs.reset()
    ends = 0
    for _ in range(STEPS):
        infos = act(envs)[4]
        logged = loop(infos)
        ends += len(logged)
        assert ("again" in infos) == bool(logged)
        for slot, ret, length in logged:
            assert (infos["again"]["r"][slot], infos["again"]["l"][slot]) == (ret, length)
    assert ends > STEPS // 2


@pytest.mark.parametrize("given", [None, "0.29", "1.x", InfoDialect.LISTS, InfoDialect.ARRAYS], ids=str)
def test_the_dialect_is_the_installed_one_unless_it_is_said(make_vector: MakeVector, given: Any) -> None:
    envs: Any = make_vector(make_envs, info_dialect=given)
    assert isinstance(envs, PlugRLVectorEnv)
    assert envs.metadata["autoreset_mode"] is GymnasiumsMode.SAME_STEP
    assert envs.info_dialect is (InfoDialect.installed() if given is None else InfoDialect(given))


@pytest.mark.parametrize("bad", ["0.28", "", 29, "LISTS"], ids=repr)
def test_a_bad_dialect_is_refused_and_the_port_is_free_again(make_vector: MakeVector, bad: Any) -> None:
    first = make_vector()
    port = first.port
    first.close()
    with pytest.raises(ValueError, match=r"^info_dialect must be one of '1\.x', '0\.29' or None, got "):
        make_envs(port=port, info_dialect=bad)
    assert make_vector(port=port).port == port


def test_a_bad_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^autoreset_mode must be one of"):
        make_envs(port=0, autoreset_mode="never")
