"""Ledgers that are read: opened without changing anything, and every number bounded before it is believed.

A ledger may still be written to, or have been left by a process that was killed: what it committed is read.
Everything else that is not as ``schema`` says is one `LedgerError`.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import stat
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.schema import APPLICATION_ID, INDEX, TABLES, VERSION, Flag, Header, Side, restored

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

__all__ = ["LedgerReader", "Record", "RecordedEpisode", "escaped"]

_MAX_ENVS = 1_000_000
_MAX_META = 64
_MAX_COLUMNS = 4096
_MAX_TEXT = 1 << 16
_LAST = (1 << 31) - 1
_MAGIC = b"SQLite format 3\0"

# What is wrong with a row, in the terms of SQLite; it looks at types and lengths, and reads no values.
_WRONG = (
    "SELECT id FROM steps WHERE env NOT IN (SELECT env FROM envs)"
    " OR typeof(episode) <> 'integer' OR episode NOT BETWEEN -1 AND :last"
    " OR typeof(step) <> 'integer' OR step NOT BETWEEN 0 AND :last"
    " OR typeof(flags) <> 'integer' OR flags NOT BETWEEN 0 AND 63"
    " OR (vector_step IS NOT NULL AND (typeof(vector_step) <> 'integer' OR vector_step NOT BETWEEN 0 AND :last))"
    " OR CASE typeof(reward) WHEN 'null' THEN 0 WHEN 'real' THEN 0 WHEN 'blob' THEN length(reward) <> 8 ELSE 1 END"
    " OR CASE typeof(action) WHEN 'null' THEN flags & 52 = 0 WHEN 'blob' THEN length(action) <> :action ELSE 1 END"
    " OR CASE typeof(obs) WHEN 'null' THEN flags & 43 = 0 WHEN 'blob' THEN length(obs) <> :obs ELSE 1 END"
    " LIMIT 1"
)


class Record(NamedTuple):
    """One row of a ledger: a reset or a step of one env.

    Attributes:
        id: Its place in the file.
        env: Number of the env, or the trainer's row.
        episode: How many episodes the env had begun before.
        step: Of the episode, from 1; 0 is the reset.
        vector_step: At a trainer the number of the vector step, from 1; else 0.
        flags: See `plugrl_bridges.ledger.schema.Flag`.
        reward: 0 where there is none.
        action: Its bytes; empty where there is none.
        observation: Its bytes: what the step or the reset returned; empty where the trainer was given none.
    """

    id: int
    env: int
    episode: int
    step: int
    vector_step: int
    flags: int
    reward: float
    action: bytes
    observation: bytes

    @property
    def is_reset(self) -> bool:
        """Whether it is a reset, not a step."""
        return bool(self.flags & Flag.RESET)


class RecordedEpisode(NamedTuple):
    """How a finished episode went, by the rewards and flags that were recorded.

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


