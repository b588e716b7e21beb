"""Own the rule of ``reuse-feedback-obs`` [10.1]: for which envs an infer may say "the observation you already have".

Pure bookkeeping of one connection, used by both ends: the server's session refuses an illegal mark, the client's
session makes only legal ones. Who holds the observations themselves is the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import Array

__all__ = ["ReuseRule"]


class ReuseRule:
    """Remember, for one connection, which envs' last feedback may stand for their next observation."""

    def __init__(self) -> None:
        self._legal: set[int] = set()
        self._ended: set[int] = set()

    def note_feedback(self, env_indices: Array, terminated: Array, truncated: Array) -> None:
        """Take in a feedback: its envs may be reused, except those whose episode it ended."""
        names = env_indices.tolist()
        self._legal.update(names)
        ended = terminated | truncated
        if ended.any():
            self.forget(env_indices[ended].tolist())
            self._ended.update(env_indices[ended].tolist())
        if self._ended:
            self._ended.difference_update(env_indices[~ended].tolist())

    def forget(self, envs: Iterable[int]) -> None:
        """Take in that envs were reset: their next observation was never sent."""
        self._legal.difference_update(envs)

    def marks(self, env_indices: Array) -> Array:
        """Give the bool ``[n]`` array of rows that may be marked."""
        legal = self._legal
        return np.array([env in legal for env in env_indices.tolist()])

    def check(self, env_indices: Array, reuse: Array) -> None:
        """Refuse marks that the server cannot honour.

        Raises:
            RemoteProtocolError: naming the first env marked without a feedback on this connection, or after its
                episode ended [10.1].
        """
        marked = env_indices[reuse].tolist()
        if self._legal.issuperset(marked):
            return
        env = next(name for name in marked if name not in self._legal)
        why = "its episode ended or it was reset" if env in self._ended else "it has no feedback on this connection"
        raise RemoteProtocolError(f"infer: env {env} is marked reuse, but {why}", clause="10.1")
