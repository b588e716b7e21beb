"""Own how values of a space become the bytes of a record: one entry per leaf, in the dtype of the space.

What a trainer gets went through buffers of the space's dtype, so both sides record in it. Large entries are recorded
by their digest, unless everything is asked for. ``env`` converts one env's values, ``vec_env`` and ``vector_env`` those
of a batch, ``comparing`` reads them back.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_bridges.digest.digest import sum_of_words, words_of
from plugrl_bridges.errors import LedgerError, SpaceError
from plugrl_bridges.spaces import ObservationLayout
from plugrl_bridges.wire.arrays import MAX_NDIM, MAX_TEXT_LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymnasium import spaces

    from plugrl_bridges.wire.arrays import Array, Value

__all__ = ["WHOLE_BYTES", "Column", "Columns"]

Space: TypeAlias = "spaces.Space[Any]"

WHOLE_BYTES = 1024
"""Entries up to this size are recorded whole."""
_DIGEST_BYTES = 8
_MAX_VALUE_BYTES = 1 << 40
_DTYPE = re.compile(r"\|b1|\|[iu]1|<[iuf][248]|<U[1-9][0-9]{0,9}")
"""As `Column.dtype` is written down: little-endian, or of one byte."""
_LAST_CHARACTER = 0x10FFFF
_SHOWN_NAME = 64


@dataclass(frozen=True)
class Column:
    """Say how one entry of an observation or action stands in a record.

    Attributes:
        name: Its path joined with ``/``.
        shape: Shape of one env's value.
        dtype: Of its space, little-endian.
        digested: Whether only its 64-bit digest is recorded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    digested: bool

    @property
    def width(self) -> int:
        """Bytes of one env's value in a record."""
        return _DIGEST_BYTES if self.digested else math.prod(self.shape) * self.dtype.itemsize

    def digest(self, values: Array) -> Array:
        """Give the digests, uint64 ``[n]``, of values ``[n, *shape]``."""
        return sum_of_words(words_of(values, self))

    def read(self, data: bytes) -> Array:
        """Give one env's value of its bytes: an array ``shape``, or the digest without dimensions."""
        if self.digested:
            return np.frombuffer(data, "<u8").reshape(())
        return np.frombuffer(data, self.dtype).reshape(self.shape)


