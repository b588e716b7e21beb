"""Every exception that this library raises of its own accord.

The tree (a fault of ours, or of the code that calls us, stands apart from a fault of the peer):

    PlugRLError
    ├── WireError                    protocol version 1, or the WebSocket below it
    │   ├── LocalProtocolError       this side tried to break the rules
    │   │   └── EncodeError          a value that the wire cannot carry
    │   ├── RemoteProtocolError      the peer broke the rules; has ``clause``
    │   │   └── DecodeError          bytes that are no message
    │   ├── HandshakeError           the connection never opened
    │   └── ConnectionClosed         the connection ended; has ``code`` and ``reason``
    ├── SpaceError                   spaces unknown, unsupported, or not what the data is
    ├── ConnectTimeout (TimeoutError)  the other end did not come in time
    ├── StepTimeout (TimeoutError)   a vector step had no result in time
    ├── ClientLost                   an env client went away and none took its place
    ├── RaggedClientError            a client that a lockstep trainer cannot serve
    ├── UnverifiedClientError        a client whose steps ``verify`` cannot check
    ├── LedgerMismatch               what an env took and gave is not what the trainer sent and got
    ├── EnvPoisoned                  used again after a step that failed
    ├── EnvFailed                    an env raised in an env client; has the cause
    ├── FactoryError                 the user's env factory gave something unusable
    └── LedgerError                  a ledger that cannot be written, read or compared

Bad arguments are plain ``ValueError`` or ``TypeError`` that name the argument. This module knows nothing of
sockets, slots or trainers; the raiser writes the text.
"""

from __future__ import annotations

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
    "RaggedClientError",
    "RemoteProtocolError",
    "SpaceError",
    "StepTimeout",
    "UnverifiedClientError",
    "WireError",
]


class PlugRLError(Exception):
    """Base of every error of this library; catch it to catch them all."""


class WireError(PlugRLError):
    """Base of everything that goes wrong between the two ends of a connection."""


class LocalProtocolError(WireError):
    """This side was asked to do what the protocol forbids; the connection is untouched."""


class EncodeError(LocalProtocolError):
    """A value that the wire cannot carry (object, structured or complex dtype, unknown type, bad width)."""


class RemoteProtocolError(WireError):
    """The peer broke a rule of the protocol.

    Args:
        message: What was expected and what came.
        clause: The clause of the protocol that was broken, such as ``"4.2"``; it is put in front of the text.
    """

    def __init__(self, message: str, *, clause: str = "") -> None:
        super().__init__(f"[{clause}] {message}" if clause else message)
        self.clause = clause


class DecodeError(RemoteProtocolError):
    """Bytes that are not a message: bad msgpack, a refused dtype, a wrong length, a bound exceeded."""


class HandshakeError(WireError):
    """A connection never opened.

    Args:
        message: What was expected and what came.
        status: The HTTP status the server answered with, if it answered at all.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ConnectionClosed(WireError):
    """A connection has ended.

    Args:
        address: The peer, as ``host:port`` or a URL.
        code: The close code the peer sent; 1006 if the connection ended without a close frame.
        reason: The close reason the peer sent.
        detail: What else is known, such as the operating system's error text.
    """

    def __init__(self, address: str, code: int, reason: str = "", detail: str = "") -> None:
        text = f"connection with {address} closed: {code}"
        if reason:
            text += f" {reason!r}"
        if detail:
            text += f" ({detail})"
        super().__init__(text)
        self.address = address
        self.code = code
        self.reason = reason
        self.detail = detail


class SpaceError(PlugRLError):
    """Spaces are unknown, or this library cannot carry them, or the data does not fit them."""


class ConnectTimeout(PlugRLError, TimeoutError):
    """Too few env clients, or at a client no training server, came within ``connect_timeout``."""


class StepTimeout(PlugRLError, TimeoutError):
    """A vector step or reset had no result within ``timeout``; the environment is then poisoned."""


class ClientLost(PlugRLError):
    """An env client was lost, and no other took its slots."""


class RaggedClientError(PlugRLError):
    """A client asks for a chunk for some of its envs while others of it still hold theirs [4.3]."""


class UnverifiedClientError(PlugRLError):
    """A client sends no digests of its steps to a bridge with ``verify=True``."""


class LedgerMismatch(PlugRLError):
    """In one step, what an env took and gave is not what the trainer sent and got.

    Args:
        message: Who, when, and what to do.
        slot: The trainer's row; of several the first.
        slots: All of them.
        episode: Of that slot, from 0.
        step: Of that episode, from 1; 0 is its first observation.
        vector_step: Of the run, from 1; 0 is a reset before the first.
        field: What differs, named as ``stepledger`` does, such as ``obs``; empty if it is more than one value.
        cell: The cell of it, such as ``obs[2]``.
    """

    def __init__(
        self,
        message: str,
        *,
        slot: int,
        slots: tuple[int, ...],
        episode: int,
        step: int,
        vector_step: int,
        field: str = "",
        cell: str = "",
    ) -> None:
        super().__init__(message)
        self.slot = slot
        self.slots = slots
        self.episode = episode
        self.step = step
        self.vector_step = vector_step
        self.field = field
        self.cell = cell


class EnvPoisoned(PlugRLError):
    """An environment was called whose last step or reset failed; make a new one."""


class EnvFailed(PlugRLError):
    """An env raised in ``step`` or ``reset``, or returned what does not fit its spaces; has the cause."""


class FactoryError(PlugRLError):
    """An env factory cannot be found, or returned something that is not an environment."""


class LedgerError(PlugRLError):
    """A step ledger cannot be written or read, or ledgers do not belong together."""
