"""How connections end, well and badly, and what each side then knows."""

from __future__ import annotations

import struct

import pytest

from plugrl_bridges.errors import ConnectionClosed
from plugrl_bridges.transport import State
from tests.transport.ends import (
    BOTH,
    both_finish,
    drain,
    frame,
    our_pair,
    popped,
    pump_until,
    raw_end,
    raw_pair,
    read_close,
    read_frame,
    take,
)


@BOTH
@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        ({"rsv": 4}, 1002, "reserved bits"),
        ({"rsv": 1}, 1002, "reserved bits"),
        ({"opcode": 3}, 1002, "reserved opcode 0x3"),
        ({"opcode": 15}, 1002, "reserved opcode 0xf"),
        ({"opcode": 0}, 1002, "continuation"),
        ({"opcode": 9, "fin": False}, 1002, "fragmented control"),
        ({"opcode": 9, "payload": b"x" * 126}, 1002, "control frame too long"),
        ({"opcode": 8, "payload": b"\x03"}, 1002, "close frame"),
        ({"opcode": 8, "payload": struct.pack("!H", 1005)}, 1002, "status code"),
        ({"opcode": 8, "payload": struct.pack("!H", 999)}, 1002, "status code"),
        ({"opcode": 8, "payload": struct.pack("!H", 1000) + b"\xff"}, 1007, "invalid start byte"),
        ({"opcode": 1, "payload": b"\xff\xfe"}, 1007, "not UTF-8"),
        ({"payload": b"x" * 1001}, 1009, "1001"),
        ({"payload": b"x" * 70000}, 1009, "70000"),
        ({"opcode": 1, "payload": b"x" * 1001}, 1009, "1001"),
    ],
)
def test_a_broken_rule_ends_the_connection_with_its_code(
    server: bool, wrong: dict[str, object], code: int, text: str
) -> None:
    ours, peer = raw_end(server=server, max_message_bytes=1000)
    with peer:
        good = frame(b"before", masked=server)
        bad = frame(**{"payload": b"x", "masked": server, **wrong})  # type: ignore[arg-type]
        peer.sendall(good + bad + good)
        assert drain(ours) == [b"before"]
        assert ours.state is State.CLOSING
        assert text in ours.close_detail
        assert read_close(peer)[0] == code
        with pytest.raises(ConnectionClosed, match=text) as caught:
            ours.receive(20)
        assert caught.value.code == (1006 if ours.close_code is None else ours.close_code)
    ours.finish(20)
    assert ours.closed


@BOTH
def test_the_wrong_mask_bit_ends_the_connection_with_1002(server: bool) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        peer.sendall(frame(b"x" * 300, masked=not server))
        ours.pump()
        code, reason = read_close(peer)
        assert code == 1002
        assert "masked" in reason
    ours.finish(20)


@BOTH
def test_fragments_that_are_too_large_together_end_it_with_1009_and_pings_do_not_count(server: bool) -> None:
    ours, peer = raw_end(server=server, max_message_bytes=1000)
    with peer:
        peer.sendall(frame(b"x" * 999, masked=server, fin=False))
        peer.sendall(frame(b"a ping", masked=server, opcode=9))
        peer.sendall(frame(b"y", masked=server, opcode=0))
        assert drain(ours) == [b"x" * 999 + b"y"]
        assert read_frame(peer) == (0x8A, b"a ping")
        peer.sendall(frame(b"x" * 999, masked=server, fin=False) + frame(b"yy", masked=server, opcode=0))
        assert drain(ours) == []
        assert read_close(peer)[0] == 1009
    ours.finish(20)


def test_a_message_of_exactly_the_limit_passes() -> None:
    ours, peer = raw_end(server=True, max_message_bytes=1000)
    with peer:
        peer.sendall(frame(b"x" * 1000, masked=True))
        assert drain(ours) == [b"x" * 1000]
    ours.abort()


@BOTH
def test_a_new_message_inside_a_fragmented_one_is_1002(server: bool) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        peer.sendall(frame(b"one", masked=server, fin=False) + frame(b"two", masked=server))
        assert drain(ours) == []
        assert read_close(peer) == (1002, "expected a continuation frame")
    ours.finish(20)


def test_a_header_that_lies_about_its_length_takes_no_memory() -> None:
    with raw_pair(server=True) as (ours, peer):
        peer.sendall(struct.pack("!BBQ", 0x82, 0xFF, 1 << 30) + b"keyk" + b"x" * 100_000)
        pump_until(ours, lambda: ours.bytes_received > 100_000)
        assert len(ours._inbox.view) <= 4 * 100_000


@BOTH
@pytest.mark.parametrize("size", [0, 5, 500, 100_000])
@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_peer_that_dies_in_the_middle_of_a_frame_is_1006(server: bool, size: int, cut: int) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        peer.sendall(frame(b"whole", masked=server) + frame(b"x" * size, masked=server)[: -cut if size > cut else 1])
    pump_until(ours, lambda: ours.closed)
    assert popped(ours) == b"whole"
    assert ours.pop() is None
    assert (ours.close_code, ours.close_reason) == (1006, "")
    assert "without a close frame in the middle of a message" in ours.close_detail
    assert ours.fileno() == -1
    assert not ours.pump()
    with pytest.raises(ConnectionClosed, match="1006"):
        ours.receive(0)
    with pytest.raises(ConnectionClosed, match="1006"):
        ours.send([b"x"])
    ours.ping()
    ours.close(1000)
    ours.finish(0)
    ours.abort()


