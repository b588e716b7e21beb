"""What is sent goes out whole and at once, whatever the peer does meanwhile: stalls, pings, closes, sends."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State as CoreState
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from plugrl_bridges.errors import ConnectionClosed
from tests.transport.ends import (
    BOTH,
    Task,
    frame,
    our_pair,
    payload,
    pump_until,
    raw_end,
    raw_pair,
    read_frame,
    take,
    wait_readable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.transport import WebSocket


@BOTH
@pytest.mark.parametrize(
    "part",
    [
        np.arange(24, dtype="<f4").reshape(2, 3, 4).data,
        np.zeros((0, 3)).data,
        np.float64(1.5).data,
        bytearray(b"abc"),
        np.arange(50_000, dtype="<i8").data,
    ],
    ids=["3d", "empty", "scalar", "bytearray", "large"],
)
def test_any_contiguous_buffer_can_be_sent(server: bool, part: memoryview) -> None:
    with our_pair() as (one, two):
        sender, receiver = (one, two) if server else (two, one)
        task = Task(lambda: sender.send([b"head", part, b"tail"]))
        assert take(receiver) == b"head" + bytes(part) + b"tail"
        task.result()


@BOTH
def test_a_part_that_is_no_buffer_is_a_type_error_and_nothing_is_sent(server: bool) -> None:
    with raw_pair(server=server) as (ours, peer):
        for part in ("text", 1, np.arange(10)[::2].data):
            with pytest.raises(TypeError):
                ours.send([b"good"], [part])  # type: ignore[list-item]
        ours.send([b"good"])
        assert read_frame(peer) == (0x82, b"good")


class CountingSocket:
    """Count the calls that send, as the kernel sees them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.calls = 0

    def send(self, data: bytes) -> int:
        self.calls += 1
        return self._sock.send(data)

    def sendmsg(self, buffers: list[bytes]) -> int:
        self.calls += 1
        return self._sock.sendmsg(buffers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("size", [10, 3000, 40_000, 90_000])
@BOTH
def test_feedback_and_infer_go_out_in_one_system_call(server: bool, size: int) -> None:
    ours, peer = raw_end(server=server)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    ours._stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    counting = CountingSocket(ours._stream._sock)
    ours._stream._sock = counting  # type: ignore[assignment]
    ours._stream._sendmsg = counting.sendmsg  # type: ignore[assignment]
    with peer:
        ours.send([b"feedback", np.zeros(size, np.uint8).data], [b"infer"])
        assert counting.calls == 1
    ours.abort()


@BOTH
def test_a_peer_that_never_reads_makes_send_time_out_and_the_connection_end(server: bool) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        with pytest.raises(ConnectionClosed, match=r"1006 \(peer did not take \d+ bytes in \d+\.\d s\)"):
            ours.send([bytes(1 << 24)], timeout_s=0.1)
        assert ours.closed


@BOTH
def test_a_send_to_a_peer_that_does_not_read_can_be_stopped(server: bool) -> None:
    asked: list[None] = []

    def stopping() -> bool:
        asked.append(None)
        return len(asked) > 2

    ours, peer = raw_end(server=server)
    with peer:
        task = Task(lambda: ours.send([bytes(1 << 24)], timeout_s=1000, stopping=stopping))
        with pytest.raises(ConnectionClosed, match=r"1006 \(peer did not take \d+ bytes in .* s\)"):
            task.result()
        assert ours.closed
    assert len(asked) == 3


def test_two_big_senders_at_once_do_not_block_each_other() -> None:
    big = payload(1 << 24)
    with our_pair() as (server, client):

        def both_ways(end: WebSocket) -> list[bool]:
            end.send([big], [big], timeout_s=60)
            return [take(end) == big, take(end) == big]

        task = Task(lambda: both_ways(server))
        assert both_ways(client) == [True, True]
        assert task.result() == [True, True]


def test_a_peer_that_closes_while_we_send_ends_the_send_with_its_reason() -> None:
    with our_pair() as (server, client):
        server.close(1001, "plugrl-server-stop")
        with pytest.raises(ConnectionClosed, match=r"1001 'plugrl-server-stop'"):
            client.send([bytes(1 << 26)], timeout_s=20)
        assert client.closed


def test_pings_during_a_big_send_are_answered_after_it_not_inside_it() -> None:
    with raw_pair(server=True) as (ours, peer):
        peer.sendall(frame(b"are you there", masked=True, opcode=9))
        task = Task(lambda: ours.send([bytes(1 << 22)]))
        received = b""
        while len(received) < 10 + (1 << 22):
            received += peer.recv(1 << 16)
        task.result()
        ours.pump()
        received += peer.recv(100) if len(received) == 10 + (1 << 22) else b""
        assert received[10:] == bytes(1 << 22) + b"\x8a\x0dare you there"


class Stalls:
    """Stand in for the waits of a send: at each, the test does what the peer does meanwhile, and says what is ready."""

    def __init__(self, *scripts: Callable[[], tuple[bool, bool]]) -> None:
        self.scripts = list(scripts)

    def either(self, **_asked: object) -> tuple[bool, bool]:
        return self.scripts.pop(0)() if len(self.scripts) > 1 else self.scripts[0]()


@BOTH
def test_pings_apart_in_a_stalled_send_leave_its_frame_whole(server: bool) -> None:
    ours, peer = raw_end(server=server)
    peer.setblocking(False)
    library: ClientProtocol | ServerProtocol = ServerProtocol(state=CoreState.OPEN, max_size=None)
    if server:
        library = ClientProtocol(parse_uri("ws://ours/"), state=CoreState.OPEN, max_size=None)

    def pinging(payload: bytes) -> None:
        library.send_ping(payload)
        for data in library.data_to_send():
            peer.sendall(data)

    def first_ping() -> tuple[bool, bool]:
        pinging(b"first")
        return True, False

    def second_ping() -> tuple[bool, bool]:
        # There is room again when this one is read, and the answer to the first is waiting for room.
        read()
        pinging(b"second")
        return True, True

    def read() -> tuple[bool, bool]:
        with suppress(BlockingIOError):
            while True:
                library.receive_data(peer.recv(1 << 16))
        return False, True

    ours._stream.wait = Stalls(first_ping, second_ping, first_ping, read)  # type: ignore[assignment]
    body = payload(1 << 22)
    with peer:
        ours.send([body[:1000], body[1000:]])
        read()
        pump_until(ours, lambda: not ours.wants_write)
        read()
    ours.abort()
    assert library.parser_exc is None
    frames = [event for event in library.events_received() if isinstance(event, Frame)]
    assert [(event.opcode, len(event.data)) for event in frames] == [
        (Opcode.BINARY, len(body)), (Opcode.PONG, 5), (Opcode.PONG, 6), (Opcode.PONG, 5)
    ]  # fmt: skip
    assert [bytes(event.data) for event in frames] == [body, b"first", b"second", b"first"]


def test_pings_are_counted_until_something_comes_back() -> None:
    with our_pair() as (server, client):
        server.ping()
        server.ping()
        assert server.pings_unanswered == 2
        wait_readable(client)
        client.pump()
        pump_until(server, lambda: server.pings_unanswered == 0)
        assert client.pings_unanswered == 0


def test_a_control_frame_that_the_socket_did_not_take_goes_first_in_the_next_send() -> None:
    with raw_pair(server=True) as (ours, peer):
        peer.sendall(frame(b"?", masked=True, opcode=9))
        with suppress(BlockingIOError):
            while ours._stream._sock.send(bytes(1 << 16)):
                pass
        ours.pump()
        assert ours.wants_write
        task = Task(lambda: ours.send([b"data"]))
        tail = b""
        while not tail.endswith(b"data"):
            tail = (tail + peer.recv(1 << 16))[-50:]
        task.result()
        assert tail.endswith(b"\x8a\x01?\x82\x04data")
        assert not ours.wants_write


def test_every_masked_frame_has_a_key_of_its_own() -> None:
    with raw_pair(server=False) as (ours, peer):
        for size in (4, 50_000):
            keys = set()
            for _ in range(20):
                ours.send([bytes(size)])
                wire = b""
                while len(wire) < size + (6 if size < 126 else 8):
                    wire += peer.recv(1 << 17)
                keys.add(wire[-4:] if size == 4 else wire[4:8])
            assert len(keys) == 20


@BOTH
def test_bytes_are_counted_both_ways(server: bool) -> None:
    with raw_pair(server=server) as (ours, peer):
        peer.sendall(frame(b"12345", masked=server))
        ours.pump()
        ours.send([b"123"])
        ours.ping()
        sent = len(peer.recv(1000))
        assert ours.bytes_received == len(frame(b"12345", masked=server))
        assert ours.bytes_sent == sent


def test_more_parts_than_the_system_takes_at_once_are_sent() -> None:
    parts = [os.urandom(100) + bytes([number % 256]) for number in range(1500)]
    with our_pair() as (server, client):
        task = Task(lambda: server.send(parts))
        assert take(client) == b"".join(parts)
        task.result()
