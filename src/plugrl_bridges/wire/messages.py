"""The four messages of protocol version 1 [2], [5] as frozen dataclasses, and the one place that validates them.

`parse` turns decoded values into a message or raises; past it nothing is checked again. `to_wire` is its inverse.
Who may send what when is the concern of ``session``; what an observation means to an environment is that of
``plugrl_bridges.spaces``. Knows no sockets, slots or clocks.

Arrays of a parsed message are views of the message's bytes: copy what must outlive it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import decode, encode
from plugrl_bridges.wire.info import check_splittable
from plugrl_bridges.wire.observation import Observation, describe, keys_of, parse_observation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plugrl_bridges.wire.arrays import Array, Buffer, Value

__all__ = [
    "PROTOCOL_VERSION",
    "Action",
    "Feedback",
    "Infer",
    "Message",
    "Metadata",
    "Observation",
    "ResetRequest",
    "parse",
    "parse_bytes",
    "to_bytes",
]

PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class Metadata:
    """What the server says of itself, sent exactly once and first [5.1].

    Attributes:
        data: The known keys ``protocol_version``, ``server``, ``server_version``, ``algorithm``, ``policy``,
            ``action_horizon``, ``action_dim``, ``features``, and any other. An absent key means "not known".
    """

    message_type: ClassVar[str] = "metadata"
    data: Mapping[str, Value]

    @property
    def features(self) -> frozenset[str]:
        """Names of the optional features that the server implements [10]."""
        features = self.data.get("features")
        return (
            frozenset(name for name in features if isinstance(name, str)) if isinstance(features, list) else frozenset()
        )

    def to_wire(self) -> dict[str, Value]:
        """Return the map that travels."""
        return {"message_type": "metadata", "data": dict(self.data)}


@dataclass(frozen=True)
class Infer:
    """A request for one action chunk for each env named [5.2].

    Attributes:
        observation: Observations of the envs whose row is not marked ``reuse``, in order.
        env_indices: int64 ``[n]``, unique, at least one.
        step_ids: int64 ``[n]``, completed chunks in each env's episode; informative only.
        reuse: bool ``[n]`` of feature ``reuse-feedback-obs`` [10.1], or None.
        env_spec: The map of feature ``env-spec``, on a connection's first infer, or None.
        reset_info: The info maps of envs that were reset since the last infer (feature ``env-spec``), batched to n as
            ``info`` of a feedback is, or None.
        digest: uint64 ``[n]`` of feature ``step-digest``: the chain of each env as it stands, or None.
    """

    message_type: ClassVar[str] = "infer"
    observation: Observation
    env_indices: Array
    step_ids: Array
    reuse: Array | None = None
    env_spec: Mapping[str, Value] | None = None
    reset_info: Mapping[str, Value] | None = None
    digest: Array | None = None

    @property
    def rows_sent(self) -> int:
        """Number of envs whose observation travels."""
        return len(self.env_indices) - (0 if self.reuse is None else int(np.count_nonzero(self.reuse)))

    def to_wire(self) -> dict[str, Value]:
        """Return the map that travels."""
        wire: dict[str, Value] = {
            "message_type": "infer",
            "data": self.observation.to_wire(self.rows_sent),
            "env_indices": self.env_indices,
            "step_ids": self.step_ids,
        }
        if self.reuse is not None:
            wire["reuse"] = self.reuse
        if self.digest is not None:
            wire["digest"] = self.digest
        if self.env_spec is not None:
            wire["env_spec"] = self.env_spec
        if self.reset_info:
            wire["reset_info"] = self.reset_info
        return wire


@dataclass(frozen=True)
class ResetRequest:
    """A request to reset envs in place of stepping them (feature ``seeded-reset``).

    Attributes:
        env_ids: int64 ``[k]``, a subset of the action's ``env_ids``.
        seeds: One int or None per env; None leaves the env's own random stream running.
        options: One map or None per env, handed to ``env.reset(options=)``.
    """

    env_ids: Array
    seeds: tuple[int | None, ...]
    options: tuple[Mapping[str, Value] | None, ...]

    def to_wire(self) -> dict[str, Value]:
        """Return the map that travels."""
        return {"env_ids": self.env_ids, "seed": list(self.seeds), "options": list(self.options)}


@dataclass(frozen=True)
class Action:
    """The answer to an infer: one chunk for exactly its envs, in its order [5.3].

    Attributes:
        env_ids: int64 ``[n]``; None if a (foreign) server left it out: the order is then the infer's.
        action: ``[H, n, *da]``, time-major.
        reset: Envs to reset instead of stepping (feature ``seeded-reset``), or None.
    """

    message_type: ClassVar[str] = "action"
    env_ids: Array | None
    action: Array
    reset: ResetRequest | None = None

    def to_wire(self) -> dict[str, Value]:
        """Return the map that travels."""
        data: dict[str, Value] = (
            {"action": self.action}
            if self.env_ids is None
            else {
                "env_ids": self.env_ids,
                "action": self.action,
            }
        )
        wire: dict[str, Value] = {"message_type": "action", "data": data}
        if self.reset is not None:
            wire["reset"] = self.reset.to_wire()
        return wire


@dataclass(frozen=True)
class Feedback:
    """The report of the envs whose chunk ended on this env step [5.4].

    Attributes:
        observation: What each env's last step returned; on an episode's end the terminal observation.
        env_indices: int64 ``[m]``, unique; may be empty only if every env of the action was reset instead.
        step_ids: int64 ``[m]``.
        rewards: float ``[m]``, summed over the chunk.
        terminated: bool ``[m]``.
        truncated: bool ``[m]``.
        info: The map of [5.4]; ``wire.info.split_info`` makes one dict per env of it.
        digest: uint64 ``[m]`` of feature ``step-digest``: the chain of each env after its step, or None.
    """

    message_type: ClassVar[str] = "feedback"
    observation: Observation
    env_indices: Array
    step_ids: Array
    rewards: Array
    terminated: Array
    truncated: Array
    info: Mapping[str, Value] = field(default_factory=dict)
    digest: Array | None = None

    def to_wire(self) -> dict[str, Value]:
        """Return the map that travels; ``data`` has exactly the five keys of [5.4]."""
        wire: dict[str, Value] = {
            "message_type": "feedback",
            "env_indices": self.env_indices,
            "step_ids": self.step_ids,
            "data": {
                "obs": self.observation.to_wire(len(self.env_indices)),
                "rewards": self.rewards,
                "terminated": self.terminated,
                "truncated": self.truncated,
                "info": dict(self.info),
            },
        }
        if self.digest is not None:
            wire["digest"] = self.digest
        return wire


Message: TypeAlias = "Metadata | Infer | Action | Feedback"


def to_bytes(message: Message) -> list[Buffer]:
    """Encode a message; hand the buffers to the transport's ``send`` as one message."""
    return encode(message.to_wire())


