"""Own the episodes that have begun at the client and that the trainer is not to see yet.

A client begins the next episode at once, and brings its first observation in the same exchange. In the autoreset modes
NEXT_STEP and DISABLED the trainer gets the terminal observation in this step; the first one of the next episode is kept
here. ``server.exchange`` puts it here and takes it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plugrl_bridges.server.result import InfoPart, StepResult
    from plugrl_bridges.spaces import ObservationLayout
    from plugrl_bridges.wire.arrays import Array

__all__ = ["Upcoming"]


class Upcoming:
    """Keep the first observations of episodes to come.

    Call `turn` at the end of each step, and `begin` for what a reset hands over.

    Args:
        layout: Of one env's observation.
        num_envs: Number of slots.

    Attributes:
        waiting: bool ``[num_envs]``, the slots whose next episode is kept here.
    """

    def __init__(self, layout: ObservationLayout, num_envs: int) -> None:
        self.waiting = np.zeros(num_envs, np.bool_)
        self._arrays = layout.allocate(num_envs)
        self._parts: list[InfoPart] = []

    def turn(self, step: StepResult) -> None:
        """Begin the episodes that sat out a step, and keep back those that follow the ones it ended."""
        idle = np.flatnonzero(self.waiting).tolist()
        self.forget(step.lost)  # another client's first observation is in that row
        self.begin([slot for slot in idle if slot not in step.lost], step)
        step.idle = tuple(sorted({*step.idle, *idle}))
        self.defer(step)

    def defer(self, step: StepResult) -> None:
        """Keep the reset observations of a finished step, and put the terminal ones in their place."""
        done = step.terminated | step.truncated
        if not done.any():
            return
        for kept, array in zip(self._arrays, step.observations, strict=True):
            kept[done] = array[done]
        for finals in step.finals:
            slots = list(finals.slots)
            for array, final in zip(step.observations, finals.arrays, strict=True):
                array[slots] = final
        self._parts += [part.only(done) for part in step.reset_parts]
        step.reset_parts = [part.only(~done) for part in step.reset_parts]
        self.waiting |= done

    def begin(self, slots: Iterable[int], step: StepResult) -> None:
        """Put the first observations and infos of these slots into a result."""
        chosen = self._marked(slots)
        for array, kept in zip(step.observations, self._arrays, strict=True):
            array[chosen] = kept[chosen]
        step.reset_parts += [part.only(chosen) for part in self._parts]
        self._drop(chosen)

    def forget(self, slots: Iterable[int]) -> None:
        """Drop what is kept for these slots."""
        self._drop(self._marked(slots))

    def _drop(self, chosen: Array) -> None:
        self.waiting &= ~chosen
        self._parts = [part for part in (part.only(~chosen) for part in self._parts) if len(part.rows)]

    def _marked(self, slots: Iterable[int]) -> Array:
        marked = np.zeros_like(self.waiting)
        marked[list(slots)] = True
        return marked
