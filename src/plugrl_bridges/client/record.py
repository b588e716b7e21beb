"""What a client knows of itself: its counts, whether it is to stop, and what it reports meanwhile.

``exchange`` keeps the `EpisodeBook` up to date, ``env_client`` makes the summary of it, ``cli`` shows it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["NOTHING", "ClientSummary", "Episode", "EpisodeBook", "Progress", "Stopped", "Watch", "together"]

_RECENT = 1000  # a client may run for months
_MEAN_OVER = 100
_REPORT_EVERY_S = 1.0


class Episode(NamedTuple):
    """How one episode went.

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
    """How a client is doing: what its ``progress`` callback gets about once a second.

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
    """What a client did.

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


NOTHING = ClientSummary(0, 0, math.nan, (), 0, "failed")
"""The summary of a client that never came to anything."""


def together(summaries: Sequence[ClientSummary]) -> ClientSummary:
    """Return what several clients did, as if one had; its ``recent`` may be longer than that of one."""
    episodes = sum(each.episodes for each in summaries)
    total_return = sum(each.mean_return * each.episodes for each in summaries if each.episodes)
    return ClientSummary(
        episodes=episodes,
        steps=sum(each.steps for each in summaries),
        mean_return=total_return / episodes if episodes else math.nan,
        recent=tuple(sorted(episode for each in summaries for episode in each.recent)),
        reconnects=sum(each.reconnects for each in summaries),
        reason=", ".join(each.reason for each in summaries),
    )


class EpisodeBook:
    """Counts of the running episode of each env, and the finished ones."""

    def __init__(self, num_envs: int) -> None:
        self.chunks = np.zeros(num_envs, np.int64)
        """Completed chunks of each running episode: the ``step_ids`` [5.2]."""
        self.episodes = 0
        self.steps = 0
        self.reconnects = 0
        self.recent: deque[Episode] = deque(maxlen=_RECENT)
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._total_return = 0.0

    def add(self, rows: Array | slice, rewards: Array, lengths: Array, steps: int) -> None:
        """Add one chunk of the rows named: the sum of rewards and the env steps of each, and the steps of all."""
        self.chunks[rows] += 1
        self._returns[rows] += rewards
        self._lengths[rows] += lengths
        self.steps += steps

    def finish(self, ended: Array, success: Array, now: float) -> dict[str, Value]:
        """Close the episodes that ended (bool ``[n]``) and return the ``episode`` record [5.4] of all n rows."""
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

    def summary(self, reason: str) -> ClientSummary:
        """Return the summary so far."""
        mean = self._total_return / self.episodes if self.episodes else math.nan
        return ClientSummary(self.episodes, self.steps, mean, tuple(self.recent), self.reconnects, reason)


class Stopped(Exception):
    """Unwinds a client after `EnvClient.stop`; it never leaves the client."""


class Watch:
    """Whether a client is to stop, and what it reports about once a second."""

    def __init__(self, progress: Callable[[Progress], None] | None = None) -> None:
        self.book = EpisodeBook(0)
        """What is counted; replaced when the envs are there."""
        self._progress = progress
        self._reported_at = -math.inf
        self._reported_steps = 0
        self._stopped_at = math.inf

    @property
    def stopping(self) -> bool:
        """Whether the client is to stop."""
        return self._stopped_at < math.inf

    @property
    def stopping_for_s(self) -> float:
        """Seconds since the client was to stop; below 0, if it is not."""
        return time.monotonic() - self._stopped_at

    def stop(self) -> None:
        """Say that the client is to stop; from any thread or from a signal handler."""
        # No lock, no event: one could be held by the very thread that a signal handler interrupts.
        self._stopped_at = min(self._stopped_at, time.monotonic())

    def check(self) -> None:
        """Raise `Stopped` if the client is to stop."""
        if self.stopping:
            raise Stopped

    def report(self, state: str) -> None:
        """Report progress, if there is somebody to hear it and the last report is a second ago."""
        if self._progress is None:
            return
        now = time.monotonic()
        since_s = now - self._reported_at
        if since_s < _REPORT_EVERY_S:
            return
        book = self.book
        rate = (book.steps - self._reported_steps) / since_s
        self._reported_at, self._reported_steps = now, book.steps
        latest = list(book.recent)[-_MEAN_OVER:]
        mean = sum(episode.ret for episode in latest) / len(latest) if latest else math.nan
        self._progress(Progress(state, book.episodes, book.steps, rate, mean))
