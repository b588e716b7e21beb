"""The audit of episodes: an env that pays t at step t and ends at 5 is (15, 5), whoever counts, in every mode."""

from __future__ import annotations

import contextlib
import csv
import functools
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from stable_baselines3.common.vec_env import VecMonitor

from plugrl_bridges.cleanrl import make_envs
from plugrl_bridges.gym import InfoDialect, PlugRLVectorEnv, RemoteEnv
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from tests.support import ClientThread, CountingEnv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_ENVS = 3
STEPS = 60  # of 5 steps each, or of 6 in NEXT_STEP
TRUTH = (15.0, 5)
ends = pytest.mark.parametrize("truncate", [False, True], ids=["terminated", "truncated"])


@contextlib.contextmanager
def clients(env: Any, *, truncate: bool, apart: bool = False, num_envs: int = NUM_ENVS) -> Iterator[list[ClientThread]]:
    """Serve the envs, and at the end hold the clients' own records to the truth."""
    make = functools.partial(CountingEnv, truncate=truncate)
    if apart:
        threads = [ClientThread(make, url=env.url, rank=i, group_num_envs=num_envs) for i in range(num_envs)]
    else:
        threads = [ClientThread(make, num_envs=num_envs, url=env.url)]
    yield threads
    env.close()
    for thread in threads:
        summary = thread.join()
        assert summary.episodes >= 5
        assert {(episode.ret, episode.length) for episode in summary.recent} == {TRUTH}
        assert summary.mean_return == 15.0


def logged(path: Path) -> list[tuple[float, int]]:
    with path.open(newline="") as file:
        return [(float(row["return"]), int(row["length"])) for row in csv.DictReader(file)]


def check(found: list[tuple[float, int]], path: Path, *, steps_per_episode: int) -> None:
    assert found == [TRUTH] * (NUM_ENVS * (STEPS // steps_per_episode))
    assert logged(path) == found


def pairs(record: Any, rows: Any) -> list[tuple[float, int]]:
    return [(float(record["r"][row]), int(record["l"][row])) for row in np.flatnonzero(rows)]


@ends
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP], ids=lambda mode: mode.name)
def test_gymnasiums_own_statistics(tmp_path: Path, mode: AutoresetMode, truncate: bool) -> None:
    path = tmp_path / "episodes.csv"
    remote = PlugRLVectorEnv(port=0, num_envs=NUM_ENVS, autoreset_mode=mode, episode_log=path)
    with clients(remote, truncate=truncate, apart=mode is AutoresetMode.NEXT_STEP):
        env = RecordEpisodeStatistics(remote)
        env.reset(seed=0)
        found = []
        for _ in range(STEPS):
            _, _, terminated, truncated, infos = env.step(np.zeros((NUM_ENVS, 1), np.float32))
            if "episode" in infos:
                assert (truncated if truncate else terminated).tolist() == infos["_episode"].tolist()
                found += pairs(infos["episode"], infos["_episode"])
    check(found, path, steps_per_episode=5 if mode is AutoresetMode.SAME_STEP else 6)


@ends
def test_without_autoreset(tmp_path: Path, truncate: bool) -> None:
    path = tmp_path / "episodes.csv"
    env = PlugRLVectorEnv(port=0, num_envs=NUM_ENVS, autoreset_mode="DISABLED", episode_log=path)
    with clients(env, truncate=truncate):
        env.reset(seed=0)
        totals, lengths, found = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int), []
        for _ in range(STEPS):
            _, rewards, terminated, truncated, _ = env.step(np.zeros((NUM_ENVS, 1), np.float32))
            totals, lengths, done = totals + rewards, lengths + 1, terminated | truncated
            if done.any():
                found += [(totals[row], lengths[row]) for row in np.flatnonzero(done)]
                env.reset(options={"reset_mask": done})
                totals[done], lengths[done] = 0, 0
    check(found, path, steps_per_episode=5)


