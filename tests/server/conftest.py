"""Bridges for the tests of the server, closed when a test is over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from plugrl_bridges.server import exchange, hub, lifetime
from tests.support import bridge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from plugrl_bridges.server.lockstep import Lockstep


@pytest.fixture(autouse=True)
def quick_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the keeper look after clients more often, since these tests wait for it all the time."""
    monkeypatch.setattr(lifetime, "_KEEPER_PERIOD_S", 0.01)
    monkeypatch.setattr(hub, "_CHORES_PERIOD_S", 0.02)
    monkeypatch.setattr(exchange, "_SLICE_S", 0.05)


@pytest.fixture
def make_bridge() -> Iterator[Callable[..., Lockstep]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Lockstep:
            return stack.enter_context(bridge(**options))

        yield make
