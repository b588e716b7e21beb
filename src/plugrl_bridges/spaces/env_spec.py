"""How a space itself travels, in the map of feature ``env-spec``, and what to assume of a client that sends none.

What a peer announces is bounded before anything is allocated for it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from gymnasium import spaces

from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.wire.arrays import MAX_NDIM, MAX_TEXT_LENGTH, dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.wire.arrays import Array, Value
    from plugrl_bridges.wire.messages import Observation

__all__ = ["infer_observation_space", "space_from_wire", "space_to_wire"]

Space: TypeAlias = "spaces.Space[Any]"

_MAX_BYTES = 1 << 28
"""One observation of an announced space may be this large: a space is a few bytes, its bounds are as large as it is."""
_MAX_LEAVES = 4096
_MAX_DEPTH = 32
_BYTES_PER_CHARACTER = 128  # what Gymnasium's Text keeps for each character of its charset


def infer_observation_space(
    observation: Observation, *, image_key: str | None = None, state_key: str | None = None, text: bool = False
) -> Space:
    """Return the observation space of a client that announced none, from its first observation.

    Args:
        observation: With at least one row.
        image_key: Surface only this image.
        state_key: Surface only this state.
        text: Surface non-empty text too.

    Returns:
        A Box if there is one entry, else a Dict: images are ``Box(0, 255, (h, w, c), uint8)``, states are unbounded
        boxes of the dtype and shape that came.

    Raises:
        SpaceError: if nothing is there, or the key asked for is not.
    """
    entries: dict[str, Space] = {}
    if image_key is None and state_key is None:
        for name in observation.images.keys() & observation.states.keys():
            raise SpaceError(f"the client names both an image and a state {name!r}: pass observation_space")
        entries.update({name: _box_like(array, is_image=True) for name, array in observation.images.items()})
        entries.update({name: _box_like(array, is_image=False) for name, array in observation.states.items()})
        if text and "text" not in entries and observation.text is not None and any(observation.text.tolist()):
            entries["text"] = spaces.Text(1024, min_length=0, charset=_ANY_TEXT)
    # A key is looked up in the other map too: channel-first frames, for one, travel as states.
    for key, images_first in ((image_key, True), (state_key, False)):
        if key is not None:
            entries[key] = _chosen(observation, key, images_first=images_first)
    if not entries:
        raise SpaceError("the client's observations are empty: pass observation_space")
    return next(iter(entries.values())) if len(entries) == 1 else spaces.Dict(entries)


def _chosen(observation: Observation, key: str, *, images_first: bool) -> Space:
    for is_image in (images_first, not images_first):
        arrays = observation.images if is_image else observation.states
        if key in arrays:
            return _box_like(arrays[key], is_image=is_image)
    there = sorted([*observation.images, *observation.states])
    raise SpaceError(f"the client sends no entry {key!r}: it sends {there}")


_ANY_TEXT = "".join(map(chr, range(32, 127)))


def _box_like(array: Array, *, is_image: bool) -> Space:
    shape, dtype = array.shape[1:], array.dtype.newbyteorder("=")
    if is_image or dtype == np.uint8:
        return spaces.Box(0, 255, shape, np.uint8)
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, np.bool_)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, shape, dtype.type)
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    raise SpaceError(f"a state of dtype {dtype} has no safe space: pass observation_space")


def space_to_wire(space: Space) -> dict[str, Value]:
    """Describe a space as the map that ``env-spec`` carries; `space_from_wire` is its inverse.

    Raises:
        SpaceError: for a space that cannot travel.
    """
    if isinstance(space, spaces.Box):
        dtype = np.dtype(space.dtype)
        if dtype.itemsize > 8:
            raise SpaceError(f"a Box of dtype {dtype} cannot travel")
        low, high = (_bound_to_wire(bound) for bound in (space.low, space.high))
        return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": dtype.str}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).str}
    if isinstance(space, spaces.MultiDiscrete):
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return {"type": "MultiDiscrete", "nvec": space.nvec, "start": start, "dtype": np.dtype(space.dtype).str}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "shape": space.n if isinstance(space.n, int) else list(space.n)}
    if isinstance(space, spaces.Text):
        charset = "".join(sorted(space.character_set))
        return {"type": "Text", "min_length": space.min_length, "max_length": space.max_length, "charset": charset}
    if isinstance(space, spaces.Dict):
        if any(not isinstance(key, str) for key in space.spaces):
            raise SpaceError("a Dict space with keys that are not str cannot travel")
        return {"type": "Dict", "spaces": {key: space_to_wire(inner) for key, inner in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [space_to_wire(inner) for inner in space.spaces]}
    raise SpaceError(f"a {type(space).__name__} space cannot travel")


def _bound_to_wire(bound: Array) -> Array:
    """Send one element where all are the same: an image's bounds are as large as the image."""
    first = bound.reshape(-1)[:1]
    return first if bound.size and (bound == first).all() else bound


def space_from_wire(wire: Value) -> Space:
    """Return the space that a client announced.

    Raises:
        RemoteProtocolError: if the map is none of the forms that `space_to_wire` makes, or describes a space too large
            to hold [env-spec].
    """
    try:
        return _Builder().space(wire, 0)
    except RemoteProtocolError as exc:
        raise RemoteProtocolError(f"env_spec: {exc}", clause="env-spec") from exc
    except (KeyError, TypeError, ValueError, AssertionError, OverflowError, AttributeError, MemoryError) as exc:
        raise RemoteProtocolError(f"env_spec: no such space: {repr(exc)[:200]}", clause="env-spec") from exc