class Columns:
    """Own the entries of one space.

    Args:
        entries: In the order of the space.
        owner: Whose values they are of, for errors.
    """

    def __init__(self, entries: Sequence[Column], owner: str = "") -> None:
        self.entries = tuple(entries)
        self._owner = owner
        self.width = sum(entry.width for entry in self.entries)
        """Bytes of one env's values in a record."""
        self._paths: tuple[tuple[str | int, ...], ...] = ()
        self._lone: Column | None = None
        self.has_text = any(entry.dtype.kind == "U" and not entry.digested for entry in self.entries)
        """Whether there are values that `check` looks at."""

    @classmethod
    def of(cls, space: Space, root: str, *, full: bool, owner: str = "") -> Columns:
        """Make the columns of a space.

        Args:
            space: Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict and Tuple of them.
            root: Name of the entry, where the space has no entries.
            full: Record large entries whole too.
            owner: Whose values they are of, for errors.

        Raises:
            LedgerError: for another space.
        """
        try:
            leaves = ObservationLayout(space).leaves
        except SpaceError as exc:
            raise LedgerError(f"a ledger cannot record {space}: {exc}") from exc
        entries = []
        for leaf in leaves:
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            name = leaf.name if leaf.path else root
            digested = size > WHOLE_BYTES and not full
            entries.append(Column(name, leaf.shape, leaf.dtype.newbyteorder("<"), digested))
        made = cls(entries, owner)
        made._paths = tuple(leaf.path for leaf in leaves)
        if len(leaves) == 1 and not leaves[0].path and not entries[0].digested:
            made._lone = entries[0]
        return made

    # Values to bytes ----------------------------------------------------------------------------------------------

    def values(self, value: Value, owner: str = "") -> list[Array]:
        """Give one env's value, entry by entry, in the dtype and shape of its space.

        Args:
            value: The value.
            owner: Whose it is, for errors, if another than that of all values.

        Raises:
            LedgerError: if an entry is missing or does not fit its shape.
        """
        whose = owner or self._owner
        return [
            _fitting(_at(value, path, whose), entry, entry.shape, whose)
            for path, entry in zip(self._paths, self.entries, strict=True)
        ]

    def quick(self, value: Value) -> Sequence[Array]:
        """Give what `values` gives; the value itself, where it is an array as the space says."""
        lone = self._lone
        if lone is not None and type(value) is np.ndarray and value.dtype == lone.dtype and value.shape == lone.shape:
            return (value,)
        return self.values(value)

    def batch(self, value: Value, rows: int) -> list[Array]:
        """Give the values of n envs, entry by entry, each ``[n, *shape]``.

        Raises:
            LedgerError: if an entry is missing or does not fit its shape.
        """
        return [
            _fitting(_at(value, path, self._owner), entry, (rows, *entry.shape), self._owner)
            for path, entry in zip(self._paths, self.entries, strict=True)
        ]

    def pack_one(self, value: Value) -> bytes:
        """Give the bytes of one env's value."""
        lone = self._lone
        if lone is not None and type(value) is np.ndarray and value.dtype == lone.dtype and value.shape == lone.shape:
            return value.tobytes()
        return b"".join(self.pack([each[None] for each in self.values(value)]))

    def pack(self, arrays: Sequence[Array]) -> list[bytes]:
        """Give the bytes of the values of n envs, entry by entry."""
        return [
            (entry.digest(array) if entry.digested else array).tobytes()
            for entry, array in zip(self.entries, arrays, strict=True)
        ]

    # Bytes to values ----------------------------------------------------------------------------------------------

    def rows(self, data: bytes, at: int, rows: int) -> list[bytes]:
        """Cut the columns of a record into the bytes of each env.

        Args:
            data: The record.
            at: Where the columns begin.
            rows: How many envs.
        """
        if len(self.entries) == 1:
            width = self.width
            return [data[at + row * width : at + (row + 1) * width] for row in range(rows)]
        pieces: list[list[bytes]] = [[] for _ in range(rows)]
        for width in filter(None, (entry.width for entry in self.entries)):
            for row in range(rows):
                pieces[row].append(data[at : at + width])
                at += width
        return [b"".join(row) for row in pieces]

    def check(self, rows: Sequence[bytes]) -> None:
        """Refuse bytes that are no values.

        Args:
            rows: From `rows`.

        Raises:
            ValueError: for text with a character that Unicode has not; half a pair of surrogates may stand in a value.
        """
        for row in rows if self.has_text else ():
            at = 0
            for entry in self.entries:
                if entry.dtype.kind == "U" and not entry.digested:
                    codes = np.frombuffer(row, "<u4", entry.width // 4, at)
                    if codes.max(initial=0) > _LAST_CHARACTER:
                        raise ValueError(f"{entry.name!r} has a character beyond U+10FFFF")
                at += entry.width

    def split(self, data: bytes) -> list[Array]:
        """Give the values of one env's bytes, entry by entry; a digest stands for what was recorded by it."""
        found = []
        at = 0
        for entry in self.entries:
            found.append(entry.read(data[at : at + entry.width]))
            at += entry.width
        return found

    # The header ---------------------------------------------------------------------------------------------------

    def describe(self) -> list[Value]:
        """Give what a header says of the columns."""
        return [
            {"name": e.name, "shape": list(e.shape), "dtype": e.dtype.str, "digested": e.digested} for e in self.entries
        ]

    @classmethod
    def described(cls, description: Value) -> Columns:
        """Read what `describe` gave.

        Raises:
            LedgerError: if it is no such description.
        """
        if type(description) is not list:
            raise LedgerError(f"the columns of its header are a {type(description).__name__}, expected a list")
        return cls([_column(each) for each in description])


def _column(found: Value) -> Column:
    """Read what a header says of one column; every number is bounded before it is believed."""
    if type(found) is not dict or not {"name", "shape", "dtype", "digested"} <= found.keys():
        raise LedgerError("a column of its header is no map of name, shape, dtype and digested")
    name, shape, dtype, digested = found["name"], found["shape"], found["dtype"], found["digested"]
    if type(name) is not str or type(digested) is not bool:
        raise LedgerError("a column of its header has a name that is no str, or a digested that is no bool")
    whose = f"the column {name[:_SHOWN_NAME]!r} of its header"
    if type(dtype) is not str or _DTYPE.fullmatch(dtype) is None:
        raise LedgerError(f"{whose} has a dtype that no space has, expected one such as '<f4', '|u1' or '<U8'")
    if dtype[1] == "U" and int(dtype[2:]) > MAX_TEXT_LENGTH:
        raise LedgerError(f"{whose} is text of {dtype[2:]} characters, expected at most {MAX_TEXT_LENGTH}")
    if type(shape) is not list or len(shape) > MAX_NDIM or any(type(size) is not int or size < 0 for size in shape):
        raise LedgerError(f"{whose} has a shape that no space has, expected at most {MAX_NDIM} sizes from 0")
    made = np.dtype(dtype)
    if made.kind == "U" and shape:
        raise LedgerError(f"{whose} is text of shape {shape}, expected no dimension")
    if math.prod(max(size, 1) for size in shape) * made.itemsize > _MAX_VALUE_BYTES:
        raise LedgerError(f"{whose} is larger than {_MAX_VALUE_BYTES} bytes")
    return Column(name, tuple(shape), made, digested)


def _at(value: Value, path: tuple[str | int, ...], owner: str) -> Value:
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError) as exc:
        whose = f" of {owner}" if owner else ""
        raise LedgerError(f"a value{whose} to be recorded lacks the entry {'/'.join(map(str, path))!r}") from exc
    return value


def _fitting(value: Value, entry: Column, shape: tuple[int, ...], owner: str) -> Array:
    """Cast as assigning into a buffer of the space's dtype would."""
    array = np.asarray(value)
    if array.dtype != entry.dtype:
        if array.dtype.kind not in "biufU" or (array.dtype.kind == "U") != (entry.dtype.kind == "U"):
            raise LedgerError(f"entry {_named(entry, owner)} has dtype {array.dtype}, expected {entry.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(entry.dtype)
    if array.shape != shape:
        if array.size != math.prod(shape):
            raise LedgerError(f"entry {_named(entry, owner)} has shape {list(array.shape)}, expected {list(shape)}")
        array = array.reshape(shape)
    return array


def _named(entry: Column, owner: str) -> str:
    return f"{entry.name!r} of {owner}" if owner else repr(entry.name)
