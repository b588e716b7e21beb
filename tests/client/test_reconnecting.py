"""Lost connections [7]: what the client does, and that the same episode goes on."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from plugrl_bridges.client import EnvClient, env_client
from plugrl_bridges.errors import ConnectTimeout, EnvFailed, HandshakeError, RemoteProtocolError
from plugrl_bridges.transport import connect
from plugrl_bridges.wire.messages import Action
from tests.client.scripted import (
    ALL_FEATURES,
    WAIT_S,
    CountEnv,
    Fleet,
    Peer,
    Running,
    Server,
    run,
    serve_steps,
    unanswered,
)

if TYPE_CHECKING:
    from plugrl_bridges.transport import WebSocket
    from plugrl_bridges.wire.codec import Value


def end_with(code: int, reason: str) -> Value:
    def end(peer: Peer) -> None:
        peer.ws.close(code, reason)

    return end


def start_over(peer: Peer, rows: list[list[float]]) -> None:
    """Check the first message of a new connection: an infer with the envs' current observations [7.6]."""
    peer.metadata(*ALL_FEATURES)
    infer = peer.infer()
    assert infer.reuse is None
    assert infer.env_spec is not None
    assert infer.observation.states["obs"].tolist() == rows


@pytest.mark.parametrize(
    "end",
    [
        end_with(1001, "plugrl-server-resync"),
        end_with(1001, "Feedback timeout"),
        end_with(1011, "Internal server error."),
        end_with(1000, ""),
        lambda peer: peer.drop(),
    ],
)
def test_the_same_episode_goes_on(end: Value) -> None:
    fleet = Fleet()

    def first(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        _, infer = peer.zeros(peer.infer())
        peer.zeros(infer)
        end(peer)

    def second(peer: Peer) -> None:
        start_over(peer, [[2, 0], [2, 0]])
        peer.stop()

    summary = run(fleet, first, second, num_envs=2)
    assert (summary.reconnects, summary.steps, summary.reason) == (1, 4, "server stop")
    assert [env.resets for env in fleet.envs] == [1, 1]


def test_held_feedback_is_dropped_and_the_ended_env_reset_once() -> None:
    fleet = Fleet({"length": 1}, {"length": 9})

    def first(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        peer.act(infer, np.zeros((1, 2, 1), np.float32))
        peer.ws.close(1001, "plugrl-server-resync")

    def second(peer: Peer) -> None:
        start_over(peer, [[0, 1], [1, 0]])
        peer.stop()

    assert run(fleet, first, second, num_envs=2).reconnects == 1
    assert [env.resets for env in fleet.envs] == [2, 1]


def test_a_wrong_action_is_answered_by_a_new_connection() -> None:
    def first(peer: Peer) -> None:
        peer.metadata()
        peer.infer()
        peer.send(Action(np.array([0, 1]), np.zeros((1, 2, 1))))  # one env asked
        assert peer.close_code() == 1002

    assert run(Fleet(), first, serve_steps(0)).reconnects == 1


def test_a_text_frame_is_fatal() -> None:
    codes: list[int] = []

    def script(peer: Peer) -> None:
        peer.ws.send("hello")
        codes.append(peer.close_code())

    with pytest.raises(RemoteProtocolError, match=r"\[7\.4\].*text frame.*hello"):
        run(Fleet(), script)
    assert codes == [1003]


def test_resyncs_at_once_are_no_storm() -> None:
    began: list[float] = []
    ended: list[float] = []

    def resync(peer: Peer) -> None:
        began.append(time.monotonic())
        peer.metadata()
        peer.zeros(peer.infer())
        ended.append(time.monotonic())
        peer.ws.close(1001, "plugrl-server-resync")

    def last(peer: Peer) -> None:
        began.append(time.monotonic())
        peer.stop()

    with Server(*[resync] * 5, last) as server:
        Running(EnvClient(Fleet(), url=server.url, max_backoff=5.0)).result()
    # 0.2, 0.4, … at most, half of it at least.
    assert all(back - gone > 0.1 * 2**at for at, (gone, back) in enumerate(zip(ended, began[1:], strict=True)))


def test_no_server_at_all_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with Server() as server:
        url = server.url
    fleet = Fleet()
    with pytest.raises(ConnectTimeout) as caught:
        EnvClient(fleet, url=url, connect_timeout=0.6).run()
    text = str(caught.value)
    assert url in text
    assert "tries" in text
    assert "refused" in text
    assert any(url in record.getMessage() for record in caplog.records)


def test_a_server_that_comes_later_is_found() -> None:
    with Server() as server:
        port = server.port
    running = Running(EnvClient(Fleet(), url=f"ws://127.0.0.1:{port}", max_backoff=0.05))
    with Server(serve_steps(0), port=port):
        assert running.result().reconnects == 0


@pytest.fixture
def patient_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the handshake take its time on a busy machine, whatever is left of the client's budget."""

    def patient(url: str, **options: Any) -> WebSocket:
        return connect(url, **{**options, "timeout_s": WAIT_S})

    monkeypatch.setattr(env_client, "connect", patient)


@pytest.mark.usefixtures("patient_dial")
def test_a_server_that_accepts_and_says_nothing_is_bounded() -> None:
    def mute(peer: Peer) -> None:
        peer.close_code()

    with (
        Server(mute) as server,
        pytest.raises(ConnectTimeout, match="no message came within"),
    ):
        Running(EnvClient(Fleet(), url=server.url, connect_timeout=0.3)).result()


@pytest.mark.usefixtures("patient_dial")
def test_a_server_that_always_resyncs_is_bounded() -> None:
    def resync(peer: Peer) -> None:
        with suppress(ConnectionClosed):  # the last try may end before the metadata comes
            peer.metadata()
            peer.infer()
            peer.ws.close(1001, "plugrl-server-resync")

    with Server(*[resync] * 9) as server:
        client = EnvClient(Fleet(), url=server.url, connect_timeout=0.3, max_backoff=5.0)
        with pytest.raises(ConnectTimeout, match=r"plugrl-server-resync|no message came within"):
            Running(client).result()
        server.expects(server.connections)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_fatal_at_once(status: int) -> None:
    from websockets.sync.server import serve  # noqa: PLC0415

    def refuse(connection: Value, _request: Value) -> Value:
        return connection.respond(status, "no\n")

    with serve(lambda _: None, "127.0.0.1", 0, process_request=refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        with pytest.raises(HandshakeError) as caught:
            Running(EnvClient(Fleet(), url=url)).result()
        assert caught.value.status == status
        server.shutdown()
        thread.join()


def test_the_api_key_is_sent() -> None:
    with Server(Peer.stop) as server:
        Running(EnvClient(Fleet(), url=server.url, api_key="s3")).result()
        assert server.requests[0].headers["Authorization"] == "Api-Key s3"


def test_stop_ends_it_with_1000() -> None:
    waiting = threading.Event()
    codes: list[int] = []

    with Server(serve_steps(0, codes, waiting)) as server:
        running = Running(EnvClient(Fleet(), url=server.url))
        assert waiting.wait(WAIT_S)
        running.client.stop()
        assert running.result().reason == "stopped"
    assert codes == [1000]


def test_stop_while_there_is_no_server() -> None:
    with Server() as server:
        url = server.url
    running = Running(EnvClient(Fleet(), url=url, connect_timeout=None))
    running.client.stop()
    assert running.result().reason == "stopped"


def test_stop_while_the_envs_are_made_closes_them_and_connects_to_nobody() -> None:
    closed: list[CountEnv] = []

    class Closing(CountEnv):
        def __init__(self) -> None:
            super().__init__()
            assert not closed
            client.stop()

        def close(self) -> None:
            closed.append(self)

    with Server() as server:
        client = EnvClient(Closing, num_envs=3, url=server.url)
        summary = Running(client).result()
    assert (summary.reason, summary.episodes, len(closed)) == ("stopped", 0, 1)


def test_stop_during_the_first_reset_says_nothing_to_the_server() -> None:
    codes: list[int] = []

    def script(peer: Peer) -> None:
        peer.metadata()
        codes.append(peer.close_code())

    class Stopping(CountEnv):
        def reset(self, **options: Any) -> Value:
            client.stop()
            return super().reset(**options)

    with Server(script) as server:
        client = EnvClient(Stopping, url=server.url)
        assert Running(client).result().reason == "stopped"
    assert codes == [1000]


class Crashing(CountEnv):
    def step(self, action: Value) -> Value:
        if self.t == 1:
            raise RuntimeError("the arm fell off\nand more")
        return super().step(action)


def test_an_env_that_fails_ends_the_client(caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []
    with pytest.raises(EnvFailed, match=r"^env 0 \(Crashing\) failed in step\(\): RuntimeError: the arm fell off$"):
        run(Crashing, unanswered(codes, steps=1), num_envs=2)
    assert codes == [1011]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info is not None
    assert isinstance(errors[0].exc_info[1], EnvFailed)
    assert isinstance(errors[0].exc_info[1].__cause__, RuntimeError)


def test_an_observation_that_does_not_fit_is_the_envs_fault() -> None:
    class Wrong(CountEnv):
        def _observe(self) -> Value:
            return np.zeros(3 if self.t else 2, np.float32)

    codes: list[int] = []
    with pytest.raises(EnvFailed, match=r"SpaceError.*'obs'"):
        run(Wrong, unanswered(codes))
    assert codes == [1011]


@pytest.mark.parametrize("info", [3, "text", {"is_success": [[1], 2]}])
def test_an_info_that_cannot_be_read_is_the_envs_fault(info: Value) -> None:
    codes: list[int] = []
    with pytest.raises(EnvFailed, match=r"env CountEnv failed in step\(\): "):
        run(Fleet({"length": 1, "info": [info]}), unanswered(codes))
    assert codes == [1011]


def test_every_env_is_closed() -> None:
    closed: list[int] = []

    class Closing(CountEnv):
        def close(self) -> None:
            closed.append(1)
            raise RuntimeError("cannot")

    run(Closing, Peer.stop, num_envs=3)
    assert closed == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"url": "http://x"}, ValueError, "url"),
        ({"url": "ws://"}, ValueError, "url"),
        ({"url": "ws://user:word@host"}, ValueError, "url must not contain credentials"),
        ({"url": 8000}, ValueError, "url must be like ws://"),
        ({"api_key": ""}, ValueError, "api_key"),
        ({"api_key": "one\ntwo"}, ValueError, "api_key"),
        ({"ssl": ssl.create_default_context()}, ValueError, "ssl is given, but url"),
        ({"ssl": True, "url": "wss://host"}, ValueError, "ssl must be None or"),
        (
            {"ssl": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "url": "wss://host"},
            ValueError,
            "ssl must be None or a client-side context",
        ),
        ({"num_envs": 0}, ValueError, "num_envs"),
        ({"seed": -1}, ValueError, "seed"),
        ({"rank": -1}, ValueError, "rank"),
        ({"first_env": -1}, ValueError, "first_env"),
        ({"group_num_envs": 0}, ValueError, "group_num_envs"),
        ({"connect_timeout": 0}, ValueError, "connect_timeout"),
        ({"connect_timeout": float("nan")}, ValueError, "connect_timeout"),
        ({"ping_interval": -1}, ValueError, "ping_interval"),
        ({"api_key": b"key"}, TypeError, "api_key must be printable"),
        ({"api_key": 5}, TypeError, "api_key must be printable"),
        ({"num_envs": True}, TypeError, "num_envs"),
        ({"num_envs": "3"}, TypeError, "num_envs"),
        ({"ping_timeout": "60"}, TypeError, "ping_timeout"),
        ({"max_backoff": None}, TypeError, "max_backoff"),
    ],
)
def test_bad_options_name_the_argument(options: dict[str, Any], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        EnvClient(Fleet(), **options)


def test_progress_is_reported() -> None:
    reports: list[Any] = []

    def script(peer: Peer) -> None:
        peer.metadata()
        infer = peer.infer()
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and not stepping():
            _, infer = peer.zeros(infer)
        peer.stop()

    def stepping() -> list[Any]:
        return [report for report in reports if report.state == "stepping" and report.episodes]

    run(Fleet({"length": 5}), script, progress=reports.append)
    assert reports[0].state == "connecting"
    report = stepping()[0]
    assert report.steps_per_s > 0
    assert report.mean_return == pytest.approx(16.25)
