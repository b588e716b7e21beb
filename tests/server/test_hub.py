"""The hub over real sockets: deadlines, garbage, pings, the end of the run, and what it says to whom."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
import trustme
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from plugrl_bridges.server import lifetime
from plugrl_bridges.server.lockstep import Lockstep
from plugrl_bridges.server.options import BridgeOptions
from tests.support import RESYNC, STOP, Proxy, Puppet, bridge, peers, wait_for_log, wait_until
from tests.transport.ends import Task, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    MakeBridge = Callable[..., Lockstep]

HEAD = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def dial(env: Lockstep) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", env.port), 20)
    sock.settimeout(20)
    return sock


def ended(sock: socket.socket) -> bool:
    """Wait for the end of the stream."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return True


class Run:
    """Keep one well-behaved client stepping, to see that nothing disturbs it."""

    def __init__(self, env: Lockstep) -> None:
        self.env = env
        self.puppet = Puppet(env.url, (1,)).infer()
        env.reset()
        self.steps = 0

    def step(self) -> None:
        self.env.send(np.full((1, 1), 0.5, np.float32))
        task = Task(self.env.wait)
        assert self.puppet.step(float(self.steps)).tolist() == [[[0.5]]]
        self.steps += 1
        step = task.result()
        assert step.standing()[0].tolist() == [[1, 0, self.steps]]
        assert step.rewards.tolist() == [self.steps - 1]
        assert step.lost == ()
        assert not step.over.any()


@pytest.fixture
def run(make_bridge: MakeBridge) -> Run:
    made = Run(make_bridge(num_envs=1))
    made.step()
    return made


# Greeting and deadlines ---------------------------------------------------------------------------------------------


def test_the_server_speaks_first_and_says_what_it_knows(make_bridge: MakeBridge) -> None:
    puppet = Puppet(make_bridge(num_envs=1, action_horizon=2).url)
    data = puppet.metadata["data"]
    assert puppet.metadata["message_type"] == "metadata"
    assert (data["protocol_version"], data["action_horizon"], data["action_dim"]) == (1, 2, 1)
    assert data["features"] == ["reuse-feedback-obs", "env-spec", "seeded-reset", "late-reset"]
    unknown = Puppet(make_bridge(num_envs=1, action_space=None).url)
    assert "action_dim" not in unknown.metadata["data"]  # absent means not known


def test_connected_is_logged_only_after_a_valid_first_message(
    make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "plugrl_bridges")
    env = make_bridge(num_envs=1)
    mute, garbler = Puppet(env.url), Puppet(env.url)
    garbler.send({"message_type": "infer"})
    assert garbler.close_seen() == RESYNC
    assert "connected: " not in caplog.text
    mute.infer()
    wait_for_log(caplog, f"connected: {mute.address} with 1 envs")


@pytest.mark.parametrize("said", [b"", HEAD[:40]], ids=["nothing", "half a request"])
def test_a_peer_that_never_finishes_its_handshake_is_dropped(
    run: Run, timing: Callable[..., None], caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    timing(handshake_timeout_s=0.2)
    with dial(run.env) as sock:
        sock.sendall(said)
        assert ended(sock)
    wait_for_log(caplog, "did not send its handshake in time")
    run.step()


def test_a_peer_that_never_speaks_is_dropped(
    run: Run, timing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    puppet = Puppet(run.env.url)
    timing(first_message_timeout_s=0.0)
    assert puppet.close_seen() == (None, "")
    assert f"{puppet.address} did not send its first infer in time" in caplog.text
    run.step()


# Garbage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        random.Random(1).randbytes(4096),
        b"\r\n" * 3000,
    ],
    ids=["HTTP GET", "HTTP POST", "SSH", "TLS", "random", "newlines"],
)
def test_bytes_that_are_no_websocket_disturb_nobody(run: Run, said: bytes) -> None:
    with dial(run.env) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        assert ended(sock)
    run.step()


def test_random_bytes_on_an_open_connection_disturb_nobody(run: Run) -> None:
    for seed in range(4):
        with dial(run.env) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(HEAD + random.Random(seed).randbytes(512))
                sock.shutdown(socket.SHUT_WR)
            assert ended(sock)
    run.step()


