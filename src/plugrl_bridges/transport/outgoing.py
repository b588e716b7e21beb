"""The way from the caller's buffers to the bytes of frames: gather for a server, mask for a client.

This module must not know of sockets; ``websocket`` sends what comes out of here.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .frames import SMALL_MASK_BYTES, apply_mask, build_header, mask_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Buffer", "MaskedWriter", "gather"]

Buffer: TypeAlias = bytes | bytearray | memoryview
"""A C-contiguous buffer of any item type, such as ``bytes`` or ``array.data``."""

_JOIN_BYTES = 32768
_KEEP_BYTES = 1 << 24


def _flat(parts: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Return the non-empty parts as one-dimensional byte buffers, and the number of their bytes."""
    flat: list[Buffer] = []
    total = 0
    for part in parts:
        if isinstance(part, (bytes, bytearray)):
            buffer: Buffer = part
            size = len(part)
        else:
            view = memoryview(part)
            size = view.nbytes
            # A view with a zero in its shape cannot be cast.
            buffer = view if not size or (view.format == "B" and view.ndim == 1) else view.cast("B")
        if size:
            flat.append(buffer)
            total += size
    return flat, total


def gather(messages: Sequence[Sequence[Buffer]]) -> tuple[list[Buffer], int]:
    """Frame messages as a server does, each a sequence of buffers; return what to send, and the number of its bytes.

    A small total comes as one buffer; big arrays are not copied. A part that is no C-contiguous buffer is a TypeError.
    """
    buffers: list[Buffer] = []
    total = 0
    for parts in messages:
        flat, size = _flat(parts)
        header = build_header(size)
        buffers.append(header)
        buffers += flat
        total += size + len(header)
    if total <= _JOIN_BYTES and len(buffers) > 1:
        return [b"".join(buffers)], total
    return buffers, total


class MaskedWriter:
    """Writer that frames and masks messages, as a client must, into a send buffer that is used again and again.

    Every frame has a key of its own from the operating system (RFC 6455, section 5.3: unpredictable).
    """

    __slots__ = ("_array", "_view")

    def __init__(self) -> None:
        self._array: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._view = self._array.data

    def gather(self, messages: Sequence[Sequence[Buffer]]) -> tuple[list[Buffer], int]:
        """Frame and mask messages as the function `gather` does, into one buffer that is valid until the next call."""
        flats = [_flat(parts) for parts in messages]
        payload_bytes = 0
        for _, size in flats:
            payload_bytes += size
        if payload_bytes <= SMALL_MASK_BYTES:
            small: list[bytes] = []
            for flat, size in flats:
                key = os.urandom(4)
                small.append(build_header(size, key))
                small.append(apply_mask(b"".join(flat), key))
            framed = b"".join(small)
            return [framed], len(framed)
        return self._gather_large(flats, payload_bytes)

    def _gather_large(self, flats: list[tuple[list[Buffer], int]], payload_bytes: int) -> tuple[list[Buffer], int]:
        needed = payload_bytes + 14 * len(flats) + 8
        if len(self._view) < needed or len(self._view) > max(_KEEP_BYTES, 4 * needed):
            self._array = np.empty(needed + needed // 4, np.uint8)
            self._view = self._array.data
        view = self._view
        at = begin = -1
        for flat, size in flats:
            key = os.urandom(4)
            header = build_header(size, key)
            if at < 0:
                # The first payload, usually the only large one, begins on an 8-byte boundary.
                at = begin = -len(header) & 7
            body = at + len(header)
            view[at:body] = header
            at = body
            for part in flat:
                stop = at + len(part)
                view[at:stop] = part
                at = stop
            mask_in_place(self._array, view, body, at, key)
        return [view[begin:at]], at - begin
