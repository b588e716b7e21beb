"""The persistent receive buffer: where bytes land, which of them are still lent out, when it moves or grows.

This module must not know what the bytes mean; ``websocket`` parses them. Messages are views into this storage, so
bytes in front of ``start`` never change while any of them is ``lent``: if room is needed then, the unparsed tail
goes to fresh storage, and the old one lives for as long as its views do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Inbox"]

_INITIAL_BYTES = 1 << 16
_MIN_READ_BYTES = 1 << 12


class Inbox:
    """Buffer of received bytes; ``view[start:end]`` is what nobody has parsed yet.

    The attributes are plain because the connection's inner loop reads and writes them at every message.
    """

    __slots__ = ("array", "end", "lent", "start", "view", "want")

    def __init__(self) -> None:
        self.array: NDArray[np.uint8]
        self.view: memoryview
        self._allocate(_INITIAL_BYTES)
        self.start = 0
        self.end = 0
        self.want = 0
        """Bytes of the frame at ``start``, as announced by its header; 0 if that is not known."""
        self.lent = False
        """Whether views in front of ``start`` may be in somebody's hands."""

    def target(self) -> memoryview:
        """Return the free space to receive into; never empty.

        Storage grows only when it is full, to at most twice what has really arrived, so that a header that lies
        about its length costs its sender as many bytes as it costs us.
        """
        capacity = len(self.view)
        if capacity - self.end < _MIN_READ_BYTES and (not self.want or self.start + self.want > capacity):
            self._make_room()
        return self.view[self.end :]

    def recycle(self) -> None:
        """Reclaim every view; the space in front of ``start`` may be overwritten from now on."""
        self.lent = False
        if self.start == self.end:
            self.start = self.end = 0

    def discard(self) -> None:
        """Drop everything that is not parsed yet."""
        self.end = self.start
        if not self.lent:
            self.start = self.end = 0

    def _make_room(self) -> None:
        start, have, capacity = self.start, self.end - self.start, len(self.view)
        if start and not self.lent:
            # memoryview assignment is a memmove, so the two ranges may overlap.
            self.view[:have] = self.view[start : self.end]
            self.start, self.end = 0, have
            if capacity - have >= _MIN_READ_BYTES:
                return
        old = self.view
        start, end = self.start, self.end
        # Room for four such frames at most: two big messages of one step then fit without another allocation.
        self._allocate(max(_INITIAL_BYTES, min(2 * capacity, 4 * self.want)))
        self.view[:have] = old[start:end]
        self.start, self.end, self.lent = 0, have, False

    def _allocate(self, size: int) -> None:
        # np.empty, unlike bytearray, does not touch the pages: untouched ones cost no memory.
        self.array = np.empty(size, np.uint8)
        self.view = self.array.data
