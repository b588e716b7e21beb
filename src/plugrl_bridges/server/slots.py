"""Own who sits where: the table of slots and the connections that fill them. Pure: it returns effects, performs none.

Knows no sockets, messages or clocks. ``server.roster`` tells it who arrived and who left, under the hub's lock, and
carries out what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Candidate", "Effect", "Parked", "Seated", "SlotTable"]


@dataclass(frozen=True)
class Candidate:
    """A connection that offers envs.

    Attributes:
        connection: Its number in the hub.
        num_envs: How many envs it offers; they are seated together or not at all.
        rank: What its client announced, or None; ranked candidates go first, in order.
        group_num_envs: Envs of the whole client command it belongs to (several processes), or None.
    """

    connection: int
    num_envs: int
    rank: int | None = None
    group_num_envs: int | None = None


@dataclass(frozen=True)
class Seated:
    """That a connection now fills these slots, its envs in order."""

    connection: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Parked:
    """That a connection is a spare for now, and why."""

    connection: int
    reason: str


Effect: TypeAlias = "Seated | Parked"


class SlotTable:
    """Who sits in which slots.

    Nobody is seated until the slots can all be filled, so that the order is by rank, then by arrival, whoever came
    first. After that a vacant slot goes to the first spare that fits, at best to the rank that sat there before.

    Args:
        num_envs: Number of slots; None takes what the first candidate brings.
    """

    def __init__(self, num_envs: int | None = None) -> None:
        self.num_envs = num_envs
        self.filled = False
        self._seats: dict[int, tuple[Candidate, tuple[int, ...]]] = {}
        self._spares: dict[int, Candidate] = {}
        self._vacant: list[tuple[int | None, tuple[int, ...]]] = []

    def __repr__(self) -> str:
        """Show the counts, for logs and tests."""
        seated = sum(len(slots) for _, slots in self._seats.values())
        return f"<SlotTable {seated} of {self.num_envs} slots seated, {len(self._spares)} spare connections>"

    @property
    def vacant(self) -> tuple[int, ...]:
        """Slots that were filled once and are not now, in order."""
        return tuple(sorted(slot for _, slots in self._vacant for slot in slots))

    def slots_of(self, connection: int) -> tuple[int, ...]:
        """Return a connection's slots; empty if it has none."""
        return self._seats[connection][1] if connection in self._seats else ()

    def arrive(self, candidate: Candidate) -> list[Effect]:
        """Accept a connection; it is seated, or parked as a spare."""
        if self.num_envs is None:
            self.num_envs = max(candidate.group_num_envs or 0, candidate.num_envs)
        self._spares[candidate.connection] = candidate
        effects = self._refill() if self.filled else self._fill()
        if candidate.connection in self._spares:
            effects.append(Parked(candidate.connection, self._why_parked(candidate)))
        return effects

    def leave(self, connection: int) -> list[Effect]:
        """Record that a connection ended; its slots are vacant, and spares that fit move up."""
        self._spares.pop(connection, None)
        if connection not in self._seats:
            return []
        candidate, slots = self._seats.pop(connection)
        self._vacant.append((candidate.rank, slots))
        return self._refill()

    def _queue(self) -> list[Candidate]:
        return sorted(self._spares.values(), key=lambda c: (c.rank is None, c.rank or 0, c.connection))

    def _fill(self) -> list[Effect]:
        left = self.num_envs or 0
        chosen = []
        for candidate in self._queue():
            if candidate.num_envs <= left:
                chosen.append(candidate)
                left -= candidate.num_envs
        if left:
            return []
        self.filled = True
        effects: list[Effect] = []
        at = 0
        for candidate in chosen:
            effects.append(self._seat(candidate, tuple(range(at, at + candidate.num_envs))))
            at += candidate.num_envs
        return effects

    def _seat(self, candidate: Candidate, slots: tuple[int, ...]) -> Seated:
        del self._spares[candidate.connection]
        self._seats[candidate.connection] = (candidate, slots)
        return Seated(candidate.connection, slots)

    def _refill(self) -> list[Effect]:
        effects: list[Effect] = []
        for candidate in self._queue():
            slots = self._place_for(candidate)
            if slots:
                effects.append(self._seat(candidate, slots))
        return effects

    def _place_for(self, candidate: Candidate) -> tuple[int, ...]:
        same_size = [place for place in self._vacant if len(place[1]) == candidate.num_envs]
        best = next((place for place in same_size if place[0] == candidate.rank), None) or next(iter(same_size), None)
        if best is not None:
            self._vacant.remove(best)
            return best[1]
        vacant = self.vacant
        if candidate.num_envs > len(vacant):
            return ()
        taken = vacant[: candidate.num_envs]
        rest = [(rank, tuple(s for s in slots if s not in taken)) for rank, slots in self._vacant]
        self._vacant = [(rank, slots) for rank, slots in rest if slots]
        return taken

    def _why_parked(self, candidate: Candidate) -> str:
        if not self.filled:
            if candidate.num_envs > (self.num_envs or 0):
                return f"it offers {candidate.num_envs} envs, but there are {self.num_envs} slots"
            return "waiting until all slots can be filled"
        vacant = len(self.vacant)
        if vacant:
            return f"it offers {candidate.num_envs} envs, but {vacant} slots are vacant"
        return f"all {self.num_envs} slots are taken"
