"""Who sits where: the table of slots and the connections that fill them. Pure: it decides, and does nothing.

Knows no sockets, messages or clocks. ``server.roster`` tells it who arrived and who left, under the hub's lock, and
carries out what it answers.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Candidate", "SlotTable"]


@dataclass(frozen=True)
class Candidate:
    """A connection that offers envs.

    Attributes:
        connection: Its number in the hub.
        num_envs: How many envs it offers; they are seated together or not at all.
        rank: What its client announced, or None; ranked candidates go first, in order.
    """

    connection: int
    num_envs: int
    rank: int | None = None


class SlotTable:
    """Who sits in which slots.

    Nobody is seated until the slots can all be filled, so that the order is by rank, then by arrival, whoever came
    first. After that a vacant slot goes to the first spare that fits, at best to the rank that sat there before.

    `arrive` and `leave` return the connections that have slots now and had none before, each with its slots; its envs
    fill them in order.

    Args:
        num_envs: Number of slots.
    """

    def __init__(self, num_envs: int) -> None:
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

    def arrive(self, candidate: Candidate) -> dict[int, tuple[int, ...]]:
        """Accept a connection; it is seated, or a spare for now."""
        self._spares[candidate.connection] = candidate
        return self._refill() if self.filled else self._fill()

    def leave(self, connection: int) -> dict[int, tuple[int, ...]]:
        """Record that a connection ended; its slots are vacant, and spares that fit move up."""
        self._spares.pop(connection, None)
        if connection not in self._seats:
            return {}
        candidate, slots = self._seats.pop(connection)
        self._vacant.append((candidate.rank, slots))
        return self._refill()

    def _queue(self) -> list[Candidate]:
        return sorted(self._spares.values(), key=lambda c: (c.rank is None, c.rank or 0, c.connection))

    def _fill(self) -> dict[int, tuple[int, ...]]:
        left = self.num_envs
        chosen = []
        for candidate in self._queue():
            if candidate.num_envs <= left:
                chosen.append(candidate)
                left -= candidate.num_envs
        if left:
            return {}
        self.filled = True
        at = 0
        for candidate in chosen:
            self._seat(candidate, tuple(range(at, at + candidate.num_envs)))
            at += candidate.num_envs
        return {candidate.connection: self.slots_of(candidate.connection) for candidate in chosen}

    def _seat(self, candidate: Candidate, slots: tuple[int, ...]) -> None:
        del self._spares[candidate.connection]
        self._seats[candidate.connection] = (candidate, slots)

    def _refill(self) -> dict[int, tuple[int, ...]]:
        seated: dict[int, tuple[int, ...]] = {}
        for candidate in self._queue():
            slots = self._place_for(candidate)
            if slots:
                self._seat(candidate, slots)
                seated[candidate.connection] = slots
        return seated

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

    def why_spare(self, candidate: Candidate) -> str:
        """Return why a connection has no slots."""
        if not self.filled:
            if candidate.num_envs > self.num_envs:
                return f"it offers {candidate.num_envs} envs, but there are {self.num_envs} slots"
            return "waiting until all slots can be filled"
        vacant = len(self.vacant)
        if vacant:
            return f"it offers {candidate.num_envs} envs, but {vacant} slots are vacant"
        return f"all {self.num_envs} slots are taken"
