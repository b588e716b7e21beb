"""Step environments for a training server: `EnvClient` in code, ``plugrl-env-client`` on the command line.

Start at `EnvClient`. ``envs`` and ``vector_env`` step what the user's factory gives, ``exchange`` speaks the protocol
on one connection, ``reconnect`` says what its end means; ``cli`` and ``procs`` are the program around it.
Imports neither torch nor any trainer, and nothing heavy until a name is used: ``plugrl-env-client --help`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugrl_bridges.client.env_client import EnvClient
    from plugrl_bridges.client.factory import env_factory, gym_factory
    from plugrl_bridges.client.record import ClientSummary, Episode, Progress

__all__ = ["ClientSummary", "EnvClient", "Episode", "Progress", "env_factory", "gym_factory"]

_HOMES = {
    "ClientSummary": "record",
    "EnvClient": "env_client",
    "Episode": "record",
    "Progress": "record",
    "env_factory": "factory",
    "gym_factory": "factory",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
