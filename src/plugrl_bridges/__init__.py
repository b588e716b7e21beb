"""Let the trainer you already use step environments that live in another process, machine or language.

Give ``plugrl_bridges.sb3.PlugRemoteVecEnv`` to a Stable-Baselines3 algorithm: it is the server that env clients
connect to. Start ``plugrl-env-client`` (``plugrl_bridges.client``) where the environments are.

Importing this package imports no trainer, no torch and not even Gymnasium; it gives the errors, which every side may
have to catch, and sees to it that Gymnasium knows ``plugrl_bridges:PlugRL/Probe-v0``.
"""

from __future__ import annotations

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
    LocalProtocolError,
    PlugRLError,
    RaggedClientError,
    RemoteProtocolError,
    SpaceError,
    StepTimeout,
    WireError,
)
from plugrl_bridges.registration import register_when_gymnasium_is_there

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
    "LocalProtocolError",
    "PlugRLError",
    "RaggedClientError",
    "RemoteProtocolError",
    "SpaceError",
    "StepTimeout",
    "WireError",
    "__version__",
]

__version__ = "0.1.0"

register_when_gymnasium_is_there()
