"""How observations of a space travel [5.2].

An `ObservationLayout` says which leaf of the space travels where (images, states or text) and under which name.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces

from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.wire.arrays import MAX_TEXT_LENGTH
from plugrl_bridges.wire.messages import Observation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from plugrl_bridges.wire.arrays import Array, Value

__all__ = ["Channel", "Leaf", "ObservationLayout"]

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
    """How one leaf of an observation space travels.

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
    """The mapping between observations of one space and the wire.

    The trainer's side asks for `allocate`, `read`, `nest`, `batch` and `row`; the client's side for `allocate`, `store`
    and `write`.

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
        """Return one uninitialised array ``[rows, *shape]`` per leaf, in leaf order."""
        return [np.empty((rows, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def store(self, arrays: Sequence[Array], row: int, observation: Value) -> None:
        """Store one env's observation in row ``row`` of `allocate`'s arrays.

        Raises:
            SpaceError: if the observation lacks an entry or does not fit its shape.
        """
        for leaf, array in zip(self.leaves, arrays, strict=True):
            value = observation
            try:
                for key in leaf.path:
                    value = value[key]
                if leaf.dtype.kind == "U":
                    value = _fitting_text(value, array.dtype, leaf)
                elif np.shape(value) != leaf.shape:  # numpy would broadcast it without a word
                    raise ValueError(f"shape {np.shape(value)}, expected {leaf.shape}")
                array[row] = value
            except (KeyError, IndexError, TypeError, ValueError, OverflowError) as exc:
                raise SpaceError(f"observation entry {leaf.name!r} does not fit its space {leaf.space}: {exc}") from exc

    def write(self, arrays: Sequence[Array], rows: Array | None = None) -> Observation:
        """Return the wire's observation made of `allocate`'s arrays.

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
                if not _same_order(found.shape[1:], leaf.shape):
                    raise RemoteProtocolError(
                        f"observation entry {leaf.name!r} has shape {list(found.shape[1:])}, "
                        f"expected {list(leaf.shape)}",
                        clause="5.2",
                    )
                found = found.reshape(len(found), *leaf.shape)
            if found.dtype != leaf.dtype:
                if not _castable(found.dtype, leaf.dtype):
                    raise RemoteProtocolError(
                        f"observation entry {leaf.name!r} has dtype {found.dtype.str}, expected {leaf.dtype.str}",
                        clause="5.2",
                    )
                if found.dtype.kind == "U" and found.dtype.itemsize > array.dtype.itemsize:
                    _check_lengths(found, array.dtype, leaf)
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

    def row(self, arrays: Sequence[Array], at: int) -> Value:
        """Return one env's observation out of one array ``[n, *shape]`` per leaf, as the env itself would return it."""
        values = (array[at] for array in arrays)
        return self.nest([str(value) if isinstance(value, np.str_) else value for value in values])

    def batch(self, arrays: Sequence[Array]) -> Value:
        """Return n envs' observations as Gymnasium batches them: text is a tuple of str, all else arrays."""
        return self.nest([tuple(array.tolist()) if array.dtype.kind == "U" else array for array in arrays])

    def nest(self, arrays: Sequence[Value]) -> Value:
        """Arrange one value per leaf as the space is nested: an array, a dict or a tuple (of dicts, of tuples …)."""
        return _nest(self.space, iter(arrays))


def _leaves(space: Space, path: Path = ()) -> list[Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, inner in space.spaces.items() for leaf in _leaves(inner, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for at, inner in enumerate(space.spaces) for leaf in _leaves(inner, (*path, at))]
    name = "/".join(map(str, path)) or ROOT_NAME
    if isinstance(space, spaces.Text):
        if not 1 <= space.max_length <= MAX_TEXT_LENGTH:
            raise SpaceError(f"observation entry {name!r}: text of {space.max_length} characters cannot travel")
        return [Leaf(path, name, Channel.TEXT, space, (), np.dtype(f"=U{space.max_length}"))]
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        shape = tuple(space.shape or ())
        dtype = np.dtype(space.dtype).newbyteorder("=")
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise SpaceError(f"observation entry {name!r}: dtype {dtype} cannot travel")
        channel = Channel.IMAGES if dtype == np.uint8 and _channels_last(shape) else Channel.STATES
        return [Leaf(path, name, channel, space, shape, dtype)]
    raise SpaceError(
        f"observation entry {name!r}: a {type(space).__name__} space cannot travel: expected Box, Discrete, "
        "MultiDiscrete, MultiBinary, Text, or Dict and Tuple of them"
    )


def _one_text(leaves: list[Leaf]) -> Iterator[Leaf]:
    """Let the first text travel as ``text`` [5.2], which holds one str per env, and any further one as a state."""
    seen = False
    for leaf in leaves:
        yield replace(leaf, channel=Channel.STATES) if seen and leaf.channel is Channel.TEXT else leaf
        seen = seen or leaf.channel is Channel.TEXT


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Return whether uint8 data is an image [h, w, c]; channel-first frames travel as states, their order unchanged."""
    return len(shape) == 3 and shape[2] <= _CHANNELS_LAST_AT_MOST


def _fitting_text(value: Value, dtype: np.dtype[Any], leaf: Leaf) -> str:
    if not isinstance(value, str):
        value = np.asarray(value)
        if value.dtype.kind != "U" or value.ndim:
            raise TypeError(f"expected a str, got {value.dtype} of shape {value.shape}")
        value = str(value)
    if len(value) * 4 > dtype.itemsize:
        raise ValueError(f"{len(value)} characters, at most {dtype.itemsize // 4} for {leaf.space}")
    return str(value)


def _check_lengths(found: Array, dtype: np.dtype[Any], leaf: Leaf) -> None:
    """Refuse text that assigning would cut: a wider array is fine, a longer str is not."""
    longest = max((len(text) for text in found.tolist()), default=0)
    if longest * 4 > dtype.itemsize:
        raise RemoteProtocolError(
            f"observation entry {leaf.name!r} has {longest} characters, at most {dtype.itemsize // 4} for {leaf.space}",
            clause="5.2",
        )


def _same_order(have: tuple[int, ...], want: tuple[int, ...]) -> bool:
    """Return whether reshaping keeps every element where its author meant it: never from [h, w, c] to [c, h, w]."""
    if math.prod(have) != math.prod(want):
        return False
    kept = [[extent for extent in shape if extent != 1] for shape in (have, want)]
    return kept[0] == kept[1] or len(have) <= 1 or len(want) <= 1


def _castable(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Admit what assigning into SB3's own buffers admits, but never a float into an integer entry."""
    if want.kind == "U" or have.kind == "U":
        return have.kind == want.kind
    return np.can_cast(have, want, "same_kind") or (have.kind in "biu" and want.kind in "biu")


def _nest(space: Space, values: Iterator[Value]) -> Value:
    if isinstance(space, spaces.Dict):
        return {key: _nest(inner, values) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(inner, values) for inner in space.spaces)
    return next(values)
