"""Own what a client knows of its own episodes: the counts of the running ones, and the summary at the end.

Pure bookkeeping, no clock and no socket: times come in as arguments. ``exchange`` keeps it up to date, ``env_client``
makes the summary of it, ``cli`` shows it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["RECENT_EPISODES", "ClientSummary", "Episode", "EpisodeBook", "Progress"]

RECENT_EPISODES = 1000
"""A summary holds this many of the last episodes: a client may run for months."""
_MEAN_OVER = 100


class Episode(NamedTuple):
    """Say how one episode went.

    Attributes:
        ended_at: Seconds since the epoch.
        ret: Sum of its rewards.
        length: Number of env steps.
    """

    ended_at: float
    ret: float
    length: int


@dataclass(frozen=True)
class Progress:
    """Say how a client is doing; what its ``progress`` callback gets about once a second.

    Attributes:
        state: ``"connecting"``, ``"waiting"`` (for an action) or ``"stepping"``.
        episodes: Episodes finished so far.
        steps: Env steps so far.
        steps_per_s: Env steps per second since the last report.
        mean_return: Mean return of the last 100 episodes; NaN before the first.
    """

    state: str
    episodes: int
    steps: int
    steps_per_s: float
    mean_return: float


@dataclass(frozen=True)
class ClientSummary:
    """Say what a client did, when it has ended.

    Attributes:
        episodes: Episodes finished.
        steps: Env steps.
        mean_return: Mean return of all finished episodes; NaN if there are none.
        recent: The last finished episodes, at most 1000, oldest first.
        reconnects: How often a connection was lost and made again.
        reason: Why it ended: ``"server stop"`` [7.1] or ``"stopped"`` (by `EnvClient.stop`).
    """

    episodes: int
    steps: int
    mean_return: float
    recent: tuple[Episode, ...]
    reconnects: int
    reason: str

    @property
    def returns(self) -> list[float]:
        """Returns of the last finished episodes, oldest first."""
        return [episode.ret for episode in self.recent]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the last finished episodes in env steps, oldest first."""
        return [episode.length for episode in self.recent]


class EpisodeBook:
    """Count the running episode of each env, and remember the finished ones.

    Args:
        num_envs: Number of envs.
    """

    def __init__(self, num_envs: int) -> None:
        self.chunks = np.zeros(num_envs, np.int64)
        """Completed chunks of each running episode: the ``step_ids`` [5.2]."""
        self.episodes = 0
        self.steps = 0
        self.recent: deque[Episode] = deque(maxlen=RECENT_EPISODES)
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._total_return = 0.0

    def add(self, rows: Array | slice, rewards: Array, lengths: Array, steps: int) -> None:
        """Add one chunk of the rows named.

        Args:
            rows: Which envs.
            rewards: float64, one per row: the sum over the chunk.
            lengths: int64, one per row: env steps of the chunk.
            steps: The sum of ``lengths``.
        """
        self.chunks[rows] += 1
        self._returns[rows] += rewards
        self._lengths[rows] += lengths
        self.steps += steps

    def finish(self, ended: Array, success: Array, now: float) -> dict[str, Value]:
        """Close the episodes of the rows named, and give the ``episode`` record of [5.4] for all n rows.

        Args:
            ended: bool ``[n]``: whose episode just ended.
            success: bool ``[n]``: read where ``ended``.
            now: Seconds since the epoch.

        Returns:
            Arrays of n; pick the rows of the feedback from them.
        """
        record = {"r": self._returns.copy(), "l": self._lengths.copy(), "s": success & ended, "mask": ended.copy()}
        for row in np.flatnonzero(ended).tolist():
            episode = Episode(now, float(self._returns[row]), int(self._lengths[row]))
            self.recent.append(episode)
            self.episodes += 1
            self._total_return += episode.ret
        self.drop(ended)
        return record

    def drop(self, rows: Array) -> None:
        """Start the rows' episodes anew without a record: they were reset before their end."""
        self.chunks[rows] = 0
        self._returns[rows] = 0.0
        self._lengths[rows] = 0

    def progress(self, state: str, steps_per_s: float) -> Progress:
        """Give the report for a progress line."""
        latest = list(self.recent)[-_MEAN_OVER:]
        mean = sum(episode.ret for episode in latest) / len(latest) if latest else math.nan
        return Progress(state, self.episodes, self.steps, steps_per_s, mean)

    def summary(self, *, reconnects: int, reason: str) -> ClientSummary:
        """Give the summary."""
        mean = self._total_return / self.episodes if self.episodes else math.nan
        return ClientSummary(self.episodes, self.steps, mean, tuple(self.recent), reconnects, reason)
