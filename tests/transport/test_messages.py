"""Messages arrive whole and in order, however they are cut, framed and sent."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import websockets.sync.client
import websockets.sync.server
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_bridges.errors import ConnectionClosed
from plugrl_bridges.transport import Listener, State, connect
from tests.transport.ends import (
    BOTH,
    KEY,
    SIZES,
    Task,
    drain,
    frame,
    our_pair,
    payload,
    popped,
    pump_until,
    raw_end,
    raw_pair,
    read_frame,
    serve_handshake,
    take,
)

if TYPE_CHECKING:
    from plugrl_bridges.transport import WebSocket


def echo_all(websocket: WebSocket) -> None:
    """Send back what comes, until the peer closes."""
    with suppress(ConnectionClosed):
        while True:
            message = websocket.receive(60)
            assert isinstance(message, memoryview)
            websocket.send([message])
            websocket.recycle()
    assert websocket.close_code == 1000, websocket.close_detail


def ask_all(websocket: WebSocket, sizes: tuple[int, ...]) -> None:
    """Send messages of all sizes, in two parts, and see them come back."""
    for size in sizes:
        data = payload(size)
        websocket.send([data[: size // 3], memoryview(data)[size // 3 :]])
        assert take(websocket) == data, size
        websocket.recycle()
    websocket.close(1000)


@pytest.mark.parametrize("asker", ["server", "client"])
def test_our_two_ends_echo_all_sizes(asker: str) -> None:
    with our_pair() as ends:
        first, second = ends if asker == "server" else ends[::-1]
        task = Task(lambda: echo_all(second))
        ask_all(first, (*SIZES, 1 << 26))
        task.result()


@pytest.mark.parametrize("sizes", [SIZES, (1 << 26,)], ids=["small", "64MiB"])
def test_our_client_and_the_librarys_server_echo_all_sizes(sizes: tuple[int, ...]) -> None:
    def handler(connection: websockets.sync.server.ServerConnection) -> None:
        for message in connection:
            connection.send(message)

    with websockets.sync.server.serve(handler, "127.0.0.1", 0, max_size=None) as server:
        task = Task(server.serve_forever)
        client = connect(f"ws://127.0.0.1:{server.socket.getsockname()[1]}/")
        ask_all(client, sizes)
        client.finish(20)
        assert client.close_code == 1000
        server.shutdown()
    task.result()


@pytest.mark.parametrize("sizes", [SIZES, (1 << 26,)], ids=["small", "64MiB"])
def test_our_server_and_the_librarys_client_echo_all_sizes(sizes: tuple[int, ...]) -> None:
    listener = Listener("127.0.0.1", 0)

    def ask() -> None:
        url = f"ws://127.0.0.1:{listener.port}"
        with websockets.sync.client.connect(url, max_size=None, compression="deflate") as client:
            for size in sizes:
                client.send(payload(size))
                assert client.recv() == payload(size)
                client.ping().wait(20)

    task = Task(ask)
    server = serve_handshake(listener)
    echo_all(server)
    server.finish(20)
    task.result()
    listener.close()


def test_fragments_and_text_of_the_librarys_ends_come_whole() -> None:
    listener = Listener("127.0.0.1", 0)

    def ask() -> None:
        with websockets.sync.client.connect(f"ws://127.0.0.1:{listener.port}") as client:
            client.send([b"one ", b"two ", b"three"])
            client.send("text ✓")
            client.send(["te", "xt"])

    task = Task(ask)
    server = serve_handshake(listener)
    assert [server.receive(20) for _ in range(3)] == [b"one two three", "text ✓", "text"]
    server.finish(20)
    task.result()
    listener.close()


def send_aside(peer: socket.socket, data: bytes) -> Task[None]:
    return Task(lambda: peer.sendall(data))


def stream(masked: bool) -> tuple[bytes, list[bytes | str]]:
    """Return a stream with something of everything, and the messages in it."""
    pieces = [
        frame(b"first", masked=masked),
        frame(b"p1", masked=masked, opcode=9),
        frame(b"frag", masked=masked, fin=False),
        frame(b"p2", masked=masked, opcode=9),
        frame(b"", masked=masked, fin=False, opcode=0),
        frame(b"ments", masked=masked, opcode=0),
        frame(b"", masked=masked, opcode=10),
        frame("text ✓".encode(), masked=masked, opcode=1),
        frame(b"x" * 130, masked=masked),
        frame(b"", masked=masked),
    ]
    return b"".join(pieces), [b"first", b"fragments", "text ✓", b"x" * 130, b""]


@BOTH
def test_a_stream_cut_in_two_anywhere_gives_the_same_messages(server: bool) -> None:
    data, expected = stream(server)
    for cut in range(len(data) + 1):
        ours, peer = raw_end(server=server)
        with peer:
            peer.sendall(data[:cut])
            found = drain(ours)
            peer.sendall(data[cut:])
            found += drain(ours)
            assert found == expected, cut
            assert read_frame(peer) == (0x8A, b"p1")
            assert read_frame(peer) == (0x8A, b"p2")
        ours.abort()


@BOTH
def test_a_stream_byte_by_byte_gives_the_same_messages(server: bool) -> None:
    data, expected = stream(server)
    ours, peer = raw_end(server=server)
    found = []
    with peer:
        for index in range(len(data)):
            peer.sendall(data[index : index + 1])
            found += drain(ours)
            ours.recycle()
    assert found == expected
    ours.abort()


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["binary", "text", "fragments", "ping"]),
        st.one_of(st.binary(max_size=300), st.integers(0, 80_000).map(payload)),
    ),
    max_size=30,
)


@given(messages=MESSAGES, server=st.booleans(), cuts=st.lists(st.integers(1, 70_000), max_size=20), keep=st.booleans())
@settings(deadline=None, max_examples=60)
def test_random_streams_in_random_cuts_give_the_same_messages(
    messages: list[tuple[str, bytes]], server: bool, cuts: list[int], keep: bool
) -> None:
    wire = b""
    expected: list[bytes | str] = []
    for kind, body in messages:
        if kind == "ping":
            wire += frame(body[:125], masked=server, opcode=9)
        elif kind == "text":
            wire += frame(body.hex().encode(), masked=server, opcode=1)
            expected.append(body.hex())
        elif kind == "binary":
            wire += frame(body, masked=server)
            expected.append(body)
        else:
            half = len(body) // 2
            wire += frame(body[:half], masked=server, fin=False)
            wire += frame(b"between", masked=server, opcode=9) + frame(body[half:], masked=server, opcode=0)
            expected.append(body)
    ours, peer = raw_end(server=server)
    found: list[bytes | str] = []
    with peer:
        while wire:
            cut = min(len(wire), cuts.pop(0) if cuts else 60_000)
            peer.sendall(wire[:cut])
            wire = wire[cut:]
            found += drain(ours)
            if not keep:
                ours.recycle()
        pump_until(ours, lambda: not ours.pump())
        found += drain(ours)
        assert ours.state is State.OPEN, ours.close_detail
    ours.abort()
    assert found == expected


@given(noise=st.lists(st.binary(max_size=400), max_size=8), server=st.booleans(), handshake=st.booleans())
@settings(deadline=None, max_examples=200)
def test_random_bytes_never_raise_and_stay_bounded(noise: list[bytes], server: bool, handshake: bool) -> None:
    ours, peer = raw_end(server=server, max_message_bytes=10_000)
    with peer:
        if handshake:
            peer.sendall(frame(b"x", masked=server))
        for piece in noise:
            try:
                peer.sendall(piece)
            except OSError:
                break
            drain(ours)
    pump_until(ours, lambda: ours.closed)
    assert len(ours._inbox.view) <= 1 << 17
    assert not ours._engine.pending


@BOTH
def test_views_stay_intact_until_recycle_while_more_arrives(server: bool) -> None:
    ours, peer = raw_end(server=server)
    views, expected = [], []
    with peer:
        for number in range(200):
            body = payload(5000 + number)
            peer.sendall(frame(body, masked=server))
            message = ours.receive(20)
            assert isinstance(message, memoryview)
            views.append(message)
            expected.append(body)
    assert [bytes(view) for view in views] == expected
    ours.abort()


def test_memory_is_used_again_after_recycle() -> None:
    with raw_pair(server=True) as (ours, peer):
        for _ in range(3):
            for size in (450_000, 450_000):
                task = send_aside(peer, frame(payload(size), masked=True))
                assert take(ours) == payload(size)
                task.result()
            ours.recycle()
        storage = ours._inbox.array
        for _ in range(5):
            task = send_aside(peer, frame(payload(450_000), masked=True) * 2)
            assert take(ours) == payload(450_000)
            assert take(ours) == payload(450_000)
            task.result()
            ours.recycle()
        assert ours._inbox.array is storage


def test_recycle_while_messages_are_queued_leaves_them_alone() -> None:
    with raw_pair(server=True) as (ours, peer):
        peer.sendall(frame(b"one", masked=True) + frame(b"two", masked=True))
        ours.pump()
        assert popped(ours) == b"one"
        ours.recycle()
        peer.sendall(frame(b"xxx", masked=True))
        ours.pump()
        assert popped(ours) == b"two"
        assert popped(ours) == b"xxx"


def test_reading_stops_at_a_bounded_number_of_messages_and_goes_on_from_pop() -> None:
    with raw_pair(server=True) as (ours, peer):
        peer.sendall(frame(b"x", masked=True) * 100)
        ours.pump()
        ours.pump()
        assert len(ours._queue) == 16
        assert drain(ours) == [b"x"] * 100


def test_receive_waits_no_longer_than_its_timeout() -> None:
    with raw_pair(server=True) as (ours, peer):
        assert ours.receive(0) is None
        before = time.monotonic()
        assert ours.receive(0.05) is None
        assert 0.05 <= time.monotonic() - before < 20
        task = Task(lambda: take(ours, None))
        peer.sendall(frame(b"late", masked=True))
        assert task.result() == b"late"


@pytest.mark.parametrize("asker", ["server", "client"])
def test_everything_works_without_what_windows_lacks(asker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("select.poll", None)
    monkeypatch.delattr("select.poll")
    monkeypatch.setattr("socket.socket.sendmsg", None)
    for name in ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
        monkeypatch.delattr(socket, name, raising=False)
    with our_pair() as ends:
        first, second = ends if asker == "server" else ends[::-1]
        assert first._stream._sendmsg is None
        assert first._stream.wait._polls is None
        task = Task(lambda: echo_all(second))
        ask_all(first, (*SIZES, 1 << 24))
        task.result()
    with raw_pair(server=True) as (ours, _):
        assert ours.receive(0.01) is None


@pytest.mark.parametrize(
    "frame", [b"\x89\x80" + KEY, b"\x8a\x80" + KEY, b"\x00\x80" + KEY], ids=["ping", "pong", "crumb"]
)
def test_a_flood_of_small_frames_ends_its_connection_soon(frame: bytes) -> None:
    websocket, peer = raw_end(server=True)
    start = b"" if frame[0] != 0 else b"\x02\x80" + KEY
    with peer:
        flood = Task(lambda: _pour(peer, start, frame))
        pump_until(websocket, lambda: websocket.state is not State.OPEN)
        assert "without a message" in websocket.close_detail
        websocket.abort()
        assert flood.result() < 1 << 22


def _pour(peer: socket.socket, start: bytes, frame: bytes) -> int:
    """Send small frames until nobody takes them; give the number of bytes."""
    sent = 0
    peer.settimeout(20.0)
    try:
        peer.sendall(start)
        while True:
            peer.sendall(frame * 100)
            sent += 100 * len(frame)
    except OSError:
        return sent


def test_small_frames_between_messages_are_no_flood() -> None:
    websocket, peer = raw_end(server=True)
    with peer:
        for at in range(8):
            peer.sendall((b"\x89\x80" + KEY) * 200 + b"\x82\x81" + KEY + bytes([at ^ KEY[0]]))
            found = websocket.receive(20.0)
            assert isinstance(found, memoryview)
            assert bytes(found) == bytes([at])
            websocket.recycle()
            peer.recv(1 << 16)
        websocket.abort()
