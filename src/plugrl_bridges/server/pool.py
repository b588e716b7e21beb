"""Own the reuse of large observation arrays: a fresh 450 KB array per step costs hundreds of page faults.

An array that was handed out belongs to whoever holds it. It is given out again only when nobody does, which CPython's
reference count tells; where there is no such count, every array is a fresh one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.spaces import Leaf
    from plugrl_bridges.wire.codec import Array

__all__ = ["ArrayPool"]

_LARGE_BYTES = 1 << 16
_KEEP = 5  # the trainer's current and last observation, the one being filled, the next one, and one to spare
_COUNTED = sys.implementation.name == "cpython" and getattr(sys, "_is_gil_enabled", lambda: True)()


def _count_unheld() -> int:
    """Count the references of an array that nobody holds, in a loop like the one below.

    The interpreter's own share (list, loop variable, argument) differs: Python 3.14 borrows some of them.
    """
    for array in [np.empty(1)]:
        return sys.getrefcount(array)
    raise AssertionError


_UNHELD = _count_unheld() if _COUNTED else 0


class ArrayPool:
    """Give arrays for batches of observations; call `take` once per vector step.

    Args:
        leaves: What one env's observation consists of.
        rows: Number of slots.
    """

    def __init__(self, leaves: Sequence[Leaf], rows: int) -> None:
        self._shapes = [((rows, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._kept: list[list[Array]] = [[] for _ in leaves]

    def take(self) -> list[Array]:
        """Give one array ``[rows, *shape]`` per leaf, contents undefined."""
        return [self._one(shape, dtype, kept) for (shape, dtype), kept in zip(self._shapes, self._kept, strict=True)]

    def _one(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], kept: list[Array]) -> Array:
        for array in kept:
            if sys.getrefcount(array) <= _UNHELD:
                return array
        array = np.empty(shape, dtype)
        if _COUNTED and array.nbytes >= _LARGE_BYTES:
            if len(kept) >= _KEEP:
                kept.pop(0)
            kept.append(array)
        return array
