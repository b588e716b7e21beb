"""The form in which values of both sides are compared, where they were not recorded in the same one.

The trainer may see one entry of a larger observation, or the same in another width; one side may have recorded whole
what the other recorded by its digest. Without such a difference nothing is converted. ``comparing`` is the caller.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.columns import Column, Columns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plugrl_bridges.wire.arrays import Array

__all__ = ["Cell", "Common", "differing"]

_NARROW = np.dtype("<f4")


class Cell(NamedTuple):
    """One cell in which two values differ: its name, and both values."""

    name: str
    trainer: Any
    env: Any


class Common:
    """Bring both sides' bytes into one form.

    Args:
        trainer: Columns of the trainer's ledger.
        env: Columns of the envs' ledgers.
        what: ``"observations"`` or ``"actions"``, for messages.
        float32: Compare floats of 64 bits as float32.

    Raises:
        LedgerError: if the two are not of the same space.
    """

    def __init__(self, trainer: Columns, env: Columns, what: str, *, float32: bool) -> None:
        order = [_counterpart(entry, trainer, env, what) for entry in trainer.all]
        self.columns = Columns(
            [_common(entry, env.all[at], what, float32=float32) for entry, at in zip(trainer.all, order, strict=True)]
        )
        self._trainer = _converter(trainer, self.columns, list(range(len(order))))
        self._env = _converter(env, self.columns, order)

    def from_trainer(self, data: bytes) -> bytes:
        """Convert bytes of the trainer's ledger."""
        return data if self._trainer is None or not data else self._trainer(data)

    def from_env(self, data: bytes) -> bytes:
        """Convert bytes of an env's ledger."""
        return data if self._env is None or not data else self._env(data)


def _counterpart(entry: Column, trainer: Columns, env: Columns, what: str) -> int:
    """Return the number of the env's entry that the trainer's is: by name; a lone one by its shape."""
    same = [at for at, other in enumerate(env.all) if other.name == entry.name]
    if not same and (len(trainer.all) == 1 or len(env.all) == 1):
        same = [
            at
            for at, other in enumerate(env.all)
            if other.shape == entry.shape and _kind(other.dtype) == _kind(entry.dtype)
        ]
    if len(same) != 1 or env.all[same[0]].shape != entry.shape:
        raise LedgerError(
            f"the ledgers are of different {what}: the trainer's has {_shown(entry)}, "
            f"the env's has {', '.join(map(_shown, env.all))}: put the trainer's ledger below wrappers that "
            "change values or shapes"
        )
    return same[0]


def _common(ours: Column, theirs: Column, what: str, *, float32: bool) -> Column:
    digested = ours.digested or theirs.digested
    # A float's digest is that of its float32; an integer's is of its own dtype, which then decides.
    dtype = theirs.dtype if theirs.digested and not ours.digested else ours.dtype
    if _kind(ours.dtype) != _kind(theirs.dtype) or (
        ours.digested and theirs.digested and ours.dtype != theirs.dtype and dtype.kind != "f"
    ):
        raise LedgerError(
            f"the ledgers are of different {what}: the trainer's has {_shown(ours)}, the env's {_shown(theirs)}"
        )
    if dtype.kind in "fU" and ours.dtype != theirs.dtype:
        widths = (ours.dtype, theirs.dtype)
        dtype = (min if dtype.kind == "f" else max)(widths, key=lambda each: each.itemsize)
    if float32 and dtype.kind == "f" and dtype.itemsize > 4:
        dtype = _NARROW
    return replace(ours, dtype=dtype, digested=digested)


def _converter(own: Columns, common: Columns, order: Sequence[int]) -> Callable[[bytes], bytes] | None:
    """Return what turns a side's bytes into the common form; None if they are in it already."""
    if tuple(own.all[at] for at in order) == common.all and len(order) == len(own.all):
        return None
    named = [replace(own.all[at], name=entry.name) for at, entry in zip(order, common.all, strict=True)]
    if named == list(common.all) and list(order) == list(range(len(own.all))):
        return None

    def convert(data: bytes) -> bytes:
        values = own.split(data)
        pieces = []
        for at, entry in zip(order, common.all, strict=True):
            value: Array = values[at]
            if not own.all[at].digested:
                with np.errstate(over="ignore", invalid="ignore"):
                    value = value.astype(entry.dtype)
                if entry.digested:
                    value = entry.packed(value[None])
            pieces.append(value.tobytes())
        return b"".join(pieces)

    return convert


def differing(columns: Columns, trainer: bytes, env: bytes) -> list[Cell]:
    """Return the cells in which two values differ, bit by bit.

    Args:
        columns: Of both.
        trainer: The trainer's bytes.
        env: The env's bytes.
    """
    found: list[Cell] = []
    values = zip(columns.all, columns.split(trainer), columns.split(env), strict=True)
    for entry, ours, theirs in values:
        if entry.digested:
            if ours != theirs:
                found.append(Cell(f"digest of {entry.name}", f"{int(ours):016x}", f"{int(theirs):016x}"))
            continue
        if not ours.size:
            continue
        bits = [np.frombuffer(each.tobytes(), np.uint8).reshape(each.size, -1) for each in (ours, theirs)]
        for flat in np.flatnonzero((bits[0] != bits[1]).any(axis=1)).tolist():
            index = np.unravel_index(flat, ours.shape)
            name = f"{entry.name}[{','.join(map(str, index))}]" if index else entry.name
            found.append(Cell(name, ours.reshape(-1)[flat], theirs.reshape(-1)[flat]))
    return found


def _kind(dtype: np.dtype[Any]) -> str:
    return "i" if dtype.kind in "biu" else dtype.kind


def _shown(entry: Column) -> str:
    return f"{entry.name} {list(entry.shape)} {entry.dtype.str}"
