"""Own the baseline arm: the known design that the bridge is measured against.

A WebSocket server of the websockets library on an asyncio loop in a second thread of the trainer's process; plain
msgpack with array hooks on both sides; the client is the library's blocking one and sends every observation twice, in
the feedback and in the next infer, as protocol version 1 has it without optional features. Nothing in here is slowed
down on purpose: compression is off, there is no size cap, and TCP_NODELAY is what asyncio and the library set.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import msgpack
import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["BaselineVecEnv", "run_client"]

Message = dict[str, Any]


def _pack_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(type(value).__name__)


def _unpack_hook(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
    return value


def _pack(value: Message) -> bytes:
    packed: bytes = msgpack.packb(value, default=_pack_hook)
    return packed


def _unpack(data: bytes) -> Message:
    unpacked: Message = msgpack.unpackb(data, object_hook=_unpack_hook)
    return unpacked


class BaselineVecEnv:
    """Step one remote client in lockstep through an event loop in another thread."""

    def __init__(self) -> None:
        self._received: queue.Queue[Message] = queue.Queue()
        self._connection: Future[ServerConnection] = Future()
        self._port: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        self.port = self._port.result(30)

    async def _serve(self) -> None:
        async with serve(self._handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
            self._port.set_result(next(iter(server.sockets)).getsockname()[1])
            await self._over.wait()

    async def _handle(self, connection: ServerConnection) -> None:
        await connection.send(_pack({"message_type": "metadata", "data": {}}))
        self._connection.set_result(connection)
        async for data in connection:
            assert isinstance(data, bytes)
            self._received.put(_unpack(data))

    def reset(self) -> NDArray[Any]:
        """Wait for the client's first observations."""
        self._connection.result(60)
        self._infer = self._received.get(timeout=60)
        return self._observations()

    def _observations(self) -> NDArray[Any]:
        data = self._infer["data"]
        entries = data["images"] or data["states"]
        return np.array(entries["obs"])

    def step(self, actions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Send the actions, wait for the feedback and the next infer."""
        wire = actions[None] if actions.ndim > 1 else actions[None, :, None]
        message = _pack(
            {"message_type": "action", "data": {"env_ids": self._infer["env_indices"], "action": wire}},
        )
        asyncio.run_coroutine_threadsafe(self._connection.result().send(message), self._loop)
        feedback = self._received.get(timeout=60)["data"]
        self._infer = self._received.get(timeout=60)
        return self._observations(), feedback["rewards"], feedback["terminated"] | feedback["truncated"]

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)


def run_client(port: int, make_env: Callable[[], gym.Env[Any, Any]], num_envs: int) -> None:
    """Step ``num_envs`` envs for the server at ``port`` until it goes away."""
    envs = [make_env() for _ in range(num_envs)]
    discrete = isinstance(envs[0].action_space, gym.spaces.Discrete)
    image = envs[0].observation_space.dtype == np.uint8
    indices = np.arange(num_envs)

    def batch(observations: list[Any]) -> Message:
        array = np.stack(observations)
        images, states = ({"obs": array}, {}) if image else ({}, {"obs": array})
        return {"images": images, "states": states, "text": ""}

    with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as websocket:
        websocket.recv()
        observations = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
        try:
            while True:
                ids = {"env_indices": indices, "step_ids": indices}
                websocket.send(_pack({"message_type": "infer", "data": batch(observations), **ids}))
                data = websocket.recv()
                assert isinstance(data, bytes)
                action = _unpack(data)["data"]["action"][0]
                results = [env.step(int(a[0]) if discrete else a) for env, a in zip(envs, action, strict=True)]
                observations = [result[0] for result in results]
                feedback = {
                    "obs": batch(observations),
                    "rewards": np.array([result[1] for result in results], np.float32),
                    "terminated": np.array([result[2] for result in results], bool),
                    "truncated": np.array([result[3] for result in results], bool),
                    "info": {},
                }
                websocket.send(_pack({"message_type": "feedback", "data": feedback, **ids}))
                for i, result in enumerate(results):
                    if result[2] or result[3]:
                        observations[i] = envs[i].reset()[0]
        except ConnectionClosed:
            return
