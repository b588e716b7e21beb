"""How values of a space become the bytes of a row, and are read from them: one column per entry of the space.

Large entries are recorded by their digest, unless everything is asked for.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.digest.digest import sum_of_words, words_of
from plugrl_bridges.digest.entries import SpaceEntry
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.wire.arrays import MAX_NDIM, MAX_TEXT_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.wire.arrays import Array

__all__ = ["WHOLE_BYTES", "Column", "Columns"]

WHOLE_BYTES = 1024
"""Entries up to this size are recorded whole."""
_DIGEST_BYTES = 8
_MAX_VALUE_BYTES = 1 << 30
_DTYPE = re.compile(r"\|b1|\|[iu]1|<[iuf][248]|<U[1-9][0-9]{0,9}")
"""As a dtype is written down: little-endian, or of one byte."""
_LAST_CHARACTER = 0x10FFFF
_SHOWN_NAME = 64


@dataclass(frozen=True)
class Column(SpaceEntry):
    """How one entry of an observation or action stands in the bytes of a row.

    Attributes:
        digested: Whether only its 64-bit digest is recorded.
    """

    digested: bool = False

    @property
    def width(self) -> int:
        """Bytes of one env's value."""
        return _DIGEST_BYTES if self.digested else math.prod(self.shape) * self.dtype.itemsize

    def packed(self, values: Array) -> Array:
        """Return the bytes of values ``[n, *shape]``, uint8 ``[n, width]``."""
        array = sum_of_words(words_of(values, self)) if self.digested else values
        return np.frombuffer(array.tobytes(), np.uint8).reshape(len(values), self.width)

    def read(self, data: bytes) -> Array:
        """Return one env's value of its bytes: an array ``shape``, or the digest without dimensions.

        Raises:
            LedgerError: for text with a character that Unicode has not.
        """
        if self.digested:
            return np.frombuffer(data, "<u8").reshape(())
        if self.dtype.kind == "U" and np.frombuffer(data, "<u4").max(initial=0) > _LAST_CHARACTER:
            raise LedgerError(f"the column {self.name[:_SHOWN_NAME]!r} has a character beyond U+10FFFF")
        return np.frombuffer(data, self.dtype).reshape(self.shape)


class Columns:
    """The columns of one space, in its order.

    Args:
        columns: One per entry.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.all = tuple(columns)
        self.width = sum(column.width for column in self.all)
        """Bytes of one env's values."""
        self._plain = len(self.all) == 1 and not self.all[0].digested

    @classmethod
    def of(cls, entries: Sequence[SpaceEntry], *, full: bool) -> Columns:
        """Return the columns of the entries of a space; ``full`` records large ones whole too."""
        sizes = [math.prod(entry.shape) * entry.dtype.itemsize for entry in entries]
        return cls(
            [
                Column(entry.name, entry.shape, entry.dtype, size > WHOLE_BYTES and not full)
                for entry, size in zip(entries, sizes, strict=True)
            ]
        )

    def pack_one(self, values: Sequence[Array]) -> bytes:
        """Return the bytes of one env's values, given entry by entry."""
        if self._plain:
            return values[0].tobytes()
        return self.pack([value[None] for value in values])[0]

    def pack(self, arrays: Sequence[Array]) -> list[bytes]:
        """Return the bytes of each of n envs, given ``[n, *shape]`` entry by entry."""
        n, width = len(arrays[0]) if arrays else 0, self.width
        if self._plain:
            data = arrays[0].tobytes()
        else:
            pieces = [column.packed(array) for column, array in zip(self.all, arrays, strict=True)]
            data = np.concatenate(pieces, axis=1).tobytes()
        return [data[at * width : (at + 1) * width] for at in range(n)]

    def split(self, data: bytes) -> list[Array]:
        """Return the values of one env's bytes, entry by entry; a digest stands for what was recorded by it."""
        found = []
        at = 0
        for column in self.all:
            found.append(column.read(data[at : at + column.width]))
            at += column.width
        return found

    def describe(self) -> list[tuple[int, str, str, str, int, int]]:
        """Return what the file says of each column: number, name, shape, dtype, digested and where its bytes begin."""
        rows = []
        at = 0
        for number, column in enumerate(self.all):
            rows.append((number, column.name, json.dumps(column.shape), column.dtype.str, int(column.digested), at))
            at += column.width
        return rows

    @classmethod
    def described(cls, rows: Sequence[tuple[Any, ...]]) -> Columns:
        """Read what `describe` returned; every number is bounded before it is believed.

        Raises:
            LedgerError: if it is no such description.
        """
        made = cls([_column(*row[1:5]) for row in rows])
        if made.describe() != list(rows):
            raise LedgerError("its table columns does not say where the columns are")
        return made


def _column(name: Any, shape: Any, dtype: Any, digested: Any) -> Column:  # noqa: ANN401 - of a file that may hold anything
    if type(name) is not str or digested not in (0, 1):
        raise LedgerError("its table columns has a name that is no text, or a digested that is neither 0 nor 1")
    whose = f"the column {name[:_SHOWN_NAME]!r}"
    if type(dtype) is not str or _DTYPE.fullmatch(dtype) is None:
        raise LedgerError(f"{whose} has a dtype that no space has, expected one such as '<f4', '|u1' or '<U8'")
    if dtype[1] == "U" and int(dtype[2:]) > MAX_TEXT_LENGTH:
        raise LedgerError(f"{whose} is text of {dtype[2:]} characters, expected at most {MAX_TEXT_LENGTH}")
    try:
        sizes = json.loads(shape)
    except (TypeError, ValueError, RecursionError):
        sizes = None
    if type(sizes) is not list or len(sizes) > MAX_NDIM or any(type(size) is not int or size < 0 for size in sizes):
        raise LedgerError(f"{whose} has a shape that no space has, expected at most {MAX_NDIM} sizes from 0")
    made = np.dtype(dtype)
    if made.kind == "U" and sizes:
        raise LedgerError(f"{whose} is text of shape {sizes}, expected no dimension")
    if math.prod(max(size, 1) for size in sizes) * made.itemsize > _MAX_VALUE_BYTES:
        raise LedgerError(f"{whose} is larger than {_MAX_VALUE_BYTES} bytes")
    return Column(name, tuple(sizes), made, bool(digested))