class _Builder:
    """Builder of one space from decoded values, which counts what it comes to before any of it is allocated."""

    def __init__(self) -> None:
        self.bytes = 0
        self.leaves = 0

    def space(self, wire: Value, depth: int) -> Space:
        if not isinstance(wire, dict):
            raise TypeError(f"a space is a map, got {type(wire).__name__}")
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
        kind = wire["type"]
        make = self._makers.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise ValueError(f"unknown type {str(kind)[:40]!r}")
        return make(self, wire, depth)

    def _charge(self, size: int, *, leaves: int = 1) -> None:
        self.bytes += size
        self.leaves += leaves
        if self.bytes > _MAX_BYTES or self.leaves > _MAX_LEAVES:
            raise ValueError(f"more than {_MAX_BYTES >> 20} MiB or {_MAX_LEAVES} entries")

    def _box(self, wire: dict[str, Value], _: int) -> Space:
        dtype, shape = dtype_of(wire["dtype"]), _extents(wire["shape"])
        self._charge(math.prod(shape) * dtype.itemsize)
        low, high = (_bound(wire[name], shape, dtype) for name in ("low", "high"))
        if not (low <= high).all():
            raise ValueError("a low above its high")
        return spaces.Box(low, high, shape, dtype)

    def _discrete(self, wire: dict[str, Value], _: int) -> Space:
        dtype, n, start = dtype_of(wire.get("dtype", "<i8")), _int(wire["n"]), _int(wire.get("start", 0))
        self._charge(dtype.itemsize)
        if n < 1 or not _fits(start, dtype) or not _fits(start + n - 1, dtype):
            raise ValueError(f"a Discrete of {n} from {start} in {dtype}")
        if dtype == np.int64:
            return spaces.Discrete(n, start=start)
        return spaces.Discrete(n, start=start, dtype=dtype.type)  # only a newer gymnasium has these

    def _multi_discrete(self, wire: dict[str, Value], _: int) -> Space:
        dtype, nvec = dtype_of(wire.get("dtype", "<i8")), wire["nvec"]
        start = wire.get("start")
        for array in (nvec,) if start is None else (nvec, start):
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.shape != nvec.shape:
                raise TypeError("nvec and start are int arrays of one shape")
            self._charge(array.size * dtype.itemsize)
            if not all(_fits(each, dtype) for each in (array.min(initial=0), array.max(initial=0))):
                raise ValueError(f"nvec or start beyond {dtype}")
        if (nvec <= 0).any():
            raise ValueError("nvec is positive")
        if start is None or not start.any():  # gymnasium 0.29 knows no start
            return spaces.MultiDiscrete(nvec.astype(dtype), dtype=dtype.type)
        return spaces.MultiDiscrete(nvec.astype(dtype), dtype=dtype.type, start=start.astype(dtype))

    def _multi_binary(self, wire: dict[str, Value], _: int) -> Space:
        shape = wire["shape"]
        extents = _extents(shape if isinstance(shape, list) else [shape])
        self._charge(math.prod(extents))
        return spaces.MultiBinary(list(extents) if isinstance(shape, list) else extents[0])

    def _text(self, wire: dict[str, Value], _: int) -> Space:
        longest, shortest, charset = _int(wire["max_length"]), _int(wire["min_length"]), wire["charset"]
        if not isinstance(charset, str) or not 1 <= longest <= MAX_TEXT_LENGTH:
            raise ValueError(f"a Text of at most {longest} characters")
        self._charge(4 * longest + _BYTES_PER_CHARACTER * len(charset))
        return spaces.Text(longest, min_length=shortest, charset=charset)

    def _dict(self, wire: dict[str, Value], depth: int) -> Space:
        inner = wire["spaces"]
        self._charge(0, leaves=len(inner))
        if not all(isinstance(key, str) for key in inner):
            raise TypeError("the keys of a Dict space are str")
        # An OrderedDict keeps its order, which a plain dict would lose: the order in which leaves are flattened.
        return spaces.Dict(OrderedDict((key, self.space(value, depth + 1)) for key, value in inner.items()))

    def _tuple(self, wire: dict[str, Value], depth: int) -> Space:
        inner = wire["spaces"]
        if not isinstance(inner, list):
            raise TypeError(f"the spaces of a Tuple space are a list, got {type(inner).__name__}")
        self._charge(0, leaves=len(inner))
        return spaces.Tuple([self.space(value, depth + 1) for value in inner])

    _makers: ClassVar[dict[str, Callable[[_Builder, dict[str, Value], int], Space]]] = {
        "Box": _box,
        "Discrete": _discrete,
        "MultiDiscrete": _multi_discrete,
        "MultiBinary": _multi_binary,
        "Text": _text,
        "Dict": _dict,
        "Tuple": _tuple,
    }


def _int(value: Value) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an int, got {type(value).__name__}")
    return value


def _fits(value: int, dtype: np.dtype[Any]) -> bool:
    if dtype.kind not in "iu":
        raise TypeError(f"expected an integer dtype, got {dtype}")
    limits = np.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def _extents(shape: Value) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > MAX_NDIM or any(_int(extent) < 0 for extent in shape):
        raise TypeError(f"a shape is a list of at most {MAX_NDIM} non-negative ints")
    return tuple(shape)


def _bound(bound: Value, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if not isinstance(bound, np.ndarray):
        raise TypeError(f"a bound is an array, got {type(bound).__name__}")
    if not np.can_cast(bound.dtype, dtype, "same_kind") or (bound.dtype.kind == "f" and np.isnan(bound).any()):
        raise ValueError(f"a bound of {bound.dtype} for {dtype}, or NaN")
    with np.errstate(over="ignore"):
        own = bound.astype(dtype)
    return np.broadcast_to(own.reshape(()), shape).copy() if own.size == 1 else own.reshape(shape)
