"""Own the two streams of events that are compared: what the trainer saw of each env, and what each env saw.

Files are read on demand and in step with each other, so that little of them is held. ``comparing`` pairs the events.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.files import is_empty, is_folder
from plugrl_bridges.ledger.format import Side
from plugrl_bridges.ledger.hints import ONE_FOLDER_PER_RUN
from plugrl_bridges.ledger.outcome import Slot
from plugrl_bridges.ledger.reader import LedgerReader

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from plugrl_bridges.ledger.reader import Event

__all__ = ["EnvEvents", "env_events", "env_readers", "trainer_reader"]


def trainer_reader(path: str | os.PathLike[str]) -> LedgerReader:
    """Open the ledger of a trainer.

    Raises:
        LedgerError: if it cannot be read, or is a folder, or of an env.
    """
    if is_folder(path):
        raise LedgerError(f"{path} is a folder, expected the trainer's ledger, a file: it comes first, then the envs'")
    reader = LedgerReader(path)
    if _is_env(reader):
        raise LedgerError(
            f"{path} was kept at an env, expected one that was kept at the trainer: the trainer's ledger comes first, "
            "then those of the envs"
        )
    return reader


def env_readers(paths: Sequence[str | os.PathLike[str]], run: str = "") -> tuple[list[LedgerReader], list[str]]:
    """Open ledgers of envs, oldest first; a folder stands for those in it, of this run.

    Args:
        paths: Files, and folders of them; in a folder, files that are not named ``*.ledger`` are none.
        run: Identity of the run; from a folder, ledgers of another run are not taken. Empty takes all.

    Returns:
        The ledgers, and notes on files that were left out.

    Raises:
        LedgerError: if there is none, or one cannot be read, or is not of an env.
    """
    readers: dict[Path, LedgerReader] = {}
    others: list[Path] = []
    notes = []
    for path in map(Path, paths):
        in_folder = is_folder(path)
        for each in sorted(path.glob("*.ledger")) if in_folder else [path]:
            if in_folder and is_empty(each):
                notes.append(f"{each} is empty and was left out: its process ended before it wrote anything")
                continue
            reader = LedgerReader(each)
            if not _is_env(reader):
                if in_folder:
                    continue
                raise LedgerError(
                    f"{path} was kept at the trainer, expected one that was kept at an env: the trainer's ledger comes "
                    "first, then those of the envs"
                )
            if in_folder and run and reader.header.run and reader.header.run != run:
                others.append(each)
                continue
            readers.setdefault(each.resolve(), reader)
    if others:
        notes.append(f"left out {len(others)} ledgers of other runs than {run!r}, such as {others[0]}")
    if not readers:
        raise LedgerError(
            f"no ledger of an env in {', '.join(map(str, paths)) or 'what was given'} (of a folder, the files that are "
            f"named *.ledger count){''.join(f': {note}' for note in notes)}"
        )
    first, *rest = readers.values()
    for reader in rest:
        for ours, theirs in (
            (reader.header.observation, first.header.observation),
            (reader.header.action, first.header.action),
        ):
            if ours.entries != theirs.entries:
                raise LedgerError(
                    f"{reader.path} and {first.path} are of envs with different spaces; if one is of an earlier run: "
                    f"{ONE_FOLDER_PER_RUN}"
                )
    return sorted(readers.values(), key=lambda reader: reader.header.started_ns), notes


def _is_env(reader: LedgerReader) -> bool:
    return reader.header.side is Side.ENV


class _Source:
    """Hand out the events of one file to the envs that wrote it."""

    def __init__(self, reader: LedgerReader, convert: Callable[[Event], Event] | None) -> None:
        self.reader = reader
        self.waiting: dict[tuple[int, int], deque[Event]] = {}
        ranks = {number: rank for rank, number in reader.joined()}
        self.keys = sorted({(rank, number) for number, rank in ranks.items()})
        for key in self.keys:
            self.waiting[key] = deque()
        self._queues = {number: self.waiting[rank, number] for number, rank in ranks.items()}
        self._records = reader.records()
        self._convert = convert

    def advance(self) -> bool:
        """Read one record; tell whether there was one."""
        record = next(self._records, None)
        if record is None:
            return False
        for number, event in zip(record.envs, record.events, strict=False):  # a join has no event
            queue = self._queues.get(number)
            if queue is None:
                raise LedgerError(f"{self.reader.path} is corrupted: env {number} never joined")
            queue.append(event if self._convert is None else self._convert(event))
        return True


class EnvEvents:
    """Give the events of one env, over all the files that it wrote one after another.

    Args:
        slot: Which row of the trainer it is.
        sources: The files, oldest first.
    """

    def __init__(self, slot: Slot, sources: Sequence[_Source]) -> None:
        self.slot = slot
        self.closed = sources[-1].reader.tail.closed
        """Whether its last file has an end mark, so that nothing is missing."""
        self.readers = tuple(source.reader for source in sources)
        self._key = (slot.rank, slot.env_index)
        self._sources = deque(sources)
        self._events: deque[Event] = deque()
        self.last_observation = b""
        """Of the event before the next one."""
        self._popped = 0
        self._begins: dict[int, bool] = {}
        """Number of the first event of each file but the first, and whether the file before it has no end mark."""

    def peek(self, ahead: int = 0) -> Event | None:
        """Give the event that is so many ahead; None if there is none."""
        while len(self._events) <= ahead:
            if not self._sources:
                return None
            source = self._sources[0]
            waiting = source.waiting[self._key]
            if waiting:
                self._events.append(waiting.popleft())
            elif not source.advance():
                self._sources.popleft()
                at = self._popped + len(self._events)
                self._begins[at] = self._begins.get(at, False) or not source.reader.tail.closed
        return self._events[ahead]

    def begins_file(self, ahead: int = 0) -> bool:
        """Tell whether the event that is so many ahead is the first of another file than the first."""
        return self.peek(ahead) is not None and self._popped + ahead in self._begins

    def follows_a_kill(self, ahead: int = 0) -> bool:
        """Tell whether that event is the first of a file, and the last records of the one before may be lost."""
        return self.peek(ahead) is not None and self._begins.get(self._popped + ahead, False)

    def observation_before(self, ahead: int) -> bytes:
        """Give the observation of the event before the one that is so many ahead, in whichever file; or nothing."""
        before = self.peek(ahead - 1) if ahead else None
        return self.last_observation if before is None else before.observation

    def pop(self) -> None:
        """Go on to the next event."""
        if self.peek() is not None:
            self.last_observation = self._events.popleft().observation
            self._begins.pop(self._popped, None)
            self._popped += 1


def env_events(readers: Sequence[LedgerReader], convert: Callable[[Event], Event] | None) -> list[EnvEvents]:
    """Give the events of all envs, in the order of the trainer's rows: by rank, then by number.

    Args:
        readers: From `env_readers`.
        convert: Applied to each event; None changes nothing.
    """
    sources = [_Source(reader, convert) for reader in readers]
    keys = sorted({key for source in sources for key in source.keys})
    return [
        EnvEvents(Slot(number, *key), [source for source in sources if key in source.waiting])
        for number, key in enumerate(keys)
    ]