def _foreign_dialect() -> dict[str, Any]:
    return {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<i8", "shape": [1]}


def _changed(message: dict[str, Any], *path: str, to: Any = None) -> dict[str, Any]:
    """Set what stands at a path, or take it away."""
    inner = message
    for key in path[:-1]:
        inner[key] = dict(inner[key])
        inner = inner[key]
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return message


STATES = {"obs": np.zeros((2, 3), np.float32)}
BAD_INFERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no map": lambda _: [1, 2],
    "no message_type": lambda m: _changed(m, "message_type"),
    "message_type as bin": lambda m: {**dict[Any, Any](_changed(m, "message_type")), b"message_type": "infer"},
    "unknown message_type": lambda m: {**m, "message_type": "hello"},
    "metadata from a client": lambda _: {"message_type": "metadata", "data": {}},
    "action from a client": lambda _: {"message_type": "action", "data": {"action": np.zeros((1, 1, 1))}},
    "no data": lambda m: _changed(m, "data"),
    "no env_indices": lambda m: _changed(m, "env_indices"),
    "no step_ids": lambda m: _changed(m, "step_ids"),
    "no env named": lambda m: {**m, "env_indices": np.zeros(0, np.int64), "step_ids": np.zeros(0, np.int64)},
    "negative env": lambda m: {**m, "env_indices": np.array([-1])},
    "env named twice": lambda m: {**m, "env_indices": np.array([0, 0]), "step_ids": np.zeros(2, np.int64),
                                  "data": {**m["data"], "states": STATES}},
    "float env_indices": lambda m: {**m, "env_indices": np.zeros(1)},
    "list env_indices": lambda m: {**m, "env_indices": [0]},
    "no images": lambda m: _changed(m, "data", "images"),
    "a fourth key": lambda m: _changed(m, "data", "depth", to={}),
    "wrong leading dimension": lambda m: _changed(m, "data", "states", to=STATES),
    "wrong shape": lambda m: _changed(m, "data", "states", to={"obs": np.zeros((1, 4), np.float32)}),
    "wrong entry": lambda m: _changed(m, "data", "states", to={"a": np.zeros((1, 3)), "b": np.zeros((1, 3))}),
    "text where numbers belong": lambda m: _changed(m, "data", "states", to={"obs": np.array([["a", "b", "c"]])}),
    "text of too many": lambda m: _changed(m, "data", "text", to=["a", "b"]),
    "reuse before any feedback": lambda m: {**m, "reuse": np.array([True]), "data": {**m["data"], "states": {}}},
    "reuse of the wrong length": lambda m: {**m, "reuse": np.array([False, False])},
    "reuse that is no bool": lambda m: {**m, "reuse": np.array([0])},
    "env_spec that is no map": lambda m: {**m, "env_spec": 3},
    "env_spec with a wrong key": lambda m: {**m, "env_spec": {"rank": "first"}},
    "str keys": lambda m: {**m, "env_indices": _foreign_dialect()},
}  # fmt: skip


