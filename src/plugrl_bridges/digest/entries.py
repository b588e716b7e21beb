"""How a value of a space becomes arrays: one per entry, in the dtype and shape that the space says.

What a trainer gets went through buffers of the space's dtype, so digests and ledgers are made of values in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_bridges.errors import LedgerError, SpaceError
from plugrl_bridges.spaces import ObservationLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymnasium import spaces

    from plugrl_bridges.wire.arrays import Array, Value

__all__ = ["Entries", "SpaceEntry"]

Space: TypeAlias = "spaces.Space[Any]"


@dataclass(frozen=True)
class SpaceEntry:
    """One entry of a space.

    Attributes:
        name: Its path joined with ``/``.
        shape: Shape of one env's value.
        dtype: Of its space, little-endian.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Entries:
    """The entries of one space, in its order.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict and Tuple of them.
        root: Name of the entry, where the space has no entries.
        owner: Whose values they are of, for errors.

    Raises:
        LedgerError: for another space.
    """

    def __init__(self, space: Space, root: str, *, owner: str = "") -> None:
        try:
            leaves = ObservationLayout(space).leaves
        except SpaceError as exc:
            raise LedgerError(f"a ledger cannot record {space}: {exc}") from exc
        self.all = tuple(
            SpaceEntry(leaf.name if leaf.path else root, leaf.shape, leaf.dtype.newbyteorder("<")) for leaf in leaves
        )
        self._owner = owner
        self._paths = tuple(leaf.path for leaf in leaves)
        self._lone = self.all[0] if len(leaves) == 1 and not leaves[0].path else None

    def values(self, value: Value, owner: str = "") -> Sequence[Array]:
        """Return one env's value, entry by entry; the value itself, where it is an array as the space says.

        Args:
            value: The value.
            owner: Whose it is, for errors, if another than that of all values.

        Raises:
            LedgerError: if an entry is missing or does not fit its shape.
        """
        lone = self._lone
        if lone is not None and type(value) is np.ndarray and value.dtype == lone.dtype and value.shape == lone.shape:
            return (value,)
        whose = owner or self._owner
        return [
            _fitting(_at(value, path, whose), entry, entry.shape, whose)
            for path, entry in zip(self._paths, self.all, strict=True)
        ]

    def batch(self, value: Value, rows: int) -> list[Array]:
        """Return the values of n envs, entry by entry, each ``[n, *shape]``.

        Raises:
            LedgerError: if an entry is missing or does not fit its shape.
        """
        return [
            _fitting(_at(value, path, self._owner), entry, (rows, *entry.shape), self._owner)
            for path, entry in zip(self._paths, self.all, strict=True)
        ]


def _at(value: Value, path: tuple[str | int, ...], owner: str) -> Value:
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError) as exc:
        whose = f" of {owner}" if owner else ""
        raise LedgerError(f"a value{whose} to be recorded lacks the entry {'/'.join(map(str, path))!r}") from exc
    return value


def _fitting(value: Value, entry: SpaceEntry, shape: tuple[int, ...], owner: str) -> Array:
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


def _named(entry: SpaceEntry, owner: str) -> str:
    return f"{entry.name!r} of {owner}" if owner else repr(entry.name)
