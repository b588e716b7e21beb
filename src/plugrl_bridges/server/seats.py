"""Own what the lockstep remembers of one connection: its envs, its rows, its first observations.

Pure records and the one rule that compares envs; ``server.roster`` fills and ``server.exchange`` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.server.peer import Peer
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["Loss", "Seat"]


@dataclass(eq=False)
class Seat:
    """Remember one connection that offers envs.

    Attributes:
        peer: The connection.
        envs: Its env indices, in the order of its first infer; fixed for the connection's life.
        features: Optional features that its client announced.
        held: Observations that came and were not handed to the trainer yet, one array per leaf; None if none.
        reset_info: Info of the reset that came with ``held``, batched over the envs as it came; None if none.
        digest: Digests that came with ``held``, uint64 ``[n]`` in the order of ``envs``; None if none.
        from_reset: Which of the envs stand where a reset left them, bool ``[n]`` in the order of ``envs``.
        slots: The slots its envs fill, in order; empty while it is a spare.
        unreset: Whether its envs wait for a first reset; ``held`` means nothing until then.
        preparing: Whether that reset was asked for beside the run; it is no spare until its observations are here.
        first: Whether what it brought, if that is all that came of it so far, begins episodes; a client that comes back
            brings them as they stand.
        acting: Whether a step's result is awaited.
        fed_back: Whether the step's feedback has come.
    """

    peer: Peer
    envs: tuple[int, ...]
    features: frozenset[str]
    held: list[Array] | None = None
    reset_info: Mapping[str, Value] | None = None
    digest: Array | None = None
    from_reset: Array = field(default_factory=lambda: np.zeros(0, np.bool_))
    slots: tuple[int, ...] = ()
    unreset: bool = False
    preparing: bool = False
    first: bool = False
    acting: bool = False
    fed_back: bool = False
    _key: bytes = b""
    _rows: slice | Array = field(default_factory=lambda: slice(0, 0))
    _slot_of: dict[int, int] = field(default_factory=dict)

    def sit(self, slots: Sequence[int]) -> None:
        """Take slots for the envs, in order."""
        self.slots = tuple(slots)
        self._slot_of = dict(zip(self.envs, self.slots, strict=True))
        self._key = np.array(self.envs, np.int64).tobytes()
        self._rows = _as_slice(np.array(self.slots))

    def rows(self, env_indices: Array) -> slice | Array:
        """Give the slots of these envs, as what indexes an array fastest."""
        if env_indices.tobytes() == self._key:
            return self._rows
        return np.array([self._slot_of[env] for env in env_indices.tolist()], np.int64)

    def slots_of(self, env_indices: Array) -> Array:
        """Give the slots of these envs, int ``[m]``."""
        rows = self.rows(env_indices)
        return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows

    def knows(self, env_indices: Array) -> bool:
        """Tell whether these are exactly this connection's envs, in whatever order."""
        return env_indices.tobytes() == self._key or sorted(env_indices.tolist()) == sorted(self.envs)


@dataclass(frozen=True)
class Loss:
    """Say who left a slot vacant.

    Attributes:
        address: The client that left.
        why: What ended its connection.
        last_words: What came from it last.
        at: ``time.monotonic()`` of the loss.
        timed_out: Whether it was given up for its silence.
    """

    address: str
    why: str
    last_words: str
    at: float
    timed_out: bool


def _as_slice(rows: Array) -> slice | Array:
    start = int(rows[0])
    return slice(start, start + len(rows)) if (rows == np.arange(start, start + len(rows))).all() else rows
