"""Own what the messages of an env client alone show [1] to [5]: their form, their order, and who may be named in them.

One `MessageChecks` stands for one connection and is given every message in turn. What the client did with its actions
is the concern of ``probe_checks``, what its digests are of that of ``digest_checks``; ``client_talk`` is the caller of
all three. Written without ``wire.messages`` and ``wire.session``: those are judged as anybody's code is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.conformance.observation_checks import check_observation, describe, is_int_array
from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import decode
from plugrl_bridges.wire.info import check_splittable, episode_records

if TYPE_CHECKING:
    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["ENV_SPEC", "REUSE", "STEP_DIGEST", "Broken", "FeedbackView", "InferView", "MessageChecks"]

REUSE = "reuse-feedback-obs"
ENV_SPEC = "env-spec"
STEP_DIGEST = "step-digest"
_FEEDBACK_KEYS = {"obs", "rewards", "terminated", "truncated", "info"}


class Broken(Exception):
    """Say that the conversation cannot go on; why is in the report already."""


@dataclass(frozen=True)
class InferView:
    """Hold what an infer says, as far as it can be used.

    Attributes:
        envs: Who asks, in order.
        rows: Env to its row in ``states``; without those that the server is to remember [10.1].
        states: Name to array; None if the observation is unusable.
        reused: Envs whose observation is that of their last feedback.
        digest: uint64 ``[n]``; None if there is none that can be used.
    """

    envs: list[int]
    rows: dict[int, int]
    states: dict[str, Array] | None
    reused: frozenset[int]
    digest: Array | None = None


@dataclass(frozen=True)
class FeedbackView:
    """Hold what a feedback says, as far as it can be used; None stands for what cannot.

    Attributes:
        envs: Whose chunk ended, in order, without those that held no action.
        rows: Env to its row in the arrays.
        states: Name to array.
        rewards: float ``[m]``.
        terminated: bool ``[m]``.
        truncated: bool ``[m]``.
        digest: uint64 ``[m]``.
    """

    envs: list[int]
    rows: dict[int, int]
    states: dict[str, Array] | None
    rewards: Array | None
    terminated: Array | None
    truncated: Array | None
    digest: Array | None = None


class MessageChecks:
    """Check the messages of one connection.

    Args:
        report: Where to write what is found.
        features: What the metadata offers.
        fresh: Whether this is the first connection of a client that has just started, whose episodes therefore begin
            with it.
    """

    def __init__(self, report: Report, features: frozenset[str], *, fresh: bool = True) -> None:
        self._report = report
        self._features = features
        self._fresh = fresh
        self.holding: set[int] = set()
        """Envs that hold an action."""
        self.chances = 0
        """How many observations need not have been sent."""
        self.marks = 0
        """How many were not sent."""
        self.announced = False
        """Whether an env_spec came."""
        self._infers = 0
        self._reusable: set[int] = set()
        self._ended: set[int] = set()
        self._returns: dict[int, float] = {}

    def kind_of(self, data: str | bytes) -> tuple[str, dict[Any, Value]]:
        """Decode a message and give its type, ``"infer"`` or ``"feedback"``.

        Raises:
            Broken: if it is none.
        """
        if not self.check(isinstance(data, bytes), "1", "messages are binary frames", f"a text frame: {data[:60]!r}"):
            raise Broken
        try:
            value = decode(data if isinstance(data, bytes) else b"")
        except RemoteProtocolError as exc:
            self._report.violation(exc.clause or "3", _without_clause(exc))
            raise Broken from exc
        self._report.passed("3", "messages are one msgpack value, with arrays in the form of openpi")
        kind = value.get("message_type") if isinstance(value, dict) else None
        if not self.check(
            isinstance(value, dict) and kind in {"infer", "feedback"},
            "2",
            "messages are maps with a message_type",
            f"expected a map whose message_type is infer or feedback, got {describe(value)}"
            + (f" with message_type {kind!r:.60}" if isinstance(value, dict) else ""),
        ):
            raise Broken
        return str(kind), value if isinstance(value, dict) else {}

    def infer(self, message: dict[Any, Value]) -> InferView:
        """Check an infer [5.2].

        Raises:
            Broken: if it does not say who asks.
        """
        envs = self._envs(message, "infer", "5.2")
        n = len(envs)
        if not self.check(n > 0, "4.4", "an infer names one env at least", "infer: env_indices names no env"):
            raise Broken
        stubborn = sorted(self.holding.intersection(envs))
        self.check(
            not stubborn,
            "4.3",
            "an infer names only envs whose chunk has ended",
            f"infer: env {stubborn[:4]} asks for a chunk, but has fed nothing back for the one it holds",
        )
        self._step_ids(message, n, "infer", "5.2")
        reused = self._marks(message, envs)
        self._features_of_infer(message, n)
        digest = self._digest(message, n, "infer")
        sent = [env for env in envs if env not in reused]
        clause = "10.1" if reused else "5.2"
        states = check_observation(self._report, message.get("data"), len(sent), "infer: data", clause)
        for env in envs:
            if env in self._ended or (self._fresh and env not in self._returns):
                self._returns[env] = 0.0
        self._ended.difference_update(envs)
        self._infers += 1
        return InferView(envs, {env: at for at, env in enumerate(sent)}, states, reused, digest)

    def feedback(self, message: dict[Any, Value]) -> FeedbackView:
        """Check a feedback [5.4].

        Raises:
            Broken: if it does not say of whom it is.
        """
        envs = self._envs(message, "feedback", "5.4")
        m = len(envs)
        self.check(m > 0, "5.4", "a feedback names one env at least", "feedback: env_indices names no env")
        strangers = [env for env in envs if env not in self.holding]
        self.check(
            not strangers,
            "4.3",
            "a feedback names only envs that hold an action",
            f"feedback: env {strangers[:4]} holds no action; those that do are {sorted(self.holding)[:8]}",
        )
        self._step_ids(message, m, "feedback", "5.4")
        digest = self._digest(message, m, "feedback")
        own = [env for env in envs if env in self.holding]
        self.holding.difference_update(own)
        rows = {env: at for at, env in enumerate(envs)}
        data = message.get("data")
        if not isinstance(data, dict):
            self._report.violation("5.4", f"feedback: data must be a map, got {describe(data)}")
            data = {}
        else:
            self.check(
                data.keys() == _FEEDBACK_KEYS,
                "5.4",
                "the data of a feedback has exactly its five keys",
                f"feedback: data must have exactly the keys {sorted(_FEEDBACK_KEYS)}, got {_keys(data)}",
            )
        states = check_observation(self._report, data["obs"], m, "feedback: obs", "5.4") if "obs" in data else None
        view = FeedbackView(
            own, rows, states, self._rewards(data, m), self._flags(data, "terminated", m),
            self._flags(data, "truncated", m), digest,
        )  # fmt: skip
        self._info(data, m, view)
        self._keep_books(view)
        return view

    def check(self, ok: bool, clause: str, text: str, detail: str) -> bool:
        """Count a check that was passed, or add the violation; give ``ok``."""
        if ok:
            self._report.passed(clause, text)
        else:
            self._report.violation(clause, detail)
        return ok

    def _envs(self, message: dict[Any, Value], kind: str, clause: str) -> list[int]:
        value = message.get("env_indices")
        if not is_int_array(value):
            self._report.violation(clause, f"{kind}: env_indices must be a 1-d int array, got {describe(value)}")
            raise Broken
        self._report.passed(clause, f"the env_indices of {_a(kind)} are a 1-d int array")
        envs: list[int] = value.tolist()
        if not self.check(
            len(set(envs)) == len(envs) and all(0 <= env < 2**31 for env in envs),
            "4.4",
            "env_indices are unique, non-negative and below 2^31",
            f"{kind}: env_indices must be unique and from 0 to 2^31 - 1, got {envs[:8]}",
        ):
            raise Broken
        return envs

    def _step_ids(self, message: dict[Any, Value], n: int, kind: str, clause: str) -> None:
        value = message.get("step_ids")
        self.check(
            is_int_array(value) and len(value) == n,
            clause,
            f"the step_ids of {_a(kind)} are an int array, one per env",
            f"{kind}: step_ids must be an int array of length {n}, got {describe(value)}",
        )

    def _marks(self, message: dict[Any, Value], envs: list[int]) -> frozenset[int]:
        """Give the envs whose observation is not sent [10.1]."""
        if REUSE in self._features:
            self.chances += len(self._reusable.intersection(envs))
        marks = message.get("reuse")
        if marks is None:
            return frozenset()
        if REUSE not in self._features:
            self._report.violation("10.1", f"infer: reuse, but the metadata does not list {REUSE}")
            raise Broken
        if not isinstance(marks, np.ndarray) or marks.dtype != np.bool_ or marks.shape != (len(envs),):
            self._report.violation(
                "10.1", f"infer: reuse must be a bool array of length {len(envs)}, got {describe(marks)}"
            )
            raise Broken
        marked = frozenset(env for env, mark in zip(envs, marks.tolist(), strict=True) if mark)
        self.marks += len(marked)
        illegal = sorted(marked - self._reusable)
        why = (
            "whose episode has ended"
            if self._ended.intersection(illegal[:1])
            else "without feedback on this connection"
        )
        self.check(
            not illegal,
            "10.1",
            "rows marked reuse are those of running episodes with a feedback on this connection",
            f"infer: reuse is set for env {illegal[:1]}, {why}",
        )
        return marked

    def _features_of_infer(self, message: dict[Any, Value], n: int) -> None:
        """Check what belongs to the feature env-spec, which may stand only where it was offered."""
        for key in ("env_spec", "reset_info"):
            value = message.get(key)
            if value is None:
                continue
            self.announced |= key == "env_spec"
            if ENV_SPEC not in self._features:
                self._report.violation("10", f"infer: {key}, but the metadata does not list {ENV_SPEC}")
            elif not isinstance(value, dict):
                self._report.violation("env-spec", f"infer: {key} must be a map, got {describe(value)}")
            elif key == "env_spec" and self._infers:
                self._report.violation("env-spec", "infer: env_spec belongs into the first infer of a connection")
            elif key == "reset_info" and value:
                self._split(value, n, "infer: reset_info", "env-spec")
            else:
                self._report.passed("env-spec", f"{key} is a map")

    def _digest(self, message: dict[Any, Value], n: int, kind: str) -> Array | None:
        """Check the form of what belongs to the feature step-digest, which may stand only where it was offered."""
        value = message.get("digest")
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype != np.dtype("<u8") or value.shape != (n,):
            self._report.violation(
                STEP_DIGEST, f"{kind}: digest must be a <u8 array of length {n}, got {describe(value)}"
            )
            return None
        if STEP_DIGEST not in self._features:
            self._report.violation("10", f"{kind}: digest, but the metadata does not list {STEP_DIGEST}")
            return None
        self._report.passed(STEP_DIGEST, "digests are a <u8 array, one per env")
        return value

    def _rewards(self, data: dict[Any, Value], m: int) -> Array | None:
        if "rewards" not in data:
            return None
        value = data["rewards"]
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.shape != (m,):
            self._report.violation(
                "5.4", f"feedback: rewards must be a float array of length {m}, got {describe(value)}"
            )
            return None
        self._report.passed("5.4", "rewards are a float array, one per env")
        if value.dtype.itemsize != 4 and ENV_SPEC not in self._features:
            self._report.note(
                "5.4", f"rewards are {value.dtype.str}; float32 is the custom, and some servers read only that"
            )
        return value

    def _flags(self, data: dict[Any, Value], key: str, m: int) -> Array | None:
        if key not in data:
            return None
        value = data[key]
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_ or value.shape != (m,):
            self._report.violation("5.4", f"feedback: {key} must be a bool array of length {m}, got {describe(value)}")
            return None
        self._report.passed("5.4", f"{key} is a bool array, one per env")
        return value

    def _info(self, data: dict[Any, Value], m: int, view: FeedbackView) -> None:
        if "info" not in data:
            return
        info = data["info"]
        if not isinstance(info, dict):
            self._report.violation("5.4", f"feedback: info must be a map, got {describe(info)}")
        elif self._split(info, m, "feedback: info", "5.4"):
            self._episodes(info, m, view)

    def _split(self, info: dict[Any, Value], m: int, what: str, clause: str) -> bool:
        try:
            if info:
                check_splittable(info, m, what=what, clause=clause)
        except RemoteProtocolError as exc:
            self._report.violation(clause, _without_clause(exc))
            return False
        self._report.passed(clause, f"{what.partition(': ')[2]} is a map that can be split per env")
        return True

    def _episodes(self, info: dict[Any, Value], m: int, view: FeedbackView) -> None:
        """Compare what the client says of finished episodes with what it fed back."""
        if view.rewards is None or view.terminated is None or view.truncated is None:
            return
        records = episode_records(info, m)
        for env in view.envs:
            row = view.rows[env]
            record, known = records[row], self._returns.get(env)
            if record is None or known is None or not (view.terminated[row] or view.truncated[row]):
                continue
            fed_back = known + float(view.rewards[row])
            if np.isclose(record.ret, fed_back, rtol=1e-4, atol=1e-4, equal_nan=True):
                self._report.passed("5.4", "the return in info.episode is the sum of the rewards fed back")
            else:
                self._report.note(
                    "5.4",
                    f"info.episode says that env {env} had a return of {record.ret:g}, but its rewards come to "
                    f"{fed_back:g}",
                )

    def _keep_books(self, view: FeedbackView) -> None:
        for env in view.envs:
            row = view.rows[env]
            ended = any(flags is not None and bool(flags[row]) for flags in (view.terminated, view.truncated))
            if ended or view.rewards is None:
                self._returns.pop(env, None)
            elif env in self._returns:
                self._returns[env] += float(view.rewards[row])
            if ended:
                self._ended.add(env)
                self._reusable.discard(env)
            else:
                self._reusable.add(env)


def _without_clause(exc: RemoteProtocolError) -> str:
    return str(exc).removeprefix(f"[{exc.clause}] ")


def _keys(data: dict[Any, Value]) -> list[str]:
    return sorted(str(key)[:40] for key in list(data)[:12])


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
