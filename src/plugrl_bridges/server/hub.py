"""Own the listening socket, the connections and the keeper thread: the only server file that touches sockets.

The thread that the trainer calls from drives the sockets itself, through `Hub.poll` and `Hub.poll_peer`, holding
`Hub.lock`. A keeper thread takes the lock now and then and does the same, so that minutes of learning lose no client:
accept, handshake, ping and pong, close detection. Whoever holds the lock drives; nobody else touches a connection.

Knows nothing of slots and steps: it hands validated messages to its consumer (``server.lockstep``), which answers
through `Hub.send`. A fault of one peer ends that connection and nothing else [7].
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import selectors
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from plugrl_bridges.errors import ConnectionClosed, PlugRLError, RemoteProtocolError
from plugrl_bridges.server.peer import Peer
from plugrl_bridges.transport import Listener, State
from plugrl_bridges.wire.messages import Feedback, Infer, Metadata
from plugrl_bridges.wire.session import ServerSession
from plugrl_bridges.wire.session import State as Due

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.wire.codec import Buffer

__all__ = ["FEEDBACK_TIMEOUT", "GOING_AWAY", "RESYNC", "STOP", "Hub", "HubConsumer"]

logger = logging.getLogger(__name__)

GOING_AWAY = 1001
INTERNAL_ERROR = 1011
STOP = "plugrl-server-stop"
RESYNC = "plugrl-server-resync"
FEEDBACK_TIMEOUT = "Feedback timeout"

_HANDSHAKE_TIMEOUT_S = 10.0
_FIRST_MESSAGE_TIMEOUT_S = 60.0  # a client may build its simulators after it connected
_CLOSE_TIMEOUT_S = 2.0
_KEEPER_PERIOD_S = 0.1
_CHORES_PERIOD_S = 0.2


class HubConsumer(Protocol):
    """Take what the hub receives. Every call comes with the hub's lock held; arrays are views, valid during the call."""

    def on_infer(self, peer: Peer, infer: Infer) -> None:
        """Take an infer; a `RemoteProtocolError` raised here resyncs this connection."""

    def on_feedback(self, peer: Peer, feedback: Feedback, dropped: tuple[int, ...]) -> None:
        """Take a feedback; ``dropped`` envs held no action and their rows are gone."""

    def on_lost(self, peer: Peer, why: str) -> None:
        """Take the end of a connection; called once per connection that sent a first message."""


