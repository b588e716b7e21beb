"""One connection of the server checker: the websockets library's client, with every answer judged as it comes.

Bytes become messages by ``wire.messages``: what it refuses is a violation of the clause that it names. What cannot go
on ends by an exception after it was reported; ``server_checker`` catches them phase by phase.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from plugrl_bridges.conformance.client_server import GOING_AWAY, RESYNC, STOP
from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import decode, encode
from plugrl_bridges.wire.messages import PROTOCOL_VERSION, Action, Feedback, Infer, Metadata, Observation, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Value

__all__ = ["RESYNCED", "STOPPED", "CannotGoOn", "Line", "RunEnded", "ServerGone", "Wording"]

STOPPED = (GOING_AWAY, STOP)
RESYNCED = (GOING_AWAY, RESYNC)

_CLOSE_TIMEOUT_S = 2.0
_DIAL_AGAIN_S = 0.05
_LARGE_BYTES = 1_300_000  # beyond the usual bound on a frame, which is 1 MiB

_Due = TypeVar("_Due", Metadata, Action)


class CannotGoOn(Exception):
    """The end of a phase: what it needs did not come, which is in the report."""


class ServerGone(Exception):
    """The end of the check: nobody accepts connections, or nobody speaks on them."""


class RunEnded(Exception):
    """The server closed with ``plugrl-server-stop`` [7.1]."""


@dataclass(frozen=True)
class Wording:
    """The messages of a client; the observations are random numbers of one layout.

    Attributes:
        state_key: Name of the state that is sent.
        state_dim: Its width.
        image_key: Name of the image that is sent too, or None.
        image_size: Its height and width.
    """

    state_key: str
    state_dim: int
    image_key: str | None
    image_size: int
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0), init=False)

    def infer(self, envs: Sequence[int], *, reuse: Sequence[bool] | None = None) -> Infer:
        """Return an infer; rows marked ``reuse`` go without observation (feature ``reuse-feedback-obs``)."""
        return Infer(
            self._observation(len(envs) - sum(reuse or ())),
            np.array(envs, np.int64),
            np.zeros(len(envs), np.int64),
            reuse=None if reuse is None else np.array(reuse, np.bool_),
        )

    def feedback(
        self, envs: Sequence[int], *, terminated: Sequence[int] = (), info: dict[str, Value] | None = None
    ) -> Feedback:
        """Return a feedback for these envs, of which some have terminated."""
        m = len(envs)
        return Feedback(
            self._observation(m),
            np.array(envs, np.int64),
            np.ones(m, np.int64),
            rewards=np.ones(m, np.float32),
            terminated=np.isin(envs, terminated),
            truncated=np.zeros(m, np.bool_),
            info=info or {},
        )

    def large_info(self, m: int) -> dict[str, Value]:
        """Return an info that makes a frame larger than 1 MiB; it may be split per env."""
        return {"padding": np.zeros((m, _LARGE_BYTES // m), np.uint8)}

    def _observation(self, rows: int) -> Observation:
        images = {}
        if self.image_key is not None:
            shape = (rows, self.image_size, self.image_size, 3)
            images[self.image_key] = self.random.integers(0, 256, shape, np.uint8)
        return Observation(images, {self.state_key: self.random.standard_normal((rows, self.state_dim))})


class Line:
    """One connection with a server that sent its metadata; a context manager, which closes it.

    Args:
        report: Takes the findings.
        host: Of the server.
        port: Of the server.
        timeout_s: Seconds to wait for the port, and for each message.
        offer_compression: Whether to offer permessage-deflate, which a server must decline.

    Attributes:
        offer: What the metadata says.

    Raises:
        ServerGone: if the port is closed, or no metadata comes.
        RunEnded: if the server closes with stop at once.
    """

    def __init__(
        self, report: Report, host: str, port: int, timeout_s: float, *, offer_compression: bool = False
    ) -> None:
        self._report = report
        self._timeout_s = timeout_s
        self._frame: str | bytes | None = None
        self._stack = contextlib.ExitStack()
        address = f"[{host}]" if ":" in host else host
        try:
            self._websocket = self._stack.enter_context(
                connect(
                    f"ws://{address}:{port}",
                    sock=_dial(host, port, timeout_s),  # dialled here, so that no proxy of the environment is used
                    compression="deflate" if offer_compression else None,
                    max_size=None,
                    open_timeout=timeout_s,
                    close_timeout=_CLOSE_TIMEOUT_S,
                )
            )
        except (OSError, WebSocketException) as exc:
            report.violation("1", f"no WebSocket connection with {address}:{port}: {str(exc) or type(exc).__name__}")
            raise ServerGone from exc
        try:
            self.offer = self._metadata()
        except BaseException:
            self.close()
            raise
        if offer_compression:
            report.check(
                not self._websocket.protocol.extensions,
                "1",
                "compression is declined",
                "the server accepts permessage-deflate, which is never used",
            )

    def __enter__(self) -> Line:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close as a client that has finished [7.5]."""
        self._stack.close()

    def send(self, *messages: Infer | Feedback | dict[str, Value]) -> None:
        """Send messages, one frame each; if the connection ends, or the server does not read, waiting finds out."""
        watchdog = threading.Timer(self._timeout_s, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            for message in messages:
                self._websocket.send(b"".join(encode(message if isinstance(message, dict) else message.to_wire())))
        except ConnectionClosed:
            pass
        finally:
            watchdog.cancel()

    def has_frame(self) -> bool:
        """Wait for a frame, or the end, which the next `action` will find; return whether one of them came."""
        try:
            self._frame = self._websocket.recv(self._timeout_s)
        except TimeoutError:
            return False
        except ConnectionClosed:
            pass
        return True

    def action(self, envs: Sequence[int], *, clause: str, what: str, may_stop: bool = False) -> None:
        """Wait for the answer to an infer and judge it.

        Args:
            envs: Who asked, in the order of the infer.
            clause: What the server breaks if there is none.
            what: What was sent, for the report.
            may_stop: Whether the end of the run is waited for.

        Raises:
            CannotGoOn: if none came, or one that cannot be read.
            RunEnded: if the server says stop instead.
        """
        try:
            frame, self._frame = self._frame, None
            if frame is None:
                frame = self._websocket.recv(self._timeout_s)
        except TimeoutError:
            self._report.violation(clause, f"no action within {self._timeout_s:g} s after {what}")
            raise CannotGoOn from None
        except ConnectionClosed:
            if self.ending == STOPPED:
                raise RunEnded from None
            expected = f"{GOING_AWAY} {STOP!r} at the end of the run" if may_stop else "an action"
            self._report.violation(clause, f"closed with {self.ending_text} after {what}, expected {expected}")
            raise CannotGoOn from None
        message = self._read(frame, Action, "4.2")
        if message is None:
            raise CannotGoOn
        self._judge(message, envs)
        if not may_stop:
            self._report.passed(clause, f"an action comes after {what}")

    def answers_until_close(self, most: int) -> int | None:
        """Count the messages that come before the connection is closed; stop at ``most``; None: it stays silent."""
        count = 0
        try:
            while count < most:
                self._websocket.recv(self._timeout_s)
                count += 1
        except TimeoutError:
            return None
        except ConnectionClosed:
            pass
        return count

    @property
    def ending(self) -> tuple[int, str]:
        """Code and reason of the server's close frame; 1006 stands for none."""
        received = self._websocket.protocol.close_rcvd
        return (1006, "") if received is None else (received.code, received.reason)

    @property
    def ending_text(self) -> str:
        """The same, for people."""
        code, reason = self.ending
        return f"{code} {reason!r}" if reason else f"{code}"

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self._websocket.socket.shutdown(socket.SHUT_RDWR)

    def _read(self, frame: bytes | str, due: type[_Due], clause: str) -> _Due | None:
        """Return the message that is due, or None and a violation; another message breaks ``clause``."""
        if isinstance(frame, str):
            self._report.violation("1", "a text frame came; every message is one binary frame")
            return None
        try:
            value = decode(frame)
        except RemoteProtocolError as exc:
            self._report.broken(exc, before=f"a frame of {len(frame)} bytes is no message: ")
            return None
        kind = value.get("message_type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != due.message_type:
            self._report.violation(clause, f"a message {due.message_type!r} was due, got {kind[:40]!r}")
            return None
        try:
            if isinstance(value, dict) and due is Metadata and "data" not in value:
                raise RemoteProtocolError("metadata: the key 'data' is missing", clause="5.1")
            message = parse(value)
        except RemoteProtocolError as exc:
            self._report.broken(exc, after=_shape_of_action(value))
            return None
        return message if isinstance(message, due) else None

    def _metadata(self) -> Metadata:
        """Wait for the first message of the connection, and judge it [5.1]."""
        report = self._report
        try:
            frame = self._websocket.recv(self._timeout_s)
        except TimeoutError:
            report.violation("5.1", f"no metadata within {self._timeout_s:g} s; the server speaks first")
            raise ServerGone from None
        except ConnectionClosed:
            if self.ending == STOPPED:
                raise RunEnded from None
            report.violation("5.1", f"closed with {self.ending_text} before the metadata")
            raise ServerGone from None
        message = self._read(frame, Metadata, "5.1")
        if message is None:
            raise ServerGone
        faults = [
            f"{key} must be an int of 1 or more, got {value!r}"
            for key in ("protocol_version", "action_horizon", "action_dim")
            for value in [message.data.get(key)]
            if value is not None and (type(value) is not int or value < 1)
        ]
        features = message.data.get("features", [])
        if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
            faults.append(f"features must be a list of str, got a {type(features).__name__}")
        for fault in faults:
            report.violation("5.1", f"metadata: {fault}")
        if not faults:
            report.passed("5.1", "the server speaks first, with metadata")
        version = message.data.get("protocol_version")
        if version is None:
            report.note("5.1", "the metadata says no protocol_version")
        elif version != PROTOCOL_VERSION:
            report.note("5.1", f"the metadata says protocol_version {version}; this checker knows {PROTOCOL_VERSION}")
        return message

    def _judge(self, message: Action, envs: Sequence[int]) -> None:
        """Check the answer to an infer for these envs, in this order [5.3]."""
        report, action, n = self._report, message.action, len(envs)
        shape = list(action.shape)
        if message.env_ids is None:
            report.violation("5.3", "an action without env_ids: a client cannot tell whose it is")
        else:
            report.check(
                message.env_ids.tolist() == list(envs),
                "5.3",
                "env_ids are the infer's env_indices, in its order",
                f"an infer for envs {list(envs)} was answered for env_ids {message.env_ids.tolist()[:8]}",
            )
        if not report.check(
            shape[1] == n,
            "5.3",
            "an action is time-major, with one column per env",
            f"an action for {n} envs has the shape [H, {n}, *da], got {shape}",
        ):
            return
        width = shape[-1] if action.ndim > 2 else 1
        for key, is_, text in (
            ("action_horizon", shape[0], "an action has action_horizon steps"),
            ("action_dim", width, "an action is action_dim wide"),
        ):
            said = self.offer.data.get(key)
            if type(said) is int and said > 0:
                report.check(
                    is_ == said, "5.1", text, f"the metadata says {key} {said}, an action has the shape {shape}"
                )
        if action.ndim == 2:
            report.note("5.3", f"an action has the shape {shape}: clients read action[k][i][0], which is not there")
        if action.dtype.kind == "f" and not np.isfinite(action).all():
            report.note("5.3", "an action holds NaN or infinity")


def _shape_of_action(value: Value) -> str:
    """Return what tells of an action that cannot be read whether its axes are in another order."""
    data = value.get("data") if isinstance(value, dict) else None
    action = data.get("action") if isinstance(data, dict) else None
    return f"; [H, n, *da] is due, got {list(action.shape)}" if isinstance(action, np.ndarray) else ""


def _dial(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect; a port that is not there yet is tried again until the time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            dialled = socket.create_connection((host, port), timeout=timeout_s)
        except OSError:  # noqa: PERF203 - one try after another is the point
            if time.monotonic() + _DIAL_AGAIN_S > deadline:
                raise
            time.sleep(_DIAL_AGAIN_S)
        else:
            dialled.settimeout(None)
            return dialled
