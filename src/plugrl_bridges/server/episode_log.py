"""Own the CSV file with one row per finished episode.

Knows nothing of how episodes are counted; ``server.lockstep`` gives it finished rows. Columns: ``episode`` (0-based
within its slot), ``slot``, ``return`` (sum of the rewards as they crossed the wire, in float64), ``length`` (env
steps), ``end`` (``terminated``, ``truncated`` or ``lost``), ``step`` (vector steps since the start), ``time`` (seconds
since the start). Rows are complete on disk after every vector step that wrote some.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

__all__ = ["COLUMNS", "EpisodeLog"]

COLUMNS = ("episode", "slot", "return", "length", "end", "step", "time")


class EpisodeLog:
    """Write finished episodes to a CSV file; call `add` per episode and `close` at the end.

    Args:
        path: File to create or replace.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path).open("w", newline="", buffering=1, encoding="utf-8")  # noqa: SIM115 - `close` closes it
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(COLUMNS)
        self._started = time.monotonic()

    def add(self, *, episode: int, slot: int, ret: float, length: int, end: str, step: int) -> None:
        """Append one finished episode."""
        elapsed = time.monotonic() - self._started
        self._writer.writerow((episode, slot, repr(ret), length, end, step, f"{elapsed:.3f}"))

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
