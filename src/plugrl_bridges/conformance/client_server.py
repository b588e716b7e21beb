"""The client under test as a process, and the server that it connects to, on the websockets library's own server.

A `Listener` accepts; each connection is a `Link`, whose messages the checker's thread reads and writes one by one. A
`ClientProcess` is a shell command; it may start several processes, which are ended as a group. ``client_checker`` is
the caller, and knows what the messages mean.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from websockets.sync.server import ServerConnection

__all__ = ["GOING_AWAY", "RESYNC", "STOP", "ClientProcess", "Gone", "Link", "Listener", "Stalled"]

# Spelt out anew, for both checkers: with the names of the code that is judged, a misspelling would go unseen.
STOP = "plugrl-server-stop"
RESYNC = "plugrl-server-resync"
GOING_AWAY = 1001
_ARRIVAL_TICK_S = 0.05
_EXIT_TICK_S = 0.02
_GRACE_S = 1.0
_OPEN_TIMEOUT_S = 10.0
"""At most so long a handshake may take; the end of the check has to wait for it."""


class Gone(Exception):
    """A client ended its connection.

    Args:
        code: Of its close frame; 1006 if there was none.
        reason: Of its close frame.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"close code {code}" + (f" {reason[:80]!r}" if reason else ""))
        self.code = code
        self.reason = reason


class Stalled(Exception):
    """A client did not read what was sent to it; its connection was ended."""


class Link:
    """The connection with one client, for one thread.

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

        ``last`` is sent immediately before the close frame, so that the client most likely reads both together.
        """
        self._close = (GOING_AWAY, reason)
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
    """A listener, which has connections in the order of their arrival; a context manager.

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
                return self._arrivals.get(not over, _ARRIVAL_TICK_S)
            except queue.Empty:
                if over:
                    return None


class ClientProcess:
    """Run a shell command until it ends or the context does. What it prints goes to stderr.

    Args:
        command: For the shell.
    """

    def __init__(self, command: str) -> None:
        # Own group: what the shell starts can then be ended with it, and a Ctrl-C here does not reach it unawares.
        self._posix = os.name == "posix"
        self._process = subprocess.Popen(  # noqa: S602 - a shell command is what the user gave
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=self._posix,
            creationflags=0 if self._posix else getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._swept = False

    def __enter__(self) -> ClientProcess:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Number of the process, and on POSIX of its group."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the command has ended by itself, or was ended."""
        if self._process.returncode is not None:
            return True
        if hasattr(os, "waitid"):
            # Looks without reaping: as long as nobody has reaped it, its number is nobody else's.
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the command to end; give whether it did."""
        deadline = time.monotonic() + timeout_s
        while not self.ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_EXIT_TICK_S)
        return True

    @property
    def status(self) -> int:
        """Exit status of an ended command; -N if signal N ended it."""
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """End whatever of it still runs: first with a request, then by force."""
        if self._swept:
            return
        if not self.ended:
            self._signal(signal.SIGTERM)
            self.wait(_GRACE_S)
        # The command is over or deaf; what it started and did not wait for goes with it.
        self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        self._process.wait()
        self._swept = True

    def _signal(self, number: signal.Signals) -> None:
        if self._posix:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        elif sys.platform == "win32" and self._process.poll() is None:
            subprocess.run(  # noqa: S603 - a number of ours
                ["taskkill", "/F", "/T", "/PID", str(self.pid)],  # noqa: S607 - Windows' own, found as everyone does
                check=False,
                capture_output=True,
            )
