"""A WebSocket on a plain socket, for both ends, with no thread and no event loop of its own.

This package owns sockets and RFC 6455. It must not know what a message says. Servers start at `Listener`, clients at
`connect`; both get a `WebSocket` and go on to ``plugrl_bridges.wire`` with its messages.
"""

from __future__ import annotations

from .connect import check_destination, connect
from .engine import State
from .listen import Listener
from .outgoing import Buffer
from .websocket import WebSocket

__all__ = ["Buffer", "Listener", "State", "WebSocket", "check_destination", "connect"]
