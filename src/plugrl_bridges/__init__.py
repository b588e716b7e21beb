"""Let the trainer you already use step environments that live in another process, machine or language.

Give ``plugrl_bridges.sb3.PlugRemoteVecEnv`` to a Stable-Baselines3 algorithm, and ``plugrl_bridges.PlugRLVectorEnv``
to anything that takes a Gymnasium vector env: it is the server that env clients connect to. Start ``plugrl-env-client``
(``plugrl_bridges.client``) where the environments are.

Importing this package imports no trainer, no torch and not even Gymnasium; it gives the errors, which every side may
have to catch, and sees to it that Gymnasium knows ``plugrl_bridges:PlugRL/Remote-v0`` and
``plugrl_bridges:PlugRL/Probe-v0``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugrl_bridges.errors import (
    ClientLost,
    ConnectionClosed,
    ConnectTimeout,
    DecodeError,
    EncodeError,
    EnvFailed,
    EnvPoisoned,
    FactoryError,
    HandshakeError,
    LedgerError,
    LedgerMismatch,
    LocalProtocolError,
    PlugRLError,
    RaggedClientError,
    RemoteProtocolError,
    SpaceError,
    StepTimeout,
    UnverifiedClientError,
    WireError,
)
from plugrl_bridges.registration import register_when_gymnasium_is_there

if TYPE_CHECKING:
    from plugrl_bridges.gym import PlugRLVectorEnv

__all__ = [
    "ClientLost",
    "ConnectTimeout",
    "ConnectionClosed",
    "DecodeError",
    "EncodeError",
    "EnvFailed",
    "EnvPoisoned",
    "FactoryError",
    "HandshakeError",
    "LedgerError",
    "LedgerMismatch",
    "LocalProtocolError",
    "PlugRLError",
    "PlugRLVectorEnv",
    "RaggedClientError",
    "RemoteProtocolError",
    "SpaceError",
    "StepTimeout",
    "UnverifiedClientError",
    "WireError",
    "__version__",
]

__version__ = "0.1.0"

register_when_gymnasium_is_there()


def __getattr__(name: str) -> object:
    """Import the vector env when it is asked for: it needs Gymnasium."""
    if name != "PlugRLVectorEnv":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from plugrl_bridges.gym import PlugRLVectorEnv  # noqa: PLC0415 - see above

    return PlugRLVectorEnv
