"""Own what the server's checker sends, and what it says of what comes back. Pure: values in, findings in a `Report`.

Written against the protocol and not against this library: of ``wire`` it knows the codec, and neither messages nor
sessions. ``server_checker`` drives the network with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.errors import DecodeError
from plugrl_bridges.wire.codec import decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["REUSE", "Offer", "Wording", "judge_action", "judge_metadata", "packed", "unpacked"]

REUSE = "reuse-feedback-obs"
_LARGE_BYTES = 1_300_000  # beyond the usual bound on a frame, which is 1 MiB
_KNOWN_VERSION = 1


def packed(message: dict[str, Value]) -> bytes:
    """Give the payload of one binary frame."""
    return b"".join(encode(message))


def unpacked(report: Report, frame: bytes | str) -> dict[Any, Value] | None:
    """Decode one frame of the server; None, and a violation, if it is no message."""
    if isinstance(frame, str):
        report.violation("1", "a text frame came; every message is one binary frame")
        return None
    try:
        message = decode(frame)
    except DecodeError as exc:
        report.violation(exc.clause or "3", f"a frame of {len(frame)} bytes is no message: {exc}")
        return None
    if not isinstance(message, dict) or not isinstance(message.get("message_type"), str):
        report.violation("2", f"a message is a map with the str message_type, got {_described(message)}")
        return None
    return message


@dataclass(frozen=True)
class Offer:
    """Hold what a server's metadata says; None is "not known".

    Attributes:
        horizon: Steps of every action.
        action_dim: Width of one action.
        features: Optional features.
    """

    horizon: int | None = None
    action_dim: int | None = None
    features: frozenset[str] = frozenset()


def judge_metadata(report: Report, message: dict[Any, Value]) -> Offer | None:
    """Check the first message of a connection; None if it is no metadata at all [5.1]."""
    if message["message_type"] != "metadata":
        report.violation("5.1", f"the first message must be metadata, got {message['message_type'][:40]!r}")
        return None
    data = message.get("data")
    if not isinstance(data, dict):
        report.violation("5.1", f"metadata: data must be a map, got {_described(data)}")
        return None
    sound = True
    for key in ("protocol_version", "action_horizon", "action_dim"):
        value = data.get(key)
        if value is not None and (type(value) is not int or value < 1):
            report.violation("5.1", f"metadata: {key} must be an int of 1 or more, got {value!r}")
            sound = False
    features = data.get("features", [])
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        report.violation("5.1", f"metadata: features must be a list of str, got {_described(features)}")
        features, sound = [], False
    if sound:
        report.passed("5.1", "the server speaks first, with metadata")
    version = data.get("protocol_version")
    if version is None:
        report.note("5.1", "the metadata says no protocol_version")
    elif version != _KNOWN_VERSION:
        report.note("5.1", f"the metadata says protocol_version {version}; this checker knows {_KNOWN_VERSION}")
    return Offer(_positive(data.get("action_horizon")), _positive(data.get("action_dim")), frozenset(features))


def judge_action(report: Report, message: dict[Any, Value], envs: Sequence[int], offer: Offer) -> None:
    """Check the answer to an infer for these envs, in this order [5.3]."""
    if message["message_type"] != "action":
        report.violation("4.2", f"an action was due, got {message['message_type'][:40]!r}")
        return
    data = message.get("data")
    if not isinstance(data, dict):
        report.violation("5.3", f"action: data must be a map, got {_described(data)}")
        return
    _judge_env_ids(report, data.get("env_ids"), envs)
    action = data.get("action")
    if not isinstance(action, np.ndarray) or action.ndim < 2 or action.dtype.kind not in "biuf":
        report.violation("5.3", f"action: action must be a numeric array [H, n, *da], got {_described(action)}")
        return
    n, shape = len(envs), list(action.shape)
    if shape[1] != n or shape[0] < 1:
        hint = ": it is env-major" if shape[0] == n else ""
        report.violation("5.3", f"an action for {n} envs has the shape [H, {n}, *da], got {shape}{hint}")
        return
    report.passed("5.3", "an action is time-major, with one column per env")
    if offer.horizon is not None:
        if shape[0] != offer.horizon:
            report.violation("5.1", f"the metadata says action_horizon {offer.horizon}, an action has {shape[0]} steps")
        else:
            report.passed("5.1", "an action has action_horizon steps")
    if offer.action_dim is not None:
        width = shape[-1] if action.ndim > 2 else 1
        if width != offer.action_dim:
            report.violation("5.1", f"the metadata says action_dim {offer.action_dim}, an action has the shape {shape}")
        else:
            report.passed("5.1", "an action is action_dim wide")
    if action.ndim == 2:
        report.note("5.3", f"an action has the shape {shape}: clients read action[k][i][0], which is not there")
    if action.dtype.kind == "f" and not np.isfinite(action).all():
        report.note("5.3", "an action holds NaN or infinity")


def _judge_env_ids(report: Report, env_ids: Value, envs: Sequence[int]) -> None:
    if env_ids is None:
        report.violation("5.3", "an action without env_ids: a client cannot tell whose it is")
    elif not isinstance(env_ids, np.ndarray) or env_ids.ndim != 1 or env_ids.dtype.kind not in "iu":
        report.violation("5.3", f"action: env_ids must be a 1-d int array, got {_described(env_ids)}")
    elif env_ids.tolist() != list(envs):
        report.violation("5.3", f"an infer for envs {list(envs)} was answered for env_ids {env_ids.tolist()[:8]}")
    else:
        report.passed("5.3", "env_ids are the infer's env_indices, in its order")


class Wording:
    """Word the messages of a client; the observations are random numbers of one layout.

    Args:
        state_key: Name of the state that is sent.
        state_dim: Its width.
        image_key: Name of the image that is sent too, or None.
        image_size: Its height and width.
    """

    def __init__(self, *, state_key: str, state_dim: int, image_key: str | None, image_size: int) -> None:
        self._state_key, self._state_dim = state_key, state_dim
        self._image_key, self._image_size = image_key, image_size
        self._random = np.random.default_rng(0)

    def infer(self, envs: Sequence[int], *, reuse: Sequence[bool] | None = None) -> dict[str, Value]:
        """Word an infer.

        Args:
            envs: Who asks.
            reuse: Rows whose observation is left out (feature ``reuse-feedback-obs``).
        """
        message: dict[str, Value] = {
            "message_type": "infer",
            "data": self._observation(len(envs) - sum(reuse or ())),
            "env_indices": np.array(envs, np.int64),
            "step_ids": np.zeros(len(envs), np.int64),
        }
        if reuse is not None:
            message["reuse"] = np.array(reuse, np.bool_)
        return message

    def feedback(
        self, envs: Sequence[int], *, terminated: Sequence[int] = (), info: dict[str, Value] | None = None
    ) -> dict[str, Value]:
        """Word a feedback.

        Args:
            envs: Whose chunk ended.
            terminated: Whose episode did.
            info: The info map.
        """
        m = len(envs)
        return {
            "message_type": "feedback",
            "env_indices": np.array(envs, np.int64),
            "step_ids": np.ones(m, np.int64),
            "data": {
                "obs": self._observation(m),
                "rewards": np.ones(m, np.float32),
                "terminated": np.isin(envs, terminated),
                "truncated": np.zeros(m, np.bool_),
                "info": info or {},
            },
        }

    def large_info(self, m: int) -> dict[str, Value]:
        """Give an info that makes a frame larger than 1 MiB; it may be split per env."""
        return {"padding": np.zeros((m, _LARGE_BYTES // m), np.uint8)}

    def _observation(self, rows: int) -> dict[str, Value]:
        images: dict[str, Array] = {}
        if self._image_key is not None:
            shape = (rows, self._image_size, self._image_size, 3)
            images[self._image_key] = self._random.integers(0, 256, shape, np.uint8)
        states = {self._state_key: self._random.standard_normal((rows, self._state_dim))}
        return {"images": images, "states": states, "text": np.full(rows, "", "<U1")}


def _positive(value: Value) -> int | None:
    return value if type(value) is int and value > 0 else None


def _described(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype.str}{list(value.shape)}"
    if isinstance(value, dict):
        return f"a map with the keys {[str(key)[:40] for key in list(value)[:8]]}"
    return "nothing" if value is None else f"a {type(value).__name__}"
