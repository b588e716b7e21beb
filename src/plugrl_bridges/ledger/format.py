"""Own the bytes of a ledger: magic, frames with a checksum, the header, and what stands in a record.

    file    = magic, frame of the header, frames of records
    frame   = length, length ^ GUARD, CRC-32 of the payload (three uint32), payload
    payload = kind, everybody, 0, 0 (four bytes), m (uint32), then by kind

All numbers are little-endian. A frame is written whole; what stands behind the last whole frame is a record that was
being written when the process ended. docs/ledger.md describes it all. Pure functions of bytes: ``writer`` and
``reader`` own the files.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from plugrl_bridges.errors import LedgerError, WireError
from plugrl_bridges.ledger.columns import Columns
from plugrl_bridges.wire.codec import decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FRAME",
    "FRAME_BYTES",
    "GUARD",
    "HEAD",
    "HEAD_BYTES",
    "MAGIC",
    "MAX_ENVS",
    "MAX_HEADER_BYTES",
    "VERSION",
    "Dialect",
    "Flag",
    "Header",
    "Kind",
    "Side",
    "frame",
]

MAGIC = b"\x89PLEDGR\n"
"""The first bytes of a ledger: no text, and changed by whoever takes it for one."""
VERSION = 1
GUARD = 0x5247444C
"""A length is written twice, once so changed: a damaged one is not taken for a record that is still being written."""
FRAME = struct.Struct("<III")
FRAME_BYTES = FRAME.size
HEAD = struct.Struct("<BBHI")
HEAD_BYTES = HEAD.size
MAX_HEADER_BYTES = 1 << 24
MAX_ENVS = 1_000_000
"""Envs of one trainer, and events of one record."""
_PLAIN = (str, int, float, bool, type(None))


class Kind(enum.IntEnum):
    """What a record is about."""

    JOIN = 1
    """An env begins to write to this file: rank and number (two int32)."""
    RESET = 2
    """Envs were reset: their numbers (int32, none if everybody), the columns of the observation."""
    STEP = 3
    """Envs made a step: numbers, columns of the action, rewards (float64), flags (uint8), and of the observation."""
    END = 4
    """The ledger was closed; nothing follows."""
    KEPT = 5
    """At a trainer: what a reset of other envs handed these again, if it is not what it was; as a reset."""
    FAILED = 6
    """At a trainer: a step of all envs was under way, and it went on without the outcome; nothing more."""


class Flag(enum.IntFlag):
    """What is said of one env's step."""

    TERMINATED = 1
    TRUNCATED = 2
    NO_FINAL = 4
    """The episode ended, but the trainer was given no terminal observation."""
    LOST = 8
    """The bridge made this end up, because the env client was lost."""


class Side(str, enum.Enum):
    """On which side of the boundary a ledger was kept."""

    ENV = "env"
    TRAINER = "trainer"


class Dialect(str, enum.Enum):
    """How a trainer hears of the end of an episode."""

    GYMNASIUM = "gymnasium"
    SB3 = "sb3"
    """By ``done`` and ``TimeLimit.truncated``, which is true only if the episode did not terminate too."""


def frame(payload: bytes) -> bytes:
    """Give a payload as it stands in a file."""
    return FRAME.pack(len(payload), len(payload) ^ GUARD, zlib.crc32(payload)) + payload


_Enum = TypeVar("_Enum", bound=enum.Enum)


@dataclass(frozen=True)
class Header:
    """Say what a ledger is of.

    Attributes:
        side: On which side it was kept.
        dialect: How ends of episodes are told.
        observation: Columns of an observation.
        action: Columns of an action.
        num_envs: Envs of the trainer; 0 in an env's ledger, where each says that it joins.
        run: Identity of the run, as the user gave it; "" if none was given.
        started_ns: Nanoseconds since the epoch.
        about: What else is known: env id, process, host, versions.
    """

    side: Side
    dialect: Dialect
    observation: Columns
    action: Columns
    num_envs: int
    run: str
    started_ns: int
    about: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Give the payload of the header's frame: a msgpack map."""
        return b"".join(
            encode(
                {
                    "format": VERSION,
                    "side": self.side.value,
                    "dialect": self.dialect.value,
                    "observation": self.observation.describe(),
                    "action": self.action.describe(),
                    "num_envs": self.num_envs,
                    "run": self.run,
                    "started_ns": self.started_ns,
                    "about": dict(self.about),
                }
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Read what `to_bytes` gave.

        Raises:
            LedgerError: if it is no header, or one of another version.
        """
        try:
            found = decode(data)
        except WireError as exc:
            raise LedgerError(f"its header cannot be read: {exc}") from exc
        if type(found) is not dict:
            raise LedgerError(f"its header is a {type(found).__name__}, expected a map")
        version = _entry(found, "format", int)
        if version != VERSION:
            raise LedgerError(f"it has format {version}, and this release reads format {VERSION}")
        side, dialect = _one_of(Side, found, "side"), _one_of(Dialect, found, "dialect")
        observation, action = Columns.described(found.get("observation")), Columns.described(found.get("action"))
        num_envs = _entry(found, "num_envs", int)
        least, most = (0, 0) if side is Side.ENV else (1, MAX_ENVS)
        if not least <= num_envs <= most:
            raise LedgerError(f"its header says num_envs {num_envs}, expected {least} to {most}")
        started, about = _entry(found, "started_ns", int), _entry(found, "about", dict)
        if not 0 <= started < 1 << 63:
            raise LedgerError(f"its header says started_ns {started}, expected nanoseconds since 1970")
        if any(type(key) is not str or type(value) not in _PLAIN for key, value in about.items()):
            raise LedgerError("its header says about what is no map of str to str or numbers")
        return cls(side, dialect, observation, action, num_envs, _entry(found, "run", str), started, about)


def _entry(found: Mapping[Any, Any], name: str, kind: type) -> Any:  # noqa: ANN401 - of the kind that is asked for
    if name not in found:
        raise LedgerError(f"its header lacks {name!r}")
    if type(found[name]) is not kind:
        raise LedgerError(f"its header has a {name!r} of type {type(found[name]).__name__}, expected {kind.__name__}")
    return found[name]


def _one_of(kind: type[_Enum], found: Mapping[Any, Any], name: str) -> _Enum:
    value = _entry(found, name, str)
    try:
        return kind(value)
    except ValueError as exc:
        known = ", ".join(repr(each.value) for each in kind)
        raise LedgerError(f"its header has the {name} {value[:32]!r}, expected one of {known}") from exc
