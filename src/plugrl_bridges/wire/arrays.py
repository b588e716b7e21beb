"""The form in which one array or one numpy scalar travels [3]: its dtype, its shape and its bytes.

Knows nothing of msgpack's other values, which are the concern of ``codec``, its only caller beside ``info`` and
``plugrl_bridges.spaces``. Array data is not copied: an array that is read is a view of the message's bytes.
"""

from __future__ import annotations

import math
import re
import struct
from functools import lru_cache
from typing import Any, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from plugrl_bridges.errors import DecodeError, EncodeError

__all__ = [
    "ARRAY_START",
    "JOIN_BELOW_BYTES",
    "MAX_NDIM",
    "MAX_TEXT_LENGTH",
    "Array",
    "Buffer",
    "Value",
    "array_from",
    "array_from_map",
    "array_to_parts",
    "data_of",
    "dtype_of",
    "generic_from_map",
    "generic_to_map",
    "is_unicode",
]

Array: TypeAlias = NDArray[Any]
Buffer: TypeAlias = "bytes | memoryview"
Value: TypeAlias = Any
"""What msgpack carries: None, bool, int, float, str, bytes, list, dict, and arrays."""

MAX_NDIM = 32
"""Numpy's own limit before version 2."""
JOIN_BELOW_BYTES = 1 << 14
"""Arrays below this are copied into the message: a copy is cheaper than one more buffer in the system call."""
ARRAY_START = b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data"
"""How an array begins whose keys stand in the usual order, which is that of openpi's msgpack_numpy."""

_TYPESTR = re.compile(r"([<>|])([biufU])([1-9][0-9]{0,5})")
MAX_TEXT_LENGTH = 999_999
"""Characters that the typestr of a text array can state: six digits."""
_ITEMSIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}
_NDARRAY_KEYS = {b"__ndarray__", b"data", b"dtype", b"shape"}
_NPGENERIC_KEYS = {b"__npgeneric__", b"data", b"dtype"}


@lru_cache(maxsize=256)
def dtype_of(typestr: str) -> np.dtype[Any]:
    """Return the dtype of a typestr.

    Raises:
        DecodeError: unless it is a byte order (``<``, ``>``, or ``|`` for one byte), a kind of b, i, u, f or U, and a
            size that the kind has [3].
    """
    match = _TYPESTR.fullmatch(typestr)
    if match is None:
        raise DecodeError(
            f"dtype {typestr[:40]!r} is refused: expected a byte order (<, > or |), a kind of b, i, u, f or U, a size",
            clause="3",
        )
    order, kind, size = match[1], match[2], int(match[3])
    if kind != "U" and size not in _ITEMSIZES[kind]:
        raise DecodeError(f"dtype {typestr!r} is refused: kind {kind} has sizes {_ITEMSIZES[kind]}", clause="3")
    if order == "|" and (kind == "U" or size > 1):
        raise DecodeError(f"dtype {typestr!r} states no byte order: expected < or >", clause="3")
    return np.dtype(typestr)


def is_unicode(data: Buffer, dtype: np.dtype[Any]) -> bool:
    """Return whether the bytes of a text array are UTF-32: numpy itself would take any four bytes [3.4]."""
    try:
        str(data, "utf-32-be" if dtype.str[0] == ">" else "utf-32-le")
    except UnicodeDecodeError:
        return False
    return True


def array_to_parts(array: Array) -> tuple[bytes, Buffer, bytes]:
    """Return the bytes before an array's data, the data in C order (a view if they are many), and the bytes after it.

    Raises:
        EncodeError: for a refused dtype, too many dimensions, or text that is no Unicode.
    """
    before, after = _frame(array.dtype.str, array.shape)
    return before, data_of(array), after


def data_of(array: Array) -> Buffer:
    """Return an array's data in C order; a view if they are many.

    Raises:
        EncodeError: for text that is no Unicode.
    """
    data: Buffer = (
        array.tobytes()
        if array.nbytes < JOIN_BELOW_BYTES
        else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    )
    if array.dtype.kind == "U" and not is_unicode(data, array.dtype):
        raise EncodeError("a text array holds a surrogate, which is not a character")
    return data


