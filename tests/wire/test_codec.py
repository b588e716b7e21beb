from __future__ import annotations

import math
import struct
import tracemalloc
from collections import OrderedDict
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from plugrl_bridges.errors import DecodeError, EncodeError, RemoteProtocolError
from plugrl_bridges.wire.codec import MAX_DEPTH, MAX_ITEMS, decode, encode
from plugrl_bridges.wire.messages import parse_bytes
from tests.vectors.generate import HERE

if TYPE_CHECKING:
    from collections.abc import Callable

VECTORS = sorted(HERE.rglob("*.bin"))
MIB = 1 << 20

quick = settings(deadline=None, max_examples=150)

# Text of UTF-32 in numpy loses trailing NULs, by numpy's own rule.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.text(characters, max_size=40)
ints = st.integers(-(2**63), 2**64 - 1)
leaves = st.none() | st.booleans() | ints | st.floats(allow_nan=False) | texts | st.binary(max_size=40)
# What makes a map an array, in one dialect or another, is no key of a plain map.
keys = (texts | st.binary(max_size=4)).filter(lambda key: key not in {"__ndarray__", "__npgeneric__", "nd", b"nd"})
plain_values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=18) | st.dictionaries(keys, inner, max_size=18),
    max_leaves=60,
)
dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.unicode_string_dtypes(endianness="?", min_len=1, max_len=6),
)
shapes = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(dtypes)
    elements = st.text(characters, max_size=dtype.itemsize // 4) if dtype.kind == "U" else None
    array = draw(hnp.arrays(dtype, draw(shapes), elements=elements))
    form = draw(st.sampled_from(["as made", "transposed", "every other", "backwards", "Fortran", "read-only"]))
    if form == "transposed":
        array = array.T
    elif form == "every other" and array.ndim:
        array = array[::2]
    elif form == "backwards" and array.ndim:
        array = array[..., ::-1]
    elif form == "Fortran":
        array = np.asfortranarray(array)
    elif form == "read-only":
        array.flags.writeable = False
    return array


values = st.recursive(
    leaves | arrays(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=12,
)


def packed(value: Any) -> bytes:
    return b"".join(encode(value))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict) and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, (list, tuple)):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@quick
@given(values)
def test_values_with_arrays_round_trip(value: Any) -> None:
    data = packed(value)
    assert same(value, decode(data))
    assert packed(decode(data)) == data


@quick
@given(arrays())
def test_arrays_of_every_dtype_shape_and_layout_round_trip(array: Any) -> None:
    assert same(array, decode(packed(array)))


@quick
@given(plain_values)
def test_encoding_without_arrays_is_plain_msgpack(value: Any) -> None:
    assert packed(value) == msgpack.packb(value)


@quick
@given(plain_values, st.booleans())
def test_decoding_without_arrays_agrees_with_msgpack(value: Any, single: bool) -> None:
    try:
        data = msgpack.packb(value, use_single_float=single)
    except OverflowError:  # a float that no float 32 holds
        data = msgpack.packb(value)
    expected = msgpack.unpackb(data, strict_map_key=False)
    assert same(decode(data), expected)


