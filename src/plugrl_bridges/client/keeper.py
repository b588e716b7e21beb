"""The connection as the two threads of a client share it: the one that steps envs, and the keeper.

While envs are being stepped, for a minute perhaps, somebody must answer the server's pings, send our own, and hear a
close: the keeper thread, about four times a second, under the lock. While the client waits for the server, it does so
itself and the keeper stands aside. Knows nothing of messages.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from plugrl_bridges.client.reconnect import TextFrame
from plugrl_bridges.errors import ConnectionClosed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.client.record import Watch
    from plugrl_bridges.transport import WebSocket
    from plugrl_bridges.wire.codec import Buffer

__all__ = ["KeptConnection"]

_TICK_S = 0.25
_SLICE_S = 0.2
"""Waits are cut into slices of this length, since `EnvClient.stop` only sets a flag: it may run in a signal handler."""
_LAST_SEND_S = 0.5
"""What a message that is being sent still gets after a stop: a close frame can only go behind the whole of it."""


class KeptConnection:
    """One open connection, which a keeper thread keeps alive.

    Once the ``watch`` is stopping, the keeper closes it with 1000, even in mid-step. While we wait for the server, it
    may be silent for ``ping_interval`` and ``ping_timeout`` together; if either is None, for ever.
    """

    def __init__(
        self, websocket: WebSocket, watch: Watch, *, ping_interval: float | None, ping_timeout: float | None
    ) -> None:
        self._websocket = websocket
        self._watch = watch
        self._ping_interval = ping_interval
        self._silence_s = None if ping_interval is None or ping_timeout is None else ping_interval + ping_timeout
        self._lock = threading.Lock()
        self._heard_bytes = -1
        self._heard_at = self._pinged_at = time.monotonic()
        self._done = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="plugrl-keeper", daemon=True)
        self._keeper.start()

    @property
    def address(self) -> str:
        """The server's URL."""
        return self._websocket.address

    def receive(self, timeout_s: float = math.inf) -> memoryview:
        """Wait for a message, valid until `recycle`; a server that is silent for too long counts as gone."""
        since = time.monotonic()
        while True:
            with self._lock:
                message = self._websocket.receive(_SLICE_S)
                if isinstance(message, str):
                    raise TextFrame(f"{self.address} sent a text frame ({message[:80]!r}); is it a training server?")
                if message is not None:
                    return message
                now = time.monotonic()
                self._tend(now)
                silent_s = now - max(since, self._heard_at)
                if self._silence_s is not None and silent_s > self._silence_s:
                    self._give_up(
                        f"nothing was heard for {silent_s:.0f} s, {self._websocket.pings_unanswered} pings unanswered"
                    )
                if now - since > timeout_s:
                    self._give_up(f"no message came within {timeout_s:g} s")
            self._watch.check()
            self._watch.report("waiting")

    def _give_up(self, why: str) -> None:
        self._websocket.abort()
        raise ConnectionClosed(self.address, 1006, "", why)

    def send(self, *messages: Sequence[Buffer]) -> None:
        """Send messages in one go. Once the client is to end, a server that does not read has half a second more."""
        with self._lock:
            self._websocket.send(*messages, stopping=lambda: self._watch.stopping_for_s >= _LAST_SEND_S)

    def recycle(self) -> None:
        """Give back what `receive` returned."""
        with self._lock:
            self._websocket.recycle()

    def shut(self, code: int = 1000, reason: str = "", *, timeout_s: float = 2.0) -> None:
        """Close, wait for the server to do the same for at most so long, and end the keeper. Idempotent."""
        self._done.set()
        self._keeper.join()
        with self._lock:
            self._websocket.close(code, reason)
            self._websocket.finish(timeout_s)

    def _tend(self, now: float) -> None:
        """Ping if it is time to; the lock is held."""
        websocket = self._websocket
        if websocket.bytes_received != self._heard_bytes:
            self._heard_bytes, self._heard_at = websocket.bytes_received, now
        if self._ping_interval is not None and now - self._pinged_at >= self._ping_interval:
            self._pinged_at = now
            websocket.ping()

    def _keep(self) -> None:
        while not self._done.wait(_TICK_S):
            if not self._lock.acquire(blocking=False):
                continue  # the other thread is at the socket, and does all this itself
            try:
                if self._websocket.closed:
                    return
                if self._watch.stopping:
                    self._websocket.close(1000)
                self._websocket.pump()
                self._tend(time.monotonic())
            finally:
                self._lock.release()
