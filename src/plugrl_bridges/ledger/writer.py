"""Ledgers that are being written: made at the first row, filled in transactions, closed with a mark.

One file per env process: the envs of a process share the writer of a path (`shared`). Rows wait until there are enough
for a transaction, or a second is over; resets do not wait. What a killed process leaves is readable up to its last
transaction. Knows nothing of envs and trainers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import platform
import socket
import sqlite3
import sys
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium

from plugrl_bridges import __version__
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.schema import APPLICATION_ID, INDEX, INSERT, MAX_ROWS, TABLES, VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.ledger.schema import Header, StepRow

__all__ = ["LedgerWriter", "check_trainer_path", "shared"]

_WAIT_S = 1.0
_CHECKPOINT_PAGES = 4000
_shared: weakref.WeakValueDictionary[tuple[int, str], LedgerWriter] = weakref.WeakValueDictionary()
"""By process and path, as long as an env has the writer; nothing needs to take them out, and no lock to do so."""
_alive: weakref.WeakSet[LedgerWriter] = weakref.WeakSet()
_not_ours: list[sqlite3.Connection | None] = []
"""Connections of the process that forked this one: SQLite forbids to close them here."""
_registry_lock = threading.Lock()
_process = os.getpid()


class LedgerWriter:
    """Write one ledger.

    The file is made at the first row: a vector env may make an env only to look at its spaces.

    Args:
        path: The file, which must not exist; or a folder, in which one with a name of its own is made.
        header: What it is of.
        env_id: Id of the env, or the class.
        rank: Part of the name in a folder.
    """

    def __init__(self, path: str | os.PathLike[str], header: Header, env_id: str, *, rank: int = 0) -> None:
        self.header = header
        self.env_id = env_id
        self.path = Path(path)
        self.closed = False
        self.complete = True
        """Whether nothing is missing so far, to the knowledge of whoever writes here; else it is not marked closed."""
        self.writers = 0
        """Envs that write here; set by `shared` and by the env that leaves."""
        self._is_folder = _is_folder(path)
        self._rank = rank
        self._db: sqlite3.Connection | None = None
        self._process = _process
        self._waiting: list[tuple[Any, ...]] = []
        self._rows = 0
        self._committed = time.monotonic()
        self._broken = ""
        self._lock = threading.Lock()
        self._ranks: dict[int, int] = {}
        self._present: set[int] = set()
        self._left = False

    def begin(self, joining: Sequence[tuple[int, int]]) -> None:
        """Make the file, if it is not there, and say which envs join.

        Args:
            joining: Rank and number of each.

        Raises:
            LedgerError: if the file exists, cannot be made, or was closed; if a number is taken.
        """
        self._check()
        for rank, number in joining:
            self._check_number(rank, number)
        with self._lock:
            if self.closed:
                raise LedgerError(f"the ledger {self.path} was closed: give the next envs another file")
            try:
                if self._db is None:
                    self._db = self._made()
                    _alive.add(self)
                rows = [(number, rank) for rank, number in joining]
                self._db.executemany("INSERT OR REPLACE INTO envs VALUES (?, ?)", rows)
            except sqlite3.Error as exc:
                raise LedgerError(f"the ledger {self.path} cannot be made: {exc}") from exc
        self._ranks.update((number, rank) for rank, number in joining)
        self._present.update(number for _, number in joining)

    def _check_number(self, rank: int, number: int) -> None:
        if self._ranks.get(number, rank) != rank:
            raise LedgerError(
                f"envs of rank {self._ranks[number]} and of rank {rank} write env_index {number} to {self.path}: give "
                "each rank a file of its own, or all of them a folder"
            )
        if number in self._present:
            gc.collect()  # an env that was dropped without a close may have it still
        if number in self._present:
            raise LedgerError(
                f"two envs of this process write env_index {number} of rank {rank} to {self.path}: give each LedgerEnv "
                "its own env_index, or close the env that is no longer used"
            )

    def _made(self) -> sqlite3.Connection:
        try:
            folder = self.path if self._is_folder else self.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            if self._is_folder:
                name = f"{self.header.side.value}-r{self._rank}-{time.time_ns():x}-{os.getpid()}.ledger"
                self.path /= name
                self._is_folder = False
            self.path.open("xb").close()
        except FileExistsError as exc:
            advice = "each process needs a file of its own: name a folder (end it with /), and each makes one there"
            raise _exists(self.path, advice) from exc
        except OSError as exc:
            raise LedgerError(f"the ledger {self.path} cannot be made: {exc}") from exc
        # Envs may be stepped in other threads than the one that closes them; `_lock` keeps them apart.
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous = OFF")  # what is committed outlives the process; nothing waits for the disk
        db.execute("BEGIN")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        for statement in TABLES.values():
            db.execute(statement)
        about = {
            "env_id": self.env_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "library": __version__,
            "gymnasium": gymnasium.__version__,
            "python": platform.python_version(),
            "platform": sys.platform,
        }
        header = replace(self.header, started_ns=time.time_ns(), about=about)
        db.executemany("INSERT INTO meta VALUES (?, ?)", [*header.meta(), ("closed", 0)])
        db.executemany("INSERT INTO columns VALUES (?, ?, ?, ?, ?, ?, ?)", header.columns())
        db.execute("COMMIT")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        return db

    def write(self, rows: Sequence[StepRow], *, through: bool = False) -> None:
        """Append rows; they wait for others, unless they are to go through.

        Raises:
            LedgerError: if the file cannot be written, now or ever since an earlier row could not; if it belongs to
                the process that forked this one.
        """
        if self._broken or self._process != _process:
            self._check()
        at = self._rows
        self._rows = at + len(rows)
        self._waiting += [(number, *row) for number, row in enumerate(rows, at + 1)]
        if through or len(self._waiting) >= MAX_ROWS or time.monotonic() - self._committed > _WAIT_S:
            self.commit()

    def commit(self) -> None:
        """Put the rows that wait into the file, in one transaction.

        Raises:
            LedgerError: if the file cannot be written, or belongs to the process that forked this one.
        """
        self._check()
        with self._lock:
            self._commit()
        self._settle()

    def _commit(self) -> None:
        db = self._db
        if db is None:
            return
        try:
            if db.in_transaction:  # somebody interrupted it
                db.execute("ROLLBACK")
            rows = self._waiting[:]  # more may come meanwhile
            db.execute("BEGIN")
            db.executemany(INSERT, rows)
            db.execute("COMMIT")
            del self._waiting[: len(rows)]
            self._committed = time.monotonic()
        except sqlite3.Error as exc:
            self.complete = False
            self._broken = (
                f"the ledger {self.path} cannot be written: {exc}; what it has up to there can be read. Make room, and "
                "begin another one"
            )
            self._waiting.clear()
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise LedgerError(self._broken) from exc

    @property
    def _own(self) -> bool:
        """Whether this process made the writer, and not the one that forked it."""
        return self._process == _process

    def _check(self) -> None:
        if not self._own:
            raise LedgerError(f"the ledger {self.path} belongs to the process that forked this one: make envs here")
        if self._broken:
            raise LedgerError(self._broken)

    def leave(self, number: int | None = None) -> None:
        """Count an env out; the last one closes the file.

        Args:
            number: Of the env; None if it never joined.
        """
        self._present.discard(-1 if number is None else number)
        self.writers -= 1
        # An env that is garbage may be counted out in the midst of a commit of this very thread: then afterwards.
        self._left = True
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._settle()

    def _settle(self) -> None:
        if self._left:
            self._left = False
            if self.writers <= 0:
                self.close()

    def close(self, *, whole: bool = True) -> None:
        """Close the file; idempotent.

        Args:
            whole: Mark it as closed: nothing is missing.
        """
        if self.closed:
            return
        self.closed = True
        if self._db is None or not self._own:
            return
        db = self._db
        try:
            if not self._broken:
                self.commit()
                if whole and self.complete:
                    db.execute("UPDATE meta SET value = 1 WHERE name = 'closed'")
            with contextlib.suppress(sqlite3.Error):  # somebody may be reading; the file is whole all the same
                for statement in INDEX.values():
                    db.execute(statement)
                db.execute("PRAGMA journal_mode = DELETE")  # one plain file, which opens in folders that are read-only
        except sqlite3.Error as exc:
            raise LedgerError(f"the ledger {self.path} cannot be closed: {exc}") from exc
        finally:
            self._db = None
            db.close()


def check_trainer_path(path: str | os.PathLike[str]) -> None:
    """Refuse a path where a trainer's ledger cannot be, before anything is done for it.

    Raises:
        LedgerError: if it is there, or is a folder.
    """
    if _is_folder(path):
        raise LedgerError(f"a trainer's ledger is one file, {path} is a folder: name a file, such as trainer.ledger")
    if Path(path).exists():
        raise _exists(Path(path), "give each run a file of its own")


def _is_folder(path: str | os.PathLike[str]) -> bool:
    return Path(path).is_dir() or str(path).endswith(("/", os.sep))


def _exists(path: Path, advice: str) -> LedgerError:
    return LedgerError(f"the ledger {path} exists: a ledger is never overwritten; {advice}")


def shared(path: str | os.PathLike[str], header: Header, env_id: str, *, rank: int) -> LedgerWriter:
    """Return the writer that all envs of this process share for a path, and count one more env in.

    Raises:
        LedgerError: if other envs with other spaces, or of another run, write there.
    """
    name = str(Path(path).absolute()) + (f" {rank}" if _is_folder(path) else "")
    key = (_process, name)
    with _registry_lock:
        writer = _shared.get(key)
        if writer is not None:
            writer.writers += 1  # first of all: the last env may become garbage at any moment, and would close it
            if not writer.closed:
                if writer.header.like(header) and writer.header.run == header.run:
                    return writer
                writer.leave()
                raise LedgerError(
                    f"the ledger {path} is of {writer.env_id} with other spaces or of another run: give {env_id} "
                    "another file"
                )
        writer = _shared[key] = LedgerWriter(path, header, env_id, rank=rank)
        writer.writers = 1
        return writer


def _close_all() -> None:
    """Save what waits when the interpreter ends; without the mark, since nobody closed it."""
    for writer in list(_alive):
        with contextlib.suppress(LedgerError):
            writer.close(whole=False)


def _forked() -> None:
    global _process  # noqa: PLW0603 - asked for at each step, so not of the system
    _process = os.getpid()
    _not_ours.extend(writer._db for writer in _alive)  # noqa: SLF001 - this module's own


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
