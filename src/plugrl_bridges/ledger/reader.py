"""Own ledger files that are read: checked frame by frame, cut into records and events, and where the record ends.

`LedgerReader` is what ``streams`` pulls from. A file may still be written to, or have lost its tail: what stands behind
the last whole record is no fault. Everything else that is not as ``format`` says is one `LedgerError`.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.files import opened
from plugrl_bridges.ledger.format import (
    FRAME,
    FRAME_BYTES,
    GUARD,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    MAX_ENVS,
    MAX_HEADER_BYTES,
    Flag,
    Header,
    Kind,
    Side,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

__all__ = ["Event", "LedgerReader", "Record", "RecordedEpisode", "Tail"]

_ZEROS_BYTES = 1 << 16
_JOIN = struct.Struct("<ii")
_KINDS = {int(kind): kind for kind in Kind}
_FLAGS = bytes(range(sum(Flag) + 1))
_LAST_NUMBER = 2**31 - 1


class Event(NamedTuple):
    """Hold what happened to one env: a reset, or a step.

    Attributes:
        is_reset: Which of both.
        at: How many records of steps the file had before this one ended: the vector step, on the trainer's side.
        flags: See `format.Flag`; 0 for a reset.
        reward: 0 for a reset.
        action: Its bytes; empty for a reset.
        observation: Its bytes: what the step or the reset returned.
    """

    is_reset: bool
    at: int
    flags: int
    reward: float
    action: bytes
    observation: bytes


class RecordedEpisode(NamedTuple):
    """Say how a finished episode went, by the rewards and flags that were recorded.

    Attributes:
        env: Number of the env, or the trainer's row.
        ret: Sum of its rewards, in float64.
        length: Its steps.
        terminated: Whether it ended by itself.
        truncated: Whether it was cut.
    """

    env: int
    ret: float
    length: int
    terminated: bool
    truncated: bool


class Record(NamedTuple):
    """Hold one record: which envs, and one event each.

    Attributes:
        kind: What it is about.
        envs: Numbers of the envs; for a join the number of the one that joins.
        events: One per env; none for a join, a failed step and the end. Of kind ``KEPT`` they are no events of the env:
            only their observation, and after which vector step, counts.
        rank: Of the env that joins.
    """

    kind: Kind
    envs: tuple[int, ...]
    events: tuple[Event, ...]
    rank: int = 0


@dataclass(frozen=True)
class Tail:
    """Say how a ledger ends.

    Attributes:
        closed: Whether it has its end mark.
        records: Whole records.
        at_byte: Where the last whole record ends.
        lost_bytes: Bytes behind it, of a record that was not written whole.
    """

    closed: bool
    records: int
    at_byte: int
    lost_bytes: int

    def __str__(self) -> str:
        """Say it in words."""
        if self.closed:
            return f"closed after {self.records} records"
        text = f"ends without an end mark after {self.records} records, at byte {self.at_byte}"
        return text + (f"; the {self.lost_bytes} bytes behind it are no whole record" if self.lost_bytes else "")


class LedgerReader:
    """Read one ledger, in order, holding one record at a time.

    Iterate over `records`; ask `tail` how the file ends.

    Args:
        path: The file.

    Raises:
        LedgerError: if it cannot be read, or is no ledger that this release reads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with opened(self.path) as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                what = "is empty" if not start else "is no step ledger: it does not begin as one"
                raise LedgerError(f"{self.path} {what}")
            payload = next(self._frames(file, largest=MAX_HEADER_BYTES), None)
            if payload is None:
                raise LedgerError(f"{self.path} ends within its header")
            try:
                self.header = Header.from_bytes(payload)
            except LedgerError as exc:
                raise LedgerError(f"{self.path} cannot be read: {exc}") from exc
            self._begin = file.tell()
        self._tail: Tail | None = None
        self._last = self.header.num_envs - 1 if self.header.side is Side.TRAINER else _LAST_NUMBER
        self._has_text = self.header.action.has_text or self.header.observation.has_text
        self._everybody = tuple(range(self.header.num_envs))
        per_env = 4 + self.header.action.width + 9 + self.header.observation.width
        self._largest = HEAD_BYTES + max(_JOIN.size, (self.header.num_envs or MAX_ENVS) * per_env)

    def _frames(self, file: BinaryIO, *, largest: int) -> Iterator[bytes]:
        """Give the payloads of whole frames, from where the file stands; no length is believed that it cannot have."""
        size = 0
        while True:
            at = file.tell()
            head = file.read(FRAME_BYTES)
            if len(head) < FRAME_BYTES:
                return
            length, guard, checksum = FRAME.unpack(head)
            if length ^ GUARD != guard:
                if not any(head) and self._only_zeros(file):
                    return  # what some filesystems leave after a power failure
                raise self._corrupted(at, "no record begins there")
            if length > largest:
                raise self._corrupted(at, f"a record of {length} bytes, expected at most {largest}")
            end = at + FRAME_BYTES + length
            if end > size and end > (size := os.fstat(file.fileno()).st_size):
                return
            payload = file.read(length)
            if len(payload) < length:
                return
            if zlib.crc32(payload) != checksum:
                raise self._corrupted(at, "the checksum of the record does not fit")
            yield payload

    @staticmethod
    def _only_zeros(file: BinaryIO) -> bool:
        while piece := file.read(_ZEROS_BYTES):
            if piece.count(0) != len(piece):
                return False
        return True

    def _corrupted(self, at: int, what: str) -> LedgerError:
        return LedgerError(f"{self.path} is corrupted at byte {at}: {what}")

    @property
    def tail(self) -> Tail:
        """How the file ends; reads it to the end once."""
        if self._tail is None:
            for _ in self._payloads():
                pass
        if self._tail is None:
            raise LedgerError(f"{self.path} cannot be read to its end")
        return self._tail

    def _payloads(self) -> Iterator[tuple[int, Kind, bytes]]:
        """Give where each record begins, its kind and its payload."""
        with opened(self.path) as file:
            file.seek(self._begin)
            count, end, closed = 0, self._begin, False
            for payload in self._frames(file, largest=self._largest):
                if closed:
                    raise self._corrupted(end, "a record behind the end mark")
                kind = _KINDS.get(payload[0]) if len(payload) >= HEAD_BYTES else None
                if kind is None:
                    raise self._corrupted(end, "a record of an unknown kind")
                count += 1
                at, end = end, end + FRAME_BYTES + len(payload)
                closed = kind is Kind.END
                yield at, kind, payload
            self._tail = Tail(closed, count, end, file.seek(0, 2) - end)

    def joined(self) -> list[tuple[int, int]]:
        """Give rank and number of the envs that wrote here, in the order in which they joined; reads the whole file."""
        return [self._join(at, payload) for at, kind, payload in self._payloads() if kind is Kind.JOIN]

    def _join(self, at: int, payload: bytes) -> tuple[int, int]:
        if self.header.side is not Side.ENV:
            raise self._corrupted(at, "an env joins, which only those of an env's ledger do")
        if len(payload) != HEAD_BYTES + _JOIN.size:
            raise self._corrupted(at, f"a join of {len(payload)} bytes, expected {HEAD_BYTES + _JOIN.size}")
        rank, number = _JOIN.unpack_from(payload, HEAD_BYTES)
        if rank < 0 or number < 0:
            raise self._corrupted(at, f"env {number} of rank {rank} joins, expected numbers from 0")
        return rank, number

    def records(self) -> Iterator[Record]:
        """Give the records.

        Raises:
            LedgerError: at a record that is not as it should be.
        """
        steps = 0
        for at, kind, payload in self._payloads():
            if kind is Kind.JOIN:
                rank, number = self._join(at, payload)
                yield Record(kind, (number,), (), rank)
                continue
            try:
                record = self._record(kind, payload, steps)
            except (struct.error, ValueError) as exc:
                raise self._corrupted(at, f"the record is not as its header says ({exc})") from exc
            steps += record.kind is Kind.STEP
            yield record

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Give the finished episodes, in the order in which they ended: what any log of returns must agree with.

        Raises:
            LedgerError: as `records` does.
        """
        running: dict[int, tuple[float, int]] = {}
        for record in self.records():
            if record.kind is Kind.KEPT:
                continue
            for env, event in zip(record.envs, record.events, strict=False):  # a join has no event
                ret, length = (0.0, 0) if event.is_reset else running.get(env, (0.0, 0))
                if not event.is_reset:
                    ret, length = ret + event.reward, length + 1
                running[env] = (ret, length)
                if event.flags & (Flag.TERMINATED | Flag.TRUNCATED):
                    flags = bool(event.flags & Flag.TERMINATED), bool(event.flags & Flag.TRUNCATED)
                    yield RecordedEpisode(env, ret, length, *flags)

    def _record(self, kind: Kind, payload: bytes, steps: int) -> Record:
        _, everybody, _, m = HEAD.unpack_from(payload)
        action, observation = self.header.action, self.header.observation
        is_step = kind is Kind.STEP
        if kind in (Kind.KEPT, Kind.FAILED) and self.header.side is Side.ENV:
            raise ValueError("a kind that only a trainer's has")
        if everybody > 1 or (everybody and m != len(self._everybody)):
            raise ValueError(f"{m} rows are everybody (mark {everybody}), and it has {len(self._everybody)}")
        row_bytes = (0 if everybody else 4) + observation.width + (action.width + 9 if is_step else 0)
        due = HEAD_BYTES + (0 if kind is Kind.FAILED else m * row_bytes)
        if due != len(payload):
            raise ValueError(f"{len(payload)} bytes, expected {due}")
        if kind in (Kind.END, Kind.FAILED):
            return Record(kind, (), ())
        at = HEAD_BYTES
        envs = self._everybody
        if not everybody:
            envs = struct.unpack_from(f"<{m}i", payload, at)
            if m != 1 or not 0 <= envs[0] <= self._last:
                self._check_numbers(envs)
            at += 4 * m
        if not is_step:
            rows = observation.rows(payload, at, m)
            if self._has_text:
                observation.check(rows)
            return Record(kind, envs, tuple(Event(kind is Kind.RESET, steps, 0, 0.0, b"", row) for row in rows))
        actions = action.rows(payload, at, m)
        at += m * action.width
        rewards = struct.unpack_from(f"<{m}d", payload, at)
        at += 8 * m
        flags = payload[at : at + m]
        if flags.translate(None, _FLAGS):
            raise ValueError(f"the flags {max(flags):#04x}, expected at most {_FLAGS[-1]:#04x}")
        rows = observation.rows(payload, at + m, m)
        if self._has_text:
            action.check(actions)
            observation.check(rows)
        return Record(kind, envs, tuple(map(Event, repeat(False), repeat(steps + 1), flags, rewards, actions, rows)))

    def _check_numbers(self, envs: tuple[int, ...]) -> None:
        """Refuse rows that a trainer has not, negative ones, and one that is named twice."""
        wrong = [env for env in envs if not 0 <= env <= self._last]
        if wrong:
            raise ValueError(f"it is of env {wrong[0]}, expected 0 to {self._last}")
        if len(set(envs)) < len(envs):
            raise ValueError("an env is named twice")