def parse_bytes(message: Buffer | str) -> Message:
    """Decode and parse one received message.

    Args:
        message: The payload of one binary frame; a str is that of a text frame, which is refused [1].

    Raises:
        RemoteProtocolError: naming the clause that was broken (`DecodeError` if the bytes are no message at all).
    """
    if isinstance(message, str):
        raise RemoteProtocolError("a text frame where a binary one was due", clause="1")
    return parse(decode(message))


def parse(value: Value) -> Message:
    """Return the message of decoded values, checking everything that one message alone can show.

    Raises:
        RemoteProtocolError: naming the clause, what was expected and what came.
    """
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"a message is a map, got {describe(value)}", clause="2")
    kind = value.get("message_type")
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        hint = " (as bin, expected str)" if b"message_type" in value else ""
        raise RemoteProtocolError(
            f"message_type must be one of {', '.join(_PARSERS)}, got {str(kind)[:40]!r}{hint}", clause="2"
        )
    return parser(value)


def _parse_metadata(value: dict[Any, Value]) -> Metadata:
    data = value.get("data", {})
    if not isinstance(data, dict):
        raise RemoteProtocolError(f"metadata: data must be a map, got {describe(data)}", clause="5.1")
    return Metadata(data)


def _parse_infer(value: dict[Any, Value]) -> Infer:
    indices = _indices(value, "env_indices", "infer", "5.2")
    n = len(indices)
    if n == 0:
        raise RemoteProtocolError("infer: env_indices names no env", clause="4.4")
    reuse = value.get("reuse")
    sent = n
    if reuse is not None:
        if not isinstance(reuse, np.ndarray) or reuse.dtype != np.bool_ or reuse.shape != (n,):
            raise RemoteProtocolError(
                f"infer: reuse must be a bool array of length {n}, got {describe(reuse)}", clause="10.1"
            )
        sent = n - int(np.count_nonzero(reuse))
    reset_info = _optional_map(value, "reset_info", "infer", "env-spec")
    if reset_info:
        check_splittable(reset_info, n, what="infer: reset_info", clause="env-spec")
    return Infer(
        observation=parse_observation(
            _need(value, "data", "infer", "5.2"), sent, "infer", "5.2" if reuse is None else "10.1"
        ),
        env_indices=indices,
        step_ids=_step_ids(value, n, "infer", "5.2"),
        reuse=reuse,
        env_spec=_optional_map(value, "env_spec", "infer", "env-spec"),
        reset_info=reset_info,
        digest=_digest(value, n, "infer"),
    )


