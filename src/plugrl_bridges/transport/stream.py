"""The byte stream: one non-blocking socket, plain or TLS, with the differences between the two hidden.

This module must not know of WebSockets. ``websocket`` decides what is sent and when to wait.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING

from .options import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .outgoing import Buffer

__all__ = ["Stream"]

_BUFFERS_PER_CALL = 512
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Stream:
    """A byte stream that does not block; only `wait` waits. A connection that failed raises `OSError`.

    Args:
        sock: A connected, non-blocking socket, plain or TLS-wrapped (handshake not done); owned from here on.
    """

    __slots__ = ("_sendmsg", "_sock", "_tls", "handshake_due", "tls_error", "wait", "wants_write")

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        # Looked up once; neither TLS nor every platform (Windows) has it.
        self._sendmsg: Callable[[Sequence[Buffer]], int] | None = (
            None if self._tls is not None else getattr(sock, "sendmsg", None)
        )
        self.handshake_due = self._tls is not None
        """Whether TLS must shake hands before anything is sent or received."""
        self.wants_write = False
        """Whether the TLS handshake waits for room to write."""
        self.tls_error: OSError | None = None
        """Why the TLS handshake failed, if it did."""
        self.wait = Waiter(sock.fileno())

    def fileno(self) -> int:
        """Return the file descriptor, or -1 once closed."""
        return self._sock.fileno()

    def shake_hands(self) -> bool:
        """Go on with the TLS handshake; True if it is done, False if it waits or has failed (see `tls_error`)."""
        self.wants_write = False
        try:
            if self._tls is not None:
                self._tls.do_handshake()
            self.handshake_due = False
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            self.wants_write = True
        except OSError as exc:
            self.tls_error = exc
        return not self.handshake_due

    def receive(self, space: memoryview) -> int:
        """Receive into `space`; return the number of bytes, 0 at the end of the stream, -1 if there are none now."""
        try:
            return self._sock.recv_into(space)
        except _WOULD_BLOCK:
            return -1

    def may_hold_more(self, *, full: bool, enough: bool) -> bool:
        """Return whether to receive again at once, when the last call was `full` or the caller has `enough`.

        A plain socket that did not fill its space is empty. TLS gives one record at a time, and may hold bytes that no
        selector sees.
        """
        if self._tls is None:
            return full and not enough
        return not enough or bool(self._tls.pending())

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Send what the socket takes now of the buffers, in one call; return the number of bytes, 0 if it is full."""
        try:
            if len(buffers) == 1:
                return self._sock.send(buffers[0])
            if self._sendmsg is None:
                return self._sock.send(b"".join(buffers))
            return self._sendmsg(buffers[:_BUFFERS_PER_CALL])
        except _WOULD_BLOCK:
            return 0

    def joined(self, buffers: list[Buffer]) -> list[Buffer]:
        """Join buffers once where they could not be gathered in one call anyway."""
        return [b"".join(buffers)] if self._sendmsg is None and len(buffers) > 1 else buffers

    def end(self) -> None:
        """Send the end of the stream; receiving goes on until the peer has ended it too."""
        if self._tls is not None:
            # SSLWantReadError: the close_notify is sent, and its answer is not waited for.
            with contextlib.suppress(OSError):
                self._tls.unwrap()
            self._tls = None
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()
