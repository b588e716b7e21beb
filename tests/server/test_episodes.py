"""Counting episodes, and the rows of the episode log."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.server.episodes import COLUMNS, EpisodeCounter, EpisodeLog
from plugrl_bridges.server.result import StepResult

if TYPE_CHECKING:
    from pathlib import Path


def result(rewards: list[float], *, terminated: tuple[int, ...] = (), truncated: tuple[int, ...] = (),
           lengths: dict[int, int] | None = None, cut_short: dict[int, bool] | None = None) -> StepResult:  # fmt: skip
    n = len(rewards)
    ends = np.zeros((2, n), bool)
    ends[0, list(terminated)] = True
    ends[1, [*truncated, *(cut_short or {})]] = True
    return StepResult(
        observations=[],
        rewards=np.array(rewards, float),
        terminated=ends[0],
        truncated=ends[1],
        stepped=np.array([(cut_short or {}).get(slot, True) for slot in range(n)]),
        begun=np.logical_or(*ends),
        first=[],
        lengths=lengths or {},
        lost=tuple(cut_short or ()),
        cut_short=tuple(cut_short or ()),
    )


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    with path.open(newline="") as file:
        return [
            (int(r["episode"]), int(r["slot"]), float(r["return"]), int(r["length"]), r["end"], int(r["step"]))
            for r in csv.DictReader(file)
        ]


def counter(tmp_path: Path, num_envs: int, horizon: int = 1) -> tuple[EpisodeCounter, Path]:
    path = tmp_path / "episodes.csv"
    return EpisodeCounter(num_envs, horizon, path), path


def test_every_slot_counts_its_own_episodes(tmp_path: Path) -> None:
    count, path = counter(tmp_path, 2)
    count.count(result([1.0, 10.0]))
    count.count(result([2.0, 20.0], terminated=(0,)))
    count.count(result([4.0, 40.0], truncated=(1,)))
    count.count(result([8.0, 80.0], terminated=(0, 1), truncated=(1,)))
    assert rows_of(path) == [
        (0, 0, 3.0, 2, "terminated", 2),
        (0, 1, 70.0, 3, "truncated", 3),
        (1, 0, 12.0, 2, "terminated", 4),
        (1, 1, 80.0, 1, "terminated", 4),
    ]
    count.close()


def test_a_lost_client_ends_an_episode_without_a_step(tmp_path: Path) -> None:
    count, path = counter(tmp_path, 1)
    count.count(result([3.0]))
    count.count(result([0.0], cut_short={0: False}))
    assert rows_of(path) == [(0, 0, 3.0, 1, "lost", 2)]
    count.close()


def test_a_client_that_fed_back_before_it_was_lost_made_that_step(tmp_path: Path) -> None:
    count, path = counter(tmp_path, 1)
    count.count(result([3.0]))
    count.count(result([5.0], cut_short={0: True}))
    assert rows_of(path) == [(0, 0, 8.0, 2, "lost", 2)]
    count.close()


def test_a_reset_forgets_the_unfinished_episodes_of_its_slots_alone(tmp_path: Path) -> None:
    count, path = counter(tmp_path, 2)
    count.count(result([3.0, 3.0]))
    count.restart([0])
    count.count(result([1.0, 1.0], terminated=(0, 1)))
    assert rows_of(path) == [(0, 0, 1.0, 1, "terminated", 2), (0, 1, 4.0, 2, "terminated", 2)]
    count.close()


def test_with_a_horizon_the_reported_length_counts_else_the_steps_sent(tmp_path: Path) -> None:
    count, path = counter(tmp_path, 2, horizon=4)
    count.count(result([1.0, 1.0]))
    count.count(result([1.0, 1.0], terminated=(0, 1), lengths={0: 6}))
    assert [row[3] for row in rows_of(path)] == [6, 8]
    count.close()


def test_returns_are_summed_in_float64(tmp_path: Path) -> None:
    count, path = counter(tmp_path, 1)
    count.count(result([1e8]))
    count.count(result([0.25], terminated=(0,)))
    assert rows_of(path)[0][2] == 100000000.25
    count.close()


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    count = EpisodeCounter(1, 1, None)
    count.count(result([1.0], terminated=(0,)))
    count.close()
    assert list(tmp_path.iterdir()) == []


# The file -----------------------------------------------------------------------------------------------------------


def test_rows_are_on_disk_at_once_and_readable_by_column(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    log = EpisodeLog(path)
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    log.add(episode=0, slot=3, ret=0.1 + 0.2, length=7, end="truncated", step=9)
    row = dict(zip(COLUMNS, path.read_text().splitlines()[1].split(","), strict=True))
    assert (row["episode"], row["slot"], row["length"], row["end"], row["step"]) == ("0", "3", "7", "truncated", "9")
    assert float(row["return"]) == 0.1 + 0.2  # to the last bit
    assert 0 <= float(row["time"]) < 60
    log.close()
    log.close()


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "episodes.csv"
    path.write_text("something else\n" * 10)
    EpisodeLog(path).close()
    assert path.read_text() == ",".join(COLUMNS) + "\n"
