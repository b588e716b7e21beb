"""Make the golden vectors of the digest of a step, and compute it once more without numpy's help.

`words_of_event` and `chained` are written from the definition in ``plugrl_bridges.digest.digest``, word by word, as one
would in another language; ``tests/ledger/test_digest.py`` holds the library to them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CASES", "Case", "Happening", "Part", "chained", "events_of", "key", "words_of_event"]

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Part:
    """One entry of an action or observation."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    name: str = "obs"


@dataclass(frozen=True)
class Happening:
    """A reset (no action) or a step."""

    action: tuple[Any, ...] | None
    reward: float
    terminated: bool
    truncated: bool
    observation: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """What one vector file is of."""

    name: str
    what: str
    action: tuple[Part, ...]
    observation: tuple[Part, ...]


def part(dtype: str, *shape: int, name: str = "obs") -> Part:
    return Part(np.dtype(dtype), shape, name)


CASES = (
    Case("box_f4", "float32 observation and action", (part("<f4", 2),), (part("<f4", 3),)),
    Case(
        "box_f8", "float64 observation and action, which are rounded to float32", (part("<f8", 2),), (part("<f8", 3),)
    ),
    Case("discrete", "Discrete action and observation: int64, two words each", (part("<i8"),), (part("<i8"),)),
    Case("image", "uint8 image whose last word is padded with two zero bytes", (part("<i8"),), (part("|u1", 3, 2, 3),)),
    Case(
        "large",
        "an entry of 300 words, and a small one behind it",
        (part("<f4", 1),),
        (part("<u2", 600, name="large"), part("<f4", 2, name="small")),
    ),
    Case(
        "dict",
        "entries of many dtypes, each beginning with a word of its own, in the order of their names",
        (part("|i1", 3, name="where"), part("<f4", name="how/far")),
        (
            part("<f2", 2, name="z"),
            part("<i2", 3, name="arm/10"),
            part("|b1", 5, name="arm/2"),
            part("<u4", name="B"),
            part("<U6", name="ä"),
            part("<f8", 1, name="arm-1"),
        ),
    ),
)


def key(number: int) -> int:
    """Give the key of a word."""
    z = ((number + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31) | 1


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _bytes_of(entry: Part, value: Any) -> bytes:
    cells = np.asarray(value).reshape(-1).tolist()
    kind, size = entry.dtype.kind, entry.dtype.itemsize
    if kind == "f":
        data = b"".join(_float32(cell) for cell in cells)
    elif kind == "U":
        data = b"".join(cell.encode("utf-32-le").ljust(size, b"\0") for cell in cells)
    else:
        data = b"".join(int(cell).to_bytes(size, "little", signed=kind == "i") for cell in cells)
    return data + bytes(-len(data) % 4)


def _by_name(parts: Sequence[Part], values: Sequence[Any]) -> bytes:
    pieces = {part.name.encode(): _bytes_of(part, value) for part, value in zip(parts, values, strict=True)}
    return b"".join(pieces[name] for name in sorted(pieces))


def words_of_event(case: Case, event: Happening) -> list[int]:
    """Give the words of a reset or a step."""
    if event.action is None:
        flags, taken = 4, bytes(sum(len(_bytes_of(each, np.zeros(each.shape, each.dtype))) for each in case.action))
    else:
        flags = event.terminated + 2 * event.truncated
        taken = _by_name(case.action, event.action)
    data = struct.pack("<I", flags) + _float32(event.reward) + taken
    data += _by_name(case.observation, event.observation)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def chained(chain: int, words: Sequence[int]) -> int:
    """Give the chain after an event."""
    if words[0] == 4:
        chain = 0
    return (chain * 0xD1342543DE82EF95 + sum(key(at) * word for at, word in enumerate(words))) & MASK


def _values(parts: Sequence[Part], number: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(number)
    found: list[Any] = []
    for each in parts:
        if each.dtype.kind == "U":
            found.append(np.array(["", "größer", "✓ a"][number % 3], each.dtype))
        elif each.dtype.kind == "f":
            wide = rng.normal(size=each.shape) * 10.0 ** rng.integers(-3, 4)
            found.append(wide.astype(each.dtype))
        elif each.dtype.kind == "b":
            found.append(rng.integers(0, 2, each.shape).astype(each.dtype))
        else:
            low = -100 if each.dtype.kind == "i" else 0
            found.append(rng.integers(low, 128, each.shape).astype(each.dtype))
    return tuple(found)


def events_of(case: Case) -> Iterator[Happening]:
    """Give two episodes: one that terminates, one that is truncated and terminates at once."""
    number = 0
    for length, truncated in ((3, False), (2, True)):
        yield Happening(None, 0.0, terminated=False, truncated=False, observation=_values(case.observation, number))
        for step in range(length):
            number += 1
            last = step == length - 1
            yield Happening(
                _values(case.action, 100 + number),
                [0.1, -1.5, 1e300][number % 3],
                terminated=last,
                truncated=last and truncated,
                observation=_values(case.observation, number),
            )
        number += 1
    edge = [np.zeros(each.shape, each.dtype) for each in case.observation]
    for value in edge:
        if value.dtype.kind == "f" and value.size:
            value.reshape(-1)[:1] = -0.0
            value.reshape(-1)[1:2] = 3.5e38 if value.dtype.itemsize == 8 else 65504.0  # beyond float32: infinity
    yield Happening(None, 0.0, terminated=False, truncated=False, observation=tuple(edge))
