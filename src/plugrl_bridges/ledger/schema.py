"""The tables of a ledger, a SQLite database, and what stands in them; docs/ledger.md describes them.

``writer`` fills them in, ``reader`` reads them.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.columns import Columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "APPLICATION_ID",
    "INDEX",
    "INSERT",
    "MAX_ROWS",
    "TABLES",
    "VERSION",
    "Dialect",
    "Flag",
    "Header",
    "Side",
    "StepRow",
    "restored",
    "stored",
]

APPLICATION_ID = 0x504C4C47
"""What tells a ledger from other SQLite files: ``PLLG``."""
VERSION = 2
"""``user_version`` of the file."""
TABLES = {
    "meta": "CREATE TABLE meta (name TEXT, value)",
    "columns": (
        "CREATE TABLE columns (part TEXT, number INTEGER, name TEXT, shape TEXT, dtype TEXT, digested INTEGER, "
        "at INTEGER)"
    ),
    "envs": "CREATE TABLE envs (env INTEGER PRIMARY KEY, rank INTEGER)",
    "steps": (
        "CREATE TABLE steps (id INTEGER PRIMARY KEY, env INTEGER, episode INTEGER, step INTEGER, vector_step INTEGER, "
        "flags INTEGER, reward, action BLOB, obs BLOB)"
    ),
}
INDEX = {"steps_of_env": "CREATE INDEX steps_of_env ON steps (env)"}
"""Made when a ledger is closed."""
INSERT = "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
"""A row that is inserted twice, since somebody interrupted, is there once."""
MAX_ROWS = 32
"""Rows of a transaction, beyond which none waits; what a killed process loses at most."""

StepRow = tuple[int, int, int, "int | None", int, "float | bytes | None", "bytes | None", "bytes | None"]
"""A row of ``steps`` without its id."""


_DOUBLE = struct.Struct("<d")


def stored(reward: float) -> float | bytes:
    """Return a reward as it is stored: SQLite takes NaN for NULL, so of one its eight bytes are."""
    return reward if reward == reward else _DOUBLE.pack(reward)  # noqa: PLR0124 - NaN is what does not equal itself


def restored(value: float | bytes | None) -> float:
    """Return the reward that was stored; 0 where there is none."""
    if isinstance(value, bytes):
        return float(_DOUBLE.unpack(value)[0])
    return 0.0 if value is None else value


class Flag(enum.IntFlag):
    """What is said of a row of ``steps``."""

    TERMINATED = 1
    TRUNCATED = 2
    RESET = 4
    """A reset; the row has no action and no reward."""
    LOST = 8
    """The bridge made this end up, because the env client was lost."""
    AGAIN = 16
    """At a trainer: what a reset of other envs handed this one again, if it is not what it was."""
    FAILED = 32
    """At a trainer: a step or reset was under way whose outcome it never had."""


class Side(str, enum.Enum):
    """On which side of the boundary a ledger was kept."""

    ENV = "env"
    TRAINER = "trainer"


class Dialect(str, enum.Enum):
    """How a trainer hears of the end of an episode."""

    GYMNASIUM = "gymnasium"
    SB3 = "sb3"
    """By ``done`` and ``TimeLimit.truncated``, which is true only if the episode did not terminate too."""


_Enum = TypeVar("_Enum", bound=enum.Enum)


@dataclass(frozen=True)
class Header:
    """What a ledger is of.

    Attributes:
        side: On which side it was kept.
        dialect: How ends of episodes are told.
        observation: Columns of an observation.
        action: Columns of an action.
        run: Identity of the run, as the user gave it; "" if none was given.
        started_ns: Nanoseconds since the epoch.
        about: What else is known: env id, process, host, versions.
    """

    side: Side
    dialect: Dialect
    observation: Columns
    action: Columns
    run: str = ""
    started_ns: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)

    def meta(self) -> list[tuple[str, Any]]:
        """Return the rows of table ``meta``."""
        named = {"side": self.side.value, "dialect": self.dialect.value, "run": self.run, "started_ns": self.started_ns}
        return [*named.items(), *self.about.items()]

    def columns(self) -> list[tuple[Any, ...]]:
        """Return the rows of table ``columns``."""
        parts = (("action", self.action), ("obs", self.observation))
        return [(part, *row) for part, columns in parts for row in columns.describe()]

    @classmethod
    def read(cls, meta: Mapping[str, Any], columns: Sequence[tuple[Any, ...]]) -> Header:
        """Read what the two tables hold.

        Raises:
            LedgerError: if it is not what `meta` and `columns` return.
        """
        about = dict(meta)
        side, dialect = _one_of(Side, about.pop("side", None)), _one_of(Dialect, about.pop("dialect", None))
        run, started = about.pop("run", None), about.pop("started_ns", None)
        if type(run) is not str or type(started) is not int or not 0 <= started < 1 << 63:
            raise LedgerError("its table meta has no run that is text, or no started_ns of nanoseconds since 1970")
        action, observation = (
            Columns.described([row[1:] for row in columns if row[0] == part]) for part in ("action", "obs")
        )
        return cls(side, dialect, observation, action, run, started, about)

    def like(self, other: Header) -> bool:
        """Return whether both are of the same columns."""
        return (self.observation.all, self.action.all) == (other.observation.all, other.action.all)


def _one_of(kind: type[_Enum], value: object) -> _Enum:
    try:
        return kind(value)
    except ValueError as exc:
        known = ", ".join(repr(each.value) for each in kind)
        name = kind.__name__.lower()
        raise LedgerError(f"its table meta has the {name} {str(value)[:32]!r}, expected one of {known}") from exc
