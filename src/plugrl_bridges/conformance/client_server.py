"""Own the server that a client under test connects to, on the websockets library's own server.

A `Listener` accepts; each connection is a `Link`, whose messages the checker's thread reads and writes one by one.
``client_checker`` is the caller, and knows what the messages mean.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from websockets.sync.server import ServerConnection

__all__ = ["RESYNC", "STOP", "Gone", "Link", "Listener", "Stalled"]

# Spelt out anew: with the names of the code that is judged, a misspelling would go unseen.
STOP = "plugrl-server-stop"
RESYNC = "plugrl-server-resync"
_GOING_AWAY = 1001
_TICK_S = 0.05
_OPEN_TIMEOUT_S = 10.0
"""At most so long a handshake may take; the end of the check has to wait for it."""


class Gone(Exception):
    """Say that a client ended its connection.

    Args:
        code: Of its close frame; 1006 if there was none.
        reason: Of its close frame.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"close code {code}" + (f" {reason[:80]!r}" if reason else ""))
        self.code = code
        self.reason = reason


class Stalled(Exception):
    """Say that a client did not read what was sent to it; its connection was ended."""


class Link:
    """Speak with one client, from one thread.

    Args:
        connection: Open.
        timeout_s: How long a client may take to read a message.
    """

    def __init__(self, connection: ServerConnection, timeout_s: float) -> None:
        request = connection.request
        self.extensions = ", ".join(request.headers.get_all("Sec-WebSocket-Extensions")) if request is not None else ""
        """What the client offered in its handshake."""
        self._connection = connection
        self._timeout_s = timeout_s
        self._held_back: list[str | bytes] = []
        self._order = threading.Event()
        self._ended = threading.Event()
        self._close: tuple[int, str] | None = None
        self._last: bytes | None = None

    def receive(self, timeout_s: float) -> str | bytes | None:
        """Wait for a message; None if none came in time.

        Raises:
            Gone: if there will be none.
        """
        if self._held_back:
            return self._held_back.pop()
        try:
            message = self._connection.recv(timeout_s)
        except TimeoutError:
            return None
        except ConnectionClosed as exc:
            raise self._gone() from exc
        return message

    def put_back(self, message: str | bytes) -> None:
        """Let the next `receive` return a message that was received already."""
        self._held_back.append(message)

    def send(self, message: str | bytes) -> None:
        """Send one message: str in a text frame, bytes in a binary one.

        Raises:
            Gone: if the connection has ended.
            Stalled: if the client does not read it in time.
        """
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._shut_down()

        watchdog = threading.Timer(self._timeout_s, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._connection.send(message)
        except ConnectionClosed as exc:
            if not late.is_set():
                raise self._gone() from exc
        finally:
            watchdog.cancel()
        if late.is_set():
            raise Stalled

    def close(self, reason: str, *, last: bytes | None = None) -> None:
        """Begin to close with 1001; return at once.

        Args:
            reason: Of the close frame.
            last: Sent immediately before it, so that the client most likely reads both together.
        """
        self._close = (_GOING_AWAY, reason)
        self._last = last
        self._order.set()

    def closed_within(self, timeout_s: float) -> bool:
        """Wait for the end of a connection that `close` was called for."""
        return self._ended.wait(max(0.0, timeout_s))

    @property
    def close_frame_came(self) -> bool:
        """Whether the client sent a close frame, be it as an answer to ours."""
        return self._connection.protocol.close_rcvd is not None

    def abort(self) -> None:
        """End the connection without ado."""
        self._shut_down()
        self._order.set()

    def serve(self) -> None:
        """Keep the connection open until told otherwise; the library's own thread for it runs this."""
        self._order.wait()
        if self._close is not None:
            if self._last is not None:
                with contextlib.suppress(Gone, Stalled):
                    self.send(self._last)
            self._connection.close(*self._close)
        self._ended.set()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_RDWR)

    def _gone(self) -> Gone:
        frame = self._connection.protocol.close_rcvd
        return Gone(1006, "") if frame is None else Gone(frame.code, frame.reason)


class Listener:
    """Listen, and hand out connections in the order of their arrival; a context manager.

    Args:
        host: Address to listen on.
        port: Port, 0 for a free one.
        timeout_s: How long a client may take to read a message, to answer a close frame, and, up to 10 s, for its
            handshake.

    Raises:
        OSError: if the port cannot be had.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        self._arrivals: queue.Queue[Link] = queue.Queue()
        self._links: list[Link] = []
        self._timeout_s = timeout_s
        options: dict[str, Any] = {
            "compression": None,
            "max_size": None,
            "open_timeout": min(_OPEN_TIMEOUT_S, timeout_s),
            "close_timeout": timeout_s,
        }
        if "ping_interval" in inspect.signature(serve).parameters:
            options["ping_interval"] = None  # clients that step without a thread of their own answer late
        quiet = logging.getLogger(f"{__name__}.websockets")
        quiet.setLevel(logging.CRITICAL)  # what goes wrong in a handshake is seen by its absence
        self._server = serve(self._handle, host, port, logger=quiet, **options)
        self.port: int = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="plugrl-conformance", daemon=True)

    def __enter__(self) -> Listener:  # noqa: PYI034 - Self came with Python 3.11
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links:
            link.abort()
        self._server.shutdown()
        self._thread.join()

    def _handle(self, connection: ServerConnection) -> None:
        link = Link(connection, self._timeout_s)
        self._links.append(link)
        self._arrivals.put(link)
        link.serve()

    def next(self, timeout_s: float, *, given_up: Callable[[], bool]) -> Link | None:
        """Wait for the next connection.

        Args:
            timeout_s: Return None after so long.
            given_up: Return None at once when this is true and nobody has come; asked some times a second.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            over = given_up() or time.monotonic() >= deadline
            try:
                return self._arrivals.get(not over, _TICK_S)
            except queue.Empty:
                if over:
                    return None
