"""The listening socket, the connections and the keeper thread: the only server file that touches sockets.

The thread that the trainer calls from drives the sockets itself, through `Hub.poll` and `Hub.poll_peer`, holding
`Hub.lock`. A keeper thread takes the lock now and then and does the same, so that minutes of learning lose no client:
accept, handshake, ping and pong, close detection. Whoever holds the lock drives; nobody else touches a connection.

Knows nothing of slots and steps: it hands validated messages to its consumer (``server.exchange``), which answers
through `Hub.send`. A fault of one peer ends that connection and nothing else [7].
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import selectors
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from plugrl_bridges.errors import ConnectionClosed, PlugRLError, RemoteProtocolError
from plugrl_bridges.server.lifetime import LifeLine
from plugrl_bridges.transport import Listener, State
from plugrl_bridges.wire.closing import GOING_AWAY, INTERNAL_ERROR, RESYNC, STOP
from plugrl_bridges.wire.messages import Feedback, Infer, Metadata
from plugrl_bridges.wire.session import Due, ServerSession

if TYPE_CHECKING:
    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.transport import WebSocket
    from plugrl_bridges.wire.codec import Buffer

__all__ = ["Hub", "HubConsumer", "Peer"]

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0


@dataclass(eq=False)
class Peer:
    """One connection, as the hub and its consumer see it: who, since when, what came last.

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
        """Return what came last and how long ago, for error texts."""
        return f"{self.last_message} {time.monotonic() - self.last_message_at:.1f} s ago"


class HubConsumer(Protocol):
    """Who takes what the hub receives: with the hub's lock held; arrays are views, valid during the call."""

    def on_infer(self, peer: Peer, infer: Infer) -> None:
        """Accept an infer; a `RemoteProtocolError` raised here resyncs this connection."""

    def on_feedback(self, peer: Peer, feedback: Feedback, dropped: tuple[int, ...]) -> None:
        """Accept a feedback; ``dropped`` envs held no action and their rows are gone."""

    def on_lost(self, peer: Peer, why: str) -> None:
        """Record the end of a connection; called once per connection that sent a first message."""


