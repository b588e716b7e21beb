"""What the tests of the bridge share: scripted envs, a client that a test leads by the hand, a proxy, and patience."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from plugrl_bridges.client import ClientSummary, EnvClient
from plugrl_bridges.server.lockstep import Lockstep
from plugrl_bridges.server.options import BridgeOptions
from tests.foreign_client import pack, unpack
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest

    from plugrl_bridges.server.hub import Hub, Peer

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 3
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)
ACTIONS = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
STOP = (1001, "plugrl-server-stop")
RESYNC = (1001, "plugrl-server-resync")
PATIENCE_S = 60.0


def wait_until(done: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Poll a predicate until it is true."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    wait_until(lambda: text in caplog.text)


class CountingEnv(gym.Env[Any, Any]):
    """Observe ``[tag, episode, t]``; step t pays t, and an episode ends after ``length`` steps: 5 steps return 15."""

    def __init__(
        self,
        tag: float = 0.0,
        *,
        length: int = 5,
        truncate: bool = False,
        action_space: gym.spaces.Space[Any] = ACTIONS,
        delay_s: float = 0.0,
    ) -> None:
        self.observation_space = OBSERVATIONS
        self.action_space = action_space
        self.tag, self.length, self.truncate, self.delay_s = tag, length, truncate, delay_s
        self.episode, self.t = -1, 0
        self.actions: list[Any] = []
        self.seeds: list[int | None] = []
        self.options: list[Any] = []
        self.closed = False

    def _observation(self) -> Any:
        return np.array([self.tag, self.episode, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.options.append(options)
        self.episode, self.t = self.episode + 1, 0
        return self._observation(), {"began": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.delay_s:
            time.sleep(self.delay_s)  # a slow simulator, not a synchronisation
        self.actions.append(action)
        self.t += 1
        done = self.t >= self.length
        return self._observation(), float(self.t), done and not self.truncate, done and self.truncate, {"t": self.t}

    def close(self) -> None:
        self.closed = True


class DictEnv(gym.ObservationWrapper[Any, Any, Any]):
    """Observe a Dict of a camera (uint8 HWC) and a state."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Dict(
            {"camera": gym.spaces.Box(0, 255, (36, 36, 3), np.uint8), "state": OBSERVATIONS}
        )

    def observation(self, observation: Any) -> dict[str, Any]:
        camera = np.full((36, 36, 3), 10 * observation[1] + observation[2], np.uint8)
        return {"camera": camera, "state": observation}


def observe(tags: Sequence[float], episode: float, t: float) -> Any:
    """What `CountingEnv` observes, batched."""
    return np.array([[tag, episode, t] for tag in tags], np.float32)


