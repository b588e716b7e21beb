"""Servers that flood, that do not read, that answer oddly: the programs can be stopped, and come back."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import signal
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(400)

METADATA = (Path(__file__).resolve().parents[1] / "vectors" / "messages" / "metadata_minimal.bin").read_bytes()
PINGS = b"\x89\x00" * 10_000_000  # in large parts, so that they come faster than they are answered
RUN_IS_OVER = b"\x88\x14" + struct.pack(">H", 1001) + b"plugrl-server-stop"


def shake_hands(peer: socket.socket, connection: bytes = b"Connection: Upgrade") -> None:
    """Answer the handshake of RFC 6455, with these header lines in the place of Connection."""
    request = b""
    while b"\r\n\r\n" not in request:
        part = peer.recv(4096)
        assert part
        request += part
    found = re.search(rb"Sec-WebSocket-Key: (\S+)", request)
    assert found is not None
    digest = hashlib.sha1(found[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
    lines = [b"HTTP/1.1 101 Switching Protocols", b"Upgrade: websocket", connection]
    lines.append(b"Sec-WebSocket-Accept: " + base64.b64encode(digest))
    peer.sendall(b"\r\n".join([*lines, b"", b""]))


@contextlib.contextmanager
def serving(speak: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """Serve one connection after another, `speak` being told which it is; give the url."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def serve() -> None:
            with contextlib.suppress(OSError):
                for number in range(1000):
                    with listener.accept()[0] as peer, contextlib.suppress(OSError):
                        speak(peer, number)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
    assert not thread.is_alive()


def drain(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while peer.recv(1 << 16):
            pass


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
def test_ends_on_sigterm_in_a_flood_of_pings(reads: bool, probe: Path) -> None:
    flooding = threading.Event()

    def flood(peer: socket.socket, _number: int) -> None:
        shake_hands(peer)
        reader = threading.Thread(target=drain, args=(peer,), daemon=True)
        if reads:
            reader.start()
        for part in [PINGS[: 1 << 20]] if reads else [PINGS] * 6:  # who cannot answer reads on, up to its limit
            peer.sendall(part)
        flooding.set()
        for _ in range(1_000_000):
            peer.sendall(PINGS)

    with serving(flood) as url:
        process = subprocess.Popen([probe, "--url", url, "--connect-timeout", "0"], stderr=subprocess.DEVNULL)
        try:
            assert flooding.wait(PATIENCE_S)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
            process.wait()


def test_comes_back_from_a_server_that_does_not_read(probe: Path) -> None:
    over = threading.Event()

    def ignore(peer: socket.socket, number: int) -> None:
        shake_hands(peer)
        peer.sendall(b"\x82" + bytes([len(METADATA)]) + METADATA)
        if number == 0:  # keep the connection, and serve the next one at the same time
            unread.append(peer.dup())
            return
        peer.sendall(RUN_IS_OVER)
        drain(peer)
        over.set()

    unread: list[socket.socket] = []
    sizes = ("--num-envs", "40", "--action-dim", "100000")  # 32 MB, more than sockets hold
    with serving(ignore) as url:
        command: list[str | Path] = [probe, "--url", url, *sizes, "--send-timeout", "0.3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False)
        for peer in unread:
            peer.close()
    assert done.returncode == 0, done.stderr
    assert over.is_set()
    assert "it does not read" in done.stderr
    assert len(unread) == 1


def test_any_line_of_the_connection_header_may_say_upgrade(probe: Path) -> None:
    def stop(peer: socket.socket, _: int) -> None:
        shake_hands(peer, b"Connection: keep-alive\r\nConnection: Upgrade")
        peer.sendall(b"\x82" + bytes([len(METADATA)]) + METADATA + RUN_IS_OVER)
        drain(peer)

    with serving(stop) as url:
        done = subprocess.run([probe, "--url", url], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_means_of_no_episodes_are_0(probe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"ws://127.0.0.1:{taken.getsockname()[1]}"
    command: list[str | Path] = [probe, "--url", url, "--connect-timeout", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (1, "steps=0 episodes=0 last_ten_mean=0 mean=0 reconnects=0\n")
