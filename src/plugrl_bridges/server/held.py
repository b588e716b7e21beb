"""Own the observations of one connection that ``reuse-feedback-obs`` [10.1] may ask for again.

Holds what each env's last feedback reported, and puts an infer's batch together of that and of what the infer brings.
Which marks are legal is the session's concern (``wire.reuse``); ``server.policy_server`` has one of these per
connection. (A lockstep needs none: there the batch of the step itself holds every env's last observation.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from plugrl_bridges.spaces import ObservationLayout
    from plugrl_bridges.wire.arrays import Array
    from plugrl_bridges.wire.messages import Infer, Observation

__all__ = ["HeldObservations"]


class HeldObservations:
    """Hold the last reported observation of each env; `keep` each feedback, and `batch` each infer.

    Args:
        layout: Of one env's observation.
    """

    def __init__(self, layout: ObservationLayout) -> None:
        self._layout = layout
        self._row_of: dict[int, int] = {}
        self._arrays = layout.allocate(0)

    def keep(self, env_indices: Array, observation: Observation) -> None:
        """Take in a feedback's observations; the message may be forgotten afterwards.

        Raises:
            RemoteProtocolError: if they do not fit the layout [5.2].
        """
        names = env_indices.tolist()
        for env in names:
            self._row_of.setdefault(env, len(self._row_of))
        self._make_room(len(self._row_of))
        self._layout.read(observation, self._arrays, self._rows(names))

    def batch(self, infer: Infer) -> list[Array]:
        """Give the observations of all envs of an infer, in its order: one fresh array ``[n, *shape]`` per leaf.

        Raises:
            RemoteProtocolError: if what the infer brings does not fit the layout [5.2].
        """
        n = len(infer.env_indices)
        arrays = self._layout.allocate(n)
        if infer.reuse is None:
            self._layout.read(infer.observation, arrays, slice(0, n))
            return arrays
        brought, marked = np.flatnonzero(~infer.reuse), np.flatnonzero(infer.reuse)
        if len(brought):
            self._layout.read(infer.observation, arrays, brought)
        rows = self._rows(infer.env_indices[marked].tolist())
        for array, held in zip(arrays, self._arrays, strict=True):
            array[marked] = held[rows]
        return arrays

    def _rows(self, names: list[int]) -> Array:
        return np.array([self._row_of[env] for env in names], np.int64)

    def _make_room(self, rows: int) -> None:
        have = len(self._arrays[0]) if self._arrays else rows
        if rows <= have:
            return
        grown = self._layout.allocate(max(rows, 2 * have))
        for array, old in zip(grown, self._arrays, strict=True):
            array[:have] = old
        self._arrays = grown
