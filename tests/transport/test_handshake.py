"""Who gets in, who does not, and what they are told."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from typing import TYPE_CHECKING

import pytest
import websockets.exceptions
import websockets.sync.client
import websockets.utils
from websockets.typing import Origin

from plugrl_bridges.errors import HandshakeError
from plugrl_bridges.transport import Listener, State, connect
from tests.transport.ends import Task, accept, both_finish, our_pair, pump_until, raw_end, serve_handshake, take

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1", 0)
    yield found
    found.close()


def get(listener: Listener, *lines: str, start: str = "GET / HTTP/1.1") -> bytes:
    """Send a request as it stands; return the whole answer."""
    with socket.create_connection(("127.0.0.1", listener.port), 20) as sock:
        sock.sendall("\r\n".join([start, "Host: x", *lines, "", ""]).encode())
        server = accept(listener)
        pump_until(server, lambda: server.closed)
        answer = b""
        while more := sock.recv(65536):
            answer += more
        return answer


UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)


def test_an_origin_header_is_refused_with_403(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "plugrl_bridges"):
        assert get(listener, "Origin: http://evil.example", *UPGRADE).startswith(b"HTTP/1.1 403 ")
    assert "127.0.0.1:" in caplog.text
    assert "Origin" in caplog.text


def test_an_allowed_origin_gets_in_and_a_second_one_beside_it_does_not() -> None:
    listener = Listener("127.0.0.1", 0, allowed_origins=["http://friend.example"])
    url = f"ws://127.0.0.1:{listener.port}"

    def friend() -> None:
        with websockets.sync.client.connect(url, origin=Origin("http://friend.example")) as client:
            client.send(b"hello")

    task = Task(friend)
    server = serve_handshake(listener)
    assert take(server) == b"hello"
    server.finish(20)
    task.result()
    origins = ("Origin: http://friend.example", "Origin: http://evil.example")
    assert get(listener, *origins, *UPGRADE).startswith(b"HTTP/1.1 403 ")
    listener.close()


@pytest.mark.parametrize(
    ("given", "status"), [(None, 401), ("open-up", 401), ("sesame!", 401), ("sesam", 401), ("sesame", None)]
)
def test_the_api_key_is_checked(given: str | None, status: int | None, caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener("127.0.0.1", 0, api_key="sesame")
    with caplog.at_level(logging.DEBUG):
        task = Task(lambda: connect(f"ws://127.0.0.1:{listener.port}/", api_key=given))
        server = serve_handshake(listener)
        if status is None:
            assert server.state is State.OPEN
            task.result().abort()
        else:
            with pytest.raises(HandshakeError, match=r"ws://127.0.0.1:\d+/ .*401.*api_key") as caught:
                task.result()
            assert caught.value.status == status
            assert server.closed
            assert "401" in server.close_detail
            assert server.address in caplog.text
    assert "Api-Key" not in caplog.text
    assert "sesam" not in caplog.text
    assert given is None or given not in caplog.text
    server.abort()
    listener.close()


def test_a_server_without_an_api_key_ignores_one(listener: Listener) -> None:
    task = Task(lambda: connect(f"ws://127.0.0.1:{listener.port}/", api_key="anything"))
    server = serve_handshake(listener)
    assert server.state is State.OPEN
    task.result().abort()
    server.abort()


@pytest.mark.parametrize("key", ["", " a", "a\r\nX: y", "ä"])
def test_an_api_key_that_is_no_header_is_a_value_error_that_does_not_show_it(key: str) -> None:
    for call in (lambda: Listener("127.0.0.1", 0, api_key=key), lambda: connect("ws://127.0.0.1:1/", api_key=key)):
        with pytest.raises(ValueError, match="api_key") as caught:
            call()
        assert repr(key) not in str(caught.value)


def test_compression_is_not_negotiated_when_offered(listener: Listener) -> None:
    url = f"ws://127.0.0.1:{listener.port}"

    def offer() -> object:
        with websockets.sync.client.connect(url, compression="deflate") as client:
            assert client.request is not None
            assert "permessage-deflate" in client.request.headers["Sec-WebSocket-Extensions"]
            assert client.response is not None
            assert "Sec-WebSocket-Extensions" not in client.response.headers
            return client.recv()

    task = Task(offer)
    server = serve_handshake(listener)
    server.send([b"x" * 1000])
    server.finish(20)
    assert task.result() == b"x" * 1000


def test_a_plain_get_is_told_426(listener: Listener) -> None:
    answer = get(listener)
    assert answer.startswith(b"HTTP/1.1 426 ")
    assert b"WebSocket" in answer


@pytest.mark.parametrize(
    ("start", "lines", "status"),
    [
        ("POST / HTTP/1.1", UPGRADE, b"405"),
        ("GET / HTTP/1.1", UPGRADE[:-1], b"400"),
        ("GET / HTTP/1.1", ("X: " + "y" * 9000,), b"431"),
        ("GET / HTTP/1.1", tuple(f"X{i}: y" for i in range(200)), b"431"),
    ],
)
def test_requests_that_are_no_handshake_are_answered_and_closed(
    listener: Listener, start: str, lines: tuple[str, ...], status: bytes
) -> None:
    answer = get(listener, *lines, start=start)
    # The core of older releases of websockets closes without an answer, or says 400.
    old = not hasattr(websockets.exceptions, "HeaderLineTooLong")
    assert answer.startswith(b"HTTP/1.1 " + status) or (old and answer[:12] in {b"", b"HTTP/1.1 400"})


def test_a_peer_that_speaks_no_http_is_closed(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), 20) as sock, caplog.at_level(logging.WARNING):
        sock.sendall(b"\x16\x03\x01 is this TLS?\r\n\r\n")
        server = accept(listener)
        pump_until(server, lambda: server.closed)
        assert sock.recv(100) == b""
    assert server.close_code == 1006
    assert server.address in caplog.text


def test_a_request_without_an_end_takes_bounded_memory(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), 20) as sock:
        server = accept(listener)
        flood = Task(lambda: sock.sendall(b"x" * (1 << 26)))
        pump_until(server, lambda: server.closed)
        with pytest.raises(OSError, match=r"reset|pipe"):
            flood.result()
    assert server.bytes_received < 1 << 20


def test_a_request_that_comes_byte_by_byte_opens_with_its_frames_right_behind(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), 20) as sock:
        server = accept(listener)
        request = "\r\n".join(["GET / HTTP/1.1", "Host: x", *UPGRADE, "", ""]).encode()
        for index in range(len(request)):
            assert server.state is State.CONNECTING
            sock.sendall(request[index : index + 1])
            pump_until(server, lambda seen=index: server.bytes_received > seen)  # type: ignore[misc]
        assert server.state is State.OPEN
        server.abort()


def test_frames_in_the_same_segment_as_the_response_are_not_lost() -> None:
    listener = Listener("127.0.0.1", 0)
    task = Task(lambda: connect(f"ws://127.0.0.1:{listener.port}/"))
    server = serve_handshake(listener)
    server.send([b"metadata"], [b"more"])
    client = task.result()
    assert take(client) == b"metadata"
    assert take(client) == b"more"
    server.abort()
    client.abort()
    listener.close()


def test_nobody_listening_is_a_handshake_error_that_says_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(HandshakeError, match="is the training server running") as caught:
            connect(url)
    assert url in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_server_that_never_speaks_is_a_handshake_error_within_the_timeout(listener: Listener) -> None:
    with pytest.raises(HandshakeError, match=r"did not answer the handshake within 1 s"):
        connect(f"ws://127.0.0.1:{listener.port}/", timeout_s=1.0)


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 5\r\n\r\nhello", 403, "refuses this client.*hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, "is it a training server"),
        (b"HTTP/1.1 404 Not Found\r\n\r\nto the end", 404, "path of the URL"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", None, "not a WebSocket server"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", None, "not a WebSocket server"),
        (b"", None, "closed the connection during the handshake"),
    ],
)
def test_answers_that_are_no_websocket_are_told_apart(answer: bytes, status: int | None, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        url = f"ws://127.0.0.1:{plain.getsockname()[1]}/policy"
        task = Task(lambda: connect(url))
        sock, _ = plain.accept()
        with sock:
            sock.recv(4096)
            sock.sendall(answer)
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises(HandshakeError, match=text) as caught:
                task.result()
    assert url in str(caught.value)
    assert caught.value.status == status


def test_a_server_that_insists_on_compression_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        task = Task(lambda: connect(f"ws://127.0.0.1:{plain.getsockname()[1]}/"))
        sock, _ = plain.accept()
        with sock:
            request = sock.recv(4096).decode()
            assert "Sec-WebSocket-Extensions" not in request
            assert "Origin" not in request
            key = next(line.split(": ")[1] for line in request.splitlines() if line.startswith("Sec-WebSocket-Key"))
            accept_key = websockets.utils.accept_key(key)
            sock.sendall(
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Accept: {accept_key}\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n".encode()
            )
            with pytest.raises(HandshakeError, match="extension"):
                task.result()


@pytest.mark.parametrize("url", ["http://x:1", "ws://", "x:1", "ws://x:99999", "ws://user:key@x:1"])
def test_a_bad_url_is_a_value_error_that_names_it(url: str) -> None:
    with pytest.raises(ValueError, match="url must"):
        connect(url)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_bad_timeouts_are_value_errors(value: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        connect("ws://127.0.0.1:1", timeout_s=value)


def test_tls_material_for_a_plain_url_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="ssl is given"):
        connect("ws://127.0.0.1:1", ssl=ssl.create_default_context())


def test_a_port_in_use_names_host_and_port_and_says_what_to_do(listener: Listener) -> None:
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{listener.port}: .*choose another port, or port=0") as caught:
        Listener("127.0.0.1", listener.port)
    assert caught.value.errno == errno.EADDRINUSE


def test_a_host_of_another_machine_says_so() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0.*address of this machine"):
        Listener("192.0.2.1", 0)
    with pytest.raises(OSError, match=r"no-such-host\.invalid.*this machine"):
        Listener("no-such-host.invalid", 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_a_value_error(port: int) -> None:
    with pytest.raises(ValueError, match="port"):
        Listener("127.0.0.1", port)


def test_the_port_is_free_again_at_once_after_a_run() -> None:
    first = Listener("127.0.0.1", 0)
    task = Task(lambda: connect(f"ws://127.0.0.1:{first.port}/"))
    server = serve_handshake(first)
    client = task.result()
    # The side that ends first is the one that stays in TIME_WAIT.
    server.close(1001, "plugrl-server-stop")
    both_finish(server, client)
    first.close()
    Listener("127.0.0.1", first.port).close()


def test_ipv6_works_where_the_system_has_it() -> None:
    try:
        listener = Listener("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    task = Task(lambda: connect(f"ws://[::1]:{listener.port}/"))
    server = serve_handshake(listener)
    assert server.address.startswith("[::1]:")
    task.result().abort()
    server.abort()
    listener.close()


def test_accept_gives_none_when_nobody_is_there_and_after_a_lack_of_descriptors(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert listener.accept() is None

    class Exhausted:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(listener, "_sock", Exhausted())
        assert listener.accept() is None
    assert "Too many open files" in caplog.text


def test_a_connection_that_was_gone_before_accept_is_passed_over(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(errno.ECONNABORTED, "gone"), BlockingIOError(errno.EAGAIN, "nobody")]

    class Gone:
        def accept(self) -> None:
            raise errors.pop(0)

    with monkeypatch.context() as patch:
        patch.setattr(listener, "_sock", Gone())
        assert listener.accept() is None
    assert not errors


def test_close_before_the_handshake_is_done_just_ends_it(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), 20) as sock:
        server = accept(listener)
        assert server.state is State.CONNECTING
        server.close(1001, "bye")
        assert server.closed
        assert server.fileno() == -1
        assert sock.recv(10) == b""


def test_both_ends_have_nodelay_and_notice_dead_peers() -> None:
    with our_pair() as ends:
        for end in ends:
            assert end._stream._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert end._stream._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert end._stream._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_the_repr_names_the_peer() -> None:
    end, peer = raw_end(server=True)
    assert repr(end) == "<WebSocket from peer, open>"
    end.abort()
    peer.close()
