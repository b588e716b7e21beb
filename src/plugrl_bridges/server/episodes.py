"""Own the count of episodes: return and length per slot, and the rows of the episode log.

Vectorised over slots. ``server.lockstep`` calls it once per vector step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.server.episode_log import EpisodeLog
from plugrl_bridges.wire.info import episode_records

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.wire.codec import Array, Value

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
        self._reported: dict[int, int] = {}
        self._horizon = horizon
        self._steps = 0
        self._log = None if path is None else EpisodeLog(path)

    def note_records(self, slots: Sequence[int], info: Mapping[str, Value]) -> None:
        """Take in what a client reports of episodes that ended in this step."""
        if self._horizon > 1:
            for slot, record in zip(slots, episode_records(info, len(slots)), strict=True):
                if record is not None:
                    self._reported[slot] = record.length

    def count(self, rewards: Array, terminated: Array, truncated: Array, lost: Sequence[int]) -> None:
        """Take in a vector step."""
        self._steps += 1
        self._returns += rewards
        self._lengths += self._horizon
        if lost:
            self._lengths[list(lost)] -= self._horizon  # no env took this step
        done = terminated | truncated
        if done.any():
            self._end(np.flatnonzero(done).tolist(), terminated, frozenset(lost))
        self._reported.clear()

    def restart(self) -> None:
        """Take in a reset of every slot; unfinished episodes are not counted."""
        self._returns[:] = 0
        self._lengths[:] = 0

    def close(self) -> None:
        """Close the episode log."""
        if self._log is not None:
            self._log.close()

    def _end(self, slots: Sequence[int], terminated: Array, lost: frozenset[int]) -> None:
        for slot in slots:
            if self._log is not None:
                self._log.add(
                    episode=int(self._episodes[slot]),
                    slot=slot,
                    ret=float(self._returns[slot]),
                    length=self._reported.get(slot, int(self._lengths[slot])),
                    end="lost" if slot in lost else "terminated" if terminated[slot] else "truncated",
                    step=self._steps,
                )
            self._episodes[slot] += 1
            self._returns[slot] = 0
            self._lengths[slot] = 0
