"""Own one connection of the server's checker: the websockets library's client, with every answer judged as it comes.

What cannot go on ends by an exception after it was reported; ``server_checker`` catches them phase by phase.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from plugrl_bridges.conformance.server_checks import Offer, judge_action, judge_metadata, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Value

__all__ = ["RESYNC", "STOP", "CannotGoOn", "Line", "RunEnded", "ServerGone"]

STOP = (1001, "plugrl-server-stop")
RESYNC = (1001, "plugrl-server-resync")

_CLOSE_TIMEOUT_S = 2.0
_DIAL_AGAIN_S = 0.05


class CannotGoOn(Exception):
    """End a phase: what it needs did not come, which is in the report."""


class ServerGone(Exception):
    """End the check: nobody accepts connections, or nobody speaks on them."""


class RunEnded(Exception):
    """Tell that the server closed with ``plugrl-server-stop`` [7.1]."""


class Line:
    """Open a connection and read the metadata; use it as a context manager, which closes it.

    Args:
        report: Takes the findings.
        host: Of the server.
        port: Of the server.
        timeout_s: Seconds to wait for the port, and for each message.
        offer_compression: Whether to offer permessage-deflate, which a server must decline.

    Attributes:
        offer: What the metadata says.

    Raises:
        ServerGone: if the port is closed, or no metadata comes.
        RunEnded: if the server closes with stop at once.
    """

    def __init__(
        self, report: Report, host: str, port: int, timeout_s: float, *, offer_compression: bool = False
    ) -> None:
        self._report = report
        self._timeout_s = timeout_s
        self._frame: str | bytes | None = None
        self._stack = contextlib.ExitStack()
        address = f"[{host}]" if ":" in host else host
        try:
            self._websocket = self._stack.enter_context(
                connect(
                    f"ws://{address}:{port}",
                    sock=_dial(host, port, timeout_s),  # dialled here, so that no proxy of the environment is used
                    compression="deflate" if offer_compression else None,
                    max_size=None,
                    open_timeout=timeout_s,
                    close_timeout=_CLOSE_TIMEOUT_S,
                )
            )
        except (OSError, WebSocketException) as exc:
            report.violation("1", f"no WebSocket connection with {address}:{port}: {str(exc) or type(exc).__name__}")
            raise ServerGone from exc
        try:
            self.offer = self._metadata()
        except BaseException:
            self.close()
            raise
        if offer_compression:
            if self._websocket.protocol.extensions:
                report.violation("1", "the server accepts permessage-deflate, which is never used")
            else:
                report.passed("1", "compression is declined")

    def __enter__(self) -> Line:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close as a client that has finished [7.5]."""
        self._stack.close()

    def send(self, *messages: dict[str, Value]) -> None:
        """Send messages, one frame each; if the connection ends, or the server does not read, waiting finds out."""
        watchdog = threading.Timer(self._timeout_s, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            for message in messages:
                self._websocket.send(packed(message))
        except ConnectionClosed:
            pass
        finally:
            watchdog.cancel()

    def has_frame(self) -> bool:
        """Wait for a frame, or the end of the connection, that the next `action` will find; tell whether it came."""
        try:
            self._frame = self._websocket.recv(self._timeout_s)
        except TimeoutError:
            return False
        except ConnectionClosed:
            pass
        return True

    def action(self, envs: Sequence[int], *, clause: str, what: str, may_stop: bool = False) -> None:
        """Wait for the answer to an infer and judge it.

        Args:
            envs: Who asked, in the order of the infer.
            clause: What the server breaks if there is none.
            what: What was sent, for the report.
            may_stop: Whether the end of the run is waited for.

        Raises:
            CannotGoOn: if none came.
            RunEnded: if the server says stop instead.
        """
        try:
            frame, self._frame = self._frame, None
            if frame is None:
                frame = self._websocket.recv(self._timeout_s)
        except TimeoutError:
            self._report.violation(clause, f"no action within {self._timeout_s:g} s after {what}")
            raise CannotGoOn from None
        except ConnectionClosed:
            if self.ending == STOP:
                raise RunEnded from None
            expected = f"{STOP[0]} {STOP[1]!r} at the end of the run" if may_stop else "an action"
            self._report.violation(clause, f"closed with {self.ending_text} after {what}, expected {expected}")
            raise CannotGoOn from None
        message = unpacked(self._report, frame)
        if message is None:
            raise CannotGoOn
        judge_action(self._report, message, envs, self.offer)
        if not may_stop:
            self._report.passed(clause, f"an action comes after {what}")

    def answers_until_close(self, most: int) -> int | None:
        """Count the messages that come before the connection is closed; stop at ``most``; None: it stays silent."""
        count = 0
        try:
            while count < most:
                self._websocket.recv(self._timeout_s)
                count += 1
        except TimeoutError:
            return None
        except ConnectionClosed:
            pass
        return count

    @property
    def ending(self) -> tuple[int, str]:
        """Code and reason of the server's close frame; 1006 stands for none."""
        received = self._websocket.protocol.close_rcvd
        return (1006, "") if received is None else (received.code, received.reason)

    @property
    def ending_text(self) -> str:
        """The same, for people."""
        code, reason = self.ending
        return f"{code} {reason!r}" if reason else f"{code}"

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self._websocket.socket.shutdown(socket.SHUT_RDWR)

    def _metadata(self) -> Offer:
        try:
            frame = self._websocket.recv(self._timeout_s)
        except TimeoutError:
            self._report.violation("5.1", f"no metadata within {self._timeout_s:g} s; the server speaks first")
            raise ServerGone from None
        except ConnectionClosed:
            if self.ending == STOP:
                raise RunEnded from None
            self._report.violation("5.1", f"closed with {self.ending_text} before the metadata")
            raise ServerGone from None
        message = unpacked(self._report, frame)
        offer = None if message is None else judge_metadata(self._report, message)
        if offer is None:
            raise ServerGone
        return offer


def _dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect; a port that is not there yet is tried again until the time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            dialled = socket.create_connection((host, port), timeout=timeout_s)
        except OSError:  # noqa: PERF203 - one try after another is the point
            if time.monotonic() + _DIAL_AGAIN_S > deadline:
                raise
            time.sleep(_DIAL_AGAIN_S)
        else:
            dialled.settimeout(None)
            return dialled
