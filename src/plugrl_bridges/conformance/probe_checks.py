"""The model of the probe environment [8.1]: what a feedback tells of what the client did with its actions.

The checker's actions say where they stand in their chunk, and the environment repeats what it was given and counts its
steps. So of each feedback three things say how far the chunk was run: the time, the last action, and the reward. Where
two of them agree the third is wrong, and so is the clause that it stands for. `ProbeModel` is one connection's;
``client_checker`` is the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plugrl_bridges.probe_env import probe_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.conformance.client_checks import Asked, Told
    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Array

__all__ = ["ProbeModel", "probe_actions"]


def probe_actions(envs: Sequence[int], horizon: int, action_dim: int, dtype: str) -> Array:
    """Return the chunk ``[H, n, d]`` that says where each of its numbers belongs: 10000 step + 10 env + component."""
    step, env, component = np.ogrid[:horizon, : len(envs), :action_dim]
    action: Array = (10000 * step + 10 * np.asarray(envs)[env] + component).astype(dtype)
    return action


class _State(NamedTuple):
    """What one env observes."""

    t: int
    a: Array

    @property
    def is_reset(self) -> bool:
        return self.t == 0 and not self.a.any()

    def same(self, other: _State) -> bool:
        return self.t == other.t and np.array_equal(self.a, other.a)


class _Row(NamedTuple):
    """What is known of one env when its feedback has come: before, its chunk, after."""

    env: int
    before: _State
    chunk: Array
    after: _State
    reward: float
    terminated: bool
    truncated: bool

    @property
    def left(self) -> int:
        """Steps that were left of the episode."""
        return probe_length(self.env) - self.before.t

    @property
    def steps(self) -> int:
        """Steps by the clock of the env."""
        return self.after.t - self.before.t

    @property
    def applied(self) -> int | None:
        """Steps by the last action: how far into the chunk it stands; None if it stands nowhere in it."""
        for step, action in enumerate(self.chunk, 1):
            if np.array_equal(action, self.after.a):
                return step
        return None

    @property
    def paid(self) -> int | None:
        """Steps by the reward; None if it is no whole number of them."""
        return round(self.reward) if np.isfinite(self.reward) and self.reward == round(self.reward) else None


class ProbeModel:
    """The model of the envs of one connection.

    Args:
        report: Where to write what is found.
        action_dim: Width of the actions that are sent.
    """

    def __init__(self, report: Report, action_dim: int) -> None:
        self._report = report
        self._dim = action_dim
        self._now: dict[int, _State] = {}
        self._fed_back: dict[int, _State] = {}
        self._over: set[int] = set()
        self._chunks: dict[int, Array] = {}

    def infer(self, asked: Asked) -> None:
        """Compare what the envs observe now with what they must."""
        states = asked.message.observation.states
        for env in asked.envs:
            last = self._fed_back.pop(env, None)
            over = env in self._over
            self._over.discard(env)
            state = self._now.get(env) if env in asked.reused else self._state(states, asked.rows[env])
            self._now.pop(env, None)
            if state is None or (over and env in asked.reused):
                continue  # nothing to go by, or an illegal mark, which is another clause's concern
            if over:
                self._report.check(
                    state.is_reset,
                    "5.4",
                    "after a terminal step, the infer carries the first observation of a new episode",
                    f"infer: the episode of env {env} had ended, but it is at t = {state.t}, expected t = 0 and a = 0",
                )
            elif last is not None and env not in asked.reused:
                self._report.check(
                    state.same(last),
                    "5.2",
                    "an infer carries the observation that the last feedback reported",
                    f"infer: env {env} is at t = {state.t}, a = {_brief(state.a)}; its last feedback said "
                    f"t = {last.t}, a = {_brief(last.a)}",
                )
            if state.t < probe_length(env):
                self._now[env] = state

    def action(self, envs: Sequence[int], action: Array) -> None:
        """Record the chunks ``[H, n, d]`` that were sent."""
        for at, env in enumerate(envs):
            self._chunks[env] = action[:, at]

    def feedback(self, told: Told) -> None:
        """Work out what the client did with its chunks."""
        for env in told.envs:
            row = self._row(told, env)
            if row is None:
                self._now.pop(env, None)
                continue
            ended = row.terminated or row.truncated
            if ended:
                self._over.add(env)
            if self._judge(row):
                self._now[env] = row.after
                if not ended:
                    self._fed_back[env] = row.after
            else:
                # Nothing that follows is held against the client a second time.
                self._now.pop(env, None)

    def _row(self, told: Told, env: int) -> _Row | None:
        message, at = told.message, told.rows[env]
        before, chunk = self._now.get(env), self._chunks.pop(env, None)
        after = self._state(message.observation.states, at)
        if before is None or chunk is None or after is None:
            return None
        flags = bool(message.terminated[at]), bool(message.truncated[at])
        return _Row(env, before, chunk, after, float(message.rewards[at]), *flags)

    def _judge(self, row: _Row) -> bool:
        """Judge one chunk; return whether all is as it must be."""
        late = self._late(row)
        if late is not None:
            self._report.violation("5.4", f"feedback: {late}")
            return False
        if row.after.is_reset:
            self._report.violation(
                "5.4",
                f"feedback: env {row.env} reports t = 0 and a = 0, the first observation of the next episode; the "
                "observation that the last step returned is due",
            )
            return False
        horizon = len(row.chunk)
        if not self._report.check(
            1 <= row.steps <= horizon,
            "5.3",
            "a chunk is run for 1 to H steps",
            f"feedback: env {row.env} went from t = {row.before.t} to t = {row.after.t} on a chunk of {horizon} steps",
        ):
            return False
        return all([self._applied(row), self._paid(row), self._ended(row)])

    def _late(self, row: _Row) -> str | None:
        """Return how a chunk was not ended by the last step of the episode; None if it was."""
        if row.steps > len(row.chunk):
            return None  # too long for another reason
        length = probe_length(row.env)
        if row.after.t > length:
            return f"env {row.env} went on to t = {row.after.t}; its episode, and so its chunk, ends at t = {length}"
        # Reset in the middle of the chunk, the clock tells little; but the last action and the rewards agree.
        if row.paid == row.applied and row.applied is not None and row.applied > row.left:
            return (
                f"env {row.env} went on for {row.applied} steps of its chunk; its episode, and so its chunk, ended "
                f"after {row.left}"
            )
        return None

    def _applied(self, row: _Row) -> bool:
        action = row.chunk[row.steps - 1]
        hint = _origin(row.after.a, row.chunk)
        return self._report.check(
            np.array_equal(row.after.a, action),
            "5.3",
            "the action applied is that of its step and env: time-major, in the infer's order, in the dtype sent",
            f"feedback: env {row.env} applied {_brief(row.after.a)}{hint} in step {row.steps} of its chunk; expected "
            f"{_brief(action)} of the {action.dtype.str} array [H, n, d]",
        )

    def _paid(self, row: _Row) -> bool:
        return self._report.check(
            row.reward == row.steps,
            "5.4",
            "the reward is the sum over the steps of the chunk",
            f"feedback: env {row.env} reports a reward of {row.reward:g} for {row.steps} steps that paid 1 each",
        )

    def _ended(self, row: _Row) -> bool:
        due = row.after.t == probe_length(row.env)
        return self._report.check(
            row.terminated == due and not row.truncated,
            "5.4",
            "terminated is set on the terminal step, with its own observation, and nowhere else",
            f"feedback: env {row.env} at t = {row.after.t} says terminated = {row.terminated}, truncated = "
            f"{row.truncated}; expected {due}, False: its episodes terminate at t = {probe_length(row.env)}",
        )

    def _state(self, states: Mapping[str, Array], row: int) -> _State | None:
        """Read the two states of one row; None if they are not those of the probe environment."""
        t, a = states.get("t"), states.get("a")
        fits = (
            t is not None
            and a is not None
            and t.dtype.kind in "iuf"
            and a.dtype.kind in "iuf"
            and t.shape[1:] == (1,)
            and a.shape[1:] == (self._dim,)
        )
        shapes = {name[:40]: list(array.shape) for name, array in list(states.items())[:4]}
        self._report.check(
            fits,
            "8.1",
            "the probe environment observes t [n, 1] and a [n, d]",
            f"expected the states t [n, 1] and a [n, {self._dim}] of the probe environment, got {shapes}",
        )
        if not fits or t is None or a is None:
            return None
        if not (np.isfinite(t[row, 0]) and t[row, 0] == round(float(t[row, 0]))):
            self._report.violation("8.1", f"the state t counts steps, but is {float(t[row, 0]):g}")
            return None
        return _State(int(t[row, 0]), a[row].astype(np.float64))


def _origin(applied: Array, chunk: Array) -> str:
    """Return where in the chunks an action stands that should not have been applied."""
    if not applied.any():
        return ", which is no action at all,"
    if np.isfinite(applied[0]) and applied[0] >= 0:
        step, rest = divmod(int(applied[0]), 10000)
        env = rest // 10
        if step < len(chunk) and np.array_equal(applied, probe_actions([env], step + 1, len(applied), "<f8")[step, 0]):
            return f", the action of env {env} in step {step + 1},"
    return ""


def _brief(action: Array) -> str:
    shown = ", ".join(f"{value:g}" for value in action[:3].tolist())
    return f"[{shown}, …]" if len(action) > 3 else f"[{shown}]"
