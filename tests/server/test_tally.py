"""The count of envs that go at their own pace, without a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plugrl_bridges.server.tally import Tally
from plugrl_bridges.wire.messages import Feedback, Infer, Observation


def ask(tally: Tally, client: int, *envs: int, chunks: int = 0) -> None:
    tally.ask(client, Infer(Observation(), np.array(envs), np.full(len(envs), chunks)))


def tell(tally: Tally, client: int, *envs: int, reward: float = 1.0, ended: Any = True, info: Any = None) -> None:
    m = len(envs)
    flags = np.broadcast_to(ended, m)
    rewards = np.full(m, reward)
    tally.feed_back(
        client, Feedback(Observation(), np.array(envs), np.zeros(m), rewards, flags, np.zeros(m, bool), info or {})
    )


def started(*clients: tuple[int, ...], horizon: int = 1) -> Tally:
    """Give a tally of connections 1, 2 … with these envs."""
    tally = Tally(horizon)
    for number, envs in enumerate(clients, 1):
        tally.arrive(number, f"host:{number}", "a client")
        ask(tally, number, *envs)
    return tally


@pytest.mark.parametrize(("episodes", "shares"), [(1, [0, 0, 1]), (3, [1, 1, 1]), (7, [2, 2, 3])])
def test_episodes_are_spread_evenly(episodes: int, shares: list[int]) -> None:
    tally = started((0, 1), (5,))
    places = [(1, 0), (1, 1), (2, 5)]
    for _ in range(4):  # the first env is by far the fastest
        tell(tally, 1, 0, reward=100)
    for (client, env), share in list(zip(places, shares, strict=True))[1:]:
        for at in range(share):
            assert not tally.complete(episodes)
            tell(tally, client, env, reward=env + at)
    assert tally.complete(episodes)
    counted = tally.counted(episodes)
    assert [sum((e.client, e.env) == place for e in counted) for place in places] == shares
    assert len(tally.counted()) == tally.episodes >= episodes


def test_what_the_lost_finished_counts_and_others_take_over() -> None:
    tally = started((0,), (0,))
    tell(tally, 1, 0, reward=5)
    tell(tally, 1, 0, reward=6, ended=False)
    tally.leave(1)
    assert not tally.complete(3)
    tell(tally, 2, 0, reward=7)
    assert not tally.complete(3)
    tell(tally, 2, 0, reward=8)
    assert tally.complete(3)
    assert [episode.ret for episode in tally.counted(3)] == [5, 7, 8]
    tally.leave(2)
    assert tally.complete(3)
    assert [episode.ret for episode in tally.counted(2)] == [5, 7]
    assert not tally.complete(4)
    assert (tally.envs_here, tally.steps) == (0, 4)


def test_slots_are_given_again() -> None:
    tally = started((0, 1), (0,))
    tally.leave(1)
    tally.arrive(3, "host:3", "a client")
    ask(tally, 3, 4, 2, 9)
    assert {env: run.slot for env, run in tally._runs[3].items()} == {4: 0, 2: 1, 9: 3}


def record(ret: float, length: int) -> dict[str, Any]:
    return {"episode": {"r": np.array([ret]), "l": np.array([length])}}


@pytest.mark.parametrize(("reported", "length"), [(6, 6), (0, 8), (-3, 8), (9, 8)])
def test_lengths_of_chunks_are_the_clients(reported: int, length: int) -> None:
    tally = started((0,), horizon=4)
    tell(tally, 1, 0, ended=False)
    tell(tally, 1, 0, info=record(99.0, reported))
    assert [(episode.ret, episode.length) for episode in tally.counted()] == [(2.0, length)]
    assert tally.steps == tally.clients[1].steps == length


def test_episodes_that_began_before_the_connection_are_the_clients() -> None:
    tally = Tally(1)
    tally.arrive(1, "host:1", "a client")
    ask(tally, 1, 0, chunks=3)
    tell(tally, 1, 0, info=record(10.0, 4))
    tell(tally, 1, 0, info=record(10.0, 4))
    assert [(episode.ret, episode.length) for episode in tally.counted()] == [(10.0, 4), (1.0, 1)]
