"""Own the rule of ``reuse-feedback-obs`` [10.1]: for which envs an infer may say "the observation you already have".

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

__all__ = ["ReuseRule"]


class ReuseRule:
    """Remember, for one connection, which envs' last feedback may stand for their next observation."""

    def __init__(self) -> None:
        self._legal: set[int] = set()
        self._ended: set[int] = set()
        self._steady: tuple[Array, Array] | None = None  # names of envs that are all legal, and a mark for each

    def note_feedback(self, env_indices: Array, terminated: Array, truncated: Array) -> None:
        """Take in a feedback: its envs may be reused, except those whose episode it ended."""
        ended = terminated | truncated
        none_ended = b"\x01" not in ended.tobytes()
        if none_ended and self._marks_of_all(env_indices) is not None:
            return
        names = env_indices.tolist()
        self._legal.update(names)
        if self._ended:
            self._ended.difference_update(names)
        if none_ended:
            marks = np.ones(len(names), np.bool_)
            marks.flags.writeable = False
            self._steady = (env_indices, marks)
        else:
            self.forget(env_indices[ended].tolist())

    def _marks_of_all(self, env_indices: Array) -> Array | None:
        """Give a mark for each, if these are the very names of the last feedback and no env was forgotten since."""
        return self._steady[1] if self._steady is not None and self._steady[0] is env_indices else None

    def forget(self, envs: Iterable[int]) -> None:
        """Take in that envs were reset, or are about to be: their next observation was never sent."""
        self._steady = None
        names = tuple(envs)
        self._legal.difference_update(names)
        self._ended.update(names)

    def marks(self, env_indices: Array) -> Array:
        """Give the bool ``[n]`` array of rows that may be marked."""
        every = self._marks_of_all(env_indices)
        if every is not None:
            return every
        legal = self._legal
        return np.array([env in legal for env in env_indices.tolist()], dtype=np.bool_)

    def fault(self, env_indices: Array, reuse: Array) -> str | None:
        """Say which env of an infer may not be marked, and why; None if all marks are legal."""
        if self._marks_of_all(env_indices) is not None:
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
