"""Own the check of the digests of steps [step-digest]: who must send them, and of what they are.

The digests are made here once more, of the actions as they were sent and of the values in the messages, over the spaces
that the client announced. One `DigestChecks` follows a client over all its connections, since the chains go on as the
episodes do; ``client_talk`` hands it every message once ``client_checks`` has looked at it.

A chain may stand at two values after a fault: at what the client said, and at what it should have said. The next
message tells which of them the client goes on from, so one fault is one violation. Where nothing is known any more the
client's word is taken over: after a chunk of several steps, and after an action whose feedback was lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.conformance.client_checks import STEP_DIGEST
from plugrl_bridges.conformance.digest_rows import DigestRow, DigestSpaces
from plugrl_bridges.digest.digest import MULTIPLIER
from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.wire.observation import parse_observation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.conformance.client_checks import FeedbackView, InferView
    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["DigestChecks"]

_MASK = (1 << 64) - 1


@dataclass
class _Chain:
    """Hold where the chain of one env may stand, and since when.

    Attributes:
        bases: What it may stand at, the client's word first; empty if only the client knows.
        step: Steps since the reset that began it; chunks, where they are longer.
        holds: Whether the env holds an action whose feedback has not come.
        action: The first step of that action, ``[*shape]``; None if it does not fit the space.
        ended: Whether its episode has ended.
    """

    bases: list[int]
    step: int = 0
    holds: bool = False
    action: Array | None = None
    ended: bool = False


@dataclass
class _Connection:
    """Hold what holds on one connection.

    Attributes:
        fresh: Whether it is the first of a client that has just started, whose episodes therefore begin with it.
        announced: Whether the client announced the feature; None before its first infer.
        spaces: Over which the digests can be made; None: only their form, presence and repetition are checked.
        unit: What the client is sent at a time, ``"step"`` or ``"chunk"``.
    """

    fresh: bool = True
    announced: bool | None = None
    spaces: DigestSpaces | None = None
    unit: str = "step"


class DigestChecks:
    """Check the digests of one client.

    Args:
        report: Where to write what is found.
        features: What the metadata offers; without ``step-digest`` nothing is done here.
    """

    def __init__(self, report: Report, features: frozenset[str]) -> None:
        self._report = report
        self._offered = STEP_DIGEST in features
        self._now = _Connection()
        self._chains: dict[int, _Chain] = {}

    @property
    def announced(self) -> bool:
        """Whether the client announced the feature on this connection."""
        return bool(self._now.announced)

    def begin(self, *, fresh: bool) -> None:
        """Begin a connection.

        Args:
            fresh: Whether it is the first one of a client that has just started.
        """
        self._now = _Connection(fresh=fresh)

    def action(self, envs: Sequence[int], action: Array) -> None:
        """Take in the chunks ``[H, n, d]`` that were sent."""
        if not self.announced:
            return
        spaces, single = self._now.spaces, len(action) == 1
        self._now.unit = "step" if single else "chunk"
        # Of a longer chunk nobody tells what was observed between its steps.
        first = spaces.actions(action) if spaces is not None and single else None
        for at, env in enumerate(envs):
            chain = self._chains.setdefault(env, _Chain([]))
            chain.holds, chain.action = True, None if first is None else first[at, ...]

    def infer(self, message: dict[Any, Value], view: InferView) -> None:
        """Check the digests of an infer: each chain as it stands, after a reset that of the reset."""
        if not self._offered:
            return
        if self._now.announced is None:
            self._announce(message.get("env_spec"))
        if not self._due(message, "infer"):
            return
        spaces = self._now.spaces
        sent = None if view.states is None else self._observations(message.get("data"), len(view.rows), "infer")
        for at, env in enumerate(view.envs):
            known = env in self._chains
            chain = self._chains.setdefault(env, _Chain([]))
            row = None
            if sent is not None and spaces is not None and env in view.rows:
                row = DigestRow(spaces, [array[view.rows[env], ...] for array in sent])
            theirs = None if view.digest is None else int(view.digest[at])
            if chain.holds or not (known or self._now.fresh):
                self._take_over(chain, theirs, row)
            elif chain.ended or not known:
                chain.step = 0
                self._compare(env, chain, theirs, row, "infer")
            else:
                self._stands(env, chain, theirs)
                self._check_step_id(env, chain, message.get("step_ids"), at)
            chain.holds = chain.ended = False

    def _check_step_id(self, env: int, chain: _Chain, step_ids: Value, at: int) -> None:
        """Hold a step id of 0 to its meaning here: no step since the reset."""
        if chain.step and isinstance(step_ids, np.ndarray) and step_ids.shape > (at,) and not step_ids[at]:
            self._report.violation(
                STEP_DIGEST,
                f"infer: step_ids says that env {env} took no step since its reset, but it has fed back {chain.step}",
            )

    def feedback(self, message: dict[Any, Value], view: FeedbackView) -> None:
        """Check the digests of a feedback: each chain after the step reported."""
        if not self._offered or not self._due(message, "feedback"):
            return
        data = message.get("data")
        obs = data.get("obs") if isinstance(data, dict) else None
        told = None if view.states is None else self._observations(obs, len(view.rows), "feedback")
        if view.rewards is not None and view.rewards.dtype.itemsize < 4:
            self._report.violation(
                STEP_DIGEST,
                f"feedback: rewards must be <f8 or <f4 where digests are sent, got {view.rewards.dtype.str}",
            )
        for env in view.envs:
            chain, at = self._chains.setdefault(env, _Chain([])), view.rows[env]
            chain.step += 1
            theirs = None if view.digest is None else int(view.digest[at])
            self._compare(env, chain, theirs, self._step(view, at, chain.action, told), "feedback")
            chain.ended = any(flags is not None and bool(flags[at]) for flags in (view.terminated, view.truncated))
            chain.holds, chain.action = False, None

    def _step(
        self, view: FeedbackView, at: int, action: Array | None, told: Sequence[Array] | None
    ) -> DigestRow | None:
        """Give the row of one env's step; None if something of it is not known."""
        spaces, rewards, terminated, truncated = self._now.spaces, view.rewards, view.terminated, view.truncated
        if spaces is None or action is None or told is None:
            return None
        if rewards is None or terminated is None or truncated is None:
            return None
        return DigestRow(
            spaces,
            [array[at, ...] for array in told],
            action=action,
            reward=float(rewards[at]),
            flags=int(terminated[at]) + 2 * int(truncated[at]),
        )

    # Who must send them ----------------------------------------------------------------------------------------------

    def _announce(self, spec: Value) -> None:
        """Read what the first infer of a connection says."""
        spec = spec if isinstance(spec, dict) else {}
        features = spec.get("features")
        self._now.announced = isinstance(features, list) and STEP_DIGEST in features
        if not self._now.announced:
            return
        observation, action = spec.get("observation_space"), spec.get("action_space")
        if observation is None or action is None:
            missing = "observation_space" if observation is None else "action_space"
            self._report.note(
                STEP_DIGEST,
                f"{STEP_DIGEST} is announced, but env_spec has no {missing}: a server cannot make the digests",
            )
            return
        try:
            self._now.spaces = DigestSpaces(observation, action)
        except RemoteProtocolError as exc:
            self._report.violation(exc.clause or "env-spec", f"infer: {str(exc).removeprefix(f'[{exc.clause}] ')}")
        except SpaceError as exc:
            self._report.violation("env-spec", f"infer: env_spec: {exc}")

    def _due(self, message: dict[Any, Value], kind: str) -> bool:
        """Check that digests are there, or are not; say whether they are due."""
        there = message.get("digest") is not None
        if self.announced and not there:
            self._report.violation(STEP_DIGEST, f"{kind}: no digest, but the env_spec announces {STEP_DIGEST}")
        elif there and not self.announced:
            self._report.violation(
                STEP_DIGEST, f"{kind}: digest, but {STEP_DIGEST} is not among the features of the client's env_spec"
            )
        elif self.announced:
            self._report.passed(STEP_DIGEST, "a client that announces digests sends them with every message")
        return self.announced

    def _observations(self, value: Value, n: int, kind: str) -> list[Array] | None:
        """Give the observations as arrays of the announced space; None if there is none, or they are none of it."""
        if self._now.spaces is None:
            return None
        try:
            observation = parse_observation(value, n, kind, "5.2")
        except RemoteProtocolError:
            return None  # in the report already
        try:
            return self._now.spaces.read(observation, n)
        except RemoteProtocolError as exc:
            detail = str(exc).removeprefix(f"[{exc.clause}] ")
            self._report.violation(exc.clause or "5.2", f"{kind}: {detail}, by the observation_space of the env_spec")
            return None

    # What they are of ------------------------------------------------------------------------------------------------

    def _take_over(self, chain: _Chain, theirs: int | None, row: DigestRow | None) -> None:
        """Take the client's word: nobody knows whether a lost action was taken, and what it brought."""
        if theirs is not None and row is not None and row.sum == theirs:
            chain.step = 0
        elif chain.holds and theirs not in chain.bases:
            chain.step += 1
        chain.bases = [] if theirs is None else [theirs]

    def _stands(self, env: int, chain: _Chain, theirs: int | None) -> None:
        """Check a chain that must stand where the last message left it."""
        if theirs is None:
            return
        if not chain.bases or theirs in chain.bases:
            self._report.passed(STEP_DIGEST, "an infer repeats the digest of the last feedback")
            chain.bases = [theirs]
        else:
            self._differs("infer", env, chain, f"{_pair(theirs, chain.bases[0])}, that of the last feedback")
            chain.bases = [theirs, chain.bases[0]]

    def _compare(self, env: int, chain: _Chain, theirs: int | None, row: DigestRow | None, kind: str) -> None:
        """Check a chain after a reset or a step; without a row to make the digest of, it is taken over."""
        reset = kind == "infer"
        if row is None:
            chain.bases = [] if theirs is None else [theirs]
            return
        expected = [row.sum] if reset else [(base * MULTIPLIER + row.sum) & _MASK for base in chain.bases]
        before = chain.bases
        chain.bases = expected if theirs is None else [theirs]
        if theirs is None or not expected:
            return
        if theirs in expected:
            what = "the reset observation, in the infer" if reset else "the step, in the feedback"
            self._report.passed(STEP_DIGEST, f"a digest is that of {what}")
            return
        chain.bases.append(expected[0])
        if reset and (theirs - row.sum) & _MASK in [base * MULTIPLIER & _MASK for base in before]:
            why = ": the chain was not begun anew"
        elif theirs in before:
            why = ": it is the digest of the step before"
        else:
            why = row.difference(theirs, expected[0])
        self._differs(kind, env, chain, f"{_pair(theirs, expected[0])}{why}")

    def _differs(self, kind: str, env: int, chain: _Chain, what: str) -> None:
        at = f"{self._now.unit} {chain.step}" if chain.step else "step 0 (the reset)"
        self._report.violation(STEP_DIGEST, f"{kind}: the digest of env {env} at {at} is {what}")


def _pair(theirs: int, ours: int) -> str:
    return f"0x{theirs:016x}, expected 0x{ours:016x}"
