"""Own the count of episodes: return and length per slot, and the rows of the episode log.

Vectorised over slots. ``server.lockstep`` calls it once per vector step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.server.episode_log import EpisodeLog
from plugrl_bridges.server.result import Ended

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from plugrl_bridges.server.result import StepResult

__all__ = ["EpisodeCounter"]


class EpisodeCounter:
    """Count the episodes of all slots.

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
        """Take in a vector step, and note in it what was counted of the episodes that it ends."""
        self._steps += 1
        self._returns += step.rewards
        self._lengths += self._horizon * step.stepped
        done = step.over
        if b"\x01" in done.tobytes():
            self._end(np.flatnonzero(done).tolist(), step)

    def restart(self, slots: Sequence[int]) -> None:
        """Take in a reset of these slots; their unfinished episodes are not counted."""
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
