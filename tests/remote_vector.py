"""Fixtures for tests of the Gymnasium adapters: vector envs with their clients, closed when a test is over."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges.gym import AutoresetMode, PlugRLVectorEnv
from tests.support import ACTIONS, OBSERVATIONS, ClientThread, CountingEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gymnasium.vector import VectorEnv

    MakeVector = Callable[..., PlugRLVectorEnv]

MODES = list(AutoresetMode)
SPACES: dict[str, Any] = {"observation_space": OBSERVATIONS, "action_space": ACTIONS}


@pytest.fixture
def make_vector() -> Iterator[MakeVector]:
    """Make a vector env on a free port, without clients."""
    with contextlib.ExitStack() as stack:

        def make(kind: Callable[..., Any] = PlugRLVectorEnv, **options: Any) -> Any:
            env = kind(**{"port": 0, "timeout": 20.0, "connect_timeout": 60.0, **options})
            stack.callback(env.close)
            return env

        yield make


@pytest.fixture
def remote_vector(make_vector: MakeVector) -> Iterator[MakeVector]:
    """Make a vector env with clients.

    ``make`` makes an env, of its number if it takes one; ``together`` puts all on one connection.
    """
    clients: list[ClientThread] = []
    made: list[PlugRLVectorEnv] = []

    def start(
        make: Callable[..., Any] = CountingEnv, envs: int = 1, *, together: bool = True, **options: Any
    ) -> PlugRLVectorEnv:
        env = make_vector(num_envs=envs, **options)
        made.append(env)
        numbered = "env_index" in inspect.signature(make).parameters
        if together:
            clients.append(ClientThread(make, num_envs=envs, url=env.url))
            return env
        for rank in range(envs):
            one = functools.partial(make, env_index=rank) if numbered else make
            clients.append(ClientThread(one, url=env.url, rank=rank, group_num_envs=envs))
        return env

    yield start
    for env in made:
        env.close()
    for client in clients:
        client.stop()


def act(env: VectorEnv[Any, Any, Any] | PlugRLVectorEnv, value: float = 0.5) -> Any:
    """Step with the same action everywhere."""
    return env.step(np.full((env.num_envs, 1), value, np.float32))
