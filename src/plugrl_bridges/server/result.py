"""Own the shape of a vector step's result, which ``server.lockstep`` fills and the adapters translate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.wire.info import own, split_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["Ended", "Finals", "InfoPart", "StepResult"]


@dataclass(frozen=True)
class Finals:
    """Hold the terminal observations of some slots of one step.

    Attributes:
        slots: The slots, ``[k]``.
        arrays: One array ``[k, *shape]`` per leaf.
    """

    slots: tuple[int, ...]
    arrays: list[Array]


@dataclass(frozen=True)
class InfoPart:
    """Hold what one message said in an info, as it came: batched over the envs of that message.

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
        """Give the part that stands for the wanted slots alone.

        Args:
            wanted: bool ``[num_envs]``.
        """
        return replace(self, rows=self.rows[wanted[self.slots[self.rows]]])

    def split(self) -> dict[int, dict[str, Any]]:
        """Give one info dict per slot."""
        infos = split_info(self.info, len(self.slots))
        return {int(self.slots[row]): infos[row] for row in self.rows}


@dataclass(frozen=True)
class Ended:
    """Say what the bridge counted of an episode that ended.

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
    """Hold the result of one vector step; every array is the caller's.

    Attributes:
        observations: One array ``[num_envs, *shape]`` per leaf. Where an episode ended, the autoreset mode says whether
            this is the reset observation or the terminal one.
        rewards: float64 ``[num_envs]``, summed over the chunk.
        terminated: bool ``[num_envs]``.
        truncated: bool ``[num_envs]``.
        finals: Terminal observations of the slots whose episode ended.
        info_parts: Infos of the last step, as they came.
        reset_parts: Infos of the resets whose observations are in this result, as they came.
        lengths: Env steps of the episodes that ended, where the client reports them and a chunk has several.
        lost: Slots whose client was lost since the step before, whatever became of the episode.
        cut_short: Slots of them whose episode ended for that, and whether their env took this step.
        idle: Slots that took no step: this result brings the first observation of their next episode, or they were to
            wait, and their rows show what they showed before.
        ended: What was counted of the episodes that ended, per slot.
    """

    observations: list[Array]
    rewards: Array
    terminated: Array
    truncated: Array
    finals: list[Finals]
    info_parts: list[InfoPart]
    reset_parts: list[InfoPart]
    lengths: dict[int, int]
    lost: tuple[int, ...]
    cut_short: dict[int, bool]
    idle: tuple[int, ...]
    ended: dict[int, Ended]

    @property
    def infos(self) -> list[dict[str, Any]]:
        """One info dict per slot, of the last step; made anew at every call."""
        infos: list[dict[str, Any]] = [{} for _ in range(len(self.rewards))]
        for slot, info in _merged(self.info_parts).items():
            infos[slot] = info
        return infos

    @property
    def reset_infos(self) -> dict[int, dict[str, Any]]:
        """Info dict per slot that was reset and has something to say; made anew at every call."""
        return {slot: info for slot, info in _merged(self.reset_parts).items() if info}


def _merged(parts: Sequence[InfoPart]) -> dict[int, dict[str, Any]]:
    return {slot: info for part in parts for slot, info in part.split().items()}
