"""The check of the digests of steps [step-digest]: who must send them, and of what they are.

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

from plugrl_bridges.digest.digest import MULTIPLIER, RESET, TERMINATED, TRUNCATED, EnvDigest
from plugrl_bridges.digest.locating import locate
from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.spaces import ActionLayout, ObservationLayout, space_from_wire
from plugrl_bridges.wire.session import STEP_DIGEST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.conformance.client_checks import Asked, Told
    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Array, Value
    from plugrl_bridges.wire.messages import Feedback, Infer
    from plugrl_bridges.wire.observation import Observation

__all__ = ["DigestChecks"]

_MASK = (1 << 64) - 1


@dataclass
class _Chain:
    """Where the chain of one env may stand, and since when.

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


class _Spaces:
    """The spaces that a client announced.

    Args:
        observation: As in its env_spec.
        action: As in its env_spec.

    Raises:
        RemoteProtocolError: if one of them describes no space [env-spec].
        SpaceError: for a space of which nothing can travel.
    """

    def __init__(self, observation: Value, action: Value) -> None:
        self.observations = ObservationLayout(space_from_wire(observation))
        self._actions = ActionLayout(space_from_wire(action))
        self.action_leaf = ObservationLayout(self._actions.space).leaves[0]
        self.digest = EnvDigest([self.action_leaf], self.observations.leaves)

    def actions(self, action: Array) -> Array | None:
        """Return the first step of a chunk ``[H, n, d]`` as ``[n, *shape]``; None if it does not fit the space."""
        try:
            first = self._actions.from_wire(action)[0]
        except RemoteProtocolError:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            taken: Array = first.astype(self.action_leaf.dtype)
        return taken

    def read(self, observation: Observation, n: int) -> list[Array]:
        """Return one array ``[n, *shape]`` per entry.

        Raises:
            RemoteProtocolError: if they are not of the space [5.2].
        """
        arrays = self.observations.allocate(n)
        if n:  # else all are marked reuse: there is nothing to read
            self.observations.read(observation, arrays, slice(None))
        return arrays


class _Row:
    """The digest of one step, or of a reset.

    Args:
        spaces: What the values are of.
        observation: Per entry its value.
        action: Of the step; None for a reset.
        reward: Of the step.
        flags: 1 for terminated, 2 for truncated, 4 for a reset.
    """

    def __init__(
        self,
        spaces: _Spaces,
        observation: Sequence[Array],
        *,
        action: Array | None = None,
        reward: float = 0.0,
        flags: int = RESET,
    ) -> None:
        leaf, digest = spaces.action_leaf, spaces.digest
        self._spaces = spaces
        self._observation = observation
        self._action = np.zeros(leaf.shape, leaf.dtype) if action is None else action
        self._reward = reward
        self._flags = flags
        if action is None:
            self.sum = digest.reset(observation)
            """What it adds to a chain: the sum of its words, each times its key."""
        else:
            digest.value = 0
            digest.take([action])
            self.sum = digest.give(reward, bool(flags & TERMINATED), bool(flags & TRUNCATED), observation)

    def difference(self, theirs: int, ours: int) -> str:
        """Return which value makes two digests differ, for a report; or that it is no single one."""
        leaves = self._spaces.observations.leaves
        found = locate(
            theirs - ours,
            flags=self._flags,
            reward=self._reward,
            actions=[("action", self._spaces.action_leaf, self._action)],
            observations=[(leaf.name, leaf, value) for leaf, value in zip(leaves, self._observation, strict=True)],
        )
        if found is None:
            return ": several values differ, or the digest is made in another way"
        what = f"observation {found.cell}" if found.field == "obs" else found.cell
        return f": {what} is {found.ours} on the wire and {found.theirs} in the digest"


@dataclass
class _Connection:
    """What is known of one connection.

    Attributes:
        fresh: Whether it is the first of a client that has just started, whose episodes therefore begin with it.
        announced: Whether the client announced the feature; None before its first infer.
        spaces: Over which the digests can be made; None: only their form, presence and repetition are checked.
        unit: What the client is sent at a time, ``"step"`` or ``"chunk"``.
    """

    fresh: bool = True
    announced: bool | None = None
    spaces: _Spaces | None = None
    unit: str = "step"


