"""The checks of what an env client's messages alone show [1] to [5]: their form, their order, and whom they may name.

Bytes become messages by ``wire.messages``, which golden vectors hold to the protocol: what it refuses is a violation of
the clause that it names, and ends the conversation. `MessageChecks` adds what one message cannot show, or what is a
risk and no fault. What the client did with its actions is the concern of ``probe_checks``, what its digests are of that
of ``digest_checks``; ``client_talk`` is the caller of all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import decode
from plugrl_bridges.wire.info import episode_records
from plugrl_bridges.wire.messages import Feedback, Infer, Message, parse
from plugrl_bridges.wire.session import ENV_SPEC, REUSE_FEEDBACK_OBS, STEP_DIGEST

if TYPE_CHECKING:
    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Value

__all__ = ["Asked", "Broken", "MessageChecks", "Told"]


class Broken(Exception):
    """The conversation cannot go on; why is in the report already."""


@dataclass(frozen=True)
class Asked:
    """An infer, and where its envs stand in it.

    Attributes:
        message: As it was parsed.
        envs: Who asks, in order.
        rows: Env to its row in the observation, for those whose observation was sent.
        reused: Envs whose observation is that of their last feedback [10.1].
    """

    message: Infer
    envs: list[int]
    rows: dict[int, int]
    reused: frozenset[int]


@dataclass(frozen=True)
class Told:
    """A feedback, and where its envs stand in it.

    Attributes:
        message: As it was parsed.
        envs: Whose chunk ended, in order, without those that held no action.
        rows: Env to its row.
    """

    message: Feedback
    envs: list[int]
    rows: dict[int, int]

    def ended(self, env: int) -> bool:
        """Return whether the episode of an env has ended."""
        row = self.rows[env]
        return bool(self.message.terminated[row] or self.message.truncated[row])


class MessageChecks:
    """The checks of the messages of one connection.

    Args:
        report: Where to write what is found.
        features: What the metadata offers.
        fresh: Whether this is the first connection of a client that has just started, whose episodes therefore begin
            with it.
        reusable: Envs whose observation need not be sent already; a connection begins without any.
    """

    def __init__(
        self, report: Report, features: frozenset[str], *, fresh: bool = True, reusable: frozenset[int] = frozenset()
    ) -> None:
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
        self._reusable = set(reusable)
        self._ended: set[int] = set()
        self._returns: dict[int, float] = {}

    def parsed(self, data: str | bytes) -> Infer | Feedback:
        """Return the message of one frame.

        Raises:
            Broken: if it is no infer or feedback, or malformed.
        """
        if not self._report.check(
            isinstance(data, bytes), "1", "messages are binary frames", f"a text frame: {data[:60]!r}"
        ):
            raise Broken
        try:
            value = decode(data if isinstance(data, bytes) else b"")
            self._report.passed("3", "messages are one msgpack value, with arrays in the form of openpi")
            message = parse(value)
        except RemoteProtocolError as exc:
            self._report.broken(exc)
            raise Broken from exc
        kind = type(message).__name__.lower()
        if not isinstance(message, (Infer, Feedback)):
            self._report.violation("2", f"expected a map whose message_type is infer or feedback, got {kind!r}")
            raise Broken
        self._report.passed("2", "messages are maps with a message_type")
        self._report.passed("4.4", "env_indices are unique, non-negative and below 2^31")
        self._report.passed("5.2" if isinstance(message, Infer) else "5.4", f"{_a(kind)} has its keys, arrays and rows")
        self._text(value, message)
        return message

    def infer(self, message: Infer) -> Asked:
        """Check an infer [5.2].

        Raises:
            Broken: if it marks observations as known without leave.
        """
        envs: list[int] = message.env_indices.tolist()
        stubborn = sorted(self.holding.intersection(envs))
        self._report.check(
            not stubborn,
            "4.3",
            "an infer names only envs whose chunk has ended",
            f"infer: env {stubborn[:4]} asks for a chunk, but has fed nothing back for the one it holds",
        )
        reused = self._marks(message, envs)
        self._features_of_infer(message)
        self._digest(message, "infer")
        for env in envs:
            if env in self._ended or (self._fresh and env not in self._returns):
                self._returns[env] = 0.0
        self._ended.difference_update(envs)
        self._infers += 1
        sent = [env for env in envs if env not in reused]
        return Asked(message, envs, {env: at for at, env in enumerate(sent)}, reused)

    def feedback(self, message: Feedback) -> Told:
        """Check a feedback [5.4]."""
        envs: list[int] = message.env_indices.tolist()
        self._report.check(bool(envs), "5.4", "a feedback names one env at least", "feedback: env_indices names no env")
        strangers = [env for env in envs if env not in self.holding]
        self._report.check(
            not strangers,
            "4.3",
            "a feedback names only envs that hold an action",
            f"feedback: env {strangers[:4]} holds no action; those that do are {sorted(self.holding)[:8]}",
        )
        self._digest(message, "feedback")
        if message.rewards.dtype.itemsize != 4 and ENV_SPEC not in self._features:
            self._report.note(
                "5.4",
                f"rewards are {message.rewards.dtype.str}; float32 is the custom, and some servers read only that",
            )
        told = Told(message, [env for env in envs if env in self.holding], {env: at for at, env in enumerate(envs)})
        self.holding.difference_update(told.envs)
        self._episodes(told)
        self._keep_books(told)
        return told

    def _text(self, value: Value, message: Message) -> None:
        """Note the forms of a text that not every server reads [3.4]."""
        data: Any = value["data"] if isinstance(value, dict) else {}
        text = (data if isinstance(message, Infer) else data["obs"])["text"]
        form = "one str for all envs" if isinstance(text, str) else "a list of str" if isinstance(text, list) else None
        if form is None:
            self._report.passed("3.4", "text is an array of str, one per env")
        else:
            self._report.note("3.4", f"text is {form}; servers differ in whether they read that, an array is safe")

    def _marks(self, message: Infer, envs: list[int]) -> frozenset[int]:
        """Return the envs whose observation is not sent [10.1]."""
        offered = REUSE_FEEDBACK_OBS in self._features
        if offered:
            self.chances += len(self._reusable.intersection(envs))
        if message.reuse is None:
            return frozenset()
        if not offered:
            self._report.violation("10.1", f"infer: reuse, but the metadata does not list {REUSE_FEEDBACK_OBS}")
            raise Broken
        marked = frozenset(env for env, mark in zip(envs, message.reuse.tolist(), strict=True) if mark)
        self.marks += len(marked)
        illegal = sorted(marked - self._reusable)
        ended = bool(self._ended.intersection(illegal[:1]))
        self._report.check(
            not illegal,
            "10.1",
            "rows marked reuse are those of running episodes with a feedback on this connection",
            f"infer: reuse is set for env {illegal[:1]}, "
            + ("whose episode has ended" if ended else "without feedback on this connection"),
        )
        return marked

    def _features_of_infer(self, message: Infer) -> None:
        """Check what belongs to the feature env-spec, which may stand only where it was offered."""
        self.announced |= message.env_spec is not None
        for key, value in (("env_spec", message.env_spec), ("reset_info", message.reset_info)):
            if value is None:
                continue
            if ENV_SPEC not in self._features:
                self._report.violation("10", f"infer: {key}, but the metadata does not list {ENV_SPEC}")
            elif key == "env_spec" and self._infers:
                self._report.violation("env-spec", "infer: env_spec belongs into the first infer of a connection")
            else:
                self._report.passed("env-spec", f"{key} is a map")

    def _digest(self, message: Infer | Feedback, kind: str) -> None:
        """Check that digests stand only where the feature step-digest was offered."""
        if message.digest is None:
            return
        if STEP_DIGEST in self._features:
            self._report.passed(STEP_DIGEST, "digests are a <u8 array, one per env")
        else:
            self._report.violation("10", f"{kind}: digest, but the metadata does not list {STEP_DIGEST}")

    def _episodes(self, told: Told) -> None:
        """Compare what the client says of finished episodes with what it fed back."""
        rewards = told.message.rewards
        records = episode_records(told.message.info, len(rewards))
        for env in told.envs:
            row = told.rows[env]
            record, known = records[row], self._returns.get(env)
            if record is None or known is None or not told.ended(env):
                continue
            fed_back = known + float(rewards[row])
            if np.isclose(record.ret, fed_back, rtol=1e-4, atol=1e-4, equal_nan=True):
                self._report.passed("5.4", "the return in info.episode is the sum of the rewards fed back")
            else:
                self._report.note(
                    "5.4",
                    f"info.episode says that env {env} had a return of {record.ret:g}, but its rewards come to "
                    f"{fed_back:g}",
                )

    def _keep_books(self, told: Told) -> None:
        for env in told.envs:
            if told.ended(env):
                self._returns.pop(env, None)
                self._ended.add(env)
                self._reusable.discard(env)
            else:
                if env in self._returns:
                    self._returns[env] += float(told.message.rewards[told.rows[env]])
                self._reusable.add(env)


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
