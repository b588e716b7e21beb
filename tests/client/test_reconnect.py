"""The pure policy: what an end means, and how long to wait."""

from __future__ import annotations

import math
import random

import pytest

from plugrl_bridges.client.reconnect import Backoff, Ending, TextFrame, Then, ending_of
from plugrl_bridges.client.record import Stopped
from plugrl_bridges.errors import ConnectionClosed, DecodeError, EnvFailed, HandshakeError, RemoteProtocolError


@pytest.mark.parametrize(
    ("code", "reason", "then"),
    [
        (1001, "plugrl-server-stop", Then.FINISH),
        (1001, "plugrl-server-resync", Then.RETRY),
        (1001, "Feedback timeout", Then.RETRY),
        (1001, "", Then.RETRY),
        (1011, "Internal server error.", Then.RETRY),
        (1011, "plugrl-server-stop", Then.RETRY),
        (1000, "", Then.RETRY),
        (1006, "", Then.RETRY),
    ],
)
def test_meaning_of_a_close(code: int, reason: str, then: Then) -> None:
    assert ending_of(ConnectionClosed("x", code, reason)) == Ending(then, 1000, "")


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (TextFrame("what?"), Ending(Then.RAISE, 1003, "[7.4] what?")),
        (RemoteProtocolError("what?", clause="4.2"), Ending(Then.RETRY, 1002, "[4.2] what?")),
        (DecodeError("what?"), Ending(Then.RETRY, 1002, "what?")),
        (HandshakeError("no key", status=401), Ending(Then.RAISE)),
        (HandshakeError("not yours", status=403), Ending(Then.RAISE)),
        (HandshakeError("not ready", status=503), Ending(Then.RETRY)),
        (HandshakeError("nobody there"), Ending(Then.RETRY)),
        (EnvFailed("env 0 failed"), Ending(Then.RAISE, 1011, "env failed")),
        (Stopped(), Ending(Then.RAISE, 1000, "")),
        (KeyError("ours"), Ending(Then.RAISE, 1000, "")),
    ],
)
def test_meaning_of_another_end(error: Exception, ending: Ending) -> None:
    assert ending_of(error) == ending


class Least(random.Random):
    def uniform(self, a: float, b: float) -> float:  # noqa: ARG002
        return a


class Most(random.Random):
    def uniform(self, a: float, b: float) -> float:  # noqa: ARG002
        return b


def test_waits_double_up_to_the_bound() -> None:
    waits = [Backoff(max_backoff_s=2, first_s=0.25, rng=Most())]
    assert [waits[0].next_wait_s() for _ in range(6)] == [0.25, 0.5, 1, 2, 2, 2]


def test_jitter_takes_away_half_at_most() -> None:
    backoff = Backoff(max_backoff_s=2, first_s=0.25, rng=Least())
    assert [backoff.next_wait_s() for _ in range(4)] == [0.125, 0.25, 0.5, 1]


def test_two_clients_do_not_come_back_together() -> None:
    first, second = (Backoff(rng=random.Random(seed)) for seed in (1, 2))
    assert first.next_wait_s() != second.next_wait_s()


def test_a_connection_that_does_not_hold_keeps_the_count() -> None:
    backoff = Backoff(first_s=1, max_backoff_s=8, stable_s=5, rng=Most())
    backoff.next_wait_s()
    backoff.held(4.9)
    assert backoff.next_wait_s() == 2
    backoff.held(5)
    assert backoff.next_wait_s() == 1


def test_the_budget_bounds_all_waiting() -> None:
    backoff = Backoff(first_s=1, max_backoff_s=100, budget_s=10, rng=Most())
    total = 0.0
    while (wait := backoff.next_wait_s()) is not None:
        total += wait
        backoff.spent(wait)
    assert total == 10
    assert backoff.tries == 5
    backoff.held(100)
    assert backoff.remaining_s == 10


def test_without_a_budget_it_never_ends() -> None:
    backoff = Backoff(rng=Most())
    assert math.isinf(backoff.remaining_s)
    backoff.spent(1e9)
    assert all(backoff.next_wait_s() is not None for _ in range(5000))