class Hub:
    """Listen for env clients and carry messages between them and a consumer.

    Args:
        options: Where to listen and within which bounds.
        metadata: Sent to every client first [5.1].
        consumer: Takes the messages.

    Raises:
        OSError: if the address cannot be listened on; the text names it, and what to do.
    """

    def __init__(self, options: BridgeOptions, metadata: Metadata, consumer: HubConsumer) -> None:
        self.lock = threading.RLock()
        self._options = options
        self._metadata = metadata
        self._consumer = consumer
        self._listener = Listener(
            options.host,
            options.port,
            api_key=options.api_key,
            ssl=options.ssl,
            allowed_origins=tuple(options.allowed_origins),
            max_message_bytes=options.max_message_bytes,
        )
        self.host, self.port = options.host, self._listener.port
        scheme = "ws" if options.ssl is None else "wss"
        self.url = f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.fileno(), selectors.EVENT_READ, None)
        self._peers: dict[int, Peer] = {}
        self._accepted = 0
        self._chores_at = 0.0
        self.closing = False
        self._closed = False
        self._muted = False
        self._creator = os.getpid()
        if not _is_loopback(options.host) and options.api_key is None:
            logger.warning(
                "listening on %s, beyond this machine, without an api_key: anybody who reaches it can take a slot",
                self.url,
            )
        self._life_line = LifeLine(self, f"plugrl-keeper-{self.port}", options.timing.keeper_period_s)

    # The trainer's side -----------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a forked process: the connections are its parent's."""
        return os.getpid() != self._creator

    def poll(self, timeout_s: float) -> bool:
        """Wait for anything on any connection, and handle it; hold the lock.

        Args:
            timeout_s: Longest wait in seconds; 0 handles what is there.

        Returns:
            Whether anything happened.
        """
        try:
            ready = self._selector.select(timeout_s)
        except (OSError, ValueError):
            if self.closing:  # by a signal handler, or by another thread that waited long enough for the lock
                return False
            raise
        for key, _ in ready:
            peer: Peer | None = key.data
            if peer is None:
                if not self._accept():
                    self._mute_listener()
            elif self._peers.get(peer.fd) is peer:  # not ended by an earlier one of this round
                self._service(peer)
        now = time.monotonic()
        if now >= self._chores_at:
            self._chores_at = now + self._options.timing.chores_period_s
            self._chores(now)
        return bool(ready)

    def poll_if_due(self) -> None:
        """Handle what is there if nobody has for a while: a trainer that never pauses must not starve others."""
        if time.monotonic() >= self._chores_at:
            self.poll(0.0)

    def poll_peer(self, peer: Peer, timeout_s: float) -> bool:
        """Wait for one connection alone, by the shortest road; hold the lock.

        Args:
            peer: The connection.
            timeout_s: Longest wait in seconds. Others are not looked after meanwhile: keep it short, then `poll`.
        """
        try:
            data = peer.websocket.receive(timeout_s)
        except ConnectionClosed:
            self._service(peer)
            return True
        if data is None:
            return False
        websocket = peer.websocket
        while data is not None:
            self._take(peer, data)
            data = websocket.pop()
        websocket.recycle()
        self._settle(peer)
        return True

    def send(self, peer: Peer, message: list[Buffer]) -> bool:
        """Send one message; hold the lock.

        Returns:
            Whether it went out; if not, the consumer was told of the connection's end.
        """
        try:
            peer.websocket.send(message, timeout_s=self._options.timeout)
        except (ConnectionClosed, TimeoutError) as exc:
            logger.debug("send to %s failed: %s", peer.address, exc)
            self._lose(peer, str(exc))
            self._service(peer)
            return False
        return True

    def end(self, peer: Peer, code: int, reason: str, why: str) -> None:
        """Close one connection with a close code [7]; the consumer is told at once.

        Args:
            peer: The connection.
            code: Close code.
            reason: Close reason, one of [7].
            why: What happened, for the consumer's texts.
        """
        if peer.ended_at is None:
            peer.ended_at = time.monotonic()
            peer.websocket.close(code, reason)
        self._lose(peer, why)
        if peer.websocket.closed:
            self._drop(peer)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Tell every client that the run is over [7.1] and stop; idempotent, bounded as a whole.

        In a forked process only its copies of the sockets are closed: the clients hear nothing.

        Args:
            timeout_s: Seconds for all connections together to answer.
        """
        if self.forked:
            self.abandon()
            return
        self.closing = True
        self._life_line.let_go()
        deadline = time.monotonic() + timeout_s
        # A step that hangs in another thread holds the lock; the run still ends.
        locked = self.lock.acquire(timeout=timeout_s)
        try:
            if self._closed:
                return
            self._closed = True
            self._mute_listener()
            self._accept()  # whoever is in the backlog hears stop too, if its handshake is done by then
            self._listener.close()
            self._say_stop()
            while self._peers and time.monotonic() < deadline:
                self.poll(min(0.05, max(0.0, deadline - time.monotonic())))
                self._say_stop()
            for peer in list(self._peers.values()):
                peer.lost = True
                peer.websocket.abort()
                self._drop(peer)
            self._selector.close()
        finally:
            if locked:
                self.lock.release()
        self._life_line.join(timeout_s=1.0)

    def abandon(self) -> None:
        """Let go of what a fork copied: close the copies of the sockets, and say nothing on them."""
        self.closing = self._closed = True
        self._life_line.forget()
        self._listener.close()
        for peer in self._peers.values():
            peer.lost = True
            peer.websocket.abort()
        with contextlib.suppress(OSError):
            self._selector.close()  # without unregistering: the parent's selector is the same object of the system

    # Inside -----------------------------------------------------------------------------------------------------

    def _say_stop(self) -> None:
        for peer in list(self._peers.values()):
            if peer.websocket.state is State.OPEN and peer.ended_at is None:
                peer.lost = True
                self.end(peer, GOING_AWAY, STOP, "the run is over")

    def _mute_listener(self) -> None:
        """Stop waiting for newcomers until the next chores: a listener that nothing can be taken from stays ready."""
        if not self._muted:
            self._muted = True
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(self._listener.fileno())

    def _accept(self) -> bool:
        """Accept who is waiting; return whether anybody was."""
        before = self._accepted
        while (websocket := self._listener.accept()) is not None:
            self._accepted += 1
            peer = Peer(self._accepted, websocket, ServerSession(), websocket.fileno())
            stale = self._peers.get(peer.fd)
            if stale is not None:  # its socket was shut by an interrupted send, and the system gave the number again
                self._drop(stale)
            self._peers[peer.fd] = peer
            self._selector.register(peer.fd, selectors.EVENT_READ, peer)
            self._service(peer)
        return self._accepted > before

    def _service(self, peer: Peer) -> None:
        """Read what a connection has, and hand it on."""
        websocket = peer.websocket
        websocket.pump()
        if not peer.greeted and websocket.state is State.OPEN:
            peer.greeted = True
            if not self.send(peer, peer.session.open(self._metadata)):
                return
        while (data := websocket.pop()) is not None:
            self._take(peer, data)
        websocket.recycle()
        self._settle(peer)

    def _settle(self, peer: Peer) -> None:
        """Record that a connection has ended, or is being ended by the peer: nothing will come of it any more."""
        if peer.websocket.closed:
            self._drop(peer)
        elif peer.websocket.state is State.CLOSING and peer.ended_at is None:
            peer.ended_at = time.monotonic()  # the peer may keep the stream open for ever
            self._tell_end(peer)

    def _take(self, peer: Peer, data: memoryview | str) -> None:
        if peer.ended_at is not None or peer.lost:  # what was on its way when it ended is nobody's any more
            return
        try:
            message, dropped = peer.session.receive(data)
            peer.last_message = message.message_type
            peer.last_message_at = time.monotonic()
            if dropped:
                logger.warning(
                    "[7.6] dropped feedback of %s for envs %s, which hold no action on this connection",
                    peer.address, list(dropped),
                )  # fmt: skip
            if isinstance(message, Infer):
                if not peer.spoke:
                    peer.spoke = True
                    logger.info("connected: %s with %d envs", peer.address, len(message.env_indices))
                self._consumer.on_infer(peer, message)
            else:
                self._consumer.on_feedback(peer, message, dropped)
        except RemoteProtocolError as exc:
            logger.warning("%s broke the protocol, closing its connection with %s: %s", peer.address, RESYNC, exc)
            self.end(peer, GOING_AWAY, RESYNC, str(exc))
        except PlugRLError as exc:
            logger.error("%s cannot be served: %s", peer.address, exc)  # noqa: TRY400 - the text says it all
            self.end(peer, GOING_AWAY, STOP, str(exc))
        except Exception:
            logger.exception("a fault of this library while serving %s", peer.address)
            self.end(peer, INTERNAL_ERROR, "Internal server error.", "a fault of this library; see the log")

    def _lose(self, peer: Peer, why: str) -> None:
        if peer.lost:
            return
        peer.lost = True
        if peer.spoke:
            self._consumer.on_lost(peer, why)

    def _drop(self, peer: Peer) -> None:
        """Forget a connection whose socket is closed."""
        if self._peers.get(peer.fd) is not peer:
            return
        del self._peers[peer.fd]
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(peer.fd)
        self._tell_end(peer)

    def _tell_end(self, peer: Peer) -> None:
        """Log how the peer ended its connection, and tell the consumer; once."""
        if peer.lost:
            return
        websocket = peer.websocket
        code = "no close frame" if websocket.close_code is None else str(websocket.close_code)
        said = code + (f" {websocket.close_reason!r}" if websocket.close_reason else "")
        detail = f" ({websocket.close_detail})" if websocket.close_detail else ""
        level = logging.INFO if peer.spoke else logging.DEBUG
        logger.log(level, "connection of %s ended: %s%s", peer.address, said, detail)
        self._lose(peer, f"its connection ended with {said}{detail}")

    def _chores(self, now: float) -> None:
        if self._muted and not self._closed:
            self._muted = False
            self._selector.register(self._listener.fileno(), selectors.EVENT_READ, None)
        for peer in list(self._peers.values()):
            websocket = peer.websocket
            if websocket.wants_write:  # a pong or a close frame that the socket did not take
                self._service(peer)
            if websocket.closed:
                self._drop(peer)
                continue
            if peer.ended_at is not None:
                overdue, limit = now - peer.ended_at > _CLOSE_TIMEOUT_S, "its close frame"
            elif not peer.greeted:
                overdue, limit = now - peer.since > self._options.timing.handshake_timeout_s, "its handshake"
            elif not peer.spoke:
                overdue, limit = now - peer.since > self._options.timing.first_message_timeout_s, "its first infer"
            else:
                overdue, limit = self._ping(peer, now), "an answer to a ping"
            if overdue:
                logger.warning("%s did not send %s in time; connection dropped", peer.address, limit)
                websocket.abort()
                self._lose(peer, f"it did not send {limit} in time")
                self._drop(peer)

    def _ping(self, peer: Peer, now: float) -> bool:
        """Ping if it is time; return whether a ping has been unanswered for too long.

        The time runs from a ping that was sent, never from what was heard last: while this process itself stood still,
        it asked nothing. A client that computes a step may have no thread to answer with: then the step's own timeout
        is its bound, and TCP's is that of a dead link.
        """
        interval, timeout = self._options.ping_interval, self._options.ping_timeout
        if interval is None:
            return False
        websocket = peer.websocket
        if peer.session.state is Due.FEEDBACK or not websocket.pings_unanswered:
            peer.silent_since = None
        elif timeout is not None and peer.silent_since is not None and now - peer.silent_since > timeout:
            return True
        if now - peer.pinged_at >= interval:
            peer.pinged_at = now
            peer.silent_since = peer.silent_since or now
            websocket.ping()
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
