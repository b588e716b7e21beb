"""The connection is kept alive, whatever the envs do [row 1, 3, 4 of the field]."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.frames import Frame, Opcode

from plugrl_bridges.client import EnvClient
from tests.client.scripted import CountEnv, Peer, Running, Server

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
            assert self.go_on.wait(20)
        return super().step(action)


def test_a_ping_is_answered_while_an_env_steps() -> None:
    env = Slow()

    def script(peer: Peer) -> None:
        peer.metadata()
        _, infer = peer.zeros(peer.infer())
        peer.act(infer, np.zeros((1, 1, 1), np.float32))
        assert env.stepping.wait(10)
        assert peer.ws.ping().wait(10)
        assert peer.ws.ping().wait(10)
        env.go_on.set()
        peer.feedback()
        assert peer.infer().observation.states["obs"].tolist() == [[2, 0]]
        peer.stop()

    with Server(script) as server:
        assert Running(EnvClient(lambda: env, url=server.url)).result().reconnects == 0


def test_stop_closes_with_1000_while_an_env_steps() -> None:
    env = Slow()

    def script(peer: Peer) -> None:
        peer.metadata()
        _, infer = peer.zeros(peer.infer())
        peer.act(infer, np.zeros((1, 1, 1), np.float32))
        assert env.stepping.wait(10)
        client.stop()
        assert peer.close_code() == 1000
        env.go_on.set()

    with Server(script) as server:
        client = EnvClient(lambda: env, url=server.url)
        assert Running(client).result().reason == "stopped"


def test_server_stop_while_an_env_steps_is_the_end() -> None:
    env = Slow()

    def script(peer: Peer) -> None:
        peer.metadata()
        _, infer = peer.zeros(peer.infer())
        peer.act(infer, np.zeros((1, 1, 1), np.float32))
        assert env.stepping.wait(10)
        peer.stop()
        env.go_on.set()

    with Server(script) as server:
        assert Running(EnvClient(lambda: env, url=server.url)).result().reason == "server stop"


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
        assert pinged.wait(10)
        if stepping:
            env.go_on.set()
            peer.feedback()
        peer.stop()

    with Server(script) as server:
        Running(EnvClient(lambda: env, url=server.url, ping_interval=0.1)).result()


def ignore(frame: Frame) -> None:
    """Take no notice of a frame, as a proxy that eats pings does."""


def silence(peer: Peer) -> None:
    """Answer nothing, not even pings, until the client is gone."""
    peer.metadata()
    peer.infer()
    peer.ws.protocol.recv_frame = ignore  # type: ignore[method-assign]
    peer.ws.recv_events_thread.join(20)


def test_a_silent_server_is_lost() -> None:
    def back(peer: Peer) -> None:
        peer.metadata()
        peer.infer()
        peer.stop()

    with Server(silence, back) as server:
        client = EnvClient(CountEnv, url=server.url, ping_interval=0.1, ping_timeout=0.4, max_backoff=0.1)
        assert Running(client).result().reconnects == 1


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
