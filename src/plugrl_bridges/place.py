"""The place of an env in a run, for ledgers that are made where nobody says it: rank of the client, and number.

An env client says it around each call of its env factory, so that the factory need not know. ``env`` asks for it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["place_of_new_envs", "placing"]

_place: ContextVar[tuple[int, int]] = ContextVar("plugrl_bridges_place", default=(0, 0))


def place_of_new_envs() -> tuple[int, int]:
    """Return the rank and the number of an env that is being made; (0, 0) outside of a client's factory."""
    return _place.get()


@contextmanager
def placing(rank: int, env_index: int) -> Iterator[None]:
    """Set the rank and the number of the env that is made in here."""
    token = _place.set((rank, env_index))
    try:
        yield
    finally:
        _place.reset(token)
