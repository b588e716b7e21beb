"""Own which files a comparison is asked for: one path or several; and what is said of folders without ledgers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.files import is_file, is_folder
from plugrl_bridges.ledger.format import Side
from plugrl_bridges.ledger.reader import LedgerReader

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Paths", "env_paths"]

AnyPath: TypeAlias = "str | os.PathLike[str]"
Paths: TypeAlias = "AnyPath | Iterable[AnyPath]"

_SHOWN_FOLDERS = 8


def env_paths(given: Paths) -> list[Path]:
    """Give the files and folders of the envs.

    Args:
        given: One path, or several.

    Raises:
        LedgerError: if they are folders in which no env's ledger is, but deeper folders hold some.
        TypeError: if one of them is no path.
    """
    paths = [Path(given)] if isinstance(given, (str, os.PathLike)) else [Path(each) for each in given]
    if not paths or any(not is_folder(path) or _may_hold(path.glob("*.ledger")) for path in paths):
        return paths
    deeper = sorted({found.parent for path in paths for found in path.rglob("*.ledger") if is_file(found)} - {*paths})
    holding = [folder for folder in deeper if _may_hold(folder.glob("*.ledger"))]
    if holding:
        more = len(holding) - _SHOWN_FOLDERS
        raise LedgerError(
            f"no ledger of an env in {', '.join(map(str, paths))} (of a folder, the files that are named *.ledger "
            f"count; folders in it are not searched). Some are in {', '.join(map(str, holding[:_SHOWN_FOLDERS]))}"
            f"{f' and {more} more folders' if more > 0 else ''}: give these"
        )
    return paths


def _may_hold(files: Iterable[Path]) -> bool:
    """Tell whether a ledger of an env is among these, or what cannot be read and is to be complained of."""
    try:
        return any(LedgerReader(file).header.side is Side.ENV for file in files)
    except LedgerError:
        return True