def only_decode_errors(data: bytes) -> None:
    """Decode and parse; nothing but these two errors may leave."""
    with suppress(RemoteProtocolError):
        parse_bytes(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_only_raise_protocol_errors(data: bytes) -> None:
    only_decode_errors(data)


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_mutated_vectors_only_raise_protocol_errors(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from(VECTORS)).read_bytes()[:4000])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole)))
        change = data.draw(st.sampled_from(["replace", "insert", "cut", "repeat"]))
        if change == "replace":
            whole[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
        elif change == "insert":
            whole[at:at] = data.draw(st.binary(min_size=1, max_size=5))
        elif change == "cut":
            del whole[at : at + data.draw(st.integers(1, 20))]
        else:
            whole[at:at] = whole[at : at + data.draw(st.integers(1, 30))]
    only_decode_errors(bytes(whole))


@quick
@given(st.data())
def test_every_prefix_of_a_message_is_refused(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([path for path in VECTORS if path.parent.name == "messages"])).read_bytes()
    with pytest.raises(DecodeError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def array_map(data: bytes, dtype: Any, shape: Any) -> bytes:
    wire: bytes = msgpack.packb({b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape})
    return wire


def swapped(data: bytes, dtype: Any, shape: Any) -> bytes:
    """The same array with its keys in an order that only the general reader takes."""
    wire: bytes = msgpack.packb({b"shape": shape, b"dtype": dtype, b"data": data, b"__ndarray__": True})
    return wire


@pytest.mark.parametrize("wire", [array_map, swapped])
@pytest.mark.parametrize(
    ("data", "dtype", "shape"),
    [
        (b"", "<f4", [0, 2**62]),
        (b"", "<f4", [2**64 - 1, 0]),
        (b"", "<f4", [2**32, 2**32, 0]),
        (b"", "<f4", [2**64 - 1] * 31 + [0]),
        (b"", "<f4", [2**64 - 1] * 32),
        (bytes(4), "<f4", [2**40]),
        (bytes(4), "<f4", [1] * 33),
        (bytes(4), "<f4", [1] * 70),
        (bytes(4), "<f4", [2**64 - 1] * 20_000),
        (bytes(4), "<f4", [[1]]),
        (bytes(4), "<f4", [None]),
        (bytes(4), "<f4", [-1]),
        (bytes(4), "<f4", {"a": 1}),
        (bytes(4), "<U1000000", [0]),
        (bytes(4), "<U99999999999999999999", [1]),
        (bytes(4), "x" * 100_000, [1]),
        (bytes(4), ["<f4"], [1]),
        (bytes(4), {"names": ["a"]}, [1]),
        (bytes(4), b"\xff\xff", [1]),
        (bytes(4), None, [1]),
    ],
)
def test_arrays_that_lie_are_refused_on_both_roads(
    wire: Callable[[bytes, Any, Any], bytes],
    data: bytes,
    dtype: Any,
    shape: Any,
) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(wire(data, dtype, shape))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("wire", [array_map, swapped])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("<f4", [2, 1]), ("<f4", [1] * 20 + [2]), ("<u1", [8]), (b"<f8", [1]), ("<U2", []), (">i2", [4])],
)
def test_both_roads_read_the_same(wire: Callable[[bytes, Any, Any], bytes], dtype: Any, shape: list[int]) -> None:
    data = b"\x01\0\0\0\x02\0\0\0"
    found = decode(wire(data, dtype, shape))
    assert found.shape == tuple(shape)
    assert found.dtype == np.dtype(dtype if isinstance(dtype, str) else dtype.decode())
    assert found.tobytes() == data


@pytest.mark.parametrize("wire", [array_map, swapped])
@pytest.mark.parametrize("dtype", ["<f4", b"<f4"])
def test_decoded_arrays_are_views_that_see_the_buffer(
    wire: Callable[[bytes, Any, Any], bytes], dtype: str | bytes
) -> None:
    whole = wire(np.arange(3, dtype="<f4").tobytes(), dtype, [3])
    buffer = bytearray(msgpack.packb({"a": 1})[:1] + b"\xa1a" + whole)
    found = decode(memoryview(buffer))["a"]
    assert np.shares_memory(found, np.frombuffer(buffer, np.uint8))
    at = buffer.index(struct.pack("<f", 2.0))
    buffer[at : at + 4] = struct.pack("<f", 7.0)
    assert found.tolist() == [0.0, 1.0, 7.0]
    assert not decode(bytes(buffer))["a"].flags.writeable


def test_bool_arrays_are_copies_of_true_and_false() -> None:
    found = decode(array_map(b"\x00\x01\x02\xff", "|b1", [2, 2]))
    assert found.view(np.uint8).tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize("value", [True, 2.5, "ab"])