def _parse_action(value: dict[Any, Value]) -> Action:
    data = _need_map(value, "data", "action", "5.3")
    action = _need(data, "action", "action", "5.3")
    if not isinstance(action, np.ndarray) or action.ndim < 2 or action.dtype.kind not in "biuf" or action.shape[0] < 1:
        raise RemoteProtocolError(
            f"action: action must be a numeric array [H, n, *da] with H of at least 1, got {describe(action)}",
            clause="5.3",
        )
    env_ids = _indices(data, "env_ids", "action", "5.3") if "env_ids" in data else None
    if env_ids is not None and len(env_ids) != action.shape[1]:
        raise RemoteProtocolError(f"action: {len(env_ids)} env_ids for {action.shape[1]} envs", clause="5.3")
    reset = value.get("reset")
    return Action(env_ids, action, None if reset is None else _parse_reset(reset, env_ids))


def _parse_reset(value: Value, env_ids: Array | None) -> ResetRequest:
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"action: reset must be a map, got {describe(value)}", clause="seeded-reset")
    targets = _indices(value, "env_ids", "action: reset", "seeded-reset")
    k = len(targets)
    if env_ids is not None and not set(targets.tolist()) <= set(env_ids.tolist()):
        raise RemoteProtocolError("action: reset names an env that the action does not", clause="seeded-reset")
    seeds = value.get("seed", [None] * k)
    options = value.get("options", [None] * k)
    if isinstance(seeds, np.ndarray):
        seeds = seeds.tolist()
    if (
        not isinstance(seeds, list)
        or len(seeds) != k
        or not all(seed is None or (type(seed) is int and seed >= 0) for seed in seeds)
    ):
        raise RemoteProtocolError(
            f"action: reset.seed must be a list of {k} non-negative ints or nils", clause="seeded-reset"
        )
    if not isinstance(options, list) or len(options) != k or any(not isinstance(o, dict | None) for o in options):
        raise RemoteProtocolError(f"action: reset.options must be a list of {k} maps or nils", clause="seeded-reset")
    return ResetRequest(targets, tuple(seeds), tuple(options))


_MANY = 64  # as many envs are worth a look by array operations
_FEEDBACK_KEYS = {"obs", "rewards", "terminated", "truncated", "info"}