@pytest.mark.parametrize("make", BAD_INFERS.values(), ids=BAD_INFERS)
def test_a_malformed_first_message_is_a_resync_for_its_sender_alone(
    run: Run, make: Callable[[dict[str, Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    puppet = Puppet(run.env.url, (9,))
    made: Any = make(puppet.infer_message())
    puppet.send(made)
    assert puppet.close_seen() == RESYNC
    assert re.search(rf"{puppet.address} broke the protocol, closing its connection with {RESYNC[1]}: \[", caplog.text)
    run.step()


FLAGS = np.zeros(1, bool)
BAD_FEEDBACKS: dict[str, Callable[[Puppet], object]] = {
    "infer instead": lambda p: p.infer_message(),
    "no rewards": lambda p: _changed(p.feedback_message(), "data", "rewards"),
    "a sixth key": lambda p: p.feedback_message(reward=1.0, bonus=np.zeros(1)),
    "integer rewards": lambda p: p.feedback_message(rewards=np.zeros(1, np.int64)),
    "list rewards": lambda p: p.feedback_message(rewards=[1.0]),
    "two rewards": lambda p: p.feedback_message(rewards=np.zeros(2)),
    "integer flags": lambda p: p.feedback_message(terminated=np.zeros(1, np.uint8)),
    "two flags": lambda p: p.feedback_message(truncated=np.zeros(2, bool)),
    "info that is no map": lambda p: p.feedback_message(info=[]),
    "obs that is no map": lambda p: p.feedback_message(obs=np.zeros((1, 3))),
    "obs of a wrong shape": lambda p: p.feedback_message(
        obs={"images": {}, "states": {"obs": np.zeros((1, 7))}, "text": ""}
    ),
    "no env named": lambda p: p.feedback_message(env_indices=np.zeros(0, np.int64), step_ids=np.zeros(0, np.int64)),
}


@pytest.mark.parametrize("make", BAD_FEEDBACKS.values(), ids=BAD_FEEDBACKS)
def test_a_malformed_feedback_is_a_resync_and_the_slot_goes_to_the_next(
    make_bridge: MakeBridge, make: Callable[[Puppet], object]
) -> None:
    env = make_bridge(num_envs=2)
    good, bad = Puppet(env.url, (1,)).infer(env_spec={"rank": 0}), Puppet(env.url, (2,)).infer(env_spec={"rank": 1})
    env.reset()
    env.send(np.zeros((2, 1), np.float32))
    task = Task(env.wait)
    bad.action()
    made: Any = make(bad)
    bad.send(made)
    assert bad.close_seen() == RESYNC
    Puppet(env.url, (3,)).infer()
    good.step(5.0)
    step = task.result()
    assert step.standing()[0].tolist() == [[1, 0, 1], [3, 0, 0]]
    assert (step.rewards.tolist(), step.truncated.tolist(), step.lost) == ([5, 0], [False, True], (1,))


def test_an_info_that_cannot_be_split_is_a_resync(make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture) -> None:
    env = make_bridge(num_envs=2)
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    env.send(np.zeros((2, 1), np.float32))
    puppet.action()
    puppet.feed_back(info={"task": "pick"})
    assert puppet.close_seen() == RESYNC
    assert "[5.4]" in caplog.text
    assert "array of length 2" in caplog.text


def test_a_reuse_of_what_a_finished_episode_left_is_a_resync(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    env.send(np.zeros((1, 1), np.float32))
    puppet.action()
    puppet.feed_back(terminated=np.array([True]))
    puppet.infer(reuse=np.array([True]), data={"images": {}, "states": {}, "text": ""})
    assert puppet.close_seen() == RESYNC


def test_a_reuse_of_the_last_feedback_stands_for_its_observation(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    env.send(np.zeros((2, 1), np.float32))
    task = Task(env.wait)
    puppet.action()
    puppet.t = 4
    puppet.feed_back(terminated=np.array([False, True]))
    reset = {"images": {}, "states": {"obs": np.array([[2, 1, 0]], np.float32)}, "text": ""}
    puppet.infer(reuse=np.array([True, False]), data=reset)
    assert task.result().standing()[0].tolist() == [[1, 0, 4], [2, 1, 0]]


def test_a_text_frame_is_a_resync(run: Run) -> None:
    puppet = Puppet(run.env.url)
    puppet.websocket.send("hello")
    assert puppet.close_seen() == RESYNC
    run.step()


def test_bytes_that_are_no_msgpack_are_a_resync(run: Run) -> None:
    for data in (b"", b"\xc1", b"\x81", msgpack.packb({"message_type": "infer"}) + b"\0", b"\x91" * 10000):
        puppet = Puppet(run.env.url)
        puppet.websocket.send(data)
        assert puppet.close_seen() == RESYNC
    run.step()


def test_a_message_above_the_bound_ends_its_connection_with_1009(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, max_message_bytes=4096)
    with dial(env) as sock:
        sock.sendall(HEAD + frame(b"x" * 5000, masked=True))
        data = b""
        while struct.pack("!H", 1009) not in data:
            data += sock.recv(4096)
            assert data


def test_a_fault_of_the_library_is_1011_without_a_traceback_on_the_wire(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    puppet = Puppet(run.env.url, (9,))

    def fail(*_: object, running: bool) -> None:  # noqa: ARG001 - as the one it stands for
        raise RuntimeError("the secret inside")

    with monkeypatch.context() as patch:
        patch.setattr(run.env._roster, "welcome", fail)
        puppet.infer()
        assert puppet.close_seen() == (1011, "Internal server error.")
    assert "the secret inside" in caplog.text
    assert "Traceback" in caplog.text
    run.step()


# Many at once -------------------------------------------------------------------------------------------------------


def test_a_descriptor_that_is_given_again_in_the_same_round_is_not_confused(run: Run) -> None:
    """One connection ends and another is accepted on its number, within one poll."""
    env = run.env
    hub_of = env._hub
    with hub_of.lock:
        before = set(hub_of._peers)
        old = dial(env)
        hub_of._accept()
        [fd] = set(hub_of._peers) - before
        stale = hub_of._peers[fd]
        new = dial(env)
        stale.websocket.abort()  # as an interrupted send does; the selector still knows the number
        hub_of._accept()
        assert hub_of._peers[fd] is not stale
        fresh = hub_of._peers[fd]
        hub_of._drop(stale)
        hub_of._service(stale)
        assert hub_of._peers[fd] is fresh
    old.close()
    new.sendall(HEAD)
    assert new.recv(12) == b"HTTP/1.1 101"
    new.close()
    run.step()


def test_a_keeper_whose_clients_never_fall_silent_leaves_the_lock_to_the_trainer(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = run.env._hub.poll
    by_keeper = threading.Event()

    def always_something(timeout_s: float) -> bool:
        if threading.current_thread().name.startswith("plugrl-keeper"):
            by_keeper.set()
        poll(timeout_s)
        return True

    monkeypatch.setattr(run.env._hub, "poll", always_something)
    assert by_keeper.wait(20)
    for _ in range(3):
        run.step()


def test_without_descriptors_for_newcomers_the_run_goes_on_and_they_are_taken_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_of = run.env._hub
    accept = hub_of._listener.accept
    calls: list[float] = []

    def no_descriptors() -> None:
        calls.append(time.monotonic())

    monkeypatch.setattr(hub_of._listener, "accept", no_descriptors)
    with dial(run.env) as sock:
        wait_until(lambda: len(calls) >= 3)
        assert calls[2] - calls[0] > BridgeOptions.timing.chores_period_s  # not in a busy loop
        run.step()
        monkeypatch.setattr(hub_of._listener, "accept", accept)
        sock.sendall(HEAD)
        assert sock.recv(12) == b"HTTP/1.1 101"


def test_a_trainer_that_never_pauses_still_admits_newcomers(run: Run) -> None:
    run.env._hub._life_line.let_go()  # no keeper: whoever steps looks after them
    task = Task(lambda: Puppet(run.env.url))
    deadline = time.monotonic() + 20
    while not task.done:
        assert time.monotonic() < deadline
        run.step()
    assert task.result().metadata["message_type"] == "metadata"


# Pings --------------------------------------------------------------------------------------------------------------


def test_a_waiting_client_that_answers_pings_is_kept_through_minutes_of_learning(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, ping_interval=0.05)
    puppet = Puppet(env.url).infer()
    env.reset()
    [peer] = peers(env)
    received = peer.websocket.bytes_received
    wait_until(lambda: peer.websocket.bytes_received > received + 20 * 6)  # twenty pongs
    env.send(np.zeros((1, 1), np.float32))
    task = Task(env.wait)
    puppet.step(3.0)
    assert task.result().rewards.tolist() == [3]


def test_a_waiting_client_that_answers_no_ping_is_lost(
    make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_bridge(num_envs=1, ping_interval=0.1, ping_timeout=2.0)
    with Proxy(env.port) as proxy:
        Puppet(proxy.url).infer()
        env.reset()
        proxy.frozen.set()
        wait_until(lambda: env.client_losses == 1)
    assert "did not send an answer to a ping in time" in caplog.text


def test_without_pings_a_silent_client_is_kept(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, ping_interval=None, ping_timeout=0.1)
    with Proxy(env.port) as proxy:
        puppet = Puppet(proxy.url).infer()
        env.reset()
        proxy.frozen.set()
        [peer] = peers(env)
        with env._hub.lock:
            env._hub._chores(time.monotonic() + 1000)
        assert not peer.lost
        assert peer.websocket.pings_unanswered == 0
        proxy.frozen.clear()
        env.send(np.zeros((1, 1), np.float32))
        task = Task(env.wait)
        puppet.step()
        assert task.result().lost == ()


def test_a_client_that_computes_a_step_need_not_answer_pings(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, ping_interval=0.02)
    with Proxy(env.port, eat_pings=True) as proxy:
        puppet = Puppet(proxy.url).infer()
        env.reset()
        env.send(np.zeros((1, 1), np.float32))
        puppet.action()
        wait_until(lambda: proxy.eaten > 4)
        with env._hub.lock:
            env._hub._chores(time.monotonic() + 1000)  # far beyond the ping timeout
        puppet.feed_back(2.0).infer()
        assert env.wait().rewards.tolist() == [2]


def test_a_pause_of_this_process_is_not_the_silence_of_a_client(run: Run) -> None:
    """A suspended laptop, or a long call that holds the GIL: no ping was sent, so none is unanswered."""
    with run.env._hub.lock:
        run.env._hub._chores(time.monotonic() + 10_000)
        run.env._hub._chores(time.monotonic() + 10_001)
    run.step()
    assert run.env.client_losses == 0


# The end of the run -------------------------------------------------------------------------------------------------


def hold_lock(env: Lockstep, held: threading.Event, until: threading.Event) -> None:
    with env._hub.lock:
        held.set()
        until.wait(20)


@pytest.mark.parametrize("kind", ["never reads", "never answers", "half a handshake", "nothing said"])
def test_close_is_bounded_whatever_a_client_does(make_bridge: MakeBridge, kind: str) -> None:
    env = make_bridge(num_envs=1)
    with dial(env) as sock:
        if kind.startswith("never"):
            sock.sendall(HEAD)
            assert sock.recv(12) == b"HTTP/1.1 101"
        elif kind == "half a handshake":
            sock.sendall(HEAD[:30])
        if kind == "never reads":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        wait_until(lambda: len(env._hub._peers) == 1)
        started = time.monotonic()
        env._hub.close(0.3)
        assert time.monotonic() - started < 20
        assert env._hub._peers == {}
    env.close()


def test_clients_hear_stop_even_when_the_lock_cannot_be_had(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    held, release = threading.Event(), threading.Event()
    holder = Task(lambda: hold_lock(env, held, release))
    assert held.wait(20)
    env._hub.close(0.2)
    assert puppet.close_seen() == STOP
    release.set()
    holder.result()


RUN_AND = """
import gymnasium, numpy as np, sys
from plugrl_bridges.server.lockstep import Lockstep
from plugrl_bridges.server.options import BridgeOptions
env = Lockstep(BridgeOptions(port=int(sys.argv[1]), num_envs=1, observation_space=gymnasium.spaces.Box(-9, 9, (3,)),
                             action_space=gymnasium.spaces.Box(-2, 2, (1,))))
print(env.port, flush=True)
env.reset()
"""


@contextlib.contextmanager
def trainer(then: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a trainer in another process that resets and then does something; yield it and its port."""
    with subprocess.Popen(
        [sys.executable, "-c", RUN_AND + then, str(port)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize(("then", "code"), [("", 0), ("sys.exit(3)", 3), ("raise RuntimeError", 1), ("env = None", 0)])
def test_clients_hear_stop_when_a_trainer_ends_that_never_calls_close(then: str, code: int) -> None:
    with trainer(then) as (process, port):
        puppet = Puppet(f"ws://127.0.0.1:{port}").infer()
        assert puppet.close_seen() == STOP
        assert process.wait(20) == code


def test_after_a_crash_the_port_is_free_at_once(make_bridge: MakeBridge) -> None:
    with trainer("sys.stdin.read()") as (process, port):
        puppet = Puppet(f"ws://127.0.0.1:{port}").infer()
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        env = make_bridge(num_envs=1, port=port)
        assert env.port == port
        assert puppet.close_seen() == (None, "")


def test_the_same_port_can_be_used_again_at_once(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    for _ in range(3):
        puppet = Puppet(env.url).infer()
        env.reset()
        env.close()
        puppet.close_seen()
        env = make_bridge(num_envs=1, port=env.port)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # that threads may deadlock is what is tested
@pytest.mark.parametrize("call", ["close", "send", "gc", "exit"])
def test_a_forked_child_leaves_its_parents_clients_alone(run: Run, call: str) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if call == "close":
                run.env.close()
            elif call == "send":
                with contextlib.suppress(Exception):
                    run.env.send(np.zeros((1, 1), np.float32))
                    os._exit(9)
            elif call == "gc":
                del run.env
                gc.collect()
            os.write(write, b"ok")
            os._exit(0)
        finally:
            os._exit(8)
    os.close(write)
    assert os.read(read, 10) == b"ok"
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    run.step()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_lives_on_keeps_no_port_and_no_connection(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    read, write = os.pipe()
    read_ready, write_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.write(write_ready, b"ok")
        os.read(read, 1)  # until the parent says so
        os._exit(0)
    os.close(read)
    assert os.read(read_ready, 2) == b"ok"
    try:
        env.close()
        assert puppet.close_seen() == STOP
        make_bridge(num_envs=1, port=env.port)
    finally:
        for end in (write, read_ready, write_ready):
            os.close(end)
        os.waitpid(child, 0)


def test_the_keeper_ends_with_its_hub_and_holds_it_not_alive() -> None:
    with bridge(num_envs=1) as env:
        [keeper] = [thread for thread in threading.enumerate() if thread.name == f"plugrl-keeper-{env.port}"]
    keeper.join(20)
    assert not keeper.is_alive()
    assert all(hub_of is not env._hub or hub_of.closing for hub_of in lifetime._HUBS)


def test_a_fault_in_the_keeper_is_logged_and_it_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: float) -> bool:
        raise RuntimeError("unheard of")

    with monkeypatch.context() as patch:
        patch.setattr(run.env._hub, "poll", fail)
        wait_for_log(caplog, "a fault of this library in the keeper thread")
    run.step()


# Where it listens, and to whom --------------------------------------------------------------------------------------


def test_a_port_in_use_is_an_error_that_names_the_port_and_the_option(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{env.port}: .*in use; .*port=0"):
        make_bridge(num_envs=1, port=env.port)


def test_port_0_takes_a_free_one(make_bridge: MakeBridge) -> None:
    envs = [make_bridge(num_envs=1) for _ in range(3)]
    assert len({env.port for env in envs}) == 3
    assert envs[0].url == f"ws://127.0.0.1:{envs[0].port}"


def test_it_listens_on_loopback_alone_by_default(caplog: pytest.LogCaptureFixture) -> None:
    env = Lockstep(BridgeOptions(port=0))
    try:
        assert env._hub._listener._sock.getsockname()[0] == "127.0.0.1"
        assert "beyond this machine" not in caplog.text
    finally:
        env.close()


@pytest.mark.parametrize(("api_key", "warned"), [(None, True), ("k", False)])
def test_beyond_loopback_without_an_api_key_is_a_warning(
    make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture, api_key: str | None, *, warned: bool
) -> None:
    env = make_bridge(num_envs=1, host="0.0.0.0", api_key=api_key)  # noqa: S104 - only 127.0.0.1 connects
    assert ("without an api_key" in caplog.text) == warned
    headers = {} if api_key is None else {"Authorization": f"Api-Key {api_key}"}
    Puppet(f"ws://127.0.0.1:{env.port}", additional_headers=headers).leave()


def test_a_web_page_is_refused_unless_allowed(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, allowed_origins=["http://good.example"])
    with pytest.raises(InvalidStatus, match="403"):
        Puppet(env.url, origin="http://evil.example")
    Puppet(env.url, origin="http://good.example").leave()


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Api-Key wrong"}, {"Authorization": "Bearer right"}], ids=str
)
def test_a_client_without_the_api_key_is_refused(make_bridge: MakeBridge, headers: dict[str, str]) -> None:
    env = make_bridge(num_envs=1, api_key="right")
    with pytest.raises(InvalidStatus, match="401"):
        Puppet(env.url, additional_headers=headers)
    Puppet(env.url, additional_headers={"Authorization": "Api-Key right"}).leave()


def test_a_run_over_tls(make_bridge: MakeBridge) -> None:
    authority = trustme.CA()
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(client)
    env = make_bridge(num_envs=1, ssl=server)
    assert env.url == f"wss://127.0.0.1:{env.port}"
    puppet = Puppet(env.url, ssl=client).infer()
    env.reset()
    for number in range(5):
        env.send(np.zeros((1, 1), np.float32))
        task = Task(env.wait)
        puppet.step(float(number))
        assert task.result().rewards.tolist() == [number]
    closing = Task(env.close)
    assert puppet.close_seen() == STOP
    closing.result()


def test_compression_is_never_agreed_on(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    with connect(env.url, compression="deflate") as websocket:
        assert websocket.protocol.extensions == []
