"""A whole env client on msgpack and websockets alone, as a model for authors in other languages.

    python examples/minimal_client.py --env probe --num-envs 3 --url ws://127.0.0.1:8000

It has four concerns, in this order: arrays as bytes, the environments, the messages, the connection. The guide is
docs/writing-a-client.md, the rules are in docs/protocol.md; numbers in brackets are its clauses.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
from typing import Any

import msgpack
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

# 1. Arrays as bytes [3] ----------------------------------------------------------------------------------------------

# What stands behind the byte order in a dtype, and struct's letter for it.
LETTERS = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip


def array(dtype: str, shape: list[int], values: list[Any]) -> dict[bytes, Any]:
    """Give the map in which an array travels: little-endian, last axis fastest."""
    data = struct.pack(f"<{len(values)}{LETTERS[dtype[1:]]}", *values)
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}


def no_text(n: int) -> dict[bytes, Any]:
    """Give n empty texts: one code point each, which is NUL [3.4]."""
    return {b"__ndarray__": True, b"data": bytes(4 * n), b"dtype": "<U1", b"shape": [n]}


def values_of(array: dict[bytes, Any]) -> tuple[list[int], list[Any]]:
    """Give shape and elements of a received array; the dtype is whatever the server sends, never assumed."""
    dtype = array[b"dtype"]
    if isinstance(dtype, bytes):
        dtype = dtype.decode()
    order = ">" if dtype[0] == ">" else "<"
    letter = LETTERS[dtype[1:]]
    shape: list[int] = array[b"shape"]
    count = len(array[b"data"]) // struct.calcsize(f"={letter}")
    return shape, list(struct.unpack(f"{order}{count}{letter}", array[b"data"]))


# 2. The environments -------------------------------------------------------------------------------------------------


class Probe:
    """The probe environment [8.1]: it repeats the action that it got, and its episodes have a known length."""

    def __init__(self, env: int, action_dim: int) -> None:
        self.length = 3 + 2 * (env % 3)
        self.action_dim = action_dim

    def reset(self) -> None:
        """Begin an episode."""
        self.t, self.action = 0, [0.0] * self.action_dim

    def step(self, action: list[float]) -> tuple[float, bool, bool]:
        """Give reward, terminated, truncated."""
        self.t += 1
        self.action = [float(value) for value in (action + self.action)[: self.action_dim]]  # always so wide
        return 1.0, self.t == self.length, False

    def states(self) -> dict[str, list[float]]:
        """Observe: steps taken in the episode, and the action of the last one."""
        return {"t": [float(self.t)], "a": self.action}


class Sensor:
    """A toy: a room with a heater and a thermometer. The nearer to 20 degrees, the better; 50 steps are an episode."""

    def __init__(self, env: int, action_dim: int) -> None:
        del action_dim  # it uses the first number of any action
        self.random = random.Random(env)

    def reset(self) -> None:
        """Begin an episode in a room of any temperature."""
        self.t, self.degrees = 0, self.random.uniform(5.0, 25.0)

    def step(self, action: list[float]) -> tuple[float, bool, bool]:
        """Heat for a while; give reward, terminated, truncated."""
        self.t += 1
        power = min(max(float(action[0]), 0.0), 1.0)
        self.degrees += 2.0 * power - 0.05 * (self.degrees - 5.0) + self.random.gauss(0.0, 0.1)
        return -abs(self.degrees - 20.0), False, self.t == 50

    def states(self) -> dict[str, list[float]]:
        """Observe: degrees Celsius."""
        return {"thermometer": [self.degrees]}


Env = Probe | Sensor


# 3. The messages [5] -------------------------------------------------------------------------------------------------


def observation(envs: list[Env]) -> dict[str, Any]:
    """Batch the observations: every array has one row per environment."""
    rows = [env.states() for env in envs]
    states = {
        name: array("<f8", [len(envs), len(first)], [value for row in rows for value in row[name]])
        for name, first in rows[0].items()
    }
    return {"images": {}, "states": states, "text": no_text(len(envs))}


def names(chunks: list[int]) -> dict[str, Any]:
    """Name all environments, with the number of chunks that each has completed in its episode."""
    n = len(chunks)
    return {"env_indices": array("<i8", [n], list(range(n))), "step_ids": array("<i8", [n], chunks)}


def infer(envs: list[Env], chunks: list[int]) -> bytes:
    return pack({"message_type": "infer", "data": observation(envs), **names(chunks)})


def run_chunks(envs: list[Env], chunks: list[int], ended: list[bool], message: dict[str, Any]) -> bytes:
    """Step every environment through its chunk, and give the feedback [5.4]."""
    (horizon, n, *_), flat = values_of(message["data"]["action"])
    width = len(flat) // (horizon * n)
    rewards, terminations, truncations = [0.0] * n, [False] * n, [False] * n
    for i, env in enumerate(envs):
        for k in range(horizon):
            start = (k * n + i) * width  # time-major: all environments of step k stand side by side [5.3]
            reward, terminations[i], truncations[i] = env.step(flat[start : start + width])
            rewards[i] += reward  # the sum over the chunk, not the last step's
            if terminations[i] or truncations[i]:
                break  # the episode's end is the chunk's end
        ended[i] = terminations[i] or truncations[i]
        chunks[i] += 1
    data = {
        "obs": observation(envs),  # of the last step: nobody is reset yet
        "rewards": array("<f4", [n], rewards),
        "terminated": array("|b1", [n], terminations),
        "truncated": array("|b1", [n], truncations),
        "info": {},
    }
    return pack({"message_type": "feedback", "data": data, **names(chunks)})


def pack(message: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


# 4. The connection [4], [7] ------------------------------------------------------------------------------------------


class Fatal(Exception):
    """There is no training server on the other side."""


def receive(socket: ClientConnection) -> dict[str, Any]:
    frame = socket.recv()
    if isinstance(frame, str):
        raise Fatal("a text frame came")  # [7.4]
    message: dict[str, Any] = msgpack.unpackb(frame)
    return message


def converse(socket: ClientConnection, client: argparse.Namespace) -> None:
    """Alternate infer, action and feedback until somebody closes; the environments outlive the connection."""
    metadata = receive(socket)["data"]  # the server speaks first; no key of it is required [4], [5.1]
    if not client.envs:
        kind = {"probe": Probe, "sensor": Sensor}[client.env]
        action_dim = metadata.get("action_dim") or client.action_dim
        client.envs = [kind(i, action_dim) for i in range(client.num_envs)]
        client.chunks, client.ended = [0] * client.num_envs, [True] * client.num_envs
    while True:
        for i, env in enumerate(client.envs):
            if client.ended[i]:
                env.reset()  # a new episode begins here, between the feedback and the infer
                client.chunks[i], client.ended[i] = 0, False
        socket.send(infer(client.envs, client.chunks))
        feedback = run_chunks(client.envs, client.chunks, client.ended, receive(socket))
        socket.send(feedback)  # if this fails, the feedback is gone, and that is as it should be [7.6]


def main() -> int:
    parser = argparse.ArgumentParser(description="A minimal env client.")
    parser.add_argument("--url", default="ws://127.0.0.1:8000")
    parser.add_argument("--env", choices=["probe", "sensor"], default="probe")
    parser.add_argument("--num-envs", type=int, default=1)
    parser.add_argument("--action-dim", type=int, default=7, help="of the probe, if the server does not tell")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without a server")
    client = parser.parse_args()
    client.envs = []
    wait, last_seen = 0.1, time.monotonic()
    while time.monotonic() - last_seen < client.patience:
        try:
            with connect(client.url, compression=None, max_size=None) as socket:  # [1]
                opened = time.monotonic()
                try:
                    converse(socket, client)
                except ConnectionClosed as closed:
                    if closed.rcvd is not None and closed.rcvd.reason == "plugrl-server-stop":
                        return 0  # the run is over: do not come back [7.1]
                    print(f"closed: {closed}", file=sys.stderr)
            last_seen = time.monotonic()
            if last_seen - opened > 5.0:  # it was a good connection: begin with short waits again
                wait = 0.1
        except Fatal as fatal:
            print(fatal, file=sys.stderr)
            return 1
        except (OSError, InvalidHandshake) as failed:
            print(f"no server: {failed}", file=sys.stderr)
        time.sleep(wait * random.uniform(0.5, 1.0))
        wait = min(2 * wait, 5.0)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
