"""An observation as it travels [5.2], and the one place that validates it.

Part of ``messages``, which is the caller. What an observation means to an environment is the concern of
``plugrl_bridges.spaces``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.errors import RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plugrl_bridges.wire.arrays import Array, Value

__all__ = ["Observation", "blank_text", "describe", "keys_of", "parse_observation"]

_MAX_TEXT_BYTES = 1 << 26
"""A batch of text may become this large: one long str is padded to all envs, so a short message could cost much."""
_KEYS = {"images", "states", "text"}


@dataclass(frozen=True)
class Observation:
    """The observations of n envs as they travel [5.2].

    Attributes:
        images: Name to uint8 array of shape ``[n, h, w, c]``.
        states: Name to array of shape ``[n, ...]``, any numeric dtype.
        text: One str per env, shape ``[n]``; None where the message had no text for its rows.
    """

    images: Mapping[str, Array] = field(default_factory=dict)
    states: Mapping[str, Array] = field(default_factory=dict)
    text: Array | None = None

    def to_wire(self, rows: int) -> dict[str, Value]:
        """Return the map that travels; ``rows`` is n, needed for the text of observations that have none."""
        text = blank_text(rows) if self.text is None else self.text
        return {"images": dict(self.images), "states": dict(self.states), "text": text}


def parse_observation(value: Value, n: int, message: str, clause: str) -> Observation:
    """Return the observation of n rows of decoded values.

    Args:
        value: The map with the keys images, states and text.
        n: Rows that must be there.
        message: Name of the message it is part of, for the text of an error.
        clause: Clause of that message.

    Raises:
        RemoteProtocolError: naming the clause, the entry, what was expected and what came.
    """
    if not isinstance(value, dict) or value.keys() != _KEYS:
        got = keys_of(value) if isinstance(value, dict) else describe(value)
        raise RemoteProtocolError(
            f"{message}: an observation has exactly the keys images, states, text; got {got}", clause=clause
        )
    images, states = value["images"], value["states"]
    if not isinstance(images, dict) or not isinstance(states, dict):
        raise RemoteProtocolError(f"{message}: images and states must be maps", clause=clause)
    for name, array in images.items():
        if type(name) is not str or not isinstance(array, np.ndarray) or array.ndim != 4 or array.dtype != np.uint8:
            raise RemoteProtocolError(
                f"{message}: image {str(name)[:40]!r} must be a uint8 array [n, h, w, c], got {describe(array)}",
                clause=clause,
            )
    for name, array in states.items():
        if type(name) is not str or not isinstance(array, np.ndarray) or array.ndim < 1:
            raise RemoteProtocolError(
                f"{message}: state {str(name)[:40]!r} must be an array [n, ...], got {describe(array)}", clause=clause
            )
    for entries in (images, states):
        for name, array in entries.items():
            if len(array) != n:
                raise RemoteProtocolError(
                    f"{message}: {name[:40]!r} has a leading dimension of {len(array)}, expected {n} rows",
                    clause=clause,
                )
    return Observation(images, states, _text(value["text"], n, message))


def _text(text: Value, n: int, message: str) -> Array:
    """Accept the three forms that are in the wild [3.4]: a ``<U`` array, a list of str, one str for all."""
    if isinstance(text, np.ndarray) and text.dtype.kind == "U" and text.ndim == 1:
        if len(text) == n:
            return text
        if n == 0:
            return text[:0]
    elif isinstance(text, str):
        if text == "":
            return blank_text(n)
        _check_size(n, len(text), message)
        return np.full(n, text)
    elif isinstance(text, list) and len(text) in {n, n or len(text)} and all(isinstance(item, str) for item in text):
        text = text[:n]
        _check_size(n, max(map(len, text), default=0), message)
        return np.array(text, dtype=np.str_) if text else blank_text(0)
    raise RemoteProtocolError(
        f"{message}: text must hold {n} str (an array, a list) or be one str, got {describe(text)}", clause="3.4"
    )


def _check_size(n: int, length: int, message: str) -> None:
    if n * length * 4 > _MAX_TEXT_BYTES:
        raise RemoteProtocolError(
            f"{message}: text of {length} characters for {n} envs is more than {_MAX_TEXT_BYTES >> 20} MiB",
            clause="3.4",
        )


@lru_cache(maxsize=64)
def blank_text(n: int) -> Array:
    """Return n empty texts, read-only."""
    blank = np.full(n, "", dtype="<U1")
    blank.flags.writeable = False
    return blank


def describe(value: Value) -> str:
    """Describe a value in an error without repeating its contents."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype.str}{list(value.shape)}"
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def keys_of(value: Mapping[Any, Value]) -> list[str]:
    """Return a map's first keys for an error; a peer may send long ones, and many."""
    return sorted(str(key)[:40] for _, key in zip(range(8), value, strict=False))
