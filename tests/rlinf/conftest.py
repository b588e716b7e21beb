"""RLinf's env on a free port with its clients in threads, closed when a test is over."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

from tests.rlinf.ports import first_free_port
from tests.support import ClientThread, CountingEnv

with warnings.catch_warnings():  # what RLinf and its requirements say when they are imported is none of ours
    warnings.simplefilter("ignore")
    import rlinf.workers.env.env_worker  # noqa: F401 - so that no test imports it first

    from plugrl_bridges.rlinf import PlugRLEnv, register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

register()


@pytest.fixture
def make_env() -> Iterator[Callable[..., PlugRLEnv]]:
    """Make a `PlugRLEnv` from what its part of a config would say, without clients."""
    with contextlib.ExitStack() as stack:

        def make(*, envs: int = 2, index: int = 0, instances: int = 1, whole: Any = None, **config: Any) -> PlugRLEnv:
            node = {"env_type": "plugrl", "port": 0, "timeout": 20.0, "connect_timeout": 20.0, "seed": None, **config}
            root = OmegaConf.create({"env": {"train": node}, **(whole or {})})
            env = PlugRLEnv(
                cfg=root.env.train, num_envs=envs, seed_offset=index, total_num_processes=instances, worker_info=None
            )
            stack.callback(env.close)
            return env

        yield make


@pytest.fixture
def remote(make_env: Callable[..., PlugRLEnv]) -> Iterator[Callable[..., PlugRLEnv]]:
    """Make a `PlugRLEnv` with clients: ``apart`` gives each env a connection of its own."""
    clients: list[ClientThread] = []

    def start(
        make: Callable[[int], Any] = CountingEnv,
        *,
        envs: int = 2,
        apart: bool = False,
        client: dict[str, Any] | None = None,
        **config: Any,
    ) -> PlugRLEnv:
        env = make_env(envs=envs, **config)
        numbers = itertools.count()
        for rank in range(envs if apart else 1):
            factory = functools.partial(make, rank) if apart else lambda: make(next(numbers) % envs)
            clients.append(
                ClientThread(factory, num_envs=1 if apart else envs, url=env.url, rank=rank, **(client or {}))
            )
        return env

    yield start
    for client in clients:
        client.stop()


@pytest.fixture
def free_ports() -> Callable[[int], int]:
    """Give the first of so many ports in a row that nobody listens on."""
    return first_free_port
