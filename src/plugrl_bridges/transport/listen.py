"""The listening socket and the rules of the server-side handshake.

This module must not know what happens on a connection once it is open, nor when a slow handshake is given up: the
caller drives each connection that `Listener.accept` returns with ``WebSocket.pump``, and aborts it when it likes.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING

from websockets.server import ServerProtocol

from plugrl_bridges import arguments

from .engine import CORE_LOGGER
from .options import format_address, set_options
from .websocket import WebSocket

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Sequence

    from websockets.http11 import Request, Response

__all__ = ["Listener"]

logger = logging.getLogger(__name__)

_ALL_IPV4 = "0.0.0.0"  # noqa: S104 - only for a caller who asks for it
_BACKLOG = 128
"""Connections that the system may hold before they are accepted."""
_NOBODY = {errno.EAGAIN, errno.EWOULDBLOCK}
_GONE_AGAIN = {errno.ECONNABORTED, errno.EPROTO, errno.EPERM}


class Listener:
    """A TCP port that is listened on; hands out connections whose handshake is still to be done.

    Args:
        host: Address or name to bind; ``""`` for all IPv4 addresses, ``"::"`` for all of both kinds.
        port: Port, or 0 for a free one.
        api_key: What a client must send as ``Authorization: Api-Key <key>`` [1.2]; None accepts all.
        ssl: Speak TLS with this server-side context.
        allowed_origins: Values of the ``Origin`` header that may pass. Browsers send one with every handshake, so by
            default no web page can reach this port.
        max_message_bytes: The largest message accepted on a connection.

    Raises:
        OSError: The address cannot be bound; the text says what to do.
        ValueError: An argument is out of range (`TypeError` for a wrong type).
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        api_key: str | None = None,
        ssl: ssl_module.SSLContext | None = None,
        allowed_origins: Sequence[str] = (),
        max_message_bytes: int = 1 << 30,
    ) -> None:
        arguments.whole("port", port, 0, 65535)
        arguments.api_key(api_key)
        arguments.whole("max_message_bytes", max_message_bytes, 1)
        self._api_key = api_key
        self._ssl = ssl
        self._origins = frozenset(allowed_origins)
        self._max_bytes = max_message_bytes
        self.host = host
        """The host as it was given."""
        self._sock = _bind(host, port)
        self.port: int = self._sock.getsockname()[1]
        """The port that is bound, also if 0 was asked for."""

    def fileno(self) -> int:
        """Return the file descriptor for a selector, or -1 once closed."""
        return self._sock.fileno()

    def accept(self) -> WebSocket | None:
        """Accept the next connection, without waiting.

        Returns:
            A connection in state CONNECTING whose ``pump`` does the TLS and HTTP handshakes; None if nobody is there,
            or if the system has no file descriptor left (logged).
        """
        while True:
            try:
                sock, name = self._sock.accept()
            except OSError as exc:
                if exc.errno in _NOBODY:
                    return None
                logger.warning("cannot accept a connection on %s:%d: %s", self.host, self.port, exc)
                if exc.errno in _GONE_AGAIN:
                    continue
                return None
            address = format_address(name)
            try:
                set_options(sock)
                if self._ssl is not None:
                    sock = self._ssl.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError as exc:
                logger.warning("connection from %s failed at once: %s", address, exc)
                sock.close()
                continue
            return self._welcome(sock, address)

    def close(self) -> None:
        """Stop listening; connections that were accepted live on. Idempotent."""
        self._sock.close()

    def _welcome(self, sock: socket.socket, address: str) -> WebSocket:
        core = ServerProtocol(max_size=None, logger=CORE_LOGGER)

        def answer(request: Request) -> Response:
            return self._refusal(core, request) or core.accept(request)

        return WebSocket(sock, core, address=address, max_message_bytes=self._max_bytes, answer=answer)

    def _refusal(self, core: ServerProtocol, request: Request) -> Response | None:
        """Check a request by our own rules; those of RFC 6455 are the core's."""
        origins = request.headers.get_all("Origin")
        if any(origin not in self._origins for origin in origins):
            return core.reject(HTTPStatus.FORBIDDEN, "Requests of web pages are refused: Origin is not allowed.\n")
        if self._api_key is not None:
            given = request.headers.get_all("Authorization")
            expected = f"Api-Key {self._api_key}".encode()
            if len(given) != 1 or not hmac.compare_digest(given[0].encode(errors="replace"), expected):
                return core.reject(HTTPStatus.UNAUTHORIZED, "The api key is missing or wrong.\n")
        return None


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound, listening, non-blocking socket."""
    where = f"{host}:{port}" if host else f"port {port} of all addresses"
    try:
        found = socket.getaddrinfo(host or _ALL_IPV4, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise OSError(f"cannot listen on {where}: {exc}; host must be an address or name of this machine") from exc
    # A name such as localhost that stands for both kinds: clients that are told 127.0.0.1 must get through.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            # An earlier run's connections in TIME_WAIT must not block the port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            # On Windows SO_REUSEADDR would let two servers share the port, and this keeps others from it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        if family == socket.AF_INET6 and address[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        hint = "choose another port, or port=0 for a free one"
        if exc.errno == errno.EADDRNOTAVAIL:
            hint = "host must be an address of this machine"
        raise OSError(exc.errno, f"cannot listen on {where}: {exc.strerror or exc}; {hint}") from exc
    return sock
