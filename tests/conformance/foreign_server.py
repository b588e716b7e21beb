"""A training server in the manner of third parties (nothing of this library), which can be wrong in one way."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from tests.foreign_client import pack, unpack
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

HORIZON = 2
WIDTH = 2


class Resync(Exception):
    """End a connection whose client broke the protocol."""


class ForeignServer:
    """Answer everybody with zeros, and end the run after so many exchanges.

    Args:
        fault: What is wrong with it; "" is nothing.
        stop_after: Exchanges after which the run is over; None is never.
    """

    def __init__(self, fault: str = "", *, stop_after: int | None = 60) -> None:
        self.fault = fault
        self.stop_after = stop_after
        self.exchanges = 0
        self.holding: set[int] = set()
        self.lock = threading.Lock()
        self.server: Server
        self.port = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[ForeignServer]:
        """Serve in a thread."""
        compression = "deflate" if self.fault == "compresses" else None
        max_size = 1 << 20 if self.fault == "keeps the 1 MiB cap" else None
        with serve(self.handle, "127.0.0.1", 0, compression=compression, max_size=max_size) as self.server:
            self.port = self.server.socket.getsockname()[1]
            thread = threading.Thread(target=self.server.serve_forever, daemon=True)
            thread.start()
            yield self
            self.server.shutdown()
            thread.join(10)

    def handle(self, connection: ServerConnection) -> None:
        own: set[int] = set()  # envs that hold an action here
        try:
            if self.fault != "no metadata":
                connection.send(self.metadata())
            self.serve(connection, own)
        except Resync:
            reason = "oops" if self.fault == "plain close instead of resync" else "plugrl-server-resync"
            connection.close(1001, reason)
        except ConnectionClosed:
            pass
        finally:
            with self.lock:
                self.holding -= own

    def metadata(self) -> bytes:
        data: dict[str, Any] = {
            "protocol_version": 1,
            "action_horizon": HORIZON,
            "action_dim": WIDTH,
            "features": ["reuse-feedback-obs"],
        }
        if self.fault == "wrong action_dim":
            data["action_dim"] = WIDTH + 1
        return pack({"message_type": "metadata", "data": data})

    def serve(self, connection: ServerConnection, own: set[int]) -> None:
        reusable: set[int] = set()
        feedback_of: tuple[int, ...] = ()
        while True:
            envs = self.infer(unpack(connection.recv()), reusable, own)
            if self.stop_after is not None and self.exchanges >= self.stop_after:
                stop = (1000, "") if self.fault == "plain close instead of stop" else (1001, "plugrl-server-stop")
                connection.close(*stop)
                return
            answer = self.action(envs)
            if self.fault == "answers in text":
                connection.send(repr(answer))
            else:
                connection.send(pack(answer))
            message = unpack(connection.recv())
            if message["message_type"] == "infer" and self.fault == "lenient on two infers":
                connection.send(pack(answer))
                message = unpack(connection.recv())
            feedback_of = self.feedback(message, reusable, own)
            if self.fault == "routes by the last infer" and set(feedback_of) != set(envs):
                raise Resync
            self.exchanges += 1

    def infer(self, message: Any, reusable: set[int], own: set[int]) -> list[int]:
        if message["message_type"] != "infer":
            raise Resync
        if "env_indices" not in message:
            if self.fault == "lenient on a malformed infer":
                return [0]
            raise Resync
        envs: list[int] = message["env_indices"].tolist()
        marked = {env for env, mark in zip(envs, message.get("reuse", [False] * len(envs)), strict=True) if mark}
        if marked - reusable and self.fault != "honours an illegal reuse":
            raise Resync
        if marked and self.fault == "offers a reuse that it does not have":
            raise Resync
        with self.lock:
            if self.fault == "leaks env 0 between connections" and 0 in envs and 0 in self.holding:
                raise Resync
            own.update(envs)
            self.holding.update(envs)
        return envs

    def feedback(self, message: Any, reusable: set[int], own: set[int]) -> tuple[int, ...]:
        if message["message_type"] != "feedback":
            raise Resync
        envs, data = message["env_indices"], message["data"]
        if len(envs) > 1 and "task" in data["info"]:
            if self.fault == "dies on an unsplittable info":
                threading.Thread(target=self.server.shutdown, daemon=True).start()  # it waits for this very thread
                wait_until(lambda: self.server.socket.fileno() < 0)
                raise ConnectionClosed(None, None)
            if self.fault != "ignores an unsplittable info":
                raise Resync
        reusable.update(envs.tolist())
        reusable.difference_update(envs[data["terminated"] | data["truncated"]].tolist())
        with self.lock:
            own.difference_update(envs.tolist())
            self.holding.difference_update(envs.tolist())
        return tuple(envs.tolist())

    def action(self, envs: list[int]) -> dict[str, Any]:
        n = len(envs)
        horizon = HORIZON + 1 if self.fault == "wrong horizon" else HORIZON
        action = np.zeros((n, horizon, WIDTH) if self.fault == "env-major" else (horizon, n, WIDTH), np.float32)
        data: dict[str, Any] = {"env_ids": np.array(envs), "action": action}
        if self.fault == "no env_ids":
            del data["env_ids"]
        elif self.fault == "env_ids in another order":
            data["env_ids"] = np.sort(envs)
        message_type = "actions" if self.fault == "wrong message_type" else "action"
        return {"message_type": message_type, "data": data}
