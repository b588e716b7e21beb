"""Fixtures for tests of the SB3 adapter: remote envs with their clients, closed when a test is over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from plugrl_bridges.sb3 import PlugRemoteVecEnv
from tests.support import ClientThread, CountingEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_env() -> Iterator[Callable[..., PlugRemoteVecEnv]]:
    """Make a `PlugRemoteVecEnv` on a free port, without clients."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> PlugRemoteVecEnv:
            env = PlugRemoteVecEnv(**{"port": 0, "timeout": 20.0, "connect_timeout": 60.0, **options})
            stack.callback(env.close)
            return env

        yield make


@pytest.fixture
def remote(make_env: Callable[..., PlugRemoteVecEnv]) -> Iterator[Callable[..., PlugRemoteVecEnv]]:
    """Make a `PlugRemoteVecEnv` with one client; ``make`` makes an env, ``client`` has options for the client."""
    clients: list[ClientThread] = []

    def start(
        make: Callable[[], Any] = CountingEnv, *, envs: int = 1, client: dict[str, Any] | None = None, **options: Any
    ) -> PlugRemoteVecEnv:
        env = make_env(**options)
        clients.append(ClientThread(make, num_envs=envs, url=env.url, **(client or {})))
        return env

    yield start
    for client in clients:
        client.stop()
