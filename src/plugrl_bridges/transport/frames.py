"""The shape of a WebSocket frame (RFC 6455, section 5.2): headers, length, masking. Pure functions only.

This module must not know of sockets, connections or messages. Callers go on to ``websocket`` (reading) and
``outgoing`` (writing).
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

try:
    from websockets.speedups import apply_mask
except ImportError:  # the C extension is optional
    from websockets.utils import apply_mask

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BINARY_FINAL",
    "CONTROL_BIT",
    "MASK_BIT",
    "SMALL_MASK_BYTES",
    "Fault",
    "apply_mask",
    "build_header",
    "check_header",
    "mask_in_place",
    "parse_header",
]

BINARY_FINAL = 0x82
"""First header byte of a whole binary message: FIN, no RSV bit, opcode 2."""

CONTROL_BIT = 0x08
"""The bit of the first header byte that close, ping and pong have and data frames have not."""

MASK_BIT = 0x80
"""The bit of the second header byte that says that the payload is masked."""

SMALL_MASK_BYTES = 32768
"""Below this the C loop of websockets, with its fresh bytes object, is quicker than numpy with its fixed cost."""

_KNOWN_OPCODES = frozenset((0x0, 0x1, 0x2, 0x8, 0x9, 0xA))
_MAX_CONTROL_BYTES = 125
_LENGTH_16 = struct.Struct("!BBH")
_LENGTH_64 = struct.Struct("!BBQ")
_U64 = struct.Struct("!Q")


class Fault(NamedTuple):
    """A reason to fail the connection: the close code to send and the text that goes with it."""

    code: int
    text: str


def check_header(first: int, second: int, *, masked: bool) -> Fault | None:
    """Check the first two bytes of a frame.

    Judging here, and not when the announced payload has arrived, spares us reading the payload of a frame that is
    already known to be illegal.

    Args:
        first: First header byte: FIN, RSV bits, opcode.
        second: Second header byte: mask bit and 7-bit length.
        masked: Whether frames from this peer must be masked (RFC 6455, section 5.1).

    Returns:
        The fault, with close code 1002, or None if the two bytes are legal.
    """
    if first & 0x70:
        return Fault(1002, "reserved bits must be 0")
    opcode = first & 0x0F
    if opcode not in _KNOWN_OPCODES:
        return Fault(1002, f"reserved opcode {opcode:#x}")
    if bool(second & MASK_BIT) is not masked:
        return Fault(1002, "frame from a client must be masked" if masked else "frame from a server must not be masked")
    if opcode & CONTROL_BIT:
        if not first & 0x80:
            return Fault(1002, "fragmented control frame")
        if second & 0x7F > _MAX_CONTROL_BYTES:
            return Fault(1002, "control frame too long")
    return None


def parse_header(view: memoryview, start: int, end: int) -> tuple[int, int] | None:
    """Read the lengths from a frame header.

    Args:
        view: Bytes received.
        start: Where the header begins in ``view``; at least two bytes must be there.
        end: Where the received bytes end.

    Returns:
        (header bytes including the masking key, payload bytes), or None if the length field is not complete yet.
    """
    second = view[start + 1]
    length = second & 0x7F
    size = 2
    if length == 126:
        if end - start < 4:
            return None
        length = view[start + 2] << 8 | view[start + 3]
        size = 4
    elif length == 127:
        if end - start < 10:
            return None
        length = _U64.unpack_from(view, start + 2)[0]
        size = 10
    return (size + 4 if second & MASK_BIT else size), length


def build_header(length: int, key: bytes = b"") -> bytes:
    """Build the header of a whole binary message.

    Args:
        length: Payload bytes.
        key: The 4-byte masking key of a client, or nothing for a server.

    Returns:
        2, 4 or 10 bytes, and the key.
    """
    bit = MASK_BIT if key else 0
    if length < 126:
        return bytes((BINARY_FINAL, bit | length)) + key
    if length < 65536:
        return _LENGTH_16.pack(BINARY_FINAL, bit | 126, length) + key
    return _LENGTH_64.pack(BINARY_FINAL, bit | 127, length) + key


def mask_in_place(array: NDArray[np.uint8], view: memoryview, start: int, stop: int, key: bytes) -> None:
    """Mask or unmask payload bytes where they lie (RFC 6455, section 5.3).

    Args:
        array: The storage, uint8, one-dimensional, contiguous; its first byte must be 8-byte aligned.
        view: A memoryview of the same storage.
        start: Where the payload begins.
        stop: Where the payload ends; any alignment will do.
        key: The 4-byte masking key.
    """
    if stop - start <= SMALL_MASK_BYTES:
        view[start:stop] = apply_mask(view[start:stop], key)
        return
    head = -start & 7
    body = start + head
    tail = stop - (stop & 7)
    turn = head & 3
    turned = key[turn:] + key[:turn]
    words = array[body:tail].view(np.uint64)
    np.bitwise_xor(words, np.uint64(int.from_bytes(turned * 2, sys.byteorder)), out=words)
    if head:
        view[start:body] = apply_mask(view[start:body], key)
    if tail != stop:
        # The words between are a multiple of 8 bytes, so the key is at the same turn behind them.
        view[tail:stop] = apply_mask(view[tail:stop], turned)
