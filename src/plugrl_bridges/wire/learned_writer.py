"""The fast path for sending: a message with the layout of the one before it is written around its arrays.

The counterpart of ``learned``. What stands between the arrays of a message depends only on its type, the names of its
observations, and the shapes and dtypes of its arrays; it is taken from the first such message, once encoded. Messages
with anything else inside (an info, a reset, an env-spec) are encoded by ``messages``. One writer belongs to one
connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from plugrl_bridges.wire.arrays import data_of
from plugrl_bridges.wire.codec import decode, join_small
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Message, to_bytes

if TYPE_CHECKING:
    import numpy as np

    from plugrl_bridges.wire.arrays import Array, Buffer
    from plugrl_bridges.wire.observation import Observation

__all__ = ["LearnedWriter"]

_REMEMBER = 8  # layouts per kind of message: with n envs, the infers that leave out 0, 1, … rows
_Names: TypeAlias = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Template:
    """What stands around the arrays of one kind of message."""

    names: _Names
    kinds: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    between: tuple[bytes, ...]

    def fits(self, names: _Names, arrays: list[Array]) -> bool:
        if names != self.names or len(arrays) != len(self.kinds):
            return False
        for array, (shape, dtype) in zip(arrays, self.kinds, strict=True):
            if array.shape != shape or array.dtype != dtype:
                return False
        return True

    def write(self, arrays: list[Array]) -> list[Buffer]:
        parts: list[Buffer] = [self.between[0]]
        for array, after in zip(arrays, self.between[1:], strict=True):
            parts.append(data_of(array))
            parts.append(after)
        return join_small(parts)


class LearnedWriter:
    """Encoder of one connection's messages; call it in place of ``messages.to_bytes``, whose bytes are the same."""

    def __init__(self) -> None:
        self._layouts: dict[type[Message], list[_Template]] = {}

    def __call__(self, message: Message) -> list[Buffer]:
        """Return the buffers of one message."""
        taken = _arrays_of(message)
        if taken is None:
            return to_bytes(message)
        names, arrays, blank = taken
        layouts = self._layouts.setdefault(type(message), [])
        for layout in layouts:
            if layout.fits(names, arrays):
                return layout.write(arrays)
        buffers = to_bytes(message)
        if len(layouts) < _REMEMBER:  # a connection with ever new layouts is not worth learning from
            learned = _learn(names, arrays, blank, b"".join(buffers))
            if learned is not None:
                layouts.append(learned)
        return buffers


def _arrays_of(message: Message) -> tuple[_Names, list[Array], int | None] | None:
    """Split a message into its arrays and the rest; None if there is more to it than its arrays.

    Returns:
        What its layout depends on beside its arrays; the arrays in the order in which they travel; and, where there is
        no text, the place among them of the blank one that travels in its stead, which is no different from a constant.
    """
    if isinstance(message, Feedback):
        if message.info:
            return None
        names, observed, blank = _observed(message.observation, len(message.env_indices))
        arrays = [message.env_indices, message.step_ids, *observed]
        arrays += [message.rewards, message.terminated, message.truncated]
        if message.digest is not None:
            arrays.append(message.digest)
        return names, arrays, None if blank is None else 2 + blank
    if isinstance(message, Infer):
        if message.env_spec is not None or message.reset_info:
            return None
        names, arrays, blank = _observed(message.observation, message.rows_sent)
        arrays += [message.env_indices, message.step_ids]
        if message.reuse is not None:
            arrays.append(message.reuse)
        if message.digest is not None:
            arrays.append(message.digest)
        return names, arrays, blank
    if isinstance(message, Action) and message.reset is None and message.env_ids is not None:
        return (), [message.env_ids, message.action], None
    return None


def _observed(observation: Observation, rows: int) -> tuple[_Names, list[Array], int | None]:
    names = (tuple(observation.images), tuple(observation.states))
    arrays = [*observation.images.values(), *observation.states.values()]
    if observation.text is not None:
        return names, [*arrays, observation.text], None
    return (*names, (str(rows),)), arrays, len(arrays)


def _learn(names: _Names, arrays: list[Array], blank: int | None, data: bytes) -> _Template | None:
    spans: list[tuple[Array, int]] = []
    decode(data, spans)
    if blank is not None:
        del spans[blank]
    if [(found.shape, found.dtype) for found, _ in spans] != [(array.shape, array.dtype) for array in arrays]:
        return None
    between = []
    at = 0
    for found, start in spans:
        between.append(data[at:start])
        at = start + found.nbytes
    between.append(data[at:])
    return _Template(names, tuple((array.shape, array.dtype) for array in arrays), tuple(between))
