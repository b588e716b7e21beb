"""Headers and masks, pure."""

from __future__ import annotations

import numpy as np
import pytest

from plugrl_bridges.transport import frames
from tests.transport.ends import KEY, SIZES, frame


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", [b"", KEY])
def test_a_header_that_was_built_is_parsed_back(size: int, key: bytes) -> None:
    header = frames.build_header(size, key)
    assert header == frame(bytes(size), masked=bool(key))[: len(header)]
    assert frames.parse_header(memoryview(b"xx" + header), 2, 2 + len(header)) == (len(header), size)


@pytest.mark.parametrize(("size", "needed"), [(5, 2), (300, 4), (70000, 10)])
def test_a_header_without_its_whole_length_is_not_parsed(size: int, needed: int) -> None:
    header = memoryview(frames.build_header(size, KEY))
    for end in range(2, needed):
        assert frames.parse_header(header, 0, end) is None
    assert frames.parse_header(header, 0, needed) == (needed + 4, size)


@pytest.mark.parametrize("offset", range(17))
@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 9, 1000, 32768, 32769, 32775, 40001])
def test_masking_in_place_touches_the_payload_alone_at_any_alignment(offset: int, size: int) -> None:
    before = np.random.default_rng(size).integers(0, 256, offset + size + 11, dtype=np.uint8)
    after = before.copy()
    frames.mask_in_place(after, memoryview(after), offset, offset + size, KEY)
    before[offset : offset + size] ^= np.resize(np.frombuffer(KEY, np.uint8), size)
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("first", range(256))
def test_every_first_byte_is_judged_as_rfc_6455_says(first: int, masked: bool) -> None:
    opcode = first & 15
    legal = not first & 0x70 and opcode in {0, 1, 2, 8, 9, 10} and (opcode < 8 or first & 0x80)
    bit = 0x80 if masked else 0
    fault = frames.check_header(first, bit | 125, masked=masked)
    assert (fault is None) is bool(legal)
    assert frames.check_header(first, bit ^ 0x80, masked=masked) is not None
    if opcode >= 8:
        assert frames.check_header(first, bit | 126, masked=masked) is not None