def test_arrays_without_dimensions_stay_arrays(value: Any) -> None:
    found = decode(packed(np.array(value)))
    assert isinstance(found, np.ndarray)
    assert found.shape == ()
    assert found == value


def test_large_arrays_are_sent_as_views_and_small_ones_in_one_buffer() -> None:
    large, small = np.zeros((300, 300), np.float32), np.zeros(10)
    buffers = encode({"a": small, "b": large, "c": small})
    assert [type(part) for part in buffers] == [bytes, memoryview, bytes]
    assert np.shares_memory(np.frombuffer(buffers[1], np.uint8), large)
    assert len(encode({"a": small, "c": small})) == 1
    assert same(decode(b"".join(buffers)), {"a": small, "b": large, "c": small})


class Colour(IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ((1, (2,)), [1, [2]]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (Colour.RED, 3),
        (np.float64(0.1), 0.1),
        (np.str_("ab"), "ab"),
        (np.bytes_(b"ab"), b"ab"),
        (np.float16(0.1), np.float16(0.1)),
        (np.uint64(2**64 - 1), np.uint64(2**64 - 1)),
        (np.bool_(True), np.bool_(True)),
        (np.float32("inf"), np.float32("inf")),
        ({np.str_("k"): 1, b"k": 2}, {"k": 1, b"k": 2}),
        ({"nd": 1, "type": "x"}, {"nd": 1, "type": "x"}),
        ({"__ndarray__": 1, "data": 2}, {"__ndarray__": 1, "data": 2}),
        ({b"data": b"x"}, {b"data": b"x"}),
        ("x" * 5000, "x" * 5000),
    ],
)
def test_other_values_travel_as_what_they_are(value: Any, expected: Any) -> None:
    assert same(decode(packed(value)), expected)


def test_nan_scalars_round_trip() -> None:
    assert math.isnan(decode(packed(math.nan)))
    assert math.isnan(decode(packed(np.float32("nan"))))


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**63) - 1,
        10**5000,
        "\ud800",
        {"\udfff": 1},
        "\ud800" * 1000,
        np.array(["a\ud800"]),
        {1: 2},
        {10**5000: 2},
        {None: 2},
        {(1, 2): 3},
        {1.5, 2},
        object(),
        1j,
        np.array([object()]),
        np.array([1j]),
        np.array([b"raw"]),
        np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.complex64(1),
        np.datetime64("2020-01-01"),
        memoryview(b"abcdef")[::2],
        range(3),
        dict,
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_what_the_wire_cannot_carry_is_an_encode_error(value: Any) -> None:
    with pytest.raises(EncodeError) as caught:
        encode({"key": [value]})
    assert len(str(caught.value)) < 300


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="there is no wider float here")
def test_long_double_is_an_encode_error() -> None:
    for value in (np.zeros(2, np.longdouble), np.longdouble(1)):
        with pytest.raises(EncodeError, match="dtype"):
            encode(value)


def nest(value: Any, levels: int) -> Any:
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def test_both_ends_draw_the_same_line_of_depth() -> None:
    array = np.arange(2)
    assert decode(packed(nest(1, MAX_DEPTH))) == nest(1, MAX_DEPTH)
    assert packed(decode(packed(nest(array, MAX_DEPTH - 1)))) == packed(nest(array, MAX_DEPTH - 1))
    for value in (nest(1, MAX_DEPTH + 1), nest(array, MAX_DEPTH), nest(np.int8(1), MAX_DEPTH), nest([], MAX_DEPTH)):
        with pytest.raises(EncodeError, match="nested deeper"):
            encode(value)
        with pytest.raises(DecodeError, match="nested deeper"):
            decode(msgpack.packb(value, default=_as_map))


def _as_map(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def test_a_value_that_holds_itself_is_an_encode_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodeError, match="nested deeper"):
        encode(loop)