@ends
def test_a_single_env(tmp_path: Path, truncate: bool) -> None:
    path = tmp_path / "episodes.csv"
    remote = RemoteEnv(port=0, episode_log=path)
    found = []
    with clients(remote, truncate=truncate, num_envs=1):
        env = gym.wrappers.RecordEpisodeStatistics(remote)
        for _ in range(STEPS // 5):
            env.reset()
            over = False
            info: dict[str, Any] = {}
            while not over:
                _, _, terminated, truncated, info = env.step(np.zeros(1, np.float32))
                over = terminated or truncated
            found.append((float(info["episode"]["r"]), int(info["episode"]["l"])))
    assert found == [TRUTH] * (STEPS // 5)
    assert logged(path) == found


@ends
def test_stable_baselines3s_monitor(tmp_path: Path, truncate: bool) -> None:
    path = tmp_path / "episodes.csv"
    remote = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS, episode_log=path)
    found = []
    with clients(remote, truncate=truncate):
        env = VecMonitor(remote)
        env.reset()
        for _ in range(STEPS):
            *_, infos = env.step(np.zeros((NUM_ENVS, 1), np.float32))
            found += [(info["episode"]["r"], info["episode"]["l"]) for info in infos if "episode" in info]
    check(found, path, steps_per_episode=5)


def loop_of_0_29(infos: dict[str, Any]) -> list[tuple[float, int]]:
    """Read records as a CleanRL script for Gymnasium 0.29 does."""
    found: list[tuple[float, int]] = []
    if "final_info" in infos:
        for info in infos["final_info"]:
            if info and "episode" in info:
                ret, length = (np.asarray(info["episode"][key]).item() for key in "rl")
                found.append((ret, length))
    return found


def loop_of_1_x(infos: dict[str, Any]) -> list[tuple[float, int]]:
    """Read records as a script for Gymnasium 1.x in SAME_STEP does."""
    if "final_info" not in infos:
        return []
    return pairs(infos["final_info"]["episode"], infos["final_info"]["_episode"])


def loop_of_next_step(infos: dict[str, Any]) -> list[tuple[float, int]]:
    """Read records as a script for Gymnasium 1.x's default, NEXT_STEP, does."""
    return pairs(infos["episode"], infos["_episode"]) if "episode" in infos else []


@ends
@pytest.mark.parametrize("own_record", [False, True], ids=["bare", "recorded at the client"])
@pytest.mark.parametrize(
    ("dialect", "mode", "loop"),
    [
        (InfoDialect.LISTS, "SAME_STEP", loop_of_0_29),
        (InfoDialect.ARRAYS, "SAME_STEP", loop_of_1_x),
        (InfoDialect.ARRAYS, "NEXT_STEP", loop_of_next_step),
    ],
    ids=["0.29", "1.x SAME_STEP", "1.x NEXT_STEP"],
)
def test_cleanrls_logging_loops(
    tmp_path: Path, dialect: InfoDialect, mode: str, loop: Any, own_record: bool, truncate: bool
) -> None:
    path = tmp_path / "episodes.csv"
    envs = make_envs(port=0, num_envs=NUM_ENVS, autoreset_mode=mode, info_dialect=dialect, episode_log=path)

    def make() -> gym.Env[Any, Any]:
        env: gym.Env[Any, Any] = CountingEnv(truncate=truncate)
        return gym.wrappers.RecordEpisodeStatistics(env) if own_record else env

    threads = [ClientThread(make, url=envs.url, rank=i, group_num_envs=NUM_ENVS) for i in range(NUM_ENVS)]
    envs.reset(seed=0)
    found: list[tuple[float, int]] = []
    for _ in range(STEPS):
        *_, infos = envs.step(np.zeros((NUM_ENVS, 1), np.float32))
        found += loop(infos)
    envs.close()
    for thread in threads:
        assert {(episode.ret, episode.length) for episode in thread.join().recent} == {TRUTH}
    check(found, path, steps_per_episode=6 if mode == "NEXT_STEP" else 5)
