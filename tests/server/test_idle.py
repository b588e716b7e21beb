"""Steps in which some envs wait: what is sent for them, what their rows show, and what is counted."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges.errors import RaggedClientError
from tests.support import Puppet, knows_reset, observe, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plugrl_bridges.server.lockstep import Lockstep
    from plugrl_bridges.server.result import StepResult

    MakeBridge = Callable[..., Lockstep]


def stepping(env: Lockstep, *idle: int) -> Task[StepResult]:
    mask = np.isin(np.arange(env.num_envs), idle)
    env.send(np.full((env.num_envs, 1), 0.5, np.float32), mask if idle else None)
    return Task(env.wait)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_connection_whose_only_env_waits_is_not_answered(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    one, other = (Puppet(env.url, (tag,)).infer(env_spec={"rank": rank}) for rank, tag in enumerate((1.0, 2.0)))
    env.reset()
    task = stepping(env)
    one.step(terminated=True)
    other.step()
    task.result()
    for t in (2, 3):
        task = stepping(env, 0)
        other.step()
        step = task.result()
        assert step.standing()[0].tolist() == [[1, 1, 0], [2, 0, t]]
        assert step.rewards.tolist() == [0, 1]
        assert step.stepped.tolist() == [False, True]
        assert not step.over.any()
    task = stepping(env)
    assert one.step().tolist() == [[[0.5]]]  # the infer that was open all the time is answered now
    other.step()
    assert task.result().standing()[0].tolist() == [[1, 1, 1], [2, 0, 4]]


def test_an_env_that_waits_beside_others_is_reset_once_more(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    puppet = Puppet(env.url, (1, 2)).infer(env_spec=knows_reset())
    env.reset()
    task = stepping(env)
    puppet.step()
    task.result()
    task = stepping(env, 1)
    puppet.action()
    assert puppet.reset["env_ids"].tolist() == [1]
    puppet.t += 1
    row = np.array([0])
    puppet.feed_back(env_indices=row, step_ids=row, obs=puppet.observation(row), rewards=np.ones(1, np.float32),
                     terminated=np.zeros(1, bool), truncated=np.zeros(1, bool))  # fmt: skip
    states = np.concatenate([observe((1,), 0, 2), observe((2,), 1, 0)])
    puppet.infer(data={"images": {}, "states": {"obs": states}, "text": ""})
    step = task.result()
    assert step.standing()[0].tolist() == [[1, 0, 2], [2, 1, 0]]
    assert step.rewards.tolist() == [1, 0]


def test_beside_others_only_a_client_that_knows_seeded_reset_can_let_an_env_wait(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    with pytest.raises(RaggedClientError, match=r"envs \[1\] of .* use one env per connection"):
        stepping(env, 1)
    task = stepping(env)  # nothing was sent, so nothing is broken
    puppet.step()
    assert task.result().rewards.tolist() == [1, 1]


def test_waiting_counts_for_no_episode(make_bridge: MakeBridge, tmp_path: Path) -> None:
    env = make_bridge(num_envs=2, episode_log=tmp_path / "log.csv")
    one, other = (Puppet(env.url, (tag,)).infer(env_spec={"rank": rank}) for rank, tag in enumerate((1.0, 2.0)))
    env.reset()
    for idle in ((), (0,), (0,)):
        task = stepping(env, *idle)
        if not idle:
            one.step()
        other.step()
        task.result()
    task = stepping(env)
    one.step(terminated=True)
    other.step(terminated=True)
    task.result()
    assert [(row["slot"], row["length"], row["return"]) for row in rows(tmp_path / "log.csv")] == [
        ("0", "2", "2.0"),
        ("1", "4", "4.0"),
    ]


def test_a_client_that_leaves_while_its_env_waits_is_a_loss_like_any(make_bridge: MakeBridge, tmp_path: Path) -> None:
    env = make_bridge(num_envs=2, episode_log=tmp_path / "log.csv")
    one, other = (Puppet(env.url, (tag,)).infer(env_spec={"rank": rank}) for rank, tag in enumerate((1.0, 2.0)))
    env.reset()
    task: Any = stepping(env)
    one.step()
    other.step()
    task.result()
    task = stepping(env, 0)
    one.vanish()
    Puppet(env.url, (3,)).infer()
    wait_until(lambda: env.client_losses == 1)
    other.step()
    step = task.result()
    assert step.lost == (0,)
    assert step.truncated.tolist() == [True, False]
    assert step.standing()[0].tolist() == [[3, 0, 0], [2, 0, 2]]
    assert [(row["slot"], row["length"], row["end"]) for row in rows(tmp_path / "log.csv")] == [("0", "1", "lost")]
