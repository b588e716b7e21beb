"""A server that says what a test wants it to say, on the websockets library's own server; and envs that remember."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from plugrl_bridges.client import ClientSummary, EnvClient
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Message, Metadata, ResetRequest, parse_bytes, to_bytes
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ssl import SSLContext
    from types import TracebackType

    from typing_extensions import Self

    from plugrl_bridges.wire.codec import Value

ALL_FEATURES = ("reuse-feedback-obs", "env-spec", "seeded-reset")
WAIT_S = 30.0
"""For whatever must come, on however busy a machine; half of what the client itself gives a send."""
# The library's server sends pings of its own since release 15.
_NO_PINGS: dict[str, Any] = (
    {"ping_interval": None} if "ping_interval" in inspect.signature(ServerConnection).parameters else {}
)


class Peer:
    """One connection as the server's script sees it."""

    def __init__(self, ws: ServerConnection) -> None:
        self.ws = ws

    def send(self, message: Message) -> None:
        self.ws.send(b"".join(to_bytes(message)))

    def metadata(self, *features: str, **data: Value) -> None:
        self.send(Metadata({"features": list(features), **data} if features else data))

    def raw(self) -> bytes:
        data = self.ws.recv(timeout=WAIT_S)
        assert isinstance(data, bytes)
        return data

    def infer(self) -> Infer:
        message = parse_bytes(self.raw())
        assert isinstance(message, Infer)
        return message

    def feedback(self) -> Feedback:
        message = parse_bytes(self.raw())
        assert isinstance(message, Feedback)
        return message

    def act(self, infer: Infer, action: Value, reset: ResetRequest | None = None) -> None:
        self.send(Action(infer.env_indices, np.asarray(action), reset))

    def exchange(self, infer: Infer, action: Value, reset: ResetRequest | None = None) -> tuple[Feedback, Infer]:
        """Act, and take the feedback and the next infer."""
        self.act(infer, action, reset)
        return self.feedback(), self.infer()

    def zeros(self, infer: Infer, horizon: int = 1) -> tuple[Feedback, Infer]:
        return self.exchange(infer, np.zeros((horizon, len(infer.env_indices), 1), np.float32))

    def stop(self) -> None:
        self.ws.close(1001, "plugrl-server-stop")

    def close_code(self) -> int:
        """Wait for the client's close frame; 1006 if there is none."""
        try:
            while True:
                self.ws.recv(timeout=WAIT_S)
        except ConnectionClosed as exc:
            return 1006 if exc.rcvd is None else exc.rcvd.code

    def drop(self) -> None:
        """End the connection without a close frame."""
        self.ws.socket.shutdown(2)


def serve_steps(
    count: int,
    codes: list[int] | None = None,
    started: threading.Event | None = None,
    features: Sequence[str] = ALL_FEATURES,
) -> Callable[[Peer], None]:
    """Make a script that steps so often and then stops; or, given ``codes``, waits for the client's close."""

    def script(peer: Peer) -> None:
        peer.metadata(*features)
        infer = peer.infer()
        for _ in range(count):
            _, infer = peer.zeros(infer)
        if started is not None:
            started.set()
        if codes is None:
            peer.stop()
        else:
            codes.append(peer.close_code())

    return script


def unanswered(codes: list[int], steps: int = 0) -> Callable[[Peer], None]:
    """Make a script whose last action, after so many steps, is not fed back: the client closes with a code."""

    def script(peer: Peer) -> None:
        peer.metadata()
        infer = peer.infer()
        for _ in range(steps):
            _, infer = peer.zeros(infer)
        peer.act(infer, np.zeros((1, len(infer.env_indices), 1), np.float32))
        codes.append(peer.close_code())

    return script


class Server:
    """Serve the k-th connection with the k-th script; one more than there are scripts is a failure."""

    def __init__(self, *scripts: Callable[[Peer], None], port: int = 0, ssl: SSLContext | None = None) -> None:
        self._scripts = list(scripts)
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._ended = threading.Semaphore(0)
        self.connections = 0
        self.requests: list[Any] = []
        self._server = serve(
            self._handle, "127.0.0.1", port, max_size=None, compression=None, close_timeout=WAIT_S, ssl=ssl, **_NO_PINGS
        )
        self.port = self._server.socket.getsockname()[1]
        self.url = f"{'ws' if ssl is None else 'wss'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def _handle(self, ws: ServerConnection) -> None:
        with self._lock:
            at = self.connections
            self.connections += 1
            self.requests.append(ws.request)
        try:
            assert at < len(self._scripts), f"connection {at + 1}, but there are {len(self._scripts)} scripts"
            self._scripts[at](Peer(ws))
        except BaseException as exc:  # noqa: BLE001 - raised again at the end of the test
            self._errors.append(exc)
            ws.close(1001, "plugrl-server-stop")
        finally:
            self._ended.release()

    def expects(self, connections: int) -> None:
        """Say that so many connections are enough, though there are more scripts."""
        del self._scripts[connections:]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(self.connections):
            self._ended.acquire(timeout=WAIT_S)
        self._server.shutdown()
        self._thread.join(WAIT_S)
        if self._errors:
            raise self._errors[0]
        if kind is None:
            assert self.connections == len(self._scripts)


class Running:
    """An `EnvClient` in a thread."""

    def __init__(self, client: EnvClient) -> None:
        self.client = client
        self._task = Task(client.run)

    def result(self) -> ClientSummary:
        return self._task.result(WAIT_S)


def run(make_env: Callable[[], Any], *scripts: Callable[[Peer], None], **options: Any) -> ClientSummary:
    """Run a client against scripts until it ends."""
    with Server(*scripts) as server:
        return Running(EnvClient(make_env, url=server.url, max_backoff=0.05, **options)).result()


class CountEnv(gymnasium.Env[Any, Any]):
    """Observation ``[steps in the episode, episode]``, reward ``step + 0.25``; remembers every call."""

    observation_space: gymnasium.spaces.Space[Any] = gymnasium.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space: gymnasium.spaces.Space[Any] = gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float32)

    def __init__(self, length: int = 1000, *, truncates: bool = False, info: Sequence[dict[str, Any]] = ()) -> None:
        self.length = length
        self.truncates = truncates
        self.calls: list[tuple[str, Any]] = []
        self.episode = -1
        self.t = 0
        self.info = list(info)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.calls.append(("reset", (seed, options)))
        self.episode += 1
        self.t = 0
        return self._observe(), {"reset_of": self.episode}

    def step(self, action: Value) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.calls.append(("step", action))
        self.t += 1
        end = self.t >= self.length
        info = self.info[(self.t - 1) % len(self.info)] if self.info else {}
        return self._observe(), self.t + 0.25, end and not self.truncates, end and self.truncates, info

    def _observe(self) -> Value:
        return np.array([self.t, self.episode], np.float32)

    @property
    def resets(self) -> int:
        return sum(kind == "reset" for kind, _ in self.calls)

    @property
    def actions(self) -> list[Any]:
        return [value for kind, value in self.calls if kind == "step"]


class Fleet:
    """A factory that keeps what it made; the i-th env gets the i-th set of arguments."""

    def __init__(self, *arguments: dict[str, Any]) -> None:
        self._arguments = list(arguments)
        self.envs: list[CountEnv] = []

    def __call__(self) -> CountEnv:
        at = len(self.envs)
        env = CountEnv(**(self._arguments[at] if at < len(self._arguments) else {}))
        self.envs.append(env)
        return env
