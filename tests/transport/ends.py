"""Both ends of connections for the tests: handshake done, handshake to do, or a bare socket at the other end."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import pytest
from websockets.client import ClientProtocol
from websockets.protocol import State as CoreState
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from plugrl_bridges.transport import Listener, State, WebSocket, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

KEY = b"\x12\x34\x56\x78"
BOTH = pytest.mark.parametrize("server", [True, False], ids=["server", "client"])
SIZES = (0, 1, 125, 126, 127, 65535, 65536, (1 << 20) + 3)


class Task(Generic[T]):
    """Run a blocking call in a thread; `result` gives what it returned or raised."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as exc:  # noqa: BLE001 - raised again in the test's own thread
            self._error = exc

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end, whatever it is."""
        self._thread.join(timeout_s)

    def result(self, timeout_s: float = 60.0) -> T:
        self.wait(timeout_s)
        assert self.done, "the other end is still busy"
        if self._error is not None:
            raise self._error
        return self._value[0]


def payload(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()


def wait_readable(*ends: Any, timeout_s: float = 20.0) -> None:
    assert select.select(ends, [], [], timeout_s)[0], "nothing came"


def accept(listener: Listener) -> WebSocket:
    wait_readable(listener)
    server = listener.accept()
    assert server is not None
    return server


def pump_until(websocket: WebSocket, done: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"{websocket} got nowhere"
        if not websocket.pump() and not websocket.closed and not done():
            write = [websocket] if websocket.wants_write else []
            select.select([websocket], write, [], 0.2)


def serve_handshake(listener: Listener) -> WebSocket:
    """Accept one connection and drive it until it is open or refused."""
    server = accept(listener)
    pump_until(server, lambda: server.state is not State.CONNECTING)
    return server


@contextmanager
def our_pair(**options: Any) -> Iterator[tuple[WebSocket, WebSocket]]:
    """Yield (server, client), both ours, open. Options are those of both ends; client_ssl is the client's ssl."""
    client_ssl = options.pop("client_ssl", None)
    scheme, host = ("ws", "127.0.0.1") if client_ssl is None else ("wss", "localhost")
    listener = Listener("127.0.0.1", 0, **options)
    options.pop("ssl", None)
    try:
        task = Task(lambda: connect(f"{scheme}://{host}:{listener.port}/", ssl=client_ssl, **options))
        server = serve_handshake(listener)
        client = task.result()
    finally:
        listener.close()
    try:
        yield server, client
    finally:
        server.abort()
        client.abort()


def raw_end(*, server: bool, max_message_bytes: int = 1 << 30) -> tuple[WebSocket, socket.socket]:
    """Return our end, open without a handshake, and the bare socket at the other end."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(20)
    core: ServerProtocol | ClientProtocol
    if server:
        core = ServerProtocol(state=CoreState.OPEN, max_size=None)
    else:
        core = ClientProtocol(parse_uri("ws://peer/"), state=CoreState.OPEN, max_size=None)
    return WebSocket(ours, core, address="peer", max_message_bytes=max_message_bytes), theirs


@contextmanager
def raw_pair(*, server: bool) -> Iterator[tuple[WebSocket, socket.socket]]:
    """Yield what `raw_end` returns, and end both."""
    ours, peer = raw_end(server=server)
    try:
        with peer:
            yield ours, peer
    finally:
        ours.abort()


def frame(payload: bytes, *, masked: bool, opcode: int = 2, fin: bool = True, rsv: int = 0) -> bytes:
    """Build a frame by the book, byte by byte, independently of the code under test."""
    first = (0x80 if fin else 0) | rsv << 4 | opcode
    bit = 0x80 if masked else 0
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", first, bit | size)
    elif size < 65536:
        head = struct.pack("!BBH", first, bit | 126, size)
    else:
        head = struct.pack("!BBQ", first, bit | 127, size)
    if not masked:
        return head + payload
    return head + KEY + bytes(byte ^ KEY[index % 4] for index, byte in enumerate(payload))


def read_frame(peer: socket.socket) -> tuple[int, bytes]:
    """Read one short frame of ours: (first byte, unmasked payload)."""

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = peer.recv(size - len(data))
            assert more, "the stream ended"
            data += more
        return data

    first, second = exactly(2)
    size = second & 0x7F
    if size == 126:
        (size,) = struct.unpack("!H", exactly(2))
    key = exactly(4) if second & 0x80 else bytes(4)
    return first, bytes(byte ^ key[index % 4] for index, byte in enumerate(exactly(size)))


def read_close(peer: socket.socket) -> tuple[int, str]:
    """Read the close frame that is due next."""
    first, payload = read_frame(peer)
    assert first == 0x88
    return struct.unpack("!H", payload[:2])[0], payload[2:].decode()


def _copy(message: memoryview | str | None) -> bytes | str | None:
    return bytes(message) if isinstance(message, memoryview) else message


def take(websocket: WebSocket, timeout_s: float | None = 60) -> bytes | str | None:
    """Receive a message, as a copy."""
    return _copy(websocket.receive(timeout_s))


def popped(websocket: WebSocket) -> bytes | str | None:
    """Pop a message, as a copy."""
    return _copy(websocket.pop())


def drain(websocket: WebSocket) -> list[bytes | str]:
    """Take all messages that are there now, as copies."""
    found: list[bytes | str] = []
    websocket.pump()
    while True:
        message = websocket.pop()
        if message is None:
            return found
        found.append(message if isinstance(message, str) else bytes(message))


def both_finish(first: WebSocket, second: WebSocket) -> None:
    """Finish two connections in one thread; neither may need its whole timeout."""
    deadline = time.monotonic() + 20
    while open_ends := [end for end in (first, second) if not end.closed]:
        assert time.monotonic() < deadline, f"{open_ends} do not end"
        progress = [end.pump() for end in open_ends]
        if not any(progress):
            select.select([end for end in open_ends if not end.closed], [], [], 0.2)
    first.finish(20)
    second.finish(20)
    assert first.fileno() == second.fileno() == -1
