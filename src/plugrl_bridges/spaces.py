"""Own the mapping between Gymnasium spaces and what travels: observations, actions, and the map of ``env-spec``.

An `ObservationLayout` says, for one observation space, which leaf travels where (images, states or text) and under which
name. Both ends derive it from the space alone, so it never needs to be negotiated. An `ActionLayout` does the same for
actions. Knows no sessions, slots or trainers; ``client`` and ``server.lockstep`` are its callers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.wire.codec import Array, Value
from plugrl_bridges.wire.messages import Observation

__all__ = [
    "ActionLayout",
    "Channel",
    "Leaf",
    "ObservationLayout",
    "infer_observation_space",
    "space_from_wire",
    "space_to_wire",
]

Space: TypeAlias = "spaces.Space[Any]"
Path: TypeAlias = "tuple[str | int, ...]"

ROOT_NAME = "obs"
"""Name under which the only leaf of a space without keys travels."""
_CHANNELS_LAST_AT_MOST = 4


class Channel(enum.Enum):
    """Which of the three maps of an observation [5.2] a leaf travels in."""

    IMAGES = "images"
    STATES = "states"
    TEXT = "text"


@dataclass(frozen=True)
class Leaf:
    """Say how one leaf of an observation space travels.

    Attributes:
        path: Dict keys and Tuple positions from the root to the leaf.
        name: The path joined with ``/``, or ``obs`` for the root itself.
        channel: Where it travels.
        space: The leaf's own space.
        shape: Shape of one env's value; ``()`` for Discrete and Text.
        dtype: Native dtype of the values.
    """

    path: Path
    name: str
    channel: Channel
    space: Space
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class ObservationLayout:
    """Map observations of one space to and from the wire.

    The trainer's side asks for `allocate`, `read` and `nest`; the client's side for `allocate`, `store` and `write`.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict and Tuple of them, nested as you like.

    Raises:
        SpaceError: for any other space, naming where in the space it stands.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.leaves: tuple[Leaf, ...] = tuple(_one_text(_leaves(space)))
        names = [leaf.name for leaf in self.leaves]
        if len(set(names)) != len(names):
            raise SpaceError(f"two entries of the observation space have the same name on the wire: {sorted(names)}")

    def allocate(self, rows: int) -> list[Array]:
        """Give one uninitialised array ``[rows, *shape]`` per leaf, in leaf order."""
        return [np.empty((rows, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def store(self, arrays: Sequence[Array], row: int, observation: Any) -> None:
        """Put one env's observation into row ``row`` of `allocate`'s arrays.

        Raises:
            SpaceError: if the observation lacks an entry or does not fit its shape.
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            value = observation
            try:
                for key in leaf.path:
                    value = value[key]
                if leaf.dtype.kind == "U":
                    value = _fitting_text(str(value), array.dtype, leaf)
                elif np.shape(value) != leaf.shape:  # numpy would broadcast it without a word
                    raise ValueError(f"shape {np.shape(value)}, expected {leaf.shape}")
                array[row] = value
            except (KeyError, IndexError, TypeError, ValueError) as exc:
                raise SpaceError(f"observation entry {leaf.name!r} does not fit its space {leaf.space}: {exc}") from exc

    def write(self, arrays: Sequence[Array], rows: Array | None = None) -> Observation:
        """Make the wire's observation of `allocate`'s arrays.

        Args:
            arrays: One array per leaf.
            rows: Bool or int array that picks rows (a copy); None sends all rows as they stand, without a copy.
        """
        images: dict[str, Array] = {}
        states: dict[str, Array] = {}
        text: Array | None = None
        for leaf, array in zip(self.leaves, arrays, strict=True):
            picked = array if rows is None else array[rows]
            if leaf.dtype.kind == "U":
                picked = np.array(picked.tolist() or [""])[: len(picked)]  # no wider than the texts at hand
            if leaf.channel is Channel.IMAGES:
                images[leaf.name] = picked
            elif leaf.channel is Channel.TEXT:
                text = picked
            else:
                states[leaf.name] = picked
        return Observation(images, states, text)

    def read(self, observation: Observation, arrays: Sequence[Array], rows: slice | Array) -> None:
        """Copy a received observation into rows of `allocate`'s arrays; the message may be forgotten afterwards.

        Args:
            observation: As received; its leading dimension is the number of rows.
            arrays: One array per leaf.
            rows: Where the rows go, in the message's order.

        Raises:
            RemoteProtocolError: if an entry is missing, or its shape or dtype cannot become the space's [5.2].
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            found = self._find(observation, leaf)
            if found.shape[1:] != leaf.shape:
                if math.prod(found.shape[1:]) != math.prod(leaf.shape):
                    raise RemoteProtocolError(
                        f"observation entry {leaf.name!r} has shape {list(found.shape[1:])}, expected {list(leaf.shape)}",
                        clause="5.2",
                    )
                found = found.reshape(len(found), *leaf.shape)
            if found.dtype != leaf.dtype and not _castable(found.dtype, leaf.dtype):
                raise RemoteProtocolError(
                    f"observation entry {leaf.name!r} has dtype {found.dtype.str}, expected {leaf.dtype.str}", clause="5.2"
                )
            array[rows] = found

    def _find(self, observation: Observation, leaf: Leaf) -> Array:
        if leaf.channel is Channel.TEXT:
            if observation.text is not None:
                return observation.text
        else:
            own: Mapping[str, Array] = observation.images if leaf.channel is Channel.IMAGES else observation.states
            other: Mapping[str, Array] = observation.states if leaf.channel is Channel.IMAGES else observation.images
            for entries in (own, other):
                if leaf.name in entries:
                    return entries[leaf.name]
            if len(self.leaves) == 1 and len(own) + len(other) == 1:  # a name that only its author knows
                return next(iter((*own.values(), *other.values())))
        there = [*observation.images, *observation.states, *([] if observation.text is None else ["text"])]
        raise RemoteProtocolError(f"observation lacks the entry {leaf.name!r}; it has {there}", clause="5.2")

    def nest(self, arrays: Sequence[Any]) -> Any:
        """Arrange one value per leaf as the space is nested: an array, a dict or a tuple (of dicts, of tuples …)."""
        return _nest(self.space, iter(arrays))


class ActionLayout:
    """Map actions of one space to and from the wire's ``[H, n, *da]`` [5.3].

    Args:
        space: Box, Discrete, MultiDiscrete or MultiBinary.

    Raises:
        SpaceError: for any other space.
    """

    def __init__(self, space: Space) -> None:
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise SpaceError(f"action space {space} cannot travel: expected Box, Discrete, MultiDiscrete or MultiBinary")
        self.space = space
        self.discrete = isinstance(space, spaces.Discrete)
        self.shape: tuple[int, ...] = tuple(space.shape or ())
        self.dtype = np.dtype(space.dtype)
        self.width = 1 if self.discrete or not self.shape else self.shape[-1]

    def to_wire(self, actions: Any, slots: int, horizon: int = 1) -> Array:
        """Make ``[H, slots, *da]`` of what a trainer gave.

        Args:
            actions: ``[slots, *shape]``, or ``[slots, H, *shape]`` with a horizon above 1. Floats keep the trainer's own
                dtype, so the env gets what the trainer sent; the discrete kinds travel in the space's dtype.
            slots: Number of slots.
            horizon: H.

        Raises:
            ValueError: naming the slot, for a NaN; or naming the shape, for a wrong shape or a non-integer value.
        """
        array = np.asarray(actions)
        steps = () if horizon == 1 else (horizon,)
        if array.shape != (slots, *steps, *self.shape):
            raise ValueError(f"actions have shape {array.shape}, expected {(slots, *steps, *self.shape)}")
        if isinstance(self.space, spaces.Box):
            if array.dtype.kind not in "biuf":
                raise ValueError(f"actions have dtype {array.dtype}, expected numbers for {self.space}")
            if array.dtype.kind == "f" and np.isnan(array).any():
                slot = int(np.isnan(array).reshape(slots, -1).any(axis=1).argmax())
                raise ValueError(f"the action for slot {slot} holds NaN; it is not sent: {array[slot]}")
        elif array.dtype != self.dtype:
            whole = array.astype(self.dtype)
            if not np.array_equal(whole, array):
                raise ValueError(f"actions {array.tolist()[:4]} are no whole numbers, as {self.space} wants")
            array = whole
        array = array[None] if horizon == 1 else np.moveaxis(array, 1, 0)
        if not self.shape:
            array = array[..., None]  # clients in the wild read a[h][i][0]
        return array

    def from_wire(self, action: Array) -> Array:
        """Give a received ``[H, n, *da]`` the space's own shape per env: ``[H, n, *shape]``.

        Raises:
            RemoteProtocolError: if it has another number of elements, or is not integer where the space is [5.3].
        """
        own = (*action.shape[:2], *self.shape)
        if math.prod(action.shape) != math.prod(own):
            raise RemoteProtocolError(
                f"action: shape {list(action.shape)} does not fit {self.space}: expected {list(own)}", clause="5.3"
            )
        shaped = action if action.shape == own else action.reshape(own)
        if isinstance(self.space, spaces.Box):
            return shaped if shaped.dtype.isnative else shaped.astype(shaped.dtype.newbyteorder("="))
        whole = np.rint(shaped) if shaped.dtype.kind == "f" else shaped
        return whole.astype(self.dtype)

    def stacked(self, horizon: int) -> Space:
        """Give the space of a whole chunk per env, for a trainer that acts in chunks."""
        if horizon == 1:
            return self.space
        if not isinstance(self.space, spaces.Box):
            raise SpaceError(f"action_horizon {horizon} needs a Box action space, got {self.space}")
        low, high = (np.broadcast_to(bound, (horizon, *self.shape)) for bound in (self.space.low, self.space.high))
        return spaces.Box(low.copy(), high.copy(), dtype=self.dtype.type)


def _leaves(space: Space, path: Path = ()) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, inner in space.spaces.items() for leaf in _leaves(inner, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for at, inner in enumerate(space.spaces) for leaf in _leaves(inner, (*path, at))]
    name = "/".join(map(str, path)) or ROOT_NAME
    if isinstance(space, spaces.Text):
        return [Leaf(path, name, Channel.TEXT, space, (), np.dtype(f"<U{space.max_length}"))]
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        shape = tuple(space.shape or ())
        dtype = np.dtype(space.dtype)
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SpaceError(f"observation entry {name!r}: dtype {dtype} cannot travel")
        channel = Channel.IMAGES if dtype == np.uint8 and _channels_last(shape) else Channel.STATES
        return [Leaf(path, name, channel, space, shape, dtype)]
    raise SpaceError(f"observation entry {name!r}: a {type(space).__name__} space cannot travel: expected Box, Discrete, "
                     "MultiDiscrete, MultiBinary, Text, or Dict and Tuple of them")


def _one_text(leaves: list[Leaf]) -> Iterator[Leaf]:
    """Let the first text travel as ``text`` [5.2], which holds one str per env, and any further one as a state."""
    seen = False
    for leaf in leaves:
        yield replace(leaf, channel=Channel.STATES) if seen and leaf.channel is Channel.TEXT else leaf
        seen = seen or leaf.channel is Channel.TEXT


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Tell images [h, w, c] from other uint8 data; channel-first frames travel as states, their order unchanged."""
    return len(shape) == 3 and shape[2] <= _CHANNELS_LAST_AT_MOST


def _fitting_text(text: str, dtype: np.dtype[Any], leaf: Leaf) -> str:
    if len(text) * 4 > dtype.itemsize:
        raise ValueError(f"{len(text)} characters, at most {dtype.itemsize // 4} for {leaf.space}")
    return text


def _castable(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Admit what assigning into SB3's own buffers admits, but never a float into an integer entry."""
    if want.kind == "U" or have.kind == "U":
        return have.kind == want.kind
    return np.can_cast(have, want, "same_kind") or (have.kind in "biu" and want.kind in "biu")


def _nest(space: Space, values: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nest(inner, values) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(inner, values) for inner in space.spaces)
    return next(values)


def infer_observation_space(
    observation: Observation, *, image_key: str | None = None, state_key: str | None = None, text: bool = False
) -> Space:
    """Make the observation space of a client that announced none, from its first observation.

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
    chosen = {key for key in (image_key, state_key) if key is not None}
    for channel, arrays in (("images", observation.images), ("states", observation.states)):
        for name, array in arrays.items():
            if chosen and name not in chosen:
                continue
            if name in entries:
                raise SpaceError(f"the client names both an image and a state {name!r}: pass observation_space")
            entries[name] = _box_like(array, is_image=channel == "images")
    missing = chosen - entries.keys()
    if missing:
        there = sorted([*observation.images, *observation.states])
        raise SpaceError(f"the client sends no entry {sorted(missing)}: it sends {there}")
    if text and not chosen and observation.text is not None and any(observation.text):
        entries["text"] = spaces.Text(1024, charset=_ANY_TEXT)
    if not entries:
        raise SpaceError("the client's observations are empty: pass observation_space")
    return next(iter(entries.values())) if len(entries) == 1 else spaces.Dict(entries)


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
        low, high = (_bound_to_wire(bound) for bound in (space.low, space.high))
        return {"type": "Box", "low": low, "high": high, "shape": list(space.shape), "dtype": dtype.str}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).str}
    if isinstance(space, spaces.MultiDiscrete):
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return {"type": "MultiDiscrete", "nvec": space.nvec, "start": start, "dtype": np.dtype(space.dtype).str}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "shape": list(space.shape)}
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
    """Make the space that a client announced.

    Raises:
        RemoteProtocolError: if the map is none of the forms that `space_to_wire` makes [env-spec].
    """
    try:
        return _space_from_wire(wire)
    except (KeyError, TypeError, ValueError, AssertionError, OverflowError, AttributeError) as exc:
        raise RemoteProtocolError(f"env_spec: {str(wire)[:80]} describes no space: {exc!r}", clause="env-spec") from exc


def _space_from_wire(wire: Value) -> Space:
    kind = wire["type"]
    if kind == "Box":
        dtype, shape = np.dtype(wire["dtype"]), tuple(wire["shape"])
        low, high = (_bound_from_wire(wire[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(wire["n"], start=wire["start"])
    if kind == "MultiDiscrete":
        dtype = np.dtype(wire["dtype"])
        if not np.any(wire["start"]):  # gymnasium 0.29 knows no start
            return spaces.MultiDiscrete(wire["nvec"].astype(dtype), dtype=dtype.type)
        return spaces.MultiDiscrete(wire["nvec"].astype(dtype), dtype=dtype.type, start=wire["start"].astype(dtype))
    if kind == "MultiBinary":
        shape = wire["shape"]
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if kind == "Text":
        return spaces.Text(wire["max_length"], min_length=wire["min_length"], charset=wire["charset"])
    if kind == "Dict":
        return spaces.Dict({key: _space_from_wire(inner) for key, inner in wire["spaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([_space_from_wire(inner) for inner in wire["spaces"]])
    raise ValueError(f"unknown type {kind!r}")


def _bound_from_wire(bound: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    full = np.broadcast_to(bound.reshape(()), shape) if bound.size == 1 else bound.reshape(shape)
    return full.astype(dtype)
