"""Own the shape of a vector step's result, which ``server.lockstep`` fills and the adapters translate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plugrl_bridges.wire.codec import Array

__all__ = ["Finals", "StepResult"]


@dataclass(frozen=True)
class Finals:
    """Hold the terminal observations of some slots of one step.

    Attributes:
        slots: The slots, ``[k]``.
        arrays: One array ``[k, *shape]`` per leaf.
    """

    slots: tuple[int, ...]
    arrays: list[Array]


@dataclass
class StepResult:
    """Hold the result of one vector step; every array is the caller's.

    Attributes:
        observations: One array ``[num_envs, *shape]`` per leaf; after an episode's end the reset observation.
        rewards: float64 ``[num_envs]``, summed over the chunk.
        terminated: bool ``[num_envs]``.
        truncated: bool ``[num_envs]``.
        finals: Terminal observations of the slots whose episode ended.
        infos: One info dict per slot, of the last step.
        reset_infos: Info dict of the reset, per slot whose episode ended.
        lengths: Env steps of the episodes that ended, where the client reports them and a chunk has several.
        lost: Slots whose client was lost since the step before, whatever became of the episode.
        cut_short: Slots of them whose episode ended for that, and whether their env took this step.
        idle: Slots that were to wait in this step: their env took none, and their rows show what they showed before.
    """

    observations: list[Array]
    rewards: Array
    terminated: Array
    truncated: Array
    finals: list[Finals]
    infos: list[dict[str, Any]]
    reset_infos: dict[int, dict[str, Any]]
    lengths: dict[int, int]
    lost: tuple[int, ...]
    cut_short: dict[int, bool]
    idle: tuple[int, ...] = ()
