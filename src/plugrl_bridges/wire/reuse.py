"""The rule of ``reuse-feedback-obs`` [10.1]: for which envs an infer may say "the observation you already have".

Pure bookkeeping of one connection, used by both ends: the server's session refuses an illegal mark, the client's
session makes only legal ones. Who holds the observations themselves is the caller's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plugrl_bridges.wire.arrays import Array

__all__ = ["ReuseRule", "same_envs"]


class ReuseRule:
    """For one connection, which envs' last feedback may stand for their next observation."""

    def __init__(self) -> None:
        self._legal: set[int] = set()
        self._ended: set[int] = set()
        self._last: tuple[Array, Array] | None = None  # names of the last feedback, and which of them are legal

    def note_feedback(self, env_indices: Array, terminated: Array, truncated: Array) -> None:
        """Record a feedback: its envs may be reused, except those whose episode it ended."""
        ended = terminated | truncated
        before = self._marks_of_last(env_indices)
        if before is not None:
            if ended.tobytes() == (~before).tobytes():
                return
            fresh, over = env_indices[~before & ~ended].tolist(), env_indices[before & ended].tolist()
        else:
            fresh, over = env_indices[~ended].tolist(), env_indices[ended].tolist()
        self._legal.update(fresh)
        self._ended.difference_update(fresh)
        self._legal.difference_update(over)
        self._ended.update(over)
        marks = ~ended
        marks.flags.writeable = False
        self._last = (env_indices, marks)

    def _marks_of_last(self, env_indices: Array) -> Array | None:
        """Return a mark for each, if these are the very names of the last feedback and no env was forgotten since."""
        return self._last[1] if self._last is not None and same_envs(self._last[0], env_indices) else None

    def forget(self, envs: Iterable[int]) -> None:
        """Record that envs were reset, or are about to be: their next observation was never sent."""
        names = tuple(envs)
        if names:
            self._last = None
            self._legal.difference_update(names)
            self._ended.update(names)

    def marks(self, env_indices: Array) -> Array:
        """Return the bool ``[n]`` array of rows that may be marked."""
        last = self._marks_of_last(env_indices)
        if last is not None:
            return last
        legal = self._legal
        return np.array([env in legal for env in env_indices.tolist()], dtype=np.bool_)

    def fault(self, env_indices: Array, reuse: Array) -> str | None:
        """Return which env of an infer may not be marked, and why; None if all marks are legal."""
        last = self._marks_of_last(env_indices)
        if last is not None and (last is reuse or b"\x01" not in (reuse & ~last).tobytes()):
            return None
        marked = env_indices[reuse].tolist()
        if self._legal.issuperset(marked):
            return None
        env = next(name for name in marked if name not in self._legal)
        why = "its episode ended or it was reset" if env in self._ended else "it has no feedback on this connection"
        return f"infer: env {env} is marked reuse, but {why}"

    def check(self, env_indices: Array, reuse: Array) -> None:
        """Refuse marks that the server cannot honour.

        Raises:
            RemoteProtocolError: naming the first env marked without a feedback on this connection, or after its
                episode ended [10.1].
        """
        fault = self.fault(env_indices, reuse)
        if fault is not None:
            raise RemoteProtocolError(fault, clause="10.1")


def same_envs(names: Array, others: Array) -> bool:
    """Return whether two int64 arrays of env indices are the same, in the same order."""
    return names is others or (len(names) == len(others) and names.tobytes() == others.tobytes())
