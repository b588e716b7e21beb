"""From two digests back to the one value that differs; and never a value where several do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from plugrl_bridges.digest.digest import EnvDigest
from plugrl_bridges.digest.locating import Located, locate


@dataclass(frozen=True)
class Part:
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def parts(**entries: tuple[Any, ...]) -> dict[str, Part]:
    return {name: Part(name, tuple(shape), np.dtype(dtype)) for name, (dtype, *shape) in entries.items()}


ACTIONS = parts(action=("<f4", 2))
OBSERVATIONS = parts(image=("|u1", 40, 40, 1), wide=("<f8", 2, 3), count=("<i8",), small=("<i2", 3), words=("<U4",))


def values(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {"flags": 0, "reward": np.float32(rng.normal())}
    for name, each in {**ACTIONS, **OBSERVATIONS}.items():
        if each.dtype.kind == "f":
            found[name] = rng.normal(size=each.shape).astype(each.dtype)
        elif each.dtype.kind == "U":
            found[name] = np.array("ab", each.dtype)
        else:
            found[name] = rng.integers(0, 100, each.shape).astype(each.dtype)
    return found


def digest(step: dict[str, Any]) -> int:
    digests = EnvDigest(tuple(ACTIONS.values()), tuple(OBSERVATIONS.values()))
    digests.reset([values(9)[name] for name in OBSERVATIONS])
    digests.take([step[name] for name in ACTIONS])
    flags = step["flags"]
    return digests.give(step["reward"], bool(flags & 1), bool(flags & 2), [step[name] for name in OBSERVATIONS])


def found(ours: dict[str, Any], theirs: dict[str, Any]) -> Located | None:
    return locate(
        digest(theirs) - digest(ours),
        flags=ours["flags"],
        reward=ours["reward"],
        actions=[(name, each, ours[name]) for name, each in ACTIONS.items()],
        observations=[(name, each, ours[name]) for name, each in OBSERVATIONS.items()],
    )


@pytest.mark.parametrize(
    ("name", "index", "value", "field", "cell"),
    [
        ("action", (1,), 0.25, "action", "action[1]"),
        ("image", (39, 2, 0), 255, "obs", "image[39,2,0]"),
        ("wide", (1, 2), 0.0, "obs", "wide[1,2]"),
        ("count", (), -3, None, ""),  # both of its words change
        ("count", (), 7, "obs", "count"),
        ("small", (2,), 5, "obs", "small[2]"),
        ("words", (), "ax", "obs", "words"),
    ],
)
def test_one_value_is_found(name: str, index: tuple[int, ...], value: Any, field: str | None, cell: str) -> None:
    for seed in range(20):
        ours, theirs = values(seed), values(seed)
        theirs[name] = theirs[name].copy()
        theirs[name][index] = value
        if theirs[name][index] == ours[name][index]:
            continue
        located = found(ours, theirs)
        if field is None:
            assert located is None
            continue
        assert located is not None
        assert (located.field, located.cell) == (field, cell)
        carried = np.float32 if name == "wide" else ours[name].dtype.type
        assert located.ours == carried(ours[name][index])
        assert located.theirs == carried(value)


@pytest.mark.parametrize(
    ("ours", "theirs", "located"),
    [
        (0, 1, Located("terminated", "terminated", False, True)),
        (2, 0, Located("truncated", "truncated", True, False)),
        (2, 1, Located("terminated", "terminated", False, True)),
        (3, 2, Located("terminated", "terminated", True, False)),
    ],
)
def test_flags_are_found(ours: int, theirs: int, located: Located) -> None:
    assert found(values(0) | {"flags": ours}, values(0) | {"flags": theirs}) == located


def test_reward_is_found() -> None:
    located = found(values(0) | {"reward": np.float32(-1.5)}, values(0) | {"reward": np.float32(0)})
    assert located == Located("reward", "reward", np.float32(-1.5), np.float32(0))


def test_nothing_is_found_where_several_differ_or_nothing_does() -> None:
    for seed in range(50):
        assert found(values(seed), values(seed + 1)) is None
        twice = values(seed)
        twice["wide"][0, :2] = 0
        assert found(values(seed), twice) is None
    assert found(values(0), values(0)) is None
