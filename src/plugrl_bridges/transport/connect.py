"""The way to an open client connection: address, dial, TLS and HTTP handshakes, within one deadline.

This module must not know what the connection is for, nor try again: that is the caller's, who gets either an open
``WebSocket`` or a `HandshakeError` that says what to do. Proxies are not used.
"""

from __future__ import annotations

import socket
import ssl as ssl_module
import time
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus, InvalidURI
from websockets.uri import WebSocketURI, parse_uri

from plugrl_bridges import arguments
from plugrl_bridges.errors import HandshakeError

from .engine import CORE_LOGGER, State
from .options import Waiter, set_options
from .websocket import WebSocket

__all__ = ["check_destination", "connect"]

_ADVICE = {
    401: "the server wants an api key: pass the api_key it was started with",
    403: "the server refuses this client",
    404: "check the path of the URL",
    426: "the server does not take this request for a WebSocket handshake",
    503: "the server is not ready, try again later",
}


def connect(
    url: str,
    *,
    api_key: str | None = None,
    ssl: ssl_module.SSLContext | None = None,
    timeout_s: float = 10.0,
    max_message_bytes: int = 1 << 30,
) -> WebSocket:
    """Open a client connection.

    Args:
        url: ``ws://host:port/path`` or ``wss://…``; without credentials.
        api_key: Sent as ``Authorization: Api-Key <key>`` [1.2].
        ssl: Client-side context for a ``wss`` URL; None verifies against the system's certificates.
        timeout_s: Seconds for everything; the system's name resolution alone is not bounded by it.
        max_message_bytes: The largest message accepted.

    Returns:
        A connection in state OPEN. Compression is never offered.

    Raises:
        HandshakeError: The connection did not open; ``status`` is the HTTP status if the server sent one.
        ValueError: An argument is unusable (`TypeError` for a wrong type).
    """
    uri = check_destination(url, api_key=api_key, ssl=ssl)
    arguments.whole("max_message_bytes", max_message_bytes, 1)
    arguments.seconds("timeout_s", timeout_s)
    deadline = time.monotonic() + timeout_s
    sock = _dial(uri, url, deadline, timeout_s)
    try:
        set_options(sock)
        if uri.secure:
            context = ssl if ssl is not None else ssl_module.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=uri.host, do_handshake_on_connect=False)
        core = ClientProtocol(uri, max_size=None, logger=CORE_LOGGER)
        request = core.connect()
        if api_key is not None:
            request.headers["Authorization"] = f"Api-Key {api_key}"
        core.send_request(request)
        websocket = WebSocket(sock, core, address=url, max_message_bytes=max_message_bytes)
    except BaseException:
        sock.close()
        raise
    try:
        _shake_hands(websocket, deadline, timeout_s)
    except BaseException:
        websocket.abort()
        raise
    return websocket


def check_destination(
    url: str, *, api_key: str | None = None, ssl: ssl_module.SSLContext | None = None
) -> WebSocketURI:
    """Check where to connect and with what, as `connect` does first, without connecting.

    Args:
        url: As for `connect`.
        api_key: As for `connect`.
        ssl: As for `connect`.

    Raises:
        ValueError: naming the argument that is unusable (`TypeError` for an API key of a wrong type).
    """
    arguments.api_key(api_key)
    try:
        uri = parse_uri(url)
    except (InvalidURI, ValueError, TypeError, AttributeError) as exc:  # the last two: it is no str
        raise ValueError(f"url must be like ws://host:port or wss://host:port/path, not {url!r}: {exc}") from exc
    if uri.username is not None or "@" in urlsplit(url).netloc:
        raise ValueError("url must not contain credentials; pass api_key")
    if ssl is None:
        return uri
    neither = ssl_module.PROTOCOL_TLS_SERVER  # what is no context at all has no protocol
    if getattr(ssl, "protocol", neither) is neither:
        raise ValueError(f"ssl must be None or a client-side context as of ssl.create_default_context(), not {ssl!r}")
    if not uri.secure:
        raise ValueError(f"ssl is given, but url {url!r} is not a wss:// one")
    return uri


def _dial(uri: WebSocketURI, url: str, deadline: float, timeout_s: float) -> socket.socket:
    """Connect a TCP socket to the first address that takes it."""
    try:
        found = socket.getaddrinfo(uri.host, uri.port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise HandshakeError(f"cannot connect to {url}: {exc}; check the host name") from exc
    last: OSError | None = None
    for family, kind, protocol, _, address in found:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as exc:  # the system has no such address family
            last = exc
            continue
        try:
            sock.settimeout(remaining)
            sock.connect(address)
            return sock
        except OSError as exc:
            sock.close()
            last = exc
        except BaseException:
            sock.close()
            raise
    if last is None or isinstance(last, TimeoutError):
        text = f"nothing answered within {timeout_s:g} s; check host, port and firewall"
    else:
        text = f"{last.strerror or last}; is the training server running, and on this host and port?"
    raise HandshakeError(f"cannot connect to {url}: {text}") from last


def _shake_hands(websocket: WebSocket, deadline: float, timeout_s: float) -> None:
    """Drive the handshakes until the connection is open."""
    waiter = Waiter(websocket.fileno())
    while True:
        websocket.pump()
        if websocket.state is not State.CONNECTING:
            break
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            heard = "did not finish" if websocket.bytes_received else "accepted the connection and did not answer"
            raise HandshakeError(
                f"{websocket.address} {heard} the handshake within {timeout_s:g} s; is it a training server, and is "
                "it free (not stopped in a debugger)?"
            )
        waiter.either(read=True, write=websocket.wants_write, timeout_s=remaining)
    if websocket.handshake_error is not None or (websocket.closed and websocket.close_code == 1006):
        raise _translate(websocket)


def _translate(websocket: WebSocket) -> HandshakeError:
    """Return what went wrong as an error of ours."""
    url, exc = websocket.address, websocket.handshake_error
    status = None
    if isinstance(exc, InvalidStatus):
        status = exc.response.status_code
        body = bytes(exc.response.body or b"")[:200].decode(errors="replace").strip()
        advice = _ADVICE.get(status, "is it a training server?")
        text = f"{url} refused the handshake with HTTP {status}: {advice}" + (f" (it says {body!r})" if body else "")
    elif websocket.tls_error is not None:
        text = f"TLS handshake with {url} failed: {exc}; does the server speak TLS, with a certificate known here?"
    elif exc is not None and websocket.bytes_received:
        # The core of websockets 13 leaves a ValueError or EOFError as it is; later ones wrap it.
        cause = f" ({exc.__cause__})" if exc.__cause__ is not None else ""
        text = f"{url} is not a WebSocket server, or a broken one: {exc}{cause}"
    else:
        text = f"{url} closed the connection during the handshake: {websocket.close_detail}"
    error = HandshakeError(text, status=status)
    error.__cause__ = exc
    return error