class Hub:
    """Listen for env clients and carry messages between them and a consumer.

    Args:
        options: Where to listen and within which bounds.
        metadata: Sent to every client first [5.1].
        consumer: Takes the messages.

    Raises:
        PlugRLError: if the address cannot be listened on; the text names it.
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
        self._closing = False
        self._closed = False
        self._stop_keeper = threading.Event()
        if not _is_loopback(options.host) and options.api_key is None:
            logger.warning(
                "listening on %s, beyond this machine, without an api_key: anybody who reaches it can take a slot",
                self.url,
            )
        self._keeper = threading.Thread(
            target=_keep, args=(weakref.ref(self), self._stop_keeper), name=f"plugrl-keeper-{self.port}", daemon=True
        )
        self._keeper.start()
        self._unregister_exit = _close_at_exit(self)

    # The trainer's side -----------------------------------------------------------------------------------------

    @property
    def peers(self) -> list[Peer]:
        """Connections that have sent a valid first message and are not ended."""
        return [peer for peer in self._peers.values() if peer.spoke and not peer.lost]

    def poll(self, timeout_s: float) -> bool:
        """Wait for anything on any connection, and handle it; hold the lock.

        Args:
            timeout_s: Longest wait in seconds; 0 handles what is there.

        Returns:
            Whether anything happened.
        """
        ready = self._selector.select(timeout_s)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            elif key.data.fd in self._peers:  # not ended by an earlier one of this round
                self._service(key.data)
        now = time.monotonic()
        if now >= self._chores_at:
            self._chores_at = now + _CHORES_PERIOD_S
            self._chores(now)
        return bool(ready)

    def poll_peer(self, peer: Peer, timeout_s: float) -> bool:
        """Wait for one connection alone, by the shortest road; hold the lock.

        Args:
            peer: The connection.
            timeout_s: Longest wait in seconds. Others are not looked after meanwhile: keep it short and `poll` after it.
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
        if websocket.closed:
            self._drop(peer)
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

        Args:
            timeout_s: Seconds for all connections together to answer.
        """
        self._stop_keeper.set()
        self._closing = True
        deadline = time.monotonic() + timeout_s
        # A step that hangs in another thread holds the lock; the run still ends.
        locked = self.lock.acquire(timeout=timeout_s)
        try:
            if self._closed:
                return
            self._closed = True
            self._unregister_exit()
            with contextlib.suppress(OSError):
                self._selector.unregister(self._listener.fileno())
            self._accept()  # whoever is in the backlog hears stop too, if its handshake is done by then
            self._listener.close()
            while self._peers and time.monotonic() < deadline:
                for peer in list(self._peers.values()):
                    if peer.websocket.state is State.OPEN and peer.ended_at is None:
                        peer.lost = True
                        self.end(peer, GOING_AWAY, STOP, "the run is over")
                self.poll(min(0.05, max(0.0, deadline - time.monotonic())))
            for peer in list(self._peers.values()):
                peer.lost = True
                peer.websocket.abort()
                self._drop(peer)
            self._selector.close()
        finally:
            if locked:
                self.lock.release()
        if threading.current_thread() is not self._keeper:
            self._keeper.join(timeout=1.0)

    # Inside -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while (websocket := self._listener.accept()) is not None:
            self._accepted += 1
            peer = Peer(self._accepted, websocket, ServerSession(), websocket.fileno())
            self._peers[peer.fd] = peer
            self._selector.register(peer.fd, selectors.EVENT_READ, peer)
            self._service(peer)

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
        if websocket.closed:
            self._drop(peer)

    def _take(self, peer: Peer, data: memoryview | str) -> None:
        if peer.ended_at is not None:
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
            logger.error("%s cannot be served: %s", peer.address, exc)
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
        if self._peers.pop(peer.fd, None) is None:
            return
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(peer.fd)
        websocket = peer.websocket
        if not peer.lost:
            said = f"{websocket.close_code}" + (f" {websocket.close_reason!r}" if websocket.close_reason else "")
            detail = f" ({websocket.close_detail})" if websocket.close_detail else ""
            level = logging.INFO if peer.spoke else logging.DEBUG
            logger.log(level, "connection of %s ended: %s%s", peer.address, said, detail)
            self._lose(peer, f"its connection ended with {said}{detail}")

    def _chores(self, now: float) -> None:
        for peer in list(self._peers.values()):
            websocket = peer.websocket
            if websocket.bytes_received != peer.heard_bytes:
                peer.heard_bytes, peer.heard_at = websocket.bytes_received, now
            if peer.ended_at is not None:
                overdue, limit = now - peer.ended_at > _CLOSE_TIMEOUT_S, "its close frame"
            elif not peer.greeted:
                overdue, limit = now - peer.since > _HANDSHAKE_TIMEOUT_S, "its handshake"
            elif not peer.spoke:
                overdue, limit = now - peer.since > _FIRST_MESSAGE_TIMEOUT_S, "its first infer"
            else:
                overdue, limit = self._ping(peer, now), "an answer to a ping"
            if overdue:
                logger.warning("%s did not send %s in time; connection dropped", peer.address, limit)
                websocket.abort()
                self._lose(peer, f"it did not send {limit} in time")
                self._drop(peer)

    def _ping(self, peer: Peer, now: float) -> bool:
        """Ping if it is time; tell whether the peer has been silent for too long.

        A client that computes a step may have no thread to answer with: then the step's own timeout is its bound, and
        TCP's is that of a dead link.
        """
        interval, timeout = self._options.ping_interval, self._options.ping_timeout
        if interval is None:
            return False
        if now - peer.pinged_at >= interval:
            peer.pinged_at = now
            peer.websocket.ping()
        if timeout is None or peer.session.state is Due.FEEDBACK:
            peer.heard_at = max(peer.heard_at, now - interval)
            return False
        return now - peer.heard_at > interval + timeout


def _keep(hub_ref: Callable[[], Hub | None], stop: threading.Event) -> None:
    """Look after the connections while the trainer does not; holds no hub alive."""
    while not stop.wait(_KEEPER_PERIOD_S):
        hub = hub_ref()
        if hub is None:
            return
        if hub.lock.acquire(timeout=_KEEPER_PERIOD_S):
            try:
                while not stop.is_set() and hub.poll(0.0):
                    pass
            except Exception:
                logger.exception("a fault of this library in the keeper thread")
            finally:
                hub.lock.release()
        del hub


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _close_at_exit(hub: Hub) -> Callable[[], None]:
    """Close the hub when the interpreter ends normally [7.1]; give what undoes this."""
    ref, creator = weakref.ref(hub), os.getpid()

    def close() -> None:
        alive = ref()
        if alive is not None and os.getpid() == creator:  # a forked child leaves its parent's clients alone
            alive.close()

    atexit.register(close)
    return lambda: atexit.unregister(close)
