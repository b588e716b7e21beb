"""Patience: how long to look before sleeping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from plugrl_bridges.transport import patience as module
from plugrl_bridges.transport.patience import LIMIT_S, Patience, usable_processors

if TYPE_CHECKING:
    from pathlib import Path


def test_the_first_wait_is_worth_a_look() -> None:
    assert 0 < Patience(processors=2).budget_s() <= LIMIT_S


def test_one_processor_alone_never_looks() -> None:
    assert Patience(processors=1).budget_s() == 0


@pytest.mark.parametrize(
    ("allowed", "cpu_max", "usable"),
    [
        (8, "max 100000\n", 8),
        (8, "800000 100000\n", 8),
        (8, "250000 100000\n", 2),
        (8, "200000 100000\n", 2),
        (8, "199999 100000\n", 1),
        (8, "50000 100000\n", 1),
        (2, "1600000 100000\n", 2),
        (1, "max 100000", 1),
        (8, "", 8),
        (8, "100000", 8),
        (8, "100000 0", 8),
        (8, "-1 100000", 8),
    ],
)
def test_a_containers_quota_counts(allowed: int, cpu_max: str, usable: int) -> None:
    assert usable_processors(allowed, cpu_max) == usable


def test_the_quota_is_read_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CPU_MAX", tmp_path / "cpu.max")
    without = module._processors()
    assert without >= 1
    (tmp_path / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    assert module._processors() == 1
    assert Patience().budget_s() == 0


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
