"""The benchmark of faults: two of its cases for real, and what its report calls right and wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchmarks.boundary_faults import Setting, Trained, log_rows, run_case
from benchmarks.boundary_faults import main as run_matrix
from benchmarks.faults_report import LOG_FAULTS, Row, main, read, summary, verdict, write
from benchmarks.faulty_env import DOSES, FAULTS

if TYPE_CHECKING:
    from pathlib import Path

LOCATED = Row(
    "obs zero", "one", 0, 1, "env 5, …", ledger="located", live="in the step, named", log="agrees",
    curve="rises, 1 to 2", weights="differ",
)  # fmt: skip
SILENT = Row("none", "one", 0, ledger="silent", live="silent", log="agrees", curve="rises, 1 to 2", weights="clean")
LOG = replace(SILENT, fault=LOG_FAULTS[0], dose="every", changed=3, log="DIFFERS", weights="equal")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_clean_case_and_a_fault() -> None:
    setting = Setting("CartPole-v1", steps=1024, at=10, n_steps=16)
    clean, whole, record = run_case(setting, "none", "one", 0, None)
    rows = [clean, *log_rows(clean, whole, record)]
    rows.append(run_case(setting, "obs stale", "percent", 0, whole.weights)[0])
    assert verdict(rows) == []
    assert [row.fault for row in rows] == ["none", *LOG_FAULTS, "obs stale"]
    assert rows[-1].first.endswith(", obs")
    assert rows[-1].changed > 3
    assert "rises" in clean.curve


def test_the_log_faults_say_what_was_seen_of_the_run_that_they_are_of() -> None:
    whole = Trained([((0, 3.0, 3), 1.0)])
    rows = log_rows(replace(SILENT, seed=2, live="in the step"), whole, [(0, 3.0, 3)])
    assert [(row.fault, row.seed, row.changed, row.log) for row in rows] == [
        (name, 2, 1, "DIFFERS") for name in LOG_FAULTS
    ]
    assert [(row.ledger, row.live, row.weights, row.curve) for row in rows] == [
        ("silent", "in the step", "clean", "rises, 1 to 2")
    ] * 2
    assert len(verdict(rows)) == 2, "a false alarm in that run is one here"


def test_what_is_right_is_not_reported() -> None:
    assert verdict([LOCATED, replace(LOCATED, live="in the step"), SILENT, LOG]) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (replace(LOCATED, changed=0), "nothing was changed"),
        (replace(LOCATED, ledger="silent"), "ledger silent"),
        (replace(LOCATED, ledger="ELSEWHERE: env 4"), "ELSEWHERE"),
        (replace(LOCATED, live="silent"), "live silent"),
        (replace(LOCATED, live="ELSEWHERE: env 4"), "live ELSEWHERE"),
        (replace(SILENT, ledger="located"), "an alarm without a fault"),
        (replace(SILENT, live="in the step"), "an alarm without a fault"),
        (replace(SILENT, weights="differ"), "an alarm without a fault"),
        (replace(SILENT, log="DIFFERS"), "the episode log differs without a fault"),
        (replace(LOG, log="agrees"), "not caught"),
    ],
)
def test_what_is_wrong_is_reported(row: Row, said: str) -> None:
    [line] = verdict([row])
    assert said in line
    assert row.fault in line


def test_cases_without_a_change_and_short_curves_do_not_count(tmp_path: Path) -> None:
    nothing = replace(LOCATED, seed=1, changed=0, ledger="silent", live="silent", weights="equal")
    short = replace(LOCATED, seed=2, curve="too short", log="no episode")
    other = replace(nothing, fault="final_obs zero")
    rows = [replace(SILENT, curve="too short"), LOCATED, nothing, short, other]
    assert summary(rows).splitlines()[2:] == [
        "| obs zero | 2 of 2 | 2 of 2 | 0 of 1 | 0 of 1 | 2 of 2 |",
        "| final_obs zero | - | - | - | - | - |",
        "| control: none | 0 of 1 | 0 of 1 | 0 of 1 | - | 0 of 1 |",
    ]
    assert write(rows, tmp_path / "faults")[-1].stat().st_size > 100
    assert len(verdict(rows)) == 2


def test_help_names_faults_doses_defaults_and_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_matrix(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name in (*FAULTS, *DOSES):
        assert name in said
    assert said.count("(default: ") == 8
    assert "env steps of each run (default: 20480)" in said
    assert "--steps / 16 must be above the length of an episode" in said


def test_tables_and_picture(tmp_path: Path) -> None:
    rows = [SILENT, LOG, LOCATED, replace(LOCATED, seed=1, ledger="silent", curve="does not rise, 2 to 1")]
    written = write(rows, tmp_path / "faults", title="a test")
    assert [path.name for path in written] == ["faults.md", "faults.csv", "faults.png"]
    assert all(path.stat().st_size > 100 for path in written)
    assert read(tmp_path / "faults.csv") == rows
    assert summary(rows).splitlines()[2:] == [
        "| obs zero | 1 of 2 | 2 of 2 | 0 of 2 | 1 of 2 | 2 of 2 |",
        "| control: none | 0 of 1 | 0 of 1 | 0 of 1 | 0 of 1 | 0 of 1 |",
        f"| {LOG_FAULTS[0]} | 0 of 1 | 0 of 1 | 1 of 1 | 0 of 1 | 0 of 1 |",
    ]
    assert main([str(tmp_path / "faults.csv")]) == 1
    assert main([str(write([SILENT, LOCATED], tmp_path / "good", picture=False)[1])]) == 0
