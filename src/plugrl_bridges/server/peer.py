"""Own the record of one connection, as the hub and its consumer see it.

Holds the WebSocket and the session of a client, and remembers what error texts need: who, since when, what came last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugrl_bridges.transport import WebSocket
    from plugrl_bridges.wire.session import ServerSession

__all__ = ["Peer"]


@dataclass(eq=False)
class Peer:
    """Describe one connection.

    Attributes:
        number: Counts connections of this hub, in order of arrival.
        websocket: The transport; the hub alone drives it.
        session: The order of messages.
        since: ``time.monotonic()`` at accept.
        greeted: Whether the metadata was sent.
        spoke: Whether a valid first message came.
        lost: Whether the consumer was told of its end.
        last_message: Type of the last message that came, for error texts.
        pinged_at: ``time.monotonic()`` of the last ping.
        silent_since: When the first ping was sent that is unanswered, or None.
        ended_at: When this side began to close it, or None.
    """

    number: int
    websocket: WebSocket
    session: ServerSession
    fd: int
    since: float = field(default_factory=time.monotonic)
    greeted: bool = False
    spoke: bool = False
    lost: bool = False
    last_message: str = "nothing"
    last_message_at: float = field(default_factory=time.monotonic)
    pinged_at: float = field(default_factory=time.monotonic)
    silent_since: float | None = None
    ended_at: float | None = None

    @property
    def address(self) -> str:
        """The peer's address, ``host:port``."""
        return self.websocket.address

    def last_words(self) -> str:
        """Say what came last and how long ago, for error texts."""
        return f"{self.last_message} {time.monotonic() - self.last_message_at:.1f} s ago"
