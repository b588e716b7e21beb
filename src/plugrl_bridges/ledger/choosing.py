"""Which files a comparison is made of: those of one trainer and of all its envs; and what is wrong with others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.reader import LedgerReader

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Paths", "by_env", "env_readers", "several_files", "trainer_reader"]

AnyPath: TypeAlias = "str | os.PathLike[str]"
Paths: TypeAlias = "AnyPath | Iterable[AnyPath]"

_ONE_FOLDER_PER_RUN = "take a new folder for each run, or give run= on both sides"
_SHOWN = 8
_ORDER = "the trainer's ledger comes first, then those of the envs"


def trainer_reader(path: AnyPath) -> LedgerReader:
    """Open the ledger of a trainer.

    Raises:
        LedgerError: if it cannot be read, or is a folder, or of an env.
    """
    if os.path.isdir(path):  # noqa: PTH112 - pathlib's raises for a name that is too long
        raise LedgerError(f"{path} is a folder, expected the trainer's ledger, a file: it comes first, then the envs'")
    reader = LedgerReader(path)
    if reader.is_env:
        raise LedgerError(f"{path} was kept at an env, expected one that was kept at the trainer: {_ORDER}")
    return reader


def env_readers(given: Paths, trainer: LedgerReader) -> tuple[list[LedgerReader], list[str]]:
    """Open ledgers of envs, oldest first; a folder stands for those in it, of the trainer's run.

    Args:
        given: A file, a folder, or several of them; in a folder, files that are not named ``*.ledger`` are none.
        trainer: The trainer's ledger.

    Returns:
        The ledgers, and notes on files that were left out.

    Raises:
        LedgerError: if there is none, or one cannot be read, or is not of an env, or of another run.
        TypeError: if one of them is no path.
    """
    paths = [Path(given)] if isinstance(given, (str, os.PathLike)) else [Path(each) for each in given]
    readers, notes = _of_run(paths, trainer)
    if not readers:
        raise LedgerError(
            f"no ledger of an env in {', '.join(map(str, paths)) or 'what was given'} (of a folder, the files that are "
            f"named *.ledger count; folders in it are not searched){''.join(f': {note}' for note in notes)}"
            f"{_deeper(paths)}"
        )
    found = sorted(readers, key=lambda reader: reader.header.started_ns)
    for reader in found[1:]:
        if not reader.header.like(found[0].header):
            raise LedgerError(
                f"{reader.path} and {found[0].path} are of envs with different spaces; if one is of an earlier run: "
                f"{_ONE_FOLDER_PER_RUN}"
            )
    run = trainer.header.run
    lone = [reader for reader in found if bool(reader.header.run) is not bool(run)]
    if lone:
        which = f"the trainer's ledger has run {run!r}, and {lone[0].path} has none"
        if not run:
            which = f"{lone[0].path} has run {lone[0].header.run!r}, and the trainer's ledger has none"
        notes.append(f"{which}: nothing tells whether they are of one run; give run= on both sides")
    return found, notes


def _of_run(paths: list[Path], trainer: LedgerReader) -> tuple[list[LedgerReader], list[str]]:
    run = trainer.header.run
    readers: dict[Path, LedgerReader] = {}
    others: list[Path] = []
    notes = []
    for path in paths:
        in_folder = os.path.isdir(path)  # noqa: PTH112 - as above
        for each in sorted(path.glob("*.ledger")) if in_folder else [path]:
            if in_folder and each.is_file() and not each.stat().st_size:
                notes.append(f"{each} is empty and was left out: its process ended before it wrote anything")
                continue
            reader = LedgerReader(each)
            if reader.is_env and (not run or reader.header.run in ("", run)):
                readers.setdefault(each.resolve(), reader)
            elif in_folder:
                others += [each] if reader.is_env else []
            elif reader.is_env:
                raise LedgerError(
                    f"{trainer.path} is of run {run!r}, {each} of run {reader.header.run!r}: compare ledgers of one run"
                )
            else:
                raise LedgerError(f"{path} was kept at the trainer, expected one that was kept at an env: {_ORDER}")
    if others:
        notes.append(f"left out {len(others)} ledgers of other runs than {run!r}, such as {others[0]}")
    return list(readers.values()), notes


def _deeper(paths: list[Path]) -> str:
    folders = sorted({str(found.parent) for path in paths for found in path.rglob("*.ledger")} - {*map(str, paths)})
    return f". Some are in {_listed(folders)}: give these" if folders else ""


def by_env(readers: list[LedgerReader], trainer: LedgerReader) -> dict[tuple[int, int], list[LedgerReader]]:
    """Return rank and number of each env with its ledgers, oldest first, in the order of the trainer's rows.

    Raises:
        LedgerError: if they are not as many as the trainer has rows.
    """
    keys = sorted({key for reader in readers for key in reader.envs})
    found = {key: [reader for reader in readers if key in reader.envs] for key in keys}
    rows = len(trainer.envs)
    if len(found) != rows:
        several = next((f"; {several_files(*each)}" for each in found.items() if len(each[1]) > 1), "")
        raise LedgerError(
            f"{trainer.path} is of {rows} envs, but the envs' ledgers are of {len(found)} (rank, index): "
            f"{', '.join(map(str, keys[:16]))}: give those of all envs of the run, and of no other{several}"
        )
    return found


def several_files(key: tuple[int, int], readers: list[LedgerReader]) -> str:
    """Say of an env that wrote several ledgers what that may mean."""
    rank, number = key
    return (
        f"env {number} of rank {rank} wrote {len(readers)} ledgers: {_listed([str(each.path) for each in readers])}. "
        f"If one is of an earlier run: {_ONE_FOLDER_PER_RUN}. If several processes were this env at once: envs need an "
        "env_index of their own each, or their clients a rank"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
