"""The same over TLS."""

from __future__ import annotations

import logging
import socket
import ssl
import struct
from typing import TYPE_CHECKING

import pytest
import trustme
import websockets.sync.client
import websockets.sync.server

from plugrl_bridges.errors import ConnectionClosed, HandshakeError
from plugrl_bridges.transport import Listener, State, connect
from tests.transport.ends import (
    SIZES,
    Task,
    accept,
    both_finish,
    drain,
    our_pair,
    payload,
    pump_until,
    serve_handshake,
    take,
)
from tests.transport.test_messages import ask_all, echo_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_bridges.transport import WebSocket

AUTHORITY = trustme.CA()


@pytest.fixture(scope="module")
def server_ssl() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert("localhost").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def client_ssl() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


@pytest.fixture
def ends(server_ssl: ssl.SSLContext, client_ssl: ssl.SSLContext) -> Iterator[tuple[WebSocket, WebSocket]]:
    with our_pair(ssl=server_ssl, client_ssl=client_ssl) as both:
        yield both


@pytest.mark.parametrize("asker", ["server", "client"])
def test_our_two_ends_echo_all_sizes(asker: str, ends: tuple[WebSocket, WebSocket]) -> None:
    first, second = ends if asker == "server" else ends[::-1]
    task = Task(lambda: echo_all(second))
    ask_all(first, (*SIZES, 1 << 24))
    task.result()


def test_our_client_and_the_librarys_server(server_ssl: ssl.SSLContext, client_ssl: ssl.SSLContext) -> None:
    def handler(connection: websockets.sync.server.ServerConnection) -> None:
        for message in connection:
            connection.send(message)

    with websockets.sync.server.serve(handler, "127.0.0.1", 0, max_size=None, ssl=server_ssl) as server:
        task = Task(server.serve_forever)
        client = connect(f"wss://localhost:{server.socket.getsockname()[1]}/", ssl=client_ssl)
        ask_all(client, SIZES)
        client.finish(20)
        assert client.close_code == 1000
        server.shutdown()
    task.result()


def test_our_server_and_the_librarys_client(server_ssl: ssl.SSLContext, client_ssl: ssl.SSLContext) -> None:
    listener = Listener("127.0.0.1", 0, ssl=server_ssl)

    def ask() -> None:
        url = f"wss://localhost:{listener.port}"
        with websockets.sync.client.connect(url, max_size=None, ssl=client_ssl) as client:
            for size in SIZES:
                client.send(payload(size))
                assert client.recv() == payload(size)

    task = Task(ask)
    server = serve_handshake(listener)
    echo_all(server)
    server.finish(20)
    task.result()
    listener.close()


def test_two_big_senders_at_once_do_not_block_each_other(ends: tuple[WebSocket, WebSocket]) -> None:
    big = payload(1 << 24)
    server, client = ends

    def both_ways() -> bool:
        server.send([big], timeout_s=60)
        return take(server) == big

    task = Task(both_ways)
    client.send([big], timeout_s=60)
    assert take(client) == big
    assert task.result()


def test_messages_that_tls_holds_back_are_popped_without_new_bytes(ends: tuple[WebSocket, WebSocket]) -> None:
    server, client = ends
    client.send(*([b"x" * 3000] for _ in range(60)))
    client.close(1000, "done")
    found: list[bytes | str] = []
    while len(found) < 60:
        found += drain(server)
    assert found == [b"x" * 3000] * 60
    pump_until(server, lambda: server.close_code == 1000)


@pytest.mark.parametrize("closer", ["server", "client"])
def test_code_and_reason_reach_the_other_side(closer: str, ends: tuple[WebSocket, WebSocket]) -> None:
    first, second = ends if closer == "server" else ends[::-1]
    first.close(1001, "plugrl-server-stop")
    with pytest.raises(ConnectionClosed, match=r"1001 'plugrl-server-stop'"):
        second.receive(20)
    both_finish(first, second)
    assert first.close_code == 1001


def test_a_certificate_of_a_stranger_is_a_handshake_error(
    server_ssl: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener("127.0.0.1", 0, ssl=server_ssl)
    with caplog.at_level(logging.WARNING, "plugrl_bridges"):
        task = Task(lambda: connect(f"wss://localhost:{listener.port}/", ssl=ssl.create_default_context()))
        server = serve_handshake(listener)
    assert server.closed
    assert server.address in caplog.text
    with pytest.raises(HandshakeError, match=r"TLS handshake with wss://localhost:\d+/ failed.*certificate"):
        task.result()
    listener.close()


def test_a_plain_client_at_a_tls_port_is_closed(server_ssl: ssl.SSLContext) -> None:
    listener = Listener("127.0.0.1", 0, ssl=server_ssl)
    task = Task(lambda: connect(f"ws://localhost:{listener.port}/"))
    server = serve_handshake(listener)
    assert server.closed
    assert "TLS handshake failed" in server.close_detail
    with pytest.raises(HandshakeError):
        task.result()
    listener.close()


def test_a_client_that_vanishes_in_the_tls_handshake_is_closed(server_ssl: ssl.SSLContext) -> None:
    listener = Listener("127.0.0.1", 0, ssl=server_ssl)
    with socket.create_connection(("127.0.0.1", listener.port), 20) as sock:
        server = accept(listener)
        server.pump()
        assert server.state is State.CONNECTING
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pump_until(server, lambda: server.closed)
    listener.close()