class DigestChecks:
    """The check of the digests of one client.

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
        """Begin a connection; ``fresh`` if it is the first one of a client that has just started."""
        self._now = _Connection(fresh=fresh)

    def action(self, envs: Sequence[int], action: Array) -> None:
        """Record the chunks ``[H, n, d]`` that were sent."""
        if not self.announced:
            return
        spaces, single = self._now.spaces, len(action) == 1
        self._now.unit = "step" if single else "chunk"
        # Of a longer chunk nobody tells what was observed between its steps.
        first = spaces.actions(action) if spaces is not None and single else None
        for at, env in enumerate(envs):
            chain = self._chains.setdefault(env, _Chain([]))
            chain.holds, chain.action = True, None if first is None else first[at, ...]

    def infer(self, asked: Asked) -> None:
        """Check the digests of an infer: each chain as it stands, after a reset that of the reset."""
        if not self._offered:
            return
        message = asked.message
        if self._now.announced is None:
            self._announce(message.env_spec or {})
        if not self._due(message, "infer"):
            return
        spaces = self._now.spaces
        sent = self._observations(message.observation, len(asked.rows), "infer")
        for at, env in enumerate(asked.envs):
            known = env in self._chains
            chain = self._chains.setdefault(env, _Chain([]))
            row = None
            if sent is not None and spaces is not None and env in asked.rows:
                row = _Row(spaces, [array[asked.rows[env], ...] for array in sent])
            theirs = None if message.digest is None else int(message.digest[at])
            if chain.holds or not (known or self._now.fresh):
                self._take_over(chain, theirs, row)
            elif chain.ended or not known:
                chain.step = 0
                self._compare(env, chain, theirs, row, "infer")
            else:
                self._stands(env, chain, theirs)
                if chain.step and not message.step_ids[at]:  # no step since the reset, it says
                    self._report.violation(
                        STEP_DIGEST,
                        f"infer: step_ids says that env {env} took no step since its reset, but it has fed back "
                        f"{chain.step}",
                    )
            chain.holds = chain.ended = False

    def feedback(self, told: Told) -> None:
        """Check the digests of a feedback: each chain after the step reported."""
        message = told.message
        if not self._offered or not self._due(message, "feedback"):
            return
        observed = self._observations(message.observation, len(told.rows), "feedback")
        if message.rewards.dtype.itemsize < 4:
            self._report.violation(
                STEP_DIGEST,
                f"feedback: rewards must be <f8 or <f4 where digests are sent, got {message.rewards.dtype.str}",
            )
        for env in told.envs:
            chain, at = self._chains.setdefault(env, _Chain([])), told.rows[env]
            chain.step += 1
            theirs = None if message.digest is None else int(message.digest[at])
            self._compare(env, chain, theirs, self._step(message, at, chain.action, observed), "feedback")
            chain.ended = told.ended(env)
            chain.holds, chain.action = False, None

    def _step(self, message: Feedback, at: int, action: Array | None, observed: Sequence[Array] | None) -> _Row | None:
        """Return the row of one env's step; None if something of it is not known."""
        if self._now.spaces is None or action is None or observed is None:
            return None
        return _Row(
            self._now.spaces,
            [array[at, ...] for array in observed],
            action=action,
            reward=float(message.rewards[at]),
            flags=int(message.terminated[at]) + 2 * int(message.truncated[at]),
        )

    # Who must send them ----------------------------------------------------------------------------------------------

    def _announce(self, spec: Mapping[Any, Value]) -> None:
        """Read what the first infer of a connection says."""
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
            self._now.spaces = _Spaces(observation, action)
        except RemoteProtocolError as exc:
            self._report.broken(exc, before="infer: ", or_else="env-spec")
        except SpaceError as exc:
            self._report.violation("env-spec", f"infer: env_spec: {exc}")

    def _due(self, message: Infer | Feedback, kind: str) -> bool:
        """Check that digests are there, or are not; return whether they are due."""
        there = message.digest is not None
        if self.announced and not there:
            self._report.violation(STEP_DIGEST, f"{kind}: no digest, but the env_spec announces {STEP_DIGEST}")
        elif there and not self.announced:
            self._report.violation(
                STEP_DIGEST, f"{kind}: digest, but {STEP_DIGEST} is not among the features of the client's env_spec"
            )
        elif self.announced:
            self._report.passed(STEP_DIGEST, "a client that announces digests sends them with every message")
        return self.announced

    def _observations(self, observation: Observation, n: int, kind: str) -> list[Array] | None:
        """Return the observations as arrays of the announced space; None if there is none, or they are none of it."""
        if self._now.spaces is None:
            return None
        try:
            return self._now.spaces.read(observation, n)
        except RemoteProtocolError as exc:
            after = ", by the observation_space of the env_spec"
            self._report.broken(exc, before=f"{kind}: ", after=after, or_else="5.2")
            return None

    # What they are of ------------------------------------------------------------------------------------------------

    def _take_over(self, chain: _Chain, theirs: int | None, row: _Row | None) -> None:
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

    def _compare(self, env: int, chain: _Chain, theirs: int | None, row: _Row | None, kind: str) -> None:
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
