"""The count of a lockstep's episodes, and the CSV file with one row per finished episode.

``server.lockstep`` has each vector step counted, over all slots at once. (``server.tally`` counts what clients do at
their own pace, and writes the same file.) Columns of the file: ``episode`` (0-based within its slot), ``slot``,
``return`` (sum of the rewards as they crossed the wire, in float64), ``length`` (env steps), ``end`` (``terminated``,
``truncated`` or ``lost``), ``step`` (vector steps since the start), ``time`` (seconds since the start).
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.server.result import Ended

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from plugrl_bridges.server.result import StepResult

__all__ = ["COLUMNS", "EpisodeCounter", "EpisodeLog"]

COLUMNS = ("episode", "slot", "return", "length", "end", "step", "time")


class EpisodeLog:
    """A file of finished episodes; call `add` per episode and `close` at the end. Rows are on disk at once.

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


class EpisodeCounter:
    """The count of all slots' episodes.

    With a horizon of 1 lengths are exact. With more, a chunk may end early, so the length is what the client reports in
    ``info["episode"]``, or else the steps that were sent.

    Args:
        num_envs: Number of slots.
        horizon: Actions per env in one exchange.
        path: Episode log to write, or None.
    """

    def __init__(self, num_envs: int, horizon: int, path: str | os.PathLike[str] | None) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._episodes = np.zeros(num_envs, np.int64)
        self._began = np.full(num_envs, time.monotonic())
        self._horizon = horizon
        self._steps = 0
        self._log = None if path is None else EpisodeLog(path)

    def count(self, step: StepResult) -> None:
        """Count a vector step, and note in it what was counted of the episodes that it ends."""
        self._steps += 1
        self._returns += step.rewards
        self._lengths += self._horizon * step.stepped
        done = step.over
        if b"\x01" in done.tobytes():
            self._end(np.flatnonzero(done).tolist(), step)

    def restart(self, slots: Sequence[int]) -> None:
        """Record a reset of these slots; their unfinished episodes are not counted."""
        self._returns[list(slots)] = 0
        self._lengths[list(slots)] = 0
        self._began[list(slots)] = time.monotonic()

    def close(self) -> None:
        """Close the episode log."""
        if self._log is not None:
            self._log.close()

    def _end(self, slots: Sequence[int], step: StepResult) -> None:
        now = time.monotonic()
        for slot in slots:
            ended = Ended(
                float(self._returns[slot]),
                step.lengths.get(slot, int(self._lengths[slot])),
                now - float(self._began[slot]),
            )
            step.ended[slot] = ended
            if self._log is not None:
                self._log.add(
                    episode=int(self._episodes[slot]),
                    slot=slot,
                    ret=ended.ret,
                    length=ended.length,
                    end="lost" if slot in step.cut_short else "terminated" if step.terminated[slot] else "truncated",
                    step=self._steps,
                )
            self._episodes[slot] += 1
            self._returns[slot] = 0
            self._lengths[slot] = 0
            self._began[slot] = now
