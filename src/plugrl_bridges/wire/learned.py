"""The fast path for messages that look like the one before: the layout is learned once, and only data is read.

The messages of one connection have the same layout at nearly every step. `LearnedParser` remembers where the arrays of
a parsed message lay and what all other bytes were. A later message of the same length whose other bytes are the same
has the same layout, and everything that ``messages.parse`` checks holds for it too: so it is assembled from its arrays
without decoding. Any other message is parsed by ``messages``, and learned from.

Exact by construction: what was checked by value (env indices, reuse marks, text) counts among the bytes that must be
the same. One parser belongs to one connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from plugrl_bridges.wire.codec import Array, Buffer, Value, decode
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Message, Observation, parse, parse_bytes

__all__ = ["LearnedParser"]

_REMEMBER = 8
_GIVE_UP_AFTER = 16  # misses in a row; the next hit of that length starts anew
_MAX_FIXED_BYTES = 1 << 16
"""A layout keeps the bytes that must be the same; a message with more of them than this is not worth remembering."""
_Spans: TypeAlias = dict[int, "tuple[Array, int]"]
_Fill: TypeAlias = "Callable[[list[Array]], Message]"


class _Unlearnable(Exception):
    """A message has a part whose place in the bytes is not known."""


@dataclass(frozen=True)
class _Learned:
    """What was learned of one message.

    Attributes:
        fixed: Start, stop and content of the bytes that must be the same.
        arrays: Shape, dtype, offset, and whether it is of bools, of each array to read.
        fill: Makes the message of these arrays.
    """

    fixed: tuple[tuple[int, int, bytes], ...]
    arrays: tuple[tuple[tuple[int, ...], np.dtype[Any], int, bool], ...]
    fill: _Fill

    def read(self, view: memoryview) -> Message | None:
        for start, stop, content in self.fixed:
            if view[start:stop] != content:
                return None
        return self.fill(
            [
                np.ndarray(shape, dtype, view, offset)
                if not is_bool
                else np.ndarray(shape, np.uint8, view, offset).astype(np.bool_)
                for shape, dtype, offset, is_bool in self.arrays
            ]
        )


class LearnedParser:
    """Parser of the messages of one connection; give it to a session as ``parser``."""

    def __init__(self) -> None:
        self._layouts: dict[int, _Learned] = {}
        self._misses: dict[int, int] = {}
        self._names: dict[bytes, Array] = {}

    def __call__(self, message: Buffer | str) -> Message:
        """Parse one message; see ``messages.parse_bytes``, whose results and errors are the same."""
        if isinstance(message, str):
            return parse_bytes(message)
        view = memoryview(message)
        layout = self._layouts.get(len(view))
        if layout is not None:
            found = layout.read(view)
            if found is not None:
                if self._misses:
                    self._misses.pop(len(view), None)
                return found
            self._misses[len(view)] = self._misses.get(len(view), 0) + 1
            if self._misses[len(view)] > _GIVE_UP_AFTER:  # text that changes at every step, say
                return parse_bytes(view)
        spans: list[tuple[Array, int]] = []
        parsed = parse(decode(view, spans))
        self._learn(parsed, view, spans)
        return parsed

    def _learn(self, message: Message, view: memoryview, spans: list[tuple[Array, int]]) -> None:
        try:
            layout = _Learner(view, {id(array): (array, start) for array, start in spans}, self._names).layout(message)
        except _Unlearnable:
            return
        self._layouts.pop(len(view), None)
        while len(self._layouts) >= _REMEMBER:
            oldest = next(iter(self._layouts))
            del self._layouts[oldest]
            self._misses.pop(oldest, None)
        self._layouts[len(view)] = layout


class _Learner:
    """Divides one parsed message into what is fixed and what is read anew."""

    def __init__(self, view: memoryview, spans: _Spans, names: dict[bytes, Array]) -> None:
        self.view = view
        self.names = names
        self.spans = spans
        self.taken: list[tuple[Array, int]] = []

    def layout(self, message: Message) -> _Learned:
        if isinstance(message, Feedback):
            fill = self._feedback(message)
        elif isinstance(message, Infer):
            fill = self._infer(message)
        elif isinstance(message, Action):
            fill = self._action(message)
        else:
            raise _Unlearnable
        if len(self.view) - sum(array.nbytes for array, _ in self.taken) > _MAX_FIXED_BYTES:
            raise _Unlearnable
        fixed = []
        at = 0
        for array, start in sorted(self.taken, key=lambda taken: taken[1]):
            fixed.append((at, start, bytes(self.view[at:start])))
            at = start + array.nbytes
        fixed.append((at, len(self.view), bytes(self.view[at:])))
        return _Learned(
            tuple(fixed),
            tuple((array.shape, array.dtype, start, array.dtype == np.bool_) for array, start in self.taken),
            fill,
        )

    def _same_names(self, names: Array) -> Array:
        """Return one and the same array for the same envs in every layout: sessions recognise it by identity."""
        key = names.tobytes()
        if key not in self.names and len(self.names) >= _REMEMBER:
            self.names.clear()
        return self.names.setdefault(key, names.copy())

    def _take(self, array: Array) -> int:
        """Have an array read anew each time; return its place among the arrays."""
        if id(array) not in self.spans or array.dtype.kind == "U":  # that text is Unicode is checked by value [3.4]
            raise _Unlearnable
        self.taken.append(self.spans[id(array)])
        return len(self.taken) - 1

    def _take_all(self, arrays: Mapping[str, Array]) -> tuple[tuple[str, int], ...]:
        return tuple((name, self._take(array)) for name, array in arrays.items())

    def _observation(self, observation: Observation) -> Callable[[list[Array]], Observation]:
        images, states = self._take_all(observation.images), self._take_all(observation.states)
        text = None if observation.text is None else observation.text.copy()
        return lambda arrays: Observation(
            {name: arrays[at] for name, at in images}, {name: arrays[at] for name, at in states}, text
        )

    def _feedback(self, message: Feedback) -> _Fill:
        observation, indices = self._observation(message.observation), self._same_names(message.env_indices)
        steps, rewards = self._take(message.step_ids), self._take(message.rewards)
        terminated, truncated = self._take(message.terminated), self._take(message.truncated)
        info, digest = self._nested(message.info), self._optional(message.digest)
        return lambda arrays: Feedback(
            observation(arrays), indices, arrays[steps], arrays[rewards], arrays[terminated], arrays[truncated],
            info(arrays), digest(arrays),
        )  # fmt: skip

    def _infer(self, message: Infer) -> _Fill:
        if message.env_spec is not None:  # once in a connection's life
            raise _Unlearnable
        observation, indices = self._observation(message.observation), self._same_names(message.env_indices)
        steps, reuse = self._take(message.step_ids), message.reuse
        reset_info = None if message.reset_info is None else self._nested(message.reset_info)
        digest = self._optional(message.digest)
        return lambda arrays: Infer(
            observation(arrays), indices, arrays[steps], reuse, None,
            None if reset_info is None else reset_info(arrays), digest(arrays),
        )  # fmt: skip

    def _action(self, message: Action) -> _Fill:
        if message.reset is not None:
            raise _Unlearnable
        indices = None if message.env_ids is None else self._same_names(message.env_ids)
        action = self._take(message.action)
        return lambda arrays: Action(indices, arrays[action])

    def _optional(self, array: Array | None) -> Callable[[list[Array]], Value]:
        return _constant(None) if array is None else _picker(self._take(array))

    def _nested(self, info: Mapping[Any, Value]) -> Callable[[list[Array]], dict[Any, Value]]:
        """Collect the arrays of an info map, at any depth; everything else in it is fixed."""
        if not info:
            return lambda _: {}
        entries: list[tuple[Any, Callable[[list[Array]], Value]]] = []
        for key, value in info.items():
            if isinstance(value, Mapping):
                entries.append((key, self._nested(value)))
            elif isinstance(value, np.ndarray):
                entries.append((key, _picker(self._take(value))))
            elif value is None or isinstance(value, (bool, int, float, str, bytes)):
                entries.append((key, _constant(value)))
            else:
                raise _Unlearnable
        return lambda arrays: {key: make(arrays) for key, make in entries}


def _picker(at: int) -> Callable[[list[Array]], Value]:
    return lambda arrays: arrays[at]


def _constant(value: Value) -> Callable[[list[Array]], Value]:
    return lambda _: value
