"""Own ledger files that are being written: made at the first record, appended to, closed with an end mark.

One file per env process: the envs of a process share the writer of a path (`shared`). Steps are kept back until each
env of the process has made one, then go to the operating system in one call; what a killed process leaves is readable
up to there, and so is what stood in a file before it could not be written any more. Resets are not kept back. Knows
nothing of envs and trainers.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import platform
import socket
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium

from plugrl_bridges import __version__
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.format import HEAD, MAGIC, Header, Kind, frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from plugrl_bridges.ledger.columns import Columns
    from plugrl_bridges.ledger.format import Dialect, Side

__all__ = ["LedgerWriter", "Subject", "check_trainer_path", "shared"]

_shared: weakref.WeakValueDictionary[tuple[int, str], LedgerWriter] = weakref.WeakValueDictionary()
"""By process and path, as long as an env has the writer; nothing needs to take them out, and no lock to do so."""
_alive: weakref.WeakSet[LedgerWriter] = weakref.WeakSet()
_KEPT_BACK_BYTES = 1 << 20
_registry_lock = threading.Lock()
_process = os.getpid()


@dataclass(frozen=True)
class Subject:
    """Say what a ledger is of, as its header will.

    Attributes:
        side: On which side it is kept.
        dialect: How ends of episodes are told.
        observation: Columns of an observation.
        action: Columns of an action.
        num_envs: Envs of the trainer, or 0.
        run: Identity of the run.
        env_id: Id of the env, or the class.
    """

    side: Side
    dialect: Dialect
    observation: Columns
    action: Columns
    num_envs: int
    run: str
    env_id: str

    def header(self) -> Header:
        """Give the header of a file that begins now."""
        about: dict[str, Any] = {
            "env_id": self.env_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "library": __version__,
            "gymnasium": gymnasium.__version__,
            "python": platform.python_version(),
            "platform": sys.platform,
        }
        return Header(
            self.side, self.dialect, self.observation, self.action, self.num_envs, self.run, time.time_ns(), about
        )

    def fits(self, other: Subject) -> bool:
        """Say whether both may stand in one file."""
        return (
            self.side is other.side
            and self.observation.entries == other.observation.entries
            and self.action.entries == other.action.entries
            and self.run == other.run
        )


class LedgerWriter:
    """Write one ledger.

    The file is made at the first record: a vector env may make an env only to look at its spaces.

    Args:
        path: The file, which must not exist; or a folder, in which one with a name of its own is made.
        subject: What it is of.
        rank: Part of the name in a folder.
    """

    def __init__(self, path: str | os.PathLike[str], subject: Subject, *, rank: int = 0) -> None:
        self.subject = subject
        self.path = Path(path)
        self._is_folder = _is_folder(path)
        self._rank = rank
        self._file: BinaryIO | None = None
        self._process = _process
        self._pending: list[bytes] = []  # whole records; taken out when they are in the file
        self._pending_bytes = 0
        self._end = 0  # of what is in the file and not in `_pending`
        self._under_way = False  # a call of the operating system that appends; if nobody makes one, it was interrupted
        self._broken = ""
        self._steps = 0
        self._lock = threading.Lock()
        self._numbers: set[int] = set()
        self._ranks: dict[int, int] = {}
        self._left = False
        self.closed = False
        self.complete = True
        """Whether nothing is missing so far, to the knowledge of whoever writes here; else there is no end mark."""
        self.writers = 0
        """Envs that write here; set by `shared` and by the env that leaves."""

    def begin(self, joining: Sequence[tuple[int, int]] = ()) -> None:
        """Make the file, if it is not there, and say which envs join.

        Args:
            joining: Rank and number of each.

        Raises:
            LedgerError: if the file exists, cannot be made, or was closed; if a number is taken.
        """
        taken: list[int] = []
        try:
            for rank, number in joining:
                self._take(rank, number)
                taken.append(number)
            with self._lock:
                if self.closed:
                    raise LedgerError(f"the ledger {self.path} was closed: give the next envs another file")
                if self._file is None:
                    self._pending = [MAGIC + frame(self.subject.header().to_bytes())]
                    self._file = self._open()
                    _alive.add(self)
            for rank, number in joining:
                payload = HEAD.pack(Kind.JOIN, 0, 0, 1) + rank.to_bytes(4, "little") + number.to_bytes(4, "little")
                self._pending.append(frame(payload))
            self.flush()
        except BaseException:
            self._numbers.difference_update(taken)
            raise

    def _take(self, rank: int, number: int) -> None:
        if self._ranks.get(number, rank) != rank:
            raise LedgerError(
                f"envs of rank {self._ranks[number]} and of rank {rank} write env_index {number} to {self.path}: give "
                "each rank a file of its own, or all of them a folder"
            )
        if number in self._numbers:
            gc.collect()  # an env that was dropped without a close may have it still
        if number in self._numbers:
            raise LedgerError(
                f"two envs of this process write env_index {number} of rank {rank} to {self.path}: give each LedgerEnv "
                "its own env_index, or close the env that is no longer used"
            )
        self._ranks[number] = rank
        self._numbers.add(number)

    def leave(self, number: int | None = None) -> None:
        """Count an env out; the last one closes the file.

        Args:
            number: Of the env; None if it never joined.
        """
        self._numbers.discard(-1 if number is None else number)
        self.writers -= 1
        # An env that is garbage may be counted out in the midst of a flush of this very thread: then afterwards.
        self._left = True
        if self._lock.acquire(blocking=False):
            self._lock.release()
            self._settle()

    def _settle(self) -> None:
        if self._left:
            self._left = False
            if self.writers <= 0:
                self.close()
            elif self._own and not self._broken:
                self.flush()

    def _open(self) -> BinaryIO:
        try:
            folder = self.path if self._is_folder else self.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            if self._is_folder:
                name = f"{self.subject.side.value}-r{self._rank}-{time.time_ns():x}-{os.getpid()}.ledger"
                self.path /= name
                self._is_folder = False
            return self.path.open("xb", buffering=0)
        except FileExistsError as exc:
            advice = "each process needs a file of its own: name a folder (end it with /), and each makes one there"
            raise _exists(self.path, advice) from exc
        except OSError as exc:
            raise LedgerError(f"the ledger {self.path} cannot be made: {exc}") from exc

    def write(self, record: bytes) -> None:
        """Append the frame of a step; it is kept back until every env that writes here has made one.

        Raises:
            LedgerError: if the file cannot be written, now or ever since an earlier record could not; if it belongs to
                the process that forked this one.
        """
        if self._broken or self._process != _process:
            self._check()
        self._pending.append(record)
        self._pending_bytes += len(record)
        self._steps += 1
        if self._steps >= self.writers:
            self._steps = 0
            self.flush()
        elif self._pending_bytes > _KEPT_BACK_BYTES:
            self.flush()

    def write_through(self, record: bytes) -> None:
        """Append the frame of a reset, and hand everything to the operating system.

        Raises:
            LedgerError: if the file cannot be written, now or ever since an earlier record could not.
        """
        self._check()
        self._pending.append(record)
        self.flush()

    def flush(self) -> None:
        """Hand all records to the operating system.

        Raises:
            LedgerError: if the file cannot be written, or belongs to the process that forked this one.
        """
        self._check()
        with self._lock:
            self._write_out()
        self._settle()

    @property
    def _own(self) -> bool:
        """Whether this process made the writer, and not the one that forked it."""
        return self._process == _process

    def _check(self) -> None:
        if not self._own:
            raise LedgerError(f"the ledger {self.path} belongs to the process that forked this one: make envs here")
        if self._broken:
            raise LedgerError(self._broken)

    def _write_out(self) -> None:
        file = self._file
        if file is None or not (self._pending or self._under_way):
            return
        try:
            if self._under_way:
                self.complete = False
                self._cut(file, self._end)
                self._under_way = False
            records = self._pending[:]  # more may come meanwhile
            count, data = len(records), b"".join(records)
            end = self._end + len(data)
            self._under_way = True
            while data:
                data = data[file.write(data) :]
            # Interrupted here, records may be lost, which `complete` says; none can be in the file twice.
            del self._pending[:count]
            self._end = end
            self._under_way = False
            self._pending_bytes = 0
        except OSError as exc:
            self._give_up(file, exc)
            raise LedgerError(self._broken) from exc

    def _give_up(self, file: BinaryIO, exc: OSError) -> None:
        """Leave the file with whole records alone, and write no more."""
        self.complete = False
        self._broken = (
            f"the ledger {self.path} cannot be written: {exc}; what it has up to there can be read. Make room, and "
            "begin another one"
        )
        with contextlib.suppress(OSError):  # what cannot be cut off is read as a record that was being written
            whole, position = self._end, file.tell()
            for record in self._pending:
                if whole + len(record) > position:
                    break
                whole += len(record)
            self._cut(file, whole)
        self._pending.clear()

    @staticmethod
    def _cut(file: BinaryIO, size: int) -> None:
        file.truncate(size)
        file.seek(size)

    def close(self, *, whole: bool = True) -> None:
        """Close the file; idempotent.

        Args:
            whole: Write the end mark: nothing is missing.
        """
        if self.closed:
            return
        self.closed = True
        if self._file is None or not self._own:
            return
        try:
            if not self._broken:
                if self._under_way:
                    self.flush()
                if whole and self.complete:
                    self._pending.append(frame(HEAD.pack(Kind.END, 0, 0, 0)))
                self.flush()
        finally:
            self._file.close()
            self._file = None


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


def shared(path: str | os.PathLike[str], subject: Subject, *, rank: int) -> LedgerWriter:
    """Give the writer that all envs of this process share for a path, and count one more env in.

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
                if writer.subject.fits(subject):
                    return writer
                writer.leave()
                raise LedgerError(
                    f"the ledger {path} is of {writer.subject.env_id} with other spaces or of another run: give "
                    f"{subject.env_id} another file"
                )
        writer = _shared[key] = LedgerWriter(path, subject, rank=rank)
        writer.writers = 1
        return writer


def _flush_all() -> None:
    """Save what is kept back when the interpreter ends; without the end mark, since nobody closed it."""
    for writer in list(_alive):
        if not writer.closed and writer._own and not writer._broken:  # noqa: SLF001 - this module's own
            writer.flush()


def _forked() -> None:
    global _process  # noqa: PLW0603 - asked for at each step, so not of the system
    _process = os.getpid()


atexit.register(_flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
