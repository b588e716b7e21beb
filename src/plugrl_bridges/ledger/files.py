"""Own how ledger files are come by: regular files alone, and each failure of the system is one `LedgerError`.

Text that stands in files is not trusted either: it is shown with escapes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from plugrl_bridges.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["escaped", "is_empty", "is_file", "is_folder", "opened"]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it; what the system refuses while it is read is told of it, too.

    Args:
        path: A regular file: a pipe can be read once only, and a device may have no end.

    Raises:
        LedgerError: if it is none, cannot be opened, or fails while it is read.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise LedgerError(
                f"{path} is no regular file, expected a ledger on disk: a ledger is read several times, so a pipe or "
                "device cannot be one; save it as a file first"
            )
        with path.open("rb") as file:
            yield file
    except OSError as exc:
        raise LedgerError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise LedgerError(f"{str(path)!r} cannot be read: {exc}") from exc


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether there is a folder of this name; a name that no file can have is none."""
    return os.path.isdir(path)  # noqa: PTH112 - pathlib's raises for a name that is too long


def is_file(path: Path) -> bool:
    """Tell whether this is a regular file, as far as can be told."""
    return os.path.isfile(path)  # noqa: PTH113 - as above, and where a folder may not be searched


def is_empty(path: Path) -> bool:
    """Tell whether this is a regular file without a byte; of what cannot be asked, nothing is known."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(found.st_mode) and not found.st_size


def escaped(text: str) -> str:
    """Give text of a file as it can be shown: control characters and what is no Unicode as escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
