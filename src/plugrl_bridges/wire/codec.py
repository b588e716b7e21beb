"""Own the bytes of protocol version 1: msgpack with arrays inside [3].

Knows nothing of message types, sessions, sockets or clocks. ``messages`` is the caller: it asks for `encode` on the
way out and for `decode` on the way in.

Array data is never copied here. `encode` returns a list of buffers, of which the large ones are views of the arrays;
`decode` returns arrays that are views of the message. Whoever keeps an array longer than the message copies it.

Everything a peer sends is bounded before it is believed: nesting, the number of items, and the length of every array
against its data. Only `DecodeError` leaves `decode`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from plugrl_bridges.errors import DecodeError, EncodeError

__all__ = ["MAX_DEPTH", "MAX_ITEMS", "Array", "Buffer", "Value", "decode", "encode"]

MAX_DEPTH = 32
"""Maps and lists may be nested this deep; a message of this protocol needs six levels."""
MAX_ITEMS = 1_000_000
"""Items (keys, values, elements; array data is one) in one message: it bounds the memory that tiny items can cost."""

Array: TypeAlias = NDArray[Any]
Buffer: TypeAlias = "bytes | memoryview"
Value: TypeAlias = Any
"""What msgpack carries: None, bool, int, float, str, bytes, list, dict, and arrays."""

_JOIN_BELOW_BYTES = 1 << 16  # below this a copy is cheaper than one more buffer in the system call
_TYPESTR = re.compile(r"([<>|])([biufU])([1-9][0-9]{0,5})")
_ITEMSIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}
_MAX_NDIM = 32  # numpy's own limit before version 2
_pack = msgpack.packb

def encode(value: Value) -> list[Buffer]:
    """Turn ``value`` into the buffers of one message; hand them to the transport's ``send`` as one message.

    Args:
        value: None, bool, int, float, str, bytes, lists, tuples and str- or bytes-keyed maps of them, and numpy arrays
            and scalars of kinds b, i, u, f and U. Arrays that are not in C order are copied into it.

    Returns:
        Buffers whose concatenation is the message. Large arrays are views: do not write to them before they are sent.

    Raises:
        EncodeError: for any other type, a refused dtype (object, structured, complex [3]), or too deep nesting.
    """
    out: list[Buffer] = []
    _encode(value, out, 0)
    total = sum(map(len, out))
    if total < _JOIN_BELOW_BYTES:
        return [b"".join(out)]
    return _join_small(out)


def _join_small(parts: list[Buffer]) -> list[Buffer]:
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for part in parts:
        if len(part) < _JOIN_BELOW_BYTES // 4:
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
        out.append(_packed_str(value))
    elif isinstance(value, np.ndarray):
        before, after = _array_frame(value.dtype.str, value.shape)
        out.append(before)
        out.append(_data_of(value))
        out.append(after)
    elif isinstance(value, Mapping):
        _enter(depth)
        out.append(_map_header(len(value)))
        for key, item in value.items():
            if isinstance(key, str):
                out.append(_packed_str(key))
            elif isinstance(key, bytes):
                out.append(_scalar(key))
            else:
                raise EncodeError(f"map keys are str or bytes, got {type(key).__name__} {key!r}")
            _encode(item, out, depth + 1)
    elif isinstance(value, (list, tuple)):
        _enter(depth)
        out.append(_list_header(len(value)))
        for item in value:
            _encode(item, out, depth + 1)
    elif isinstance(value, np.generic):
        _typestr_for(value.dtype.str)
        _encode({b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}, out, depth)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, bytearray, memoryview)):
        out.append(_scalar(value))
    else:
        raise EncodeError(f"the wire cannot carry a {kind.__module__}.{kind.__qualname__}; expected numbers, str, bytes, "
                          "lists, maps or numpy arrays")


def _enter(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise EncodeError(f"nested deeper than {MAX_DEPTH} levels")


def _scalar(value: Value) -> bytes:
    try:
        packed: bytes = _pack(value, use_bin_type=True)
    except (OverflowError, ValueError) as exc:
        raise EncodeError(f"the wire cannot carry {value!r}: {exc}") from exc
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


def _bin_header(count: int) -> bytes:
    if count < 1 << 8:
        return bytes((0xC4, count))
    if count < 1 << 16:
        return struct.pack(">BH", 0xC5, count)
    if count < 1 << 32:
        return struct.pack(">BI", 0xC6, count)
    raise EncodeError(f"an array of {count} bytes is longer than msgpack's 4 GiB")


@lru_cache(maxsize=1024)
def _array_frame(typestr: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Give the bytes before and after an array's data; the key order is that of openpi's msgpack_numpy [3]."""
    dtype = _typestr_for(typestr)
    before = b"\x84" + _pack(b"__ndarray__") + b"\xc3" + _pack(b"data") + _bin_header(math.prod(shape) * dtype.itemsize)
    return before, _pack(b"dtype") + _pack(typestr) + _pack(b"shape") + _pack(shape)


