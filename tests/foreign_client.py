"""Clients in the manner of third parties: the websockets library and msgpack alone, nothing of this library."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ForeignClient", "pack", "unpack"]


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    raise TypeError(f"cannot pack {type(value)}")


def _unpack_array(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
    return value


def pack(value: Any) -> bytes:
    """Encode as openpi's clients do."""
    packed: bytes = msgpack.packb(value, default=_pack_array)
    return packed


def unpack(data: str | bytes) -> Any:
    """Decode as openpi's clients do."""
    return msgpack.unpackb(data, object_hook=_unpack_array)


@dataclass
class ForeignClient:
    """Step Gymnasium envs over one connection, knowing protocol version 1 and no optional feature.

    Attributes:
        url: Where to connect to.
        envs: The envs of this connection.
        text: What stands in ``text``: a str, or a function of n.
        reward_dtype: Of the rewards.
        observe: Makes ``(images, states)`` of a list of observations.
        seeds: First reset's seeds.
        say_goodbye: Whether to send a close frame at the end.
        metadata: What the server said first.
        close: Code and reason of the server's close.
        actions: Every action array that came.
    """

    url: str
    envs: Sequence[gym.Env[Any, Any]]
    text: str | Callable[[int], Any] = ""
    reward_dtype: str = "<f4"
    observe: Callable[[list[Any]], tuple[dict[str, Any], dict[str, Any]]] | None = None
    seeds: Sequence[int] | None = None
    say_goodbye: bool = True
    max_steps: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    close: tuple[int | None, str] = (None, "")
    actions: list[Any] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    steps: int = 0
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def start(self) -> ForeignClient:
        """Run in a thread; ``join`` waits for the end."""
        self.thread = threading.Thread(target=self._run_kept, daemon=True)
        self.thread.start()
        return self

    def join(self, timeout: float = 20.0) -> None:
        """Wait for the thread; raise what it raised."""
        assert self.thread is not None
        self.thread.join(timeout)
        assert not self.thread.is_alive(), "the client did not end"
        if self.error is not None:
            raise self.error

    def _run_kept(self) -> None:
        try:
            self.run()
        except BaseException as exc:  # noqa: BLE001 - join() raises it
            self.error = exc

    def run(self) -> None:
        """Serve until the server closes."""
        with connect(self.url, compression=None, max_size=None) as websocket:
            self.metadata = unpack(websocket.recv())["data"]
            try:
                self._serve(websocket)
            except ConnectionClosed as closed:
                if closed.rcvd is not None:
                    self.close = (closed.rcvd.code, closed.rcvd.reason)
            if not self.say_goodbye:
                websocket.socket.close()

    def _observation(self, observations: list[Any]) -> dict[str, Any]:
        images: dict[str, Any] = {}
        states: dict[str, Any] = {"obs": np.asarray(observations, np.float32)}
        if self.observe is not None:
            images, states = self.observe(observations)
        text = self.text(len(observations)) if callable(self.text) else self.text
        return {"images": images, "states": states, "text": text}

    def _serve(self, websocket: Any) -> None:
        n = len(self.envs)
        indices = np.arange(n)
        seeds: Sequence[int | None] = self.seeds or [None] * n
        observations = [env.reset(seed=seed)[0] for env, seed in zip(self.envs, seeds, strict=True)]
        totals = np.zeros(n)
        while self.max_steps is None or self.steps < self.max_steps:
            ids = np.full(n, self.steps)
            websocket.send(
                pack(
                    {
                        "message_type": "infer",
                        "data": self._observation(observations),
                        "env_indices": indices,
                        "step_ids": ids,
                    }
                )
            )
            action = unpack(websocket.recv())["data"]["action"]
            self.actions.append(action)
            results = []
            for i, env in enumerate(self.envs):
                own = action[0, i]
                if isinstance(env.action_space, gym.spaces.Discrete):
                    own = round(float(own[0]))
                results.append(env.step(own))
            last = [result[0] for result in results]
            rewards = np.array([result[1] for result in results], self.reward_dtype)
            terminated = np.array([result[2] for result in results], bool)
            truncated = np.array([result[3] for result in results], bool)
            self.steps += 1
            websocket.send(
                pack(
                    {
                        "message_type": "feedback",
                        "env_indices": indices,
                        "step_ids": ids,
                        "data": {
                            "obs": self._observation(last),
                            "rewards": rewards,
                            "terminated": terminated,
                            "truncated": truncated,
                            "info": {},
                        },
                    }
                )
            )
            totals += rewards
            observations = list(last)
            for i in np.flatnonzero(terminated | truncated).tolist():
                self.returns.append(float(totals[i]))
                totals[i] = 0
                observations[i] = self.envs[i].reset()[0]