def peak_of(data: bytes) -> int:
    """Bytes that decoding needs at its peak, whether it fails or not."""
    tracemalloc.start()
    try:
        only_decode_errors(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x81" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdd\x00\x0f\x42\x3f" * 30,
        b"\xc9\xff\xff\xff\xff\x01",
        array_map(b"", "<f8", [0, 2**40]),
        array_map(b"", "<U999999", [0, 1]),
        array_map(b"", "<f8", [2**40, 2**40]),
        msgpack.packb({b"__npgeneric__": True, b"data": "", b"dtype": "<U999999"}),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_bombs_cost_next_to_nothing(data: bytes) -> None:
    assert peak_of(data) < MIB


def test_items_are_bounded_in_sum_over_all_levels() -> None:
    """A quarter of the bound in each of eight lists, one in the other: every list by itself is within it."""
    quarter = MAX_ITEMS // 4
    body = b"\xc0" * (quarter - 1)
    data = b"\xc0"
    for _ in range(8):
        data = b"\xdd" + struct.pack(">I", quarter) + data + body
    with pytest.raises(DecodeError, match="items in one message"):
        decode(data)


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xa0", b"\xca\0\0\0\1"], ids=["list", "map", "str", "float"])
def test_tiny_items_cost_a_bounded_sum(item: bytes) -> None:
    count = MAX_ITEMS // 20
    data = b"\xdd" + struct.pack(">I", count) + item * count
    assert peak_of(data) < MIB + 100 * count


def test_tiny_arrays_count_as_the_nine_items_they_are() -> None:
    array = packed(np.empty(0))
    count = MAX_ITEMS // 9 + 1
    data = b"\xdd" + struct.pack(">I", count) + array * count
    with pytest.raises(DecodeError, match="items in one message"):
        decode(data)


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (256, "|u1"), (-1, "<u4"), (1.5, "<i4"), (math.inf, "<i4"), (math.nan, "<i4"), (2, "|b1"), (1e300, "<f4"),
        (1e6, "<f2"),
        (2**63, "<i8"), ("abc", "<U2"), ("1", "<i4"), (1, "<U4"), (None, "<i4"), (b"\1\0\0\0", "<i4"), ([1], "<i4"),
    ],
)  # fmt: skip
def test_numpy_scalars_that_do_not_fit_are_refused(data: Any, dtype: str) -> None:
    with pytest.raises(DecodeError, match=r"fit|holds"):
        decode(msgpack.packb({b"__npgeneric__": True, b"data": data, b"dtype": dtype}))


@pytest.mark.parametrize("data", [0.1, 1, -0.0, math.inf])
def test_numpy_scalars_are_rounded_to_their_width(data: float) -> None:
    found = decode(msgpack.packb({b"__npgeneric__": True, b"data": data, b"dtype": ">f4"}))
    assert same(found, np.float32(data))


@pytest.mark.parametrize(
    "keys",
    [
        {b"__npgeneric__": True, b"data": 1},
        {b"__npgeneric__": 1, b"data": 1, b"dtype": "<i4"},
        {b"__npgeneric__": True, b"data": 1, b"dtype": "<i4", b"shape": []},
        {"__npgeneric__": True, "data": 1, "dtype": "<i4"},
        {b"__ndarray__": True, b"__npgeneric__": True, b"data": 1, b"dtype": "<i4"},
    ],
)
def test_numpy_scalars_with_other_keys_are_refused(keys: dict[Any, Any]) -> None:
    with pytest.raises(DecodeError):
        decode(msgpack.packb(keys))


def test_keys_that_are_arrays_are_refused() -> None:
    for key in (packed(np.arange(2)), packed(np.int8(1)), b"\x80", b"\x90"):
        with pytest.raises(DecodeError, match="map keys are str or bin"):
            decode(b"\x81" + key + b"\x01")


def test_memoryviews_and_bytearrays_decode_alike() -> None:
    data = packed({"a": np.arange(3), "b": b"raw", "c": "text"})
    for message in (data, bytearray(data), memoryview(b"--" + data)[2:]):
        assert same(decode(message), {"a": np.arange(3), "b": b"raw", "c": "text"})  # type: ignore[arg-type]
