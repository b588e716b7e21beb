"""Bridges for the tests of the server, closed when a test is over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import bridge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from plugrl_bridges.server.lockstep import Lockstep


@pytest.fixture(autouse=True)
def quick(timing: Callable[..., None]) -> None:
    """Have servers look more often, since these tests wait for it all the time."""
    timing(keeper_period_s=0.01, chores_period_s=0.02, slice_s=0.05)


@pytest.fixture
def make_bridge() -> Iterator[Callable[..., Lockstep]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Lockstep:
            return stack.enter_context(bridge(**options))

        yield make