class LedgerReader:
    """One ledger that is read.

    Args:
        path: The file.

    Raises:
        LedgerError: if it cannot be read, or is no ledger that this release reads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _check_file(self.path)
        self._db = _opened(self.path)
        self.close = weakref.finalize(self, self._db.close)
        self._checked = False
        with self._reading():
            self._check_schema()
            meta = self._meta()
            self.closed = meta.pop("closed", 0) == 1
            """Whether it was closed by whoever wrote it, so that nothing is missing."""
            columns = self._db.execute("SELECT * FROM columns ORDER BY part, number LIMIT ?", (_MAX_COLUMNS,))
            self.header = Header.read(meta, columns.fetchall())
            self.envs: list[tuple[int, int]] = self._db.execute(
                "SELECT rank, env FROM envs WHERE typeof(rank) = 'integer' AND rank BETWEEN 0 AND ? AND env BETWEEN 0 "
                "AND ? ORDER BY rank, env LIMIT ?",
                (_LAST, _LAST, _MAX_ENVS),
            ).fetchall()
            """Rank and number of each env that wrote here; at a trainer, its rows."""

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what SQLite refuses, and what is not as it should be, into one error."""
        try:
            yield
        except (sqlite3.Error, UnicodeError, OverflowError) as exc:
            raise LedgerError(f"{self.path} cannot be read: {exc}") from exc
        except LedgerError as exc:
            raise LedgerError(f"{self.path} cannot be read: {exc}") from exc.__cause__

    def _check_schema(self) -> None:
        db = self._db
        [application], [version] = (
            db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if application != APPLICATION_ID:
            raise LedgerError("it is a SQLite file, but no step ledger")
        if version != VERSION:
            raise LedgerError(f"it has format {version}, and this release reads format {VERSION}")
        found = db.execute("SELECT name, sql FROM sqlite_master LIMIT 10").fetchall()
        if not TABLES.items() <= set(found) <= {*TABLES.items(), *INDEX.items()}:
            raise LedgerError("it has other tables than a step ledger")

    def _meta(self) -> dict[str, Any]:
        rows = self._db.execute(
            "SELECT name, value FROM meta WHERE typeof(name) = 'text' AND length(name) <= ? AND "
            "(typeof(value) IN ('integer', 'real') OR typeof(value) = 'text' AND length(value) <= ?) LIMIT ?",
            (_MAX_TEXT, _MAX_TEXT, _MAX_META),
        )
        return dict(rows.fetchall())

    def records(self, env: int | None = None, *, since: int = 0) -> Iterator[Record]:
        """Return the rows in the order in which they were written.

        Args:
            env: Number of the env, or the trainer's row; None: all.
            since: Id of the first row.

        Raises:
            LedgerError: if the file has a row that is not as it should be.
        """
        return self.select("id >= ?" if env is None else "id >= ? AND env = ?", (since, env)[: 1 + (env is not None)])

    def select(self, where: str, given: Sequence[object] = (), *, limit: int = -1, skip: int = 0) -> Iterator[Record]:
        """Return the rows for which an expression of SQL is true.

        Args:
            where: The expression.
            given: Its parameters.
            limit: Return so many at most; -1 for all.
            skip: Leave out so many first.

        Raises:
            LedgerError: as of `records`.
        """
        with self._reading():
            self._check_rows()
            query = f"SELECT * FROM steps WHERE {where} ORDER BY id LIMIT ? OFFSET ?"  # noqa: S608 - our own text
            for number, env, episode, step, at, flags, reward, action, observation in self._db.execute(
                query, (*given, limit, skip)
            ):
                yield Record(
                    number, env, episode, step, at or 0, flags, restored(reward), action or b"", observation or b""
                )

    def count(self, where: str, given: Sequence[object] = ()) -> int:
        """Return for how many rows an expression of SQL is true."""
        with self._reading():
            query = f"SELECT count(*) FROM steps WHERE {where}"  # noqa: S608 - our own text
            return int(self._db.execute(query, tuple(given)).fetchone()[0])

    def _check_rows(self) -> None:
        if not self._checked:
            given = {"action": self.header.action.width, "obs": self.header.observation.width, "last": _LAST}
            wrong = self._db.execute(_WRONG, given).fetchone()
            if wrong is not None:
                raise LedgerError(f"row {wrong[0]} of its table steps is not as its other tables say")
            self._checked = True

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Return the finished episodes, in the order in which they ended: what any log of returns must agree with.

        Raises:
            LedgerError: as of `records`.
        """
        running: dict[int, float] = {}
        for record in self.select(f"flags & {int(Flag.AGAIN | Flag.FAILED)} = 0"):
            ret = running[record.env] = 0.0 if record.is_reset else running.get(record.env, 0.0) + record.reward
            if record.flags & (Flag.TERMINATED | Flag.TRUNCATED):
                flags = bool(record.flags & Flag.TERMINATED), bool(record.flags & Flag.TRUNCATED)
                yield RecordedEpisode(record.env, ret, record.step, *flags)

    @property
    def is_env(self) -> bool:
        """Whether it was kept at an env."""
        return self.header.side is Side.ENV

    @property
    def tail(self) -> str:
        """How it ends, in words."""
        rows = self.count("1")
        return f"closed after {rows} rows" if self.closed else f"ends without having been closed, after {rows} rows"


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            raise LedgerError(f"{path} cannot be read: it is {what}, expected a ledger on disk")
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as exc:
        raise LedgerError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise LedgerError(f"{str(path)!r} cannot be read: {exc}") from exc
    if start != _MAGIC:
        what = "is empty" if not start else "is no step ledger: it is no SQLite file"
        raise LedgerError(f"{path} {what}")


def _opened(path: Path) -> sqlite3.Connection:
    """Open a file without changing it, in a folder that may be read-only, with the log of a process that was killed."""
    wal = path.with_name(path.name + "-wal")
    try:
        return _connected(path, "mode=ro")
    except sqlite3.Error as exc:
        try:
            if not wal.exists() or not wal.stat().st_size:
                return _connected(path, "immutable=1")
            with tempfile.TemporaryDirectory() as folder:  # where SQLite can put what it reads the log with
                copy = Path(folder) / "copy"
                shutil.copyfile(path, copy)
                shutil.copyfile(wal, copy.with_name("copy-wal"))
                with contextlib.closing(_connected(copy, "mode=rw")) as db:
                    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                    db.backup(memory)
                    return memory
        except (sqlite3.Error, OSError):
            raise LedgerError(f"{path} cannot be read: {exc}") from exc


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
            db.execute(f"PRAGMA {pragma}")
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def escaped(text: str) -> str:
    """Return text of a file as it can be shown: control characters and what is no Unicode as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
