"""The phases in which a training server is driven as the protocol lets clients behave, and what each one shows.

``server_talk`` has one connection and its messages; ``server_cli`` is the command. Every connection brings the same
number of envs, and all of them step together in every phase but `Phase.RAGGED`: so a lockstep trainer with that many
slots can be graded too. Such a server refuses ragged use with ``plugrl-server-stop`` and keeps a surplus client
waiting; both are noted, and are no violations.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugrl_bridges.conformance.report import Report
from plugrl_bridges.conformance.server_talk import (
    RESYNCED,
    STOPPED,
    CannotGoOn,
    Line,
    RunEnded,
    ServerGone,
    Wording,
)
from plugrl_bridges.wire.session import REUSE_FEEDBACK_OBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.wire.codec import Value
    from plugrl_bridges.wire.messages import Feedback, Infer

__all__ = ["ENVS", "Phase", "ServerCheckOptions", "ServerChecker"]

ENVS = (0, 1, 2)
"""The envs of every connection."""
_MIXED = (2, 0, 1)


class Phase(enum.Enum):
    """The phases, in the order in which they are run: after a refusal in `RAGGED` a trainer may be at its end."""

    EXCHANGE = "exchange"
    ERRORS = "errors"
    SCOPING = "scoping"
    REUSE = "reuse"
    RAGGED = "exchange, ragged"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True)
class ServerCheckOptions:
    """Which server is graded, and how.

    Attributes:
        host: Where it listens.
        port: Where it listens.
        state_key: Name of the state that is sent.
        state_dim: Its width.
        image_key: Name of an image that is sent too, or None.
        image_size: Its height and width.
        exchanges: Exchanges of the first phase.
        timeout_s: Seconds to wait for the port, and for each message.
        until_stop: Whether to go on until the server ends the run.
        max_exchanges: How many exchanges that may take.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    state_key: str = "obs"
    state_dim: int = 3
    image_key: str | None = None
    image_size: int = 64
    exchanges: int = 5
    timeout_s: float = 10.0
    until_stop: bool = False
    max_exchanges: int = 10_000


