"""The bytes of protocol version 1: msgpack with arrays inside [3].

Knows nothing of message types, sessions, sockets or clocks. ``messages`` is the caller: it asks for `encode` on the
way out and for `decode` on the way in. ``arrays`` has the form of one array.

Array data is never copied here. `encode` returns a list of buffers, of which the large ones are views of the arrays;
`decode` returns arrays that are views of the message. Whoever keeps an array longer than the message copies it.

Everything a peer sends is bounded before it is believed: nesting, the number of items, and the length of every array
against its data. Only `DecodeError` leaves `decode`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from plugrl_bridges.errors import DecodeError, EncodeError
from plugrl_bridges.wire.arrays import (
    ARRAY_START,
    JOIN_BELOW_BYTES,
    Array,
    Buffer,
    Value,
    array_from,
    array_from_map,
    array_to_parts,
    dtype_of,
    generic_from_map,
    generic_to_map,
)

__all__ = ["MAX_DEPTH", "MAX_ITEMS", "Array", "Buffer", "Value", "decode", "encode", "join_small"]

MAX_DEPTH = 32
"""Maps and lists may be nested this deep; a message of this protocol needs six levels. An array is a map."""
MAX_ITEMS = 1_000_000
"""Items (keys, values, elements) in one message: it bounds the memory that tiny items cost. An array counts nine."""

_ONE_BUFFER_BELOW_BYTES = 1 << 16
_CACHE_STR_BELOW = 64  # characters; longer ones are the text of one message, and would only fill the cache
_ARRAY_ITEMS = 8  # keys and values of an array's map; it comes to a bound on the size of array objects as well
_pack = msgpack.packb


def encode(value: Value) -> list[Buffer]:
    """Return the buffers of one message; hand them to the transport's ``send`` as one message.

    Args:
        value: None, bool, int, float, str, bytes, lists, tuples and str- or bytes-keyed maps of them, and numpy arrays
            and scalars of kinds b, i, u, f and U. Arrays that are not in C order are copied into it. The numpy scalars
            that are Python's float, str or bytes by inheritance travel as those, as with openpi's msgpack_numpy.

    Returns:
        Buffers whose concatenation is the message. Large arrays are views: do not write to them before they are sent.

    Raises:
        EncodeError: for any other type, a refused dtype (object, structured, complex [3]), an int beyond 64 bits, text
            that is no Unicode, or too deep nesting.
    """
    out: list[Buffer] = []
    _encode(value, out, 0)
    return join_small(out)


def join_small(parts: list[Buffer]) -> list[Buffer]:
    """Join what is cheaper to copy than to hand to the system call as a buffer of its own."""
    if sum(map(len, parts)) < _ONE_BUFFER_BELOW_BYTES:
        return [b"".join(parts)]
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for part in parts:
        if len(part) < JOIN_BELOW_BYTES:
            run.append(part)
            continue
        if run:
            joined.append(b"".join(run))
            run = []
        joined.append(part)
    if run:
        joined.append(b"".join(run))
    return joined


def _encode(value: Value, out: list[Buffer], depth: int) -> None:
    kind = type(value)
    if kind is str:
        out.append(_packed_str(value) if len(value) < _CACHE_STR_BELOW else _scalar(value))
    elif isinstance(value, np.ndarray):
        _enter(depth)
        out.extend(array_to_parts(value))
    elif isinstance(value, Mapping):
        _enter(depth)
        out.append(_map_header(len(value)))
        for key, item in value.items():
            out.append(_key(key))
            _encode(item, out, depth + 1)
    elif isinstance(value, (list, tuple)):
        _enter(depth)
        out.append(_list_header(len(value)))
        for item in value:
            _encode(item, out, depth + 1)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, bytearray, memoryview)):
        out.append(_scalar(value))
    elif isinstance(value, np.generic):
        _encode(generic_to_map(value), out, depth)
    else:
        raise EncodeError(
            f"the wire cannot carry a {kind.__module__}.{kind.__qualname__}; expected numbers, str, bytes, lists, maps "
            "or numpy arrays"
        )


def _enter(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise EncodeError(f"nested deeper than {MAX_DEPTH} levels")


def _key(key: object) -> bytes:
    if type(key) is str and len(key) < _CACHE_STR_BELOW:
        return _packed_str(key)
    if isinstance(key, (str, bytes)):
        return _scalar(key)
    raise EncodeError(f"map keys are str or bytes, got {type(key).__name__}")


def _scalar(value: Value) -> bytes:
    try:
        packed: bytes = _pack(value, use_bin_type=True)
    except (OverflowError, ValueError, BufferError) as exc:
        what = f"an int of {value.bit_length()} bits" if isinstance(value, int) else repr(value)[:80]
        raise EncodeError(f"the wire cannot carry {what}: {str(exc)[:80]}") from exc
    return packed


@lru_cache(maxsize=4096)
def _packed_str(text: str) -> bytes:
    return _scalar(text)


def _map_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x80 | count,))
    return struct.pack(">BH", 0xDE, count) if count < 1 << 16 else struct.pack(">BI", 0xDF, count)


def _list_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    return struct.pack(">BH", 0xDC, count) if count < 1 << 16 else struct.pack(">BI", 0xDD, count)


_ARRAY_START_LENGTH = len(ARRAY_START)
_DTYPE_KEY = b"\xc4\x05dtype"
_SHAPE_KEY = b"\xc4\x05shape"
_KEY_LENGTH = len(_DTYPE_KEY)


def decode(message: Buffer, spans: list[tuple[Array, int]] | None = None) -> Value:
    """Return the values of the bytes of one message; hand the map to ``messages.parse``.

    Args:
        message: One whole message. Arrays in the result are views of it.
        spans: Takes each array in the usual form and the offset of its data, for ``wire.learned``.

    Returns:
        What the message holds. ``bytes`` values are copies, arrays are not, bool arrays are normalised copies.

    Raises:
        DecodeError: if it is not exactly one msgpack value within the bounds, or holds an array that is refused [3].
    """
    view = memoryview(message)
    try:
        value, end = _Reader(view, spans).value(0, 0)
    except (IndexError, struct.error) as exc:
        raise DecodeError(
            f"message of {len(view)} bytes ends in the middle of a value{_dialect(view)}", clause="3"
        ) from exc
    except UnicodeDecodeError as exc:
        raise DecodeError(f"a str is not UTF-8: {exc.reason}{_dialect(view)}", clause="3") from exc
    if end != len(view):
        raise DecodeError(f"{len(view) - end} bytes follow the message's value{_dialect(view)}", clause="3")
    return value


def _dialect(view: memoryview) -> str:
    """Name what the bytes look like if they look like something else, since that is what the author must change."""
    start = bytes(view[:2])
    if start[:1] == b"\x80" and start[1:] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        return "; it looks like a Python pickle, which this protocol never carries"
    if start[:1] in {b"{", b"["}:
        return "; it looks like JSON, where msgpack was expected"
    return ""


class _Reader:
    """Decoder of one message, written by hand, so that array data is never copied and every bound is checked first."""

    __slots__ = ("items", "spans", "view")

    def __init__(self, view: memoryview, spans: list[tuple[Array, int]] | None) -> None:
        self.view = view
        self.spans = spans
        self.items = 0

    def value(self, at: int, depth: int) -> tuple[Value, int]:  # noqa: C901 - one case per kind of byte
        view = self.view
        head = view[at]
        if 0xA0 <= head < 0xC0:
            return self._text(at + 1, head & 0x1F)
        if head < 0x80:
            return head, at + 1
        if head < 0x90:
            if head == 0x84 and depth < MAX_DEPTH and view[at : at + _ARRAY_START_LENGTH] == ARRAY_START:
                found = self._usual_array(at + _ARRAY_START_LENGTH)
                if found is not None:
                    return found
            return self._map(at + 1, head & 0x0F, depth)
        if head < 0xA0:
            return self._list(at + 1, head & 0x0F, depth)
        if head >= 0xE0:
            return head - 256, at + 1
        if head in _FIXED:
            form, size, value = _FIXED[head]
            if form is None:
                return value, at + 1
            return form.unpack_from(view, at + 1)[0], at + 1 + size
        if head in _SIZED:
            form, what = _SIZED[head]
            count = form.unpack_from(view, at + 1)[0]
            start = at + 1 + form.size
            if what == "bin":
                return bytes(self._slice(start, count)), start + count
            if what == "str":
                return self._text(start, count)
            if what == "list":
                return self._list(start, count, depth)
            return self._map(start, count, depth)
        if head == 0xC1:
            raise DecodeError(f"byte 0xc1 at offset {at} is not msgpack{_dialect(view)}", clause="3")
        raise DecodeError(
            f"a msgpack ext type (0x{head:02x}) at offset {at}: another numpy dialect; arrays are maps with the bin "
            "keys __ndarray__, data, dtype, shape",
            clause="3",
        )

    def _slice(self, start: int, count: int) -> memoryview:
        if start + count > len(self.view):
            raise DecodeError(
                f"{count} bytes announced at offset {start}, {len(self.view) - start} left in the message"
                f"{_dialect(self.view)}",
                clause="3",
            )
        return self.view[start : start + count]

    def _text(self, start: int, count: int) -> tuple[str, int]:
        return str(self._slice(start, count), "utf-8"), start + count

    def _room(self, count: int, depth: int) -> None:
        """Count the items of a map or list when it announces them, so that a nest of them is bounded in sum."""
        if depth >= MAX_DEPTH:
            raise DecodeError(f"nested deeper than {MAX_DEPTH} levels", clause="3")
        self.items += count
        if self.items > MAX_ITEMS:
            raise DecodeError(f"more than {MAX_ITEMS} items in one message", clause="3")

    def _list(self, at: int, count: int, depth: int) -> tuple[list[Value], int]:
        self._room(count, depth)
        values = []
        for _ in range(count):
            value, at = self.value(at, depth + 1)
            values.append(value)
        return values, at

    def _map(self, at: int, count: int, depth: int) -> tuple[Value, int]:
        self._room(2 * count, depth)
        view = self.view
        found: dict[Any, Value] = {}
        for _ in range(count):
            head = view[at]
            if 0xA0 <= head < 0xC0:  # a short str, as nearly all keys are
                end = at + 1 + (head & 0x1F)
                key: Value = str(view[at + 1 : end], "utf-8")
                at = end
            else:
                key, at = self.value(at, depth + 1)
                if type(key) is not str and type(key) is not bytes:
                    raise DecodeError(f"map keys are str or bin, got {type(key).__name__}", clause="3")
            if key in found:
                raise DecodeError(f"map key {str(key)[:40]!r} stands twice", clause="3")
            sized = _SIZED.get(view[at]) if key == b"data" else None
            if sized is not None and sized[1] == "bin":  # likely an array's, so no copy yet
                start = at + 1 + sized[0].size
                length = sized[0].unpack_from(view, at + 1)[0]
                found[key], at = self._slice(start, length), start + length
            else:
                found[key], at = self.value(at, depth + 1)
        if b"__ndarray__" in found:
            return array_from_map(found), at
        data = found.get(b"data")
        if type(data) is memoryview:
            found[b"data"] = bytes(data)
        if b"__npgeneric__" in found:
            return generic_from_map(found), at
        if not _FOREIGN_MARKS.isdisjoint(found) and _is_foreign_array(found):
            raise DecodeError(
                f"an array in another numpy dialect (keys {sorted(str(key)[:20] for key in found)[:8]}): expected the "
                "bin keys __ndarray__, data, dtype, shape",
                clause="3",
            )
        return found, at

    def _usual_array(self, at: int) -> tuple[Array, int] | None:
        """Read an array whose keys stand in the usual order; None if they do not."""
        view = self.view
        sized = _SIZED.get(view[at])
        if sized is None or sized[1] != "bin":
            return None
        form = sized[0]
        start = at + 1 + form.size
        stop = start + form.unpack_from(view, at + 1)[0]
        if view[stop : stop + _KEY_LENGTH] != _DTYPE_KEY:
            return None
        at = stop + _KEY_LENGTH + 1
        head = view[at - 1]
        end = at + (head & 0x1F)
        if not 0xA0 <= head < 0xC0 or view[end : end + _KEY_LENGTH] != _SHAPE_KEY:
            return None
        extents = end + _KEY_LENGTH + 1
        ndim = view[extents - 1] - 0x90
        if not 0 <= ndim < 16:
            return None
        after = extents + ndim
        shape = bytes(view[extents:after])
        if len(shape) == ndim and shape.isascii():  # every extent below 128 is its own byte
            lengths = list(shape)
        else:
            lengths = []
            after = extents
            for _ in range(ndim):
                extent, after = self.value(after, MAX_DEPTH)
                if type(extent) is not int or extent < 0:
                    return None
                lengths.append(extent)
        self._room(_ARRAY_ITEMS, 0)
        array = array_from(view[start:stop], dtype_of(str(view[at:end], "utf-8")), lengths)
        if self.spans is not None:
            self.spans.append((array, start))
        return array, after


_FOREIGN_MARKS = frozenset({"__ndarray__", "__npgeneric__", "nd", b"nd"})


def _is_foreign_array(found: dict[Any, Value]) -> bool:
    """Return whether a map has str keys in place of bin, or is msgpack-numpy's; a user's own key ``nd`` is neither."""
    if "nd" in found or b"nd" in found:
        return {"nd", "type", "data"} <= found.keys() or {b"nd", b"type", b"data"} <= found.keys()
    return {"data", "dtype"} <= found.keys()


_FIXED: dict[int, tuple[struct.Struct | None, int, Value]] = {
    0xC0: (None, 0, None),
    0xC2: (None, 0, False),
    0xC3: (None, 0, True),
    **{
        head: (struct.Struct(form), struct.calcsize(form), None)
        for head, form in (
            (0xCA, ">f"), (0xCB, ">d"), (0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"),
            (0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"),
        )
    },
}  # fmt: skip
_SIZED: dict[int, tuple[struct.Struct, str]] = {
    head: (struct.Struct(form), what)
    for head, form, what in (
        (0xC4, ">B", "bin"), (0xC5, ">H", "bin"), (0xC6, ">I", "bin"),
        (0xD9, ">B", "str"), (0xDA, ">H", "str"), (0xDB, ">I", "str"),
        (0xDC, ">H", "list"), (0xDD, ">I", "list"), (0xDE, ">H", "map"), (0xDF, ">I", "map"),
    )
}  # fmt: skip
