"""The CSV file with one row per finished episode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugrl_bridges.server.episode_log import COLUMNS, EpisodeLog

if TYPE_CHECKING:
    from pathlib import Path


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
