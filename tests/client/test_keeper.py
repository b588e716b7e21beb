"""The connection is kept alive, whatever the envs do [row 1, 3, 4 of the field]."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from websockets.frames import Frame, Opcode

from plugrl_bridges.client import EnvClient
from plugrl_bridges.client.keeper import KeptConnection
from plugrl_bridges.client.record import Watch
from plugrl_bridges.errors import ConnectionClosed
from plugrl_bridges.transport import Listener
from plugrl_bridges.wire.messages import Metadata, to_bytes
from tests.client.scripted import WAIT_S, CountEnv, Peer, Running, Server
from tests.transport.ends import Task, raw_end, read_close, read_frame, serve_handshake, wait_readable

if TYPE_CHECKING:
    from plugrl_bridges.wire.codec import Value


class Slow(CountEnv):
    """Its second step takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = threading.Event()
        self.go_on = threading.Event()

    def step(self, action: Value) -> Value:
        if self.t == 1:
            self.stepping.set()
            assert self.go_on.wait(WAIT_S)
        return super().step(action)


def test_a_ping_is_answered_while_an_env_steps() -> None:
    env = Slow()

    def script(peer: Peer) -> None:
        peer.metadata()
        _, infer = peer.zeros(peer.infer())
        peer.act(infer, np.zeros((1, 1, 1), np.float32))
        assert env.stepping.wait(WAIT_S)
        assert peer.ws.ping().wait(WAIT_S)
        assert peer.ws.ping().wait(WAIT_S)
        env.go_on.set()
        peer.feedback()
        assert peer.infer().observation.states["obs"].tolist() == [[2, 0]]
        peer.stop()

    with Server(script) as server:
        assert Running(EnvClient(lambda: env, url=server.url)).result().reconnects == 0


@pytest.mark.parametrize(("by", "reason"), [("client", "stopped"), ("server", "server stop")])
def test_a_stop_of_either_side_while_an_env_steps_is_the_end(by: str, reason: str) -> None:
    env = Slow()

    def script(peer: Peer) -> None:
        peer.metadata()
        _, infer = peer.zeros(peer.infer())
        peer.act(infer, np.zeros((1, 1, 1), np.float32))
        assert env.stepping.wait(WAIT_S)
        if by == "client":
            client.stop()
            assert peer.close_code() == 1000
        else:
            peer.stop()
        env.go_on.set()

    with Server(script) as server:
        client = EnvClient(lambda: env, url=server.url)
        assert Running(client).result().reason == reason


@pytest.mark.parametrize("stepping", [True, False])
def test_the_client_pings(stepping: bool) -> None:
    env = Slow()
    pinged = threading.Event()

    def script(peer: Peer) -> None:
        process = peer.ws.process_event

        def watch(event: Value) -> None:
            if getattr(event, "opcode", None) is Opcode.PING:
                pinged.set()
            process(event)

        peer.ws.process_event = watch  # type: ignore[method-assign]
        peer.metadata()
        _, infer = peer.zeros(peer.infer())
        if stepping:
            peer.act(infer, np.zeros((1, 1, 1), np.float32))
        assert pinged.wait(WAIT_S)
        if stepping:
            env.go_on.set()
            peer.feedback()
        peer.stop()

    with Server(script) as server:
        Running(EnvClient(lambda: env, url=server.url, ping_interval=0.1)).result()


def ignore(frame: Frame) -> None:
    """Take no notice of a frame, as a proxy that eats pings does."""


def test_a_silent_server_is_lost() -> None:
    ours, peer = raw_end(server=False)
    with peer:
        line = KeptConnection(ours, Watch(), ping_interval=0.1, ping_timeout=0.4)
        with pytest.raises(ConnectionClosed, match=r"nothing was heard for .* s, \d+ pings unanswered"):
            line.receive()
        line.shut()
        assert read_frame(peer) == (0x89, b"1")


class Big(CountEnv):
    """Its observation is more than sockets hold."""

    observation_space: gymnasium.spaces.Space[Any] = gymnasium.spaces.Box(0, 255, (1 << 24,), np.uint8)

    def _observe(self) -> Value:
        return np.zeros(1 << 24, np.uint8)


def test_stop_is_heard_while_the_server_does_not_read() -> None:
    listener = Listener("127.0.0.1", 0)
    listener._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    running = Running(EnvClient(Big, url=f"ws://127.0.0.1:{listener.port}", ping_interval=None))
    server = serve_handshake(listener)
    server.send(to_bytes(Metadata({})))
    wait_readable(server)
    running.client.stop()
    assert running.result().reason == "stopped"
    server.abort()
    listener.close()


def test_a_message_on_its_way_may_still_be_finished_after_a_stop() -> None:
    asked = threading.Event()

    class Asked(Watch):
        @property
        def stopping_for_s(self) -> float:
            asked.set()
            return 0.0  # half a second is however long this machine needs

    watch = Asked()
    ours, peer = raw_end(server=False)
    with peer:
        line = KeptConnection(ours, watch, ping_interval=None, ping_timeout=None)
        task = Task(lambda: line.send([bytes(1 << 22)]))
        assert peer.recv(1, socket.MSG_PEEK)
        asked.clear()
        watch.stop()
        assert asked.wait(WAIT_S)
        left = 14 + (1 << 22)
        while left:
            left -= len(peer.recv(min(left, 1 << 16)))
        task.result()
        shutting = Task(line.shut)
        assert read_close(peer) == (1000, "")
        peer.shutdown(socket.SHUT_RDWR)
        shutting.result()


@pytest.mark.parametrize("options", [{"ping_timeout": None}, {"ping_interval": None, "ping_timeout": 0.1}])
def test_silence_is_allowed_where_the_timeout_is_off(options: dict[str, Any]) -> None:
    def script(peer: Peer) -> None:
        recv_frame = peer.ws.protocol.recv_frame
        peer.metadata()
        infer = peer.infer()
        peer.ws.protocol.recv_frame = ignore  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            peer.ws.recv(timeout=1.0)
        peer.ws.protocol.recv_frame = recv_frame  # type: ignore[method-assign]
        peer.zeros(infer)
        peer.stop()

    with Server(script) as server:
        client = EnvClient(CountEnv, url=server.url, **{"ping_interval": 0.1, **options})
        assert Running(client).result().reconnects == 0