class Puppet:
    """Lead one connection of a foreign client message by message.

    Args:
        url: Of the bridge.
        tags: One env per tag; it is the first number of its observations.
        options: For ``websockets.sync.client.connect``.
    """

    def __init__(self, url: str, tags: Sequence[float] = (0.0,), *, state: str = "obs", **options: Any) -> None:
        self._stack = contextlib.ExitStack()
        self.websocket = self._stack.enter_context(connect(url, compression=None, max_size=None, **options))
        host, port = self.websocket.socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.metadata: dict[str, Any] = unpack(self.websocket.recv(PATIENCE_S))
        self.tags = tuple(tags)
        self.state = state
        self.indices = np.arange(len(self.tags))
        self.episode = 0
        self.t = 0
        self.reset: Any = None

    def send(self, message: dict[Any, Any]) -> None:
        self.websocket.send(pack(message))

    def observation(self, rows: Any = None) -> dict[str, Any]:
        states = observe(self.tags, self.episode, self.t)
        return {"images": {}, "states": {self.state: states if rows is None else states[rows]}, "text": ""}

    def infer_message(self, **changes: Any) -> dict[str, Any]:
        message = {
            "message_type": "infer",
            "data": self.observation(),
            "env_indices": self.indices,
            "step_ids": self.indices,
        }
        return {**message, **changes}

    def infer(self, **changes: Any) -> Puppet:
        self.send(self.infer_message(**changes))
        return self

    def action(self) -> Any:
        message = unpack(self.websocket.recv(PATIENCE_S))
        assert message["message_type"] == "action", message
        self.reset = message.get("reset")
        return message["data"]["action"]

    def feedback_message(self, reward: float = 1.0, **changes: Any) -> dict[str, Any]:
        n = len(self.tags)
        data = {
            "obs": self.observation(),
            "rewards": np.full(n, reward, np.float32),
            "terminated": np.zeros(n, bool),
            "truncated": np.zeros(n, bool),
            "info": {},
        }
        outer: dict[str, Any] = {key: changes.pop(key) for key in ("env_indices", "step_ids") if key in changes}
        return {
            "message_type": "feedback",
            "env_indices": self.indices,
            "step_ids": self.indices,
            **outer,
            "data": {**data, **changes},
        }

    def feed_back(self, reward: float = 1.0, **changes: Any) -> Puppet:
        self.send(self.feedback_message(reward, **changes))
        return self

    def feed_back_nothing(self) -> Puppet:
        """Answer a reset request: a feedback about no env."""
        none = np.zeros(0, np.int64)
        empty = {"images": {}, "states": {self.state: observe(self.tags, 0, 0)[:0]}, "text": []}
        return self.feed_back(env_indices=none, step_ids=none, obs=empty, rewards=np.zeros(0, np.float32),
                       terminated=np.zeros(0, bool), truncated=np.zeros(0, bool))  # fmt: skip

    def step(self, reward: float = 1.0, *, terminated: bool = False, **changes: Any) -> Any:
        """Take an action, step, feed back and ask again; give the action."""
        action = self.action()
        self.t += 1
        self.feed_back(reward, terminated=np.full(len(self.tags), terminated), **changes)
        if terminated:
            self.episode, self.t = self.episode + 1, 0
        self.infer()
        return action

    def obey_reset(self) -> Any:
        """Take a reset request of `seeded-reset`, begin new episodes, and give the request."""
        self.action()
        return self.answer_reset()

    def answer_reset(self) -> Any:
        """Do what the action that came asks, a reset of all envs, and give the request."""
        assert self.reset is not None
        self.episode, self.t = self.episode + 1, 0
        self.feed_back_nothing()
        self.infer()
        return self.reset

    def close_seen(self, timeout_s: float = PATIENCE_S) -> tuple[int | None, str]:
        """Wait for the server's close; give code and reason."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.websocket.recv(timeout_s)
        received = self.websocket.protocol.close_rcvd
        return (None, "") if received is None else (received.code, received.reason)

    def vanish(self) -> None:
        """End the TCP connection without a close frame."""
        with contextlib.suppress(OSError):
            self.websocket.socket.shutdown(socket.SHUT_RDWR)
        self.websocket.recv_events_thread.join(PATIENCE_S)

    def leave(self) -> None:
        """Close as a client that has finished [7.5]."""
        self._stack.close()


def knows_reset(**more: Any) -> dict[str, Any]:
    """Give the env_spec of a client that knows seeded-reset."""
    return {"features": ["seeded-reset", "env-spec"], **more}


def hub_of(server: Any) -> Hub:
    """Return what holds the connections of an env of any adapter, of a `Lockstep` or of a `PolicyServer`."""
    hub: Hub = getattr(server, "_lockstep", server)._hub
    return hub


def peers(server: Any) -> list[Peer]:
    """Return the connections that have sent a first message and are not ended, in order of arrival."""
    return [peer for peer in hub_of(server)._peers.values() if peer.spoke and not peer.lost]


def lose(env: Lockstep, puppet: Puppet) -> None:
    """Have a client vanish, and wait until the bridge knows."""
    before = env.client_losses
    puppet.vanish()
    wait_until(lambda: env.client_losses == before + 1)


def resync(server: Any) -> None:
    """End the only connection of a server as a breach of the protocol does; its client comes back."""
    with hub_of(server).lock:
        [peer] = peers(server)
        hub_of(server).end(peer, *RESYNC, "a test")


@contextlib.contextmanager
def bridge(**options: Any) -> Iterator[Lockstep]:
    """Yield a Lockstep on a free port; closed at the end."""
    settings: dict[str, Any] = {
        "port": 0, "observation_space": OBSERVATIONS, "action_space": ACTIONS, "timeout": 20.0, "connect_timeout": 60.0,
        **options,
    }  # fmt: skip
    lockstep = Lockstep(BridgeOptions(**settings))
    try:
        yield lockstep
    finally:
        lockstep.close()


class ClientThread:
    """Run an `EnvClient` in a thread; `join` gives its summary or raises what it raised."""

    def __init__(self, make_env: Callable[..., Any], **options: Any) -> None:
        self.client = EnvClient(make_env, **{"connect_timeout": PATIENCE_S, "max_backoff": 0.2, **options})
        self._task = Task(self.client.run)

    @property
    def running(self) -> bool:
        return not self._task.done

    def join(self, timeout_s: float = PATIENCE_S) -> ClientSummary:
        return self._task.result(timeout_s)

    def stop(self) -> None:
        self.client.stop()
        self._task.wait(PATIENCE_S)


class Proxy:
    """Forward TCP connections to a port; a test may have it eat ping and pong frames, or swallow everything.

    Args:
        port: Where the bridge listens.
        eat_pings: Drop the control frames ping and pong, in both directions.
    """

    def __init__(self, port: int, *, eat_pings: bool = False) -> None:
        self._target = port
        self._eat = eat_pings
        self.eaten = 0
        self.connections = 0
        self.frozen = threading.Event()
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"ws://127.0.0.1:{self.port}/some/path"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.connections += 1
            thread = threading.Thread(target=self._forward, args=(near,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._target)) as far:
            ends = {near: (far, _Frames()), far: (near, _Frames())}
            near.settimeout(PATIENCE_S)
            far.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):
                while not self._stopped.is_set():
                    if self.frozen.is_set():  # the connection stays, and nothing arrives any more
                        self._stopped.wait(0.05)
                        continue
                    for end in select.select(list(ends), [], [], 0.05)[0]:
                        other, frames = ends[end]
                        data = end.recv(1 << 16)
                        if not data:
                            return
                        other.sendall(self._sift(frames, data) if self._eat else data)

    def _sift(self, frames: _Frames, data: bytes) -> bytes:
        kept = b""
        for opcode, frame in frames.cut(data):
            if opcode in {9, 10}:
                self.eaten += 1
            else:
                kept += frame
        return kept


class _Frames:
    """Cut a byte stream into its HTTP head and WebSocket frames."""

    def __init__(self) -> None:
        self._buffer = b""
        self._open = False

    def cut(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        self._buffer += data
        while (size := self._size()) is not None and len(self._buffer) >= size:
            frame, self._buffer = self._buffer[:size], self._buffer[size:]
            opcode = frame[0] & 15 if self._open else 0
            self._open = True
            yield opcode, frame

    def _size(self) -> int | None:
        buffer = self._buffer
        if not self._open:
            end = buffer.find(b"\r\n\r\n")
            return None if end < 0 else end + 4
        if len(buffer) < 2:
            return None
        size, mask = buffer[1] & 127, 4 if buffer[1] & 128 else 0
        extra = {126: 2, 127: 8}.get(size, 0)
        if len(buffer) < 2 + extra:
            return None
        if extra:
            size = int.from_bytes(buffer[2 : 2 + extra], "big")
        return 2 + extra + mask + size
