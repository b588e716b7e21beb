"""Let the trainer you already use step environments that live in another process, machine or language.

Give ``plugrl_bridges.sb3.PlugRemoteVecEnv`` to a Stable-Baselines3 algorithm, and ``plugrl_bridges.PlugRLVectorEnv``
to anything that takes a Gymnasium vector env: it is the server that env clients connect to. Start ``plugrl-env-client``
(``plugrl_bridges.client``) where the environments are.

Importing this package imports no trainer and no torch; it gives the errors, which every side may have to catch, and
registers ``plugrl_bridges:PlugRL/Remote-v0`` and ``plugrl_bridges:PlugRL/Probe-v0`` with Gymnasium.
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
from plugrl_bridges.registration import register_envs

if TYPE_CHECKING:
    from plugrl_bridges.gym import PlugRLVectorEnv
    from plugrl_bridges.server.policy_server import PolicyServer, PolicySummary

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
    "PolicyServer",
    "PolicySummary",
    "RaggedClientError",
    "RemoteProtocolError",
    "SpaceError",
    "StepTimeout",
    "UnverifiedClientError",
    "WireError",
    "__version__",
]

__version__ = "0.1.0"

register_envs()


def __getattr__(name: str) -> object:
    """Import the servers when they are asked for: a client needs none."""
    if name == "PlugRLVectorEnv":
        from plugrl_bridges.gym import PlugRLVectorEnv  # noqa: PLC0415 - see above

        return PlugRLVectorEnv
    if name in {"PolicyServer", "PolicySummary"}:
        from plugrl_bridges.server import policy_server  # noqa: PLC0415 - see above

        return getattr(policy_server, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