@lru_cache(maxsize=1024)
def _frame(typestr: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    if len(shape) > MAX_NDIM:
        raise EncodeError(f"an array of {len(shape)} dimensions; the wire carries {MAX_NDIM}")
    header = _bin_header(math.prod(shape) * _sendable(typestr).itemsize)
    return ARRAY_START + header, b"\xc4\x05dtype" + msgpack.packb(typestr) + b"\xc4\x05shape" + msgpack.packb(shape)


def _bin_header(count: int) -> bytes:
    if count < 1 << 8:
        return bytes((0xC4, count))
    if count < 1 << 16:
        return struct.pack(">BH", 0xC5, count)
    if count < 1 << 32:
        return struct.pack(">BI", 0xC6, count)
    raise EncodeError(f"an array of {count} bytes is longer than msgpack's 4 GiB")


def _sendable(typestr: str) -> np.dtype[Any]:
    try:
        return dtype_of(typestr)
    except DecodeError as exc:
        raise EncodeError(
            f"the wire cannot carry dtype {typestr!r}: bool, int, uint, float16/32/64 and str only"
        ) from exc


def generic_to_map(scalar: np.generic) -> dict[bytes, Value]:
    """Return the map in which a numpy scalar travels.

    Raises:
        EncodeError: for a refused dtype.
    """
    _sendable(scalar.dtype.str)
    return {b"__npgeneric__": True, b"data": scalar.item(), b"dtype": scalar.dtype.str}


def array_from_map(found: dict[Any, Value]) -> Array:
    """Return the array of a map with the key ``__ndarray__``.

    Raises:
        DecodeError: as `array_from`, or if the map has another key, lacks one, or a value is of the wrong type.
    """
    _check_keys(found, _NDARRAY_KEYS, "an array")
    data, shape = found[b"data"], found[b"shape"]
    if not isinstance(data, (bytes, memoryview)):
        raise DecodeError(f"an array's data must be bin, got {type(data).__name__}", clause="3")
    if not isinstance(shape, list):
        raise DecodeError(f"a shape must be a list of ints, got {type(shape).__name__}", clause="3")
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise DecodeError(f"a shape must hold non-negative ints, got {str(extent)[:40]}", clause="3")
    return array_from(memoryview(data), _dtype_in(found), shape)


def array_from(data: memoryview, dtype: np.dtype[Any], shape: list[int]) -> Array:
    """Return an array that is a view of ``data``; bools are normalised, hence copied.

    Args:
        data: Exactly the array's bytes.
        dtype: As `dtype_of` gives it.
        shape: Non-negative ints.

    Raises:
        DecodeError: if the length of the data is not that of the shape, or the array is not one that numpy can hold.
    """
    if len(shape) > MAX_NDIM:
        raise DecodeError(f"a shape of {len(shape)} dimensions, at most {MAX_NDIM} are allowed", clause="3")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise DecodeError(
            f"array of dtype {dtype.str!r}, shape {str(shape)[:80]} needs {str(expected)[:20]} bytes, got {len(data)}",
            clause="3",
        )
    try:
        array: Array = np.ndarray(shape, dtype, data if expected else None)
    except (ValueError, OverflowError) as exc:  # extents beyond what numpy counts with, possible only beside a zero
        raise DecodeError(f"shape {str(shape)[:80]} is too large: {exc}", clause="3") from exc
    if dtype.kind == "b":
        # A bool that is neither 0 nor 1 is undefined in numpy; what the peer meant by it is "true".
        return array.view(np.uint8).astype(np.bool_)
    if dtype.kind == "U" and not is_unicode(data, dtype):
        raise DecodeError(f"a text array of dtype {dtype.str!r} holds what is no Unicode", clause="3.4")
    return array


def generic_from_map(found: dict[Any, Value]) -> np.generic:
    """Return the numpy scalar of a map with the key ``__npgeneric__``.

    Raises:
        DecodeError: if the map has another key, lacks one, or the value is not one of the dtype.
    """
    _check_keys(found, _NPGENERIC_KEYS, "a numpy scalar")
    data, dtype = found[b"data"], _dtype_in(found)
    if not isinstance(data, str if dtype.kind == "U" else (bool, int, float)):
        raise DecodeError(f"a numpy scalar of dtype {dtype.str!r} holds a {type(data).__name__}", clause="3")
    if isinstance(data, str):
        if 4 * len(data) > dtype.itemsize:
            raise DecodeError(f"{len(data)} characters do not fit dtype {dtype.str!r}", clause="3")
        return np.str_(data)
    try:
        with np.errstate(over="ignore"):
            scalar: np.generic = dtype.type(data)
        same = math.isinf(scalar) == math.isinf(data) if dtype.kind == "f" else scalar == data
    except (OverflowError, ValueError) as exc:
        raise DecodeError(f"{data!r} does not fit dtype {dtype.str!r}", clause="3") from exc
    if not same:
        raise DecodeError(f"{data!r} does not fit dtype {dtype.str!r}", clause="3")
    return scalar


def _check_keys(found: dict[Any, Value], keys: set[bytes], what: str) -> None:
    if found.keys() != keys:
        for key in sorted(keys - found.keys()):
            raise DecodeError(f"{what} without its {key!r} key", clause="3")
        extra = [str(key)[:40] for key in found if key not in keys]
        raise DecodeError(f"{what} with unknown keys {extra[:4]}: data is in C order, nothing else is told", clause="3")
    mark = next(iter(keys & {b"__ndarray__", b"__npgeneric__"}))
    if found[mark] is not True:
        raise DecodeError(f"{what} whose {mark!r} is not true", clause="3")


def _dtype_in(found: dict[Any, Value]) -> np.dtype[Any]:
    typestr = found[b"dtype"]
    if isinstance(typestr, bytes):
        typestr = typestr.decode("ascii", "replace")
    if not isinstance(typestr, str):
        raise DecodeError(f"a dtype must be a str such as '<f4', got {type(typestr).__name__}", clause="3")
    return dtype_of(typestr)
