"""A log of returns is held to the record; the counter of the installed Gymnasium too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVectorEnv

if TYPE_CHECKING:
    from pathlib import Path


def test_gymnasiums_own_counter(tmp_path: Path) -> None:
    """Its release 1.3 loses the first reward of each later episode with SAME_STEP, which the record shows."""
    inner = SyncVectorEnv(
        [partial(LedgerEnv, gym.make("CartPole-v1"), tmp_path / "envs", env_index=n) for n in range(4)],
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    env = RecordEpisodeStatistics(LedgerVectorEnv(inner, tmp_path / "trainer"), buffer_length=1000)
    env.reset(seed=0)
    env.action_space.seed(0)
    for _ in range(200):
        env.step(env.action_space.sample())
    env.close()
    logged = list(zip(map(float, env.return_queue), map(int, env.length_queue), strict=True))
    for name in ("trainer", "envs"):
        recorded = list(LedgerReader(tmp_path / name).episodes())
        assert len(recorded) == len(logged) > 20
        if gym.__version__.startswith("1.3."):
            wrong = [each.ret - mine[0] for each, mine in zip(recorded, logged, strict=True) if each.ret != mine[0]]
            assert wrong == [1.0] * (len(recorded) - 4)
        else:
            assert [(each.ret, each.length) for each in recorded] == logged
        assert all(each.terminated and not each.truncated for each in recorded)


def test_episodes_of_both_sides_are_the_same(tmp_path: Path) -> None:
    env = LedgerVectorEnv(
        SyncVectorEnv([lambda: LedgerEnv(gym.make("Pendulum-v1"), tmp_path / "env")]), tmp_path / "trainer"
    )
    env.reset(seed=0)
    for _ in range(450):
        env.step(np.ones((1, 1), np.float32))
    env.close()
    trainer, own = (list(LedgerReader(tmp_path / name).episodes()) for name in ("trainer", "env"))
    assert trainer == own
    assert [(each.env, each.length, each.terminated, each.truncated) for each in own] == [(0, 200, False, True)] * 2