class ServerChecker:
    """The grading of one server; call `run`.

    Args:
        options: Which one, and how.
    """

    def __init__(self, options: ServerCheckOptions) -> None:
        self.options = options
        self.report = Report(f"training server at {options.host}:{options.port}")
        self._wording = Wording(options.state_key, options.state_dim, options.image_key, options.image_size)
        self._refused_ragged = False

    def run(self, phases: Sequence[Phase] = tuple(Phase)) -> Report:
        """Run phases, and return what was found; a server that is gone ends the check."""
        for at, phase in enumerate(phases):
            why = self._run(phase)
            if why is not None:
                self._leave_out(phases[at + 1 :], why)
                break
        return self.report

    def _run(self, phase: Phase) -> str | None:
        """Run one phase; return why no other can be run after it, or None."""
        steps = {
            Phase.EXCHANGE: self._exchange, Phase.ERRORS: self._errors, Phase.SCOPING: self._scoping,
            Phase.REUSE: self._reuse, Phase.RAGGED: self._ragged, Phase.STOP: self._until_stop,
        }  # fmt: skip
        try:
            steps[phase]()
        except CannotGoOn:
            pass
        except ServerGone:
            return "the server is gone, or speaks to nobody"
        except RunEnded:
            self.report.violation(
                "7.1", f"the server ended the run in the phase {phase.value!r}: it must run longer to be graded"
            )
            return "the run is over"
        return None

    def _leave_out(self, phases: Sequence[Phase], why: str) -> None:
        if phases:
            names = ", ".join(phase.value for phase in phases)
            self.report.preamble.append(f"not checked, since {why}: {names}")

    def _line(self, *, report: Report | None = None, offer_compression: bool = False) -> Line:
        options = self.options
        return Line(
            report or self.report, options.host, options.port, options.timeout_s, offer_compression=offer_compression
        )

    # The phases -------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Exchange in every order, with ended episodes and a large frame."""
        word = self._wording
        with self._line(offer_compression=True):
            pass
        with self._line() as line:
            clause, what = "5.2", "an infer"
            for at in range(max(3, self.options.exchanges)):
                envs = _MIXED if at % 2 else ENVS
                line.send(word.infer(envs))
                line.action(envs, clause=clause, what=what)
                if at % 3 == 0:
                    line.send(word.feedback(envs, terminated=(1,)))
                    clause, what = "5.4", "a feedback that ends an episode"
                elif at % 3 == 1:
                    line.send(word.feedback(envs, info=word.large_info(len(envs))))
                    clause, what = "1", "a frame over 1 MiB"
                else:
                    line.send(word.feedback(envs[::-1]))
                    clause, what = "4.3", "a feedback in another order than the infer's"
            line.send(word.infer(ENVS))
            line.action(ENVS, clause=clause, what=what)

    def _ragged(self) -> None:
        """Feed back other envs than asked, and ask for some while others hold their chunk [4.3]."""
        word = self._wording
        with self._line() as line:
            self._ask(line)
            try:
                for fed_back, asks in (((1,), (1,)), ((2, 0), (0,)), ((1, 0), (2, 1, 0)), ((2,), (2,))):
                    line.send(word.feedback(fed_back), word.infer(asks))
                    what = f"a feedback for envs {list(fed_back)} and an infer for {list(asks)} of {list(ENVS)}"
                    line.action(asks, clause="4.3", what=what)
            except RunEnded:
                self._refused_ragged = True
                self.report.note(
                    "4.3",
                    "the server stops a client that asks for some of its envs while others hold a chunk, as lockstep "
                    "trainers do: use one env per connection, or step all envs together",
                )

    def _errors(self) -> None:
        """Break the protocol in three ways [7.2]; each costs the connection, and nobody else."""
        word = self._wording
        nameless = word.infer(ENVS).to_wire()
        del nameless["env_indices"]
        unsplittable = word.feedback(ENVS, info={"task": "pick"})
        self._refused("5.2", "an infer without env_indices", nameless)
        self._refused("4.2", "two infers in a row", word.infer(ENVS), word.infer(ENVS), answers=1)
        self._refused("5.4", "an info that cannot be split per env", unsplittable, word.infer(ENVS), asked=True)

    def _scoping(self) -> None:
        """Let two connections use the same env indices at the same time [4.4]."""
        word, what = self._wording, f"infers for envs {list(ENVS)} on two connections"
        with self._line() as one, self._line() as other:
            one.send(word.infer(ENVS))
            other.send(word.infer(ENVS))
            one.action(ENVS, clause="4.4", what=what)
            if not other.has_frame():
                self.report.note(
                    "4.4",
                    "a second client gets no action while a first is served: it may be waiting for a place; whether "
                    "two connections may both have an env 0 could not be checked",
                )
                return
            other.action(ENVS, clause="4.4", what=what)
            for terminated in ((0,), ()):
                one.send(word.feedback(ENVS, terminated=terminated), word.infer(ENVS))
                other.send(word.feedback(_MIXED), word.infer(_MIXED))
                one.action(ENVS, clause="4.4", what=what)
                other.action(_MIXED, clause="4.4", what=what)
            one.close()
            with self._line() as third:  # where a lockstep trainer has a place again
                third.send(word.infer(ENVS))
                other.send(word.feedback(ENVS), word.infer(ENVS))
                other.action(ENVS, clause="4.4", what="another connection with the same envs was closed")
                third.action(ENVS, clause="4.4", what=what)

    def _reuse(self) -> None:
        """Leave out observations that the server has, and some that it cannot have [10.1]."""
        word = self._wording
        with self._line() as line:
            if REUSE_FEEDBACK_OBS not in line.offer.features:
                return
            self._ask(line)
            for terminated, reuse, what in (
                ((), (True, False, True), "an infer that reuses some observations"),
                ((), (True, True, True), "an infer that reuses all observations"),
                ((0,), (False, True, True), "an infer that reuses what goes on after an episode ended"),
            ):
                line.send(word.feedback(ENVS, terminated=terminated), word.infer(ENVS, reuse=reuse))
                line.action(ENVS, clause="10.1", what=what)

        ended, reuses = word.feedback(ENVS, terminated=(1,)), word.infer(ENVS, reuse=(False, True, False))
        self._refused("10.1", "a reuse after the end of an episode", ended, reuses, asked=True)
        self._refused("10.1", "a reuse on a fresh connection", word.infer(ENVS, reuse=(True, False, False)))

    def _until_stop(self) -> None:
        """Exchange until the server ends the run, which it must say [7.1]."""
        if not self.options.until_stop:
            return
        if self._refused_ragged:
            self._leave_out([Phase.STOP], "ragged use may have ended the run")
            return
        word = self._wording
        try:
            with self._line() as line:
                for _ in range(self.options.max_exchanges):
                    line.send(word.infer(ENVS))
                    line.action(ENVS, clause="7.1", what="an infer", may_stop=True)
                    line.send(word.feedback(ENVS))
        except RunEnded:
            self.report.passed("7.1", "the end of the run is said with plugrl-server-stop")
            return
        self.report.violation("7.1", f"the server did not stop within {self.options.max_exchanges} exchanges")

    # What phases share ------------------------------------------------------------------------------------------

    def _ask(self, line: Line) -> None:
        line.send(self._wording.infer(ENVS))
        line.action(ENVS, clause="5.2", what="an infer")

    def _refused(
        self,
        clause: str,
        what: str,
        *messages: Infer | Feedback | dict[str, Value],
        asked: bool = False,
        answers: int = 0,
    ) -> None:
        """Break the protocol on a connection of its own: it must be closed for a resync, and the server live on.

        Args:
            clause: What the checker breaks.
            what: How.
            messages: Break it.
            asked: Whether they come after an infer that was answered.
            answers: Actions that may come before the close.
        """
        expected = f"{RESYNCED[0]} {RESYNCED[1]}"
        with self._line() as line:
            if asked:
                self._ask(line)
            line.send(*messages)
            came = line.answers_until_close(answers + 1)
            ending, text = line.ending, line.ending_text
        if came is None:
            self.report.violation(clause, f"{what} was not answered by a close within {self.options.timeout_s:g} s")
        elif came > answers:
            self.report.violation(clause, f"{what} was answered by an action, expected a close with {expected}")
        if not self._alive():
            self.report.violation(clause, f"{what} ended the server: nobody is served after it (closed with {text})")
            raise ServerGone
        if came is None or came > answers:
            return
        if self.report.check(
            ending == RESYNCED,
            "7.2",
            "a broken rule closes its connection with plugrl-server-resync",
            f"{what} was closed with {text}, expected {expected}",
        ):
            self.report.passed(clause, f"{what} is refused, and the server lives on")

    def _alive(self) -> bool:
        """Return whether a new connection is served, in whatever way."""
        try:
            with self._line(report=Report("")) as line:
                line.send(self._wording.infer(ENVS))
                came = line.answers_until_close(1)
                if came == 0 and line.ending == STOPPED:
                    raise RunEnded
        except ServerGone:
            return False
        return bool(came)