def _typestr_for(typestr: str) -> np.dtype[Any]:
    try:
        return _dtype_of(typestr)
    except DecodeError as exc:
        raise EncodeError(f"the wire cannot carry dtype {typestr!r}: bool, int, uint, float16/32/64 and str only") from exc


def _data_of(array: Array) -> Buffer:
    if array.nbytes < _JOIN_BELOW_BYTES // 4:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


_ARRAY_START = b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data"
_ARRAY_START_LENGTH = len(_ARRAY_START)
_DTYPE_KEY = b"\xc4\x05dtype"
_SHAPE_KEY = b"\xc4\x05shape"
_KEY_LENGTH = len(_DTYPE_KEY)


def decode(message: Buffer) -> Value:
    """Turn the bytes of one message into values; hand the map to ``messages.parse``.

    Args:
        message: One whole message. Arrays in the result are views of it.

    Returns:
        What the message holds. ``bytes`` values are copies, arrays are not, bool arrays are normalised copies.

    Raises:
        DecodeError: if it is not exactly one msgpack value within the bounds, or holds an array that is refused [3].
    """
    view = memoryview(message)
    reader = _Reader(view)
    try:
        value, end = reader.value(0, 0)
    except (IndexError, struct.error) as exc:
        raise DecodeError(f"message of {len(view)} bytes ends in the middle of a value{_dialect(view)}", clause="3") from exc
    except UnicodeDecodeError as exc:
        raise DecodeError(f"a str is not UTF-8: {exc}{_dialect(view)}", clause="3") from exc
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
    """Walk one message. A hand-written walk, so that array data is never copied and every bound is checked first."""

    __slots__ = ("items", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.items = 0

    def value(self, at: int, depth: int) -> tuple[Value, int]:  # noqa: C901, PLR0911, PLR0912
        view = self.view
        self.items += 1
        head = view[at]
        if 0xA0 <= head < 0xC0:
            return self._text(at + 1, head & 0x1F)
        if head < 0x80:
            return head, at + 1
        if head < 0x90:
            if head == 0x84 and view[at : at + _ARRAY_START_LENGTH] == _ARRAY_START:
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
            raise DecodeError(f"byte 0xc1 at offset {at} is no msgpack{_dialect(view)}", clause="3")
        raise DecodeError(
            f"a msgpack ext type (0x{head:02x}) at offset {at}: another numpy dialect; arrays are maps with the bin keys "
            "__ndarray__, data, dtype, shape",
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
        if depth >= MAX_DEPTH:
            raise DecodeError(f"nested deeper than {MAX_DEPTH} levels", clause="3")
        if self.items + count > MAX_ITEMS:
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
        found: dict[Any, Value] = {}
        for _ in range(count):
            key, at = self.value(at, depth + 1)
            if not isinstance(key, (str, bytes)):
                raise DecodeError(f"map keys are str or bin, got {type(key).__name__}", clause="3")
            if key in found:
                raise DecodeError(f"map key {key!r} stands twice", clause="3")
            found[key], at = self.value(at, depth + 1)
        if b"__ndarray__" in found:
            return _array_of(found), at
        if b"__npgeneric__" in found:
            return _generic_of(found), at
        if "__ndarray__" in found or b"nd" in found or "nd" in found:
            raise DecodeError(
                f"an array in another numpy dialect (keys {sorted(map(str, found))}): expected the bin keys __ndarray__, "
                "data, dtype, shape",
                clause="3",
            )
        return found, at

    def _usual_array(self, at: int) -> tuple[Array, int] | None:
        """Read an array whose keys stand in the usual order; None sends the caller down the general road."""
        view = self.view
        sized = _SIZED.get(view[at])
        if sized is None or sized[1] != "bin":
            return None
        form = sized[0]
        count = form.unpack_from(view, at + 1)[0]
        start = at + 1 + form.size
        at = start + count
        if view[at : at + _KEY_LENGTH] != _DTYPE_KEY:
            return None
        head = view[at + _KEY_LENGTH]
        at += _KEY_LENGTH + 1
        end = at + (head & 0x1F)
        if not 0xA0 <= head < 0xC0 or view[end : end + _KEY_LENGTH] != _SHAPE_KEY:
            return None
        dtype = _dtype_of(str(view[at:end], "utf-8"))
        self.items += 8
        shape, at = self.value(end + _KEY_LENGTH, MAX_DEPTH - 1)
        return _array_from(view[start : start + count], dtype, shape), at


def _array_of(found: dict[Any, Value]) -> Array:
    try:
        data, typestr, shape = found[b"data"], found[b"dtype"], found[b"shape"]
    except KeyError as exc:
        raise DecodeError(f"an array without its {exc.args[0]!r} key", clause="3") from exc
    if not isinstance(data, bytes):
        raise DecodeError(f"an array's data must be bin, got {type(data).__name__}", clause="3")
    return _array_from(memoryview(data), _dtype_of(_typestr_from(typestr)), shape)


def _typestr_from(typestr: Value) -> str:
    if isinstance(typestr, bytes):
        typestr = typestr.decode("ascii", "replace")
    if not isinstance(typestr, str):
        raise DecodeError(f"a dtype must be a str such as '<f4', got {type(typestr).__name__}", clause="3")
    return typestr


def _array_from(data: memoryview, dtype: np.dtype[Any], shape: Value) -> Array:
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM:
        raise DecodeError(f"a shape must be a list of at most {_MAX_NDIM} ints, got {str(shape)[:80]}", clause="3")
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise DecodeError(f"a shape must hold non-negative ints, got {str(shape)[:80]}", clause="3")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise DecodeError(
            f"array of dtype {dtype.str!r} and shape {shape} needs {expected} bytes, got {len(data)}", clause="3"
        )
    try:
        flat: Array = np.frombuffer(data, dtype) if expected else np.empty(0, dtype)
        array = flat if len(shape) == 1 else flat.reshape(shape)
    except ValueError as exc:  # extents beyond what numpy counts with, possible only beside a zero
        raise DecodeError(f"shape {str(shape)[:80]} is too large: {exc}", clause="3") from exc
    # A bool that is neither 0 nor 1 is undefined in numpy; what the peer meant by it is "true".
    return array.view(np.uint8) != 0 if dtype.kind == "b" else array


def _generic_of(found: dict[Any, Value]) -> np.generic:
    try:
        data, typestr = found[b"data"], found[b"dtype"]
    except KeyError as exc:
        raise DecodeError(f"a numpy scalar without its {exc.args[0]!r} key", clause="3") from exc
    dtype = _dtype_of(_typestr_from(typestr))
    expected = str if dtype.kind == "U" else (bool, int, float)
    if not isinstance(data, expected):
        raise DecodeError(f"a numpy scalar of dtype {dtype.str!r} holds a {type(data).__name__}", clause="3")
    try:
        scalar: np.generic = np.array(data, dtype)[()]
    except (OverflowError, ValueError) as exc:
        raise DecodeError(f"{data!r} does not fit dtype {dtype.str!r}", clause="3") from exc
    return scalar


@lru_cache(maxsize=256)
def _dtype_of(typestr: str) -> np.dtype[Any]:
    match = _TYPESTR.fullmatch(typestr)
    if match is None:
        raise DecodeError(
            f"dtype {typestr[:40]!r} is refused: expected a byte order (<, > or |), a kind of b, i, u, f or U, and a size",
            clause="3",
        )
    order, kind, size = match[1], match[2], int(match[3])
    if kind != "U" and size not in _ITEMSIZES[kind]:
        raise DecodeError(f"dtype {typestr!r} is refused: kind {kind} has sizes {_ITEMSIZES[kind]}", clause="3")
    if order == "|" and (kind == "U" or size > 1):
        raise DecodeError(f"dtype {typestr!r} states no byte order: expected < or >", clause="3")
    return np.dtype(typestr)


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
