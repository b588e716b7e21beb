"""The shape of a vector step's result, which ``server.lockstep`` fills and the adapters translate.

A result knows no autoreset modes: it has what the steps returned, and apart from that which slots begin an episode and
with what. ``server.autoreset`` makes of it what a trainer gets in its mode.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.wire.info import own, split_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["Ended", "InfoPart", "StepResult", "infos_of"]


@dataclass(frozen=True)
class InfoPart:
    """What one message said in an info, as it came: batched over the envs of that message.

    Attributes:
        slots: int ``[m]``, the slot of each env of the message.
        info: The batched map; its arrays are nobody else's.
        rows: int ``[k]``, which of the m this part stands for.
    """

    slots: Array
    info: Mapping[str, Value]
    rows: Array

    @classmethod
    def of(cls, info: Mapping[str, Value], slots: Array) -> InfoPart:
        """Take over a message's info, whose arrays die with the message.

        Args:
            info: The batched map.
            slots: int ``[m]``.
        """
        return cls(slots, {key: own(value) for key, value in info.items()}, np.arange(len(slots)))

    def only(self, wanted: Array) -> InfoPart:
        """Return the part that stands for the wanted slots alone.

        Args:
            wanted: bool ``[num_envs]``.
        """
        return replace(self, rows=self.rows[wanted[self.slots[self.rows]]])

    def split(self) -> dict[int, dict[str, Any]]:
        """Return one info dict per slot."""
        infos = split_info(self.info, len(self.slots))
        return {int(self.slots[row]): infos[row] for row in self.rows}


@dataclass(frozen=True)
class Ended:
    """What the bridge counted of an episode that ended.

    Attributes:
        ret: Its return, added up in float64.
        length: Its env steps.
        elapsed_s: Wall time since it began, seconds.
    """

    ret: float
    length: int
    elapsed_s: float


@dataclass
class StepResult:
    """The result of one vector step or reset; but for ``first`` every array is the caller's.

    Attributes:
        observations: One array ``[num_envs, *shape]`` per leaf: what the steps returned, where an episode ended the
            terminal one. A slot that took no step shows where its env stands, which may be at a first observation.
        rewards: float64 ``[num_envs]``, summed over the chunk.
        terminated: bool ``[num_envs]``.
        truncated: bool ``[num_envs]``.
        stepped: bool ``[num_envs]``, the slots whose env took this step.
        begun: bool ``[num_envs]``, the slots that begin an episode, after what they returned or without a step.
        first: One array ``[num_envs, *shape]`` per leaf: in rows of ``begun`` the first observations. Written anew by
            the next exchange.
        info_parts: Infos of the last step, as they came.
        reset_parts: Infos of the resets of slots in ``begun``, as they came.
        lengths: Env steps of the episodes that ended, where the client reports them and a chunk has several.
        lost: Slots whose client was lost since the step before, whatever became of the episode.
        cut_short: Slots of them whose episode ended for that.
        ended: What was counted of the episodes that ended, per slot.
    """

    observations: list[Array]
    rewards: Array
    terminated: Array
    truncated: Array
    stepped: Array
    begun: Array
    first: list[Array]
    info_parts: list[InfoPart] = field(default_factory=list)
    reset_parts: list[InfoPart] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    cut_short: tuple[int, ...] = ()
    ended: dict[int, Ended] = field(default_factory=dict)

    @property
    def over(self) -> Array:
        """The slots whose episode ended, bool ``[num_envs]``, a new array."""
        over: Array = self.terminated | self.truncated
        return over

    def standing(self) -> list[Array]:
        """Return where the envs stand: the observations, or where episodes ended copies with the next ones' first."""
        over = self.over
        if not over.any():
            return self.observations
        standing = [array.copy() for array in self.observations]
        for array, first in zip(standing, self.first, strict=True):
            array[over] = first[over]
        return standing

    @property
    def infos(self) -> list[dict[str, Any]]:
        """One info dict per slot, of the last step; made anew at every call."""
        found = infos_of(self.info_parts)
        return [found.get(slot, {}) for slot in range(len(self.rewards))]


def infos_of(parts: Sequence[InfoPart]) -> dict[int, dict[str, Any]]:
    """Return one info dict per slot that the parts speak of; made anew at every call."""
    return {slot: info for part in parts for slot, info in part.split().items()}
