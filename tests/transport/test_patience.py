"""Patience: how long to look before sleeping."""

from __future__ import annotations

from plugrl_bridges.transport.patience import LIMIT_S, Patience, yield_processor


def test_the_first_wait_is_worth_a_look() -> None:
    assert 0 < Patience(processors=2).budget_s() <= LIMIT_S


def test_one_processor_alone_never_looks() -> None:
    assert Patience(processors=1).budget_s() == 0


def test_long_waits_end_the_looking_and_short_ones_bring_it_back() -> None:
    patience = Patience(processors=2)
    for _ in range(5):
        patience.learn(1.0)
    assert patience.budget_s() == 0
    for _ in range(20):
        patience.learn(50e-6)
    assert 50e-6 < patience.budget_s() < LIMIT_S


def test_one_long_pause_among_short_waits_is_soon_forgotten() -> None:
    patience = Patience(processors=2)
    for _ in range(20):
        patience.learn(100e-6)
    patience.learn(60.0)
    for _ in range(4):
        patience.learn(100e-6)
    assert patience.budget_s() > 0


def test_the_look_never_exceeds_its_limit() -> None:
    patience = Patience(processors=8)
    for _ in range(20):
        patience.learn(LIMIT_S)
    assert patience.budget_s() <= LIMIT_S


def test_yielding_returns() -> None:
    yield_processor()
