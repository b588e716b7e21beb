"""The life of a connection that offers envs: its stages, what it brought, the slots it fills, and how it ended.

Pure records, one table of stages, and the one rule that compares envs. ``server.roster`` makes the records;
``server.exchange`` and ``server.lockstep`` note in them what happens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.wire.closing import FEEDBACK_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.server.hub import Peer
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["AFTER", "TRANSITIONS", "Brought", "Event", "Loss", "Seat", "Stage"]


class Stage(enum.Enum):
    """What a connection has been through, and what it waits for."""

    UNRESET = "unreset, no slots"
    PREPARING = "being reset beside the run"
    SPARE = "spare"
    UNBEGUN = "unreset, with slots"
    ARRIVED = "with observations that the trainer has not had"
    SHOWN = "shown to the trainer as it came"
    RESTING = "at rest"
    ACTING = "acting"
    FED_BACK = "fed back"
    RESETTING = "being reset"
    GONE = "gone"

    __hash__ = object.__hash__  # the enum's own is a call of Python, and stages are looked up with every message


class Event(enum.Enum):
    """What happens to a connection."""

    PREPARE = "its envs' first reset is asked for beside the run"
    SIT = "it gets slots"
    HAND_OVER = "the trainer gets what it brought"
    STEP = "it is sent a chunk"
    RESET = "it is asked to reset all its envs"
    FEEDBACK = "its feedback comes"
    INFER = "its next infer comes"
    LEAVE = "its connection ends"


TRANSITIONS: Mapping[Event, Mapping[Stage, Stage]] = {
    Event.PREPARE: {Stage.UNRESET: Stage.PREPARING},
    Event.SIT: {Stage.UNRESET: Stage.UNBEGUN, Stage.SPARE: Stage.ARRIVED},
    Event.HAND_OVER: {Stage.ARRIVED: Stage.SHOWN},
    Event.STEP: {Stage.SHOWN: Stage.ACTING, Stage.RESTING: Stage.ACTING},
    Event.RESET: {
        Stage.UNBEGUN: Stage.RESETTING,
        Stage.ARRIVED: Stage.RESETTING,
        Stage.SHOWN: Stage.RESETTING,
        Stage.RESTING: Stage.RESETTING,
    },
    Event.FEEDBACK: {Stage.ACTING: Stage.FED_BACK},
    Event.INFER: {Stage.PREPARING: Stage.SPARE, Stage.FED_BACK: Stage.RESTING, Stage.RESETTING: Stage.RESTING},
    Event.LEAVE: {stage: Stage.GONE for stage in Stage if stage is not Stage.GONE},
}
"""The whole life of a seat: which stage follows which, on each event. Whatever is not in here cannot happen."""


class _Moves(dict[Stage, Stage]):
    """The stages that follow on one event; any other is refused."""

    def __init__(self, event: Event) -> None:
        super().__init__(TRANSITIONS[event])
        self._event = event

    def __missing__(self, stage: Stage) -> Stage:
        event = self._event
        raise RuntimeError(
            f"{event.name} ({event.value}) cannot happen to a seat in stage {stage.name} ({stage.value})"
        )


AFTER: Mapping[Event, Mapping[Stage, Stage]] = {event: _Moves(event) for event in Event}
"""`TRANSITIONS` as it is followed: what is not in it is a RuntimeError that names stage and event."""

_OWING = frozenset({Stage.ACTING, Stage.FED_BACK, Stage.RESETTING})
_AS_IT_CAME = frozenset({Stage.ARRIVED, Stage.SHOWN})


@dataclass(frozen=True, eq=False)
class Brought:
    """First observations of a connection, kept until a result hands them to the trainer.

    Attributes:
        observations: One array ``[n, *shape]`` per leaf, in the order of the seat's envs.
        from_reset: bool ``[n]``, which of the envs stand where a reset left them.
        reset_info: Info of the reset, batched over the envs as it came; None if none.
        digest: uint64 ``[n]``; None if none.
    """

    observations: list[Array]
    from_reset: Array
    reset_info: Mapping[str, Value] | None
    digest: Array | None


@dataclass(eq=False)
class Seat:
    """One connection that offers envs.

    Attributes:
        peer: The connection.
        envs: Its env indices, in the order of its first infer; fixed for the connection's life.
        features: Optional features that its client announced.
        stage: What it has been through; changed by `note`, or by `AFTER`.
        returned: Whether it brought its envs as they stood, for it was here before: no episode begins with them.
        brought: What it brought, until the trainer has it; None before and after.
        slots: The slots its envs fill, in order; empty while it has none.
    """

    peer: Peer
    envs: tuple[int, ...]
    features: frozenset[str]
    stage: Stage = Stage.SPARE
    returned: bool = False
    brought: Brought | None = None
    slots: tuple[int, ...] = ()
    _key: bytes = b""
    _rows: slice | Array = field(default_factory=lambda: slice(0, 0))
    _slot_of: dict[int, int] = field(default_factory=dict)

    def note(self, event: Event) -> None:
        """Go on to the next stage.

        Raises:
            RuntimeError: if the event cannot happen in this stage, naming both.
        """
        self.stage = AFTER[event][self.stage]

    @property
    def owes(self) -> bool:
        """Whether a result of it is awaited."""
        return self.stage in _OWING

    @property
    def amid_episodes(self) -> bool:
        """Whether its envs stand in the middle of episodes of which this side has seen no step."""
        return self.returned and self.stage in _AS_IT_CAME

    def sit(self, slots: Sequence[int]) -> None:
        """Take slots for the envs, in order."""
        self.note(Event.SIT)
        self.slots = tuple(slots)
        self._slot_of = dict(zip(self.envs, self.slots, strict=True))
        self._key = np.array(self.envs, np.int64).tobytes()
        self._rows = _as_slice(np.array(self.slots))

    def rows(self, env_indices: Array) -> slice | Array:
        """Return the slots of these envs, as what indexes an array fastest."""
        if env_indices.tobytes() == self._key:
            return self._rows
        return np.array([self._slot_of[env] for env in env_indices.tolist()], np.int64)

    def slots_of(self, env_indices: Array) -> Array:
        """Return the slots of these envs, int ``[m]``."""
        rows = self.rows(env_indices)
        return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows

    def knows(self, env_indices: Array) -> bool:
        """Return whether these are exactly this connection's envs, in whatever order."""
        return env_indices.tobytes() == self._key or sorted(env_indices.tolist()) == sorted(self.envs)


@dataclass(eq=False)
class Loss:
    """One lost connection that had slots, and what came of them.

    Attributes:
        slots: The slots that it had.
        address: The client that left.
        why: What ended its connection.
        last_words: What came from it last.
        at: ``time.monotonic()`` of the loss.
        vacant: Those of the slots that nobody has taken since.
        untold: Those of the slots of whose loss the trainer was not told.
    """

    slots: tuple[int, ...]
    address: str
    why: str
    last_words: str
    at: float
    vacant: set[int] = field(default_factory=set)
    untold: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Leave all the slots vacant, and nobody told."""
        self.vacant.update(self.slots)
        self.untold.update(self.slots)

    @property
    def timed_out(self) -> bool:
        """Whether it was given up for its silence."""
        return self.why == FEEDBACK_TIMEOUT


def _as_slice(rows: Array) -> slice | Array:
    start = int(rows[0])
    return slice(start, start + len(rows)) if (rows == np.arange(start, start + len(rows))).all() else rows