@BOTH
def test_a_peer_that_ends_its_half_without_a_close_frame_is_1006(server: bool) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        peer.shutdown(1)
        with pytest.raises(ConnectionClosed, match="peer closed without a close frame"):
            ours.receive(20)
        assert ours.close_code == 1006
        assert ours.closed


@pytest.mark.parametrize("code", [1000, 1001, 1011, 3000, 4999])
@pytest.mark.parametrize("closer", ["server", "client"])
def test_code_and_reason_reach_the_other_side(closer: str, code: int) -> None:
    with our_pair() as ends:
        first, second = ends if closer == "server" else ends[::-1]
        first.close(code, "plugrl-server-stop ✓")
        assert first.state is State.CLOSING
        with pytest.raises(ConnectionClosed, match="plugrl-server-stop ✓") as caught:
            second.receive(20)
        assert (caught.value.code, caught.value.reason) == (code, "plugrl-server-stop ✓")
        both_finish(first, second)
        assert (first.close_code, first.close_reason) == (code, "plugrl-server-stop ✓")
        assert f"closed by this side with {code}" in first.close_detail
        assert second.close_detail == ""


def test_both_sides_may_close_at_once() -> None:
    with our_pair() as (server, client):
        server.close(1001, "stop")
        client.close(1000, "finished")
        both_finish(server, client)
        assert (server.close_code, server.close_reason) == (1000, "finished")
        assert (client.close_code, client.close_reason) == (1001, "stop")


def test_a_close_frame_without_a_code_is_1005() -> None:
    ours, peer = raw_end(server=True)
    with peer:
        peer.sendall(frame(b"", masked=True, opcode=8))
        ours.pump()
        assert ours.close_code == 1005
        assert read_frame(peer) == (0x88, b"")
    ours.finish(20)


@BOTH
def test_messages_before_a_close_are_still_delivered(server: bool) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        stream = b"".join(frame(b"%d" % number, masked=server) for number in range(40))
        peer.sendall(stream + frame(struct.pack("!H", 1001) + b"stop", masked=server, opcode=8))
    received = [take(ours) for _ in range(40)]
    assert received == [b"%d" % number for number in range(40)]
    with pytest.raises(ConnectionClosed, match=r"1001 'stop'"):
        ours.receive(20)
    ours.finish(20)


@BOTH
def test_messages_after_our_own_close_are_dropped_and_the_handshake_completes(server: bool) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        ours.close(1001, "stop")
        assert read_close(peer) == (1001, "stop")
        with pytest.raises(ConnectionClosed, match="closed by this side with 1001"):
            ours.receive(20)
        data = frame(b"x" * 300_000, masked=server)
        ping = frame(b"!", masked=server, opcode=9)
        end = frame(struct.pack("!H", 1001) + b"stop", masked=server, opcode=8)
        peer.sendall(data[:100_000])
        ours.pump()
        assert len(ours._inbox.view) <= 1 << 17
        for part in (data[100_000:200_000], data[200_000:] + data[:7], data[7:150_000]):
            peer.sendall(part)
            pump_until(ours, lambda: not ours.pump())
        peer.sendall(data[150_000:] + ping + end)
        pump_until(ours, lambda: ours.close_code == 1001)
        assert read_frame(peer) == (0x8A, b"!")
        assert ours.pop() is None
    ours.finish(20)


def test_a_peer_that_ignores_the_close_is_given_up_after_the_timeout() -> None:
    ours, peer = raw_end(server=True)
    with peer:
        ours.close(1001, "stop")
        ours.finish(0.05)
        assert ours.closed
        assert ours.close_code == 1006
        assert "closed by this side" in ours.close_detail


def test_a_long_reason_is_cut_at_a_character_and_a_bad_code_is_a_value_error() -> None:
    ours, peer = raw_end(server=True)
    with peer:
        for code in (0, 999, 1005, 1006, 5000):
            with pytest.raises(ValueError, match="close code"):
                ours.close(code)
        assert ours.state is State.OPEN
        ours.close(1011, "x" * 122 + "ä")
        assert read_close(peer) == (1011, "x" * 122)
        ours.close(1000, "again")
        ours.abort()
        ours.abort()
        assert peer.recv(10) == b""


def test_the_reason_reaches_a_client_that_was_sending_when_the_server_closed() -> None:
    with our_pair() as (server, client):
        server.close(1001, "plugrl-server-stop")
        server.abort()
        with pytest.raises(ConnectionClosed) as caught:
            # The kernel may still take the first part; the rest meets the reset.
            client.send([bytes(1 << 26)])
        assert (caught.value.code, caught.value.reason) == (1001, "plugrl-server-stop")


@BOTH
def test_close_in_the_middle_of_a_fragmented_message_is_1002(server: bool) -> None:
    ours, peer = raw_end(server=server)
    with peer:
        peer.sendall(frame(b"one", masked=server, fin=False))
        peer.sendall(frame(struct.pack("!H", 1000), masked=server, opcode=8))
        assert drain(ours) == []
        assert read_close(peer)[0] == 1002
        assert ours.close_code == 1000
    ours.finish(20)


def test_a_peer_that_asks_for_pongs_and_never_reads_them_is_dropped() -> None:
    ours, peer = raw_end(server=True)
    ping = frame(b"x" * 125, masked=True, opcode=9) * 500
    with peer:
        peer.setblocking(False)
        for _ in range(1000):
            if ours.state is not State.OPEN:
                break
            try:
                peer.send(ping)
            except BlockingIOError:
                pass
            except OSError:
                break
            ours.pump()
        assert ours.state is not State.OPEN
        assert len(ours._engine.pending) < 1 << 21
        ours.abort()