def _parse_feedback(value: dict[Any, Value]) -> Feedback:
    indices = _indices(value, "env_indices", "feedback", "5.4")
    m = len(indices)
    data = _need_map(value, "data", "feedback", "5.4")
    if data.keys() != _FEEDBACK_KEYS:
        raise RemoteProtocolError(
            f"feedback: data must have exactly the keys {sorted(_FEEDBACK_KEYS)}, got {keys_of(data)}", clause="5.4"
        )
    rewards = data["rewards"]
    if not isinstance(rewards, np.ndarray) or rewards.dtype.kind != "f" or rewards.shape != (m,):
        raise RemoteProtocolError(
            f"feedback: rewards must be a float array of length {m}, got {describe(rewards)}", clause="5.4"
        )
    info = data["info"]
    if not isinstance(info, dict):
        raise RemoteProtocolError(f"feedback: info must be a map, got {describe(info)}", clause="5.4")
    if info:
        check_splittable(info, m)
    return Feedback(
        observation=parse_observation(data["obs"], m, "feedback", "5.4"),
        env_indices=indices,
        step_ids=_step_ids(value, m, "feedback", "5.4"),
        rewards=rewards,
        terminated=_flags(data, "terminated", m),
        truncated=_flags(data, "truncated", m),
        info=info,
        digest=_digest(value, m, "feedback"),
    )


_PARSERS: dict[str, Callable[[dict[Any, Value]], Message]] = {
    "metadata": _parse_metadata,
    "infer": _parse_infer,
    "action": _parse_action,
    "feedback": _parse_feedback,
}


def _need(value: dict[Any, Value], key: str, message: str, clause: str) -> Value:
    try:
        return value[key]
    except KeyError:
        raise RemoteProtocolError(f"{message}: the key {key!r} is missing", clause=clause) from None


def _need_map(value: dict[Any, Value], key: str, message: str, clause: str) -> dict[Any, Value]:
    found = _need(value, key, message, clause)
    if not isinstance(found, dict):
        raise RemoteProtocolError(f"{message}: {key} must be a map, got {describe(found)}", clause=clause)
    return found


def _optional_map(value: dict[Any, Value], key: str, message: str, clause: str) -> dict[Any, Value] | None:
    found = value.get(key)
    if found is not None and not isinstance(found, dict):
        raise RemoteProtocolError(f"{message}: {key} must be a map, got {describe(found)}", clause=clause)
    return found


def _indices(value: dict[Any, Value], key: str, message: str, clause: str) -> Array:
    found = _need(value, key, message, clause)
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iu":
        raise RemoteProtocolError(f"{message}: {key} must be a 1-d int array, got {describe(found)}", clause=clause)
    if len(found) > _MANY and found[0] >= 0 and found[-1] <= np.iinfo(np.int32).max and (found[1:] > found[:-1]).all():
        return found.astype(np.int64)  # in rising order: no two are the same
    names = found.tolist()
    if names and (min(names) < 0 or max(names) > np.iinfo(np.int32).max):
        raise RemoteProtocolError(f"{message}: {key} must be small non-negative ints, got {names[:8]}", clause="4.4")
    if len(set(names)) != len(names):
        raise RemoteProtocolError(f"{message}: {key} names an env twice: {names[:8]}", clause="4.4")
    return np.array(names, np.int64)  # a copy: sessions keep it for longer than the message lives


def _step_ids(value: dict[Any, Value], n: int, message: str, clause: str) -> Array:
    found = _need(value, "step_ids", message, clause)
    if not isinstance(found, np.ndarray) or found.shape != (n,) or found.dtype.kind not in "iu":
        raise RemoteProtocolError(
            f"{message}: step_ids must be an int array of length {n}, got {describe(found)}", clause=clause
        )
    return found


def _digest(value: dict[Any, Value], n: int, message: str) -> Array | None:
    found = value.get("digest")
    if found is not None and (
        not isinstance(found, np.ndarray) or found.dtype != np.dtype("<u8") or found.shape != (n,)
    ):
        raise RemoteProtocolError(
            f"{message}: digest must be a <u8 array of length {n}, got {describe(found)}", clause="step-digest"
        )
    return found


def _flags(data: dict[Any, Value], key: str, m: int) -> Array:
    found = data[key]
    if not isinstance(found, np.ndarray) or found.dtype != np.bool_ or found.shape != (m,):
        raise RemoteProtocolError(
            f"feedback: {key} must be a bool array of length {m}, got {describe(found)}", clause="5.4"
        )
    return found
