"""The scenarios through which a client is led, and the judgement of how it ends.

`check_client` is the way in. Each scenario starts the client anew:

- ``basic``: the exchange, and then a stop: the client exits with 0 and does not come back [7.1];
- ``resync``: closed while the client holds a feedback; it comes back, drops that, and asks anew [7.2], [7.6];
- ``text``: a text frame in place of an action, at which a client gives up [7.4].

What is said on one connection is the concern of ``client_talk``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, NoReturn

from plugrl_bridges.conformance.client_checks import Broken
from plugrl_bridges.conformance.client_server import RESYNC, STOP, ClientProcess, Gone, Link, Listener, Stalled
from plugrl_bridges.conformance.client_talk import Finished, Hung, Talk
from plugrl_bridges.conformance.digest_checks import DigestChecks
from plugrl_bridges.conformance.report import Report
from plugrl_bridges.wire.session import STEP_DIGEST

if TYPE_CHECKING:
    from plugrl_bridges.conformance.client_options import ClientCheckOptions

__all__ = ["check_client"]

logger = logging.getLogger(__name__)

_TEXT = "plugrl-conformance sends this text frame where an action is due"
_WATCH_S = 2.0
"""So long a client that was started elsewhere is watched for coming back. One of ours is watched until it exits."""


def check_client(options: ClientCheckOptions) -> Report:
    """Lead a client through the scenarios.

    Args:
        options: What to do, and with whom.

    Returns:
        What was found. All processes that were started have ended.

    Raises:
        OSError: if the port cannot be had.
    """
    with Listener(options.host, options.port, timeout_s=options.timeout_s) as listener:
        address = f"ws://{options.host}:{listener.port}"
        report = Report(f"env client at {address}")
        seen = "what the client did with its actions" if options.probe else "the messages only, no probe environment"
        report.preamble += [
            f"scenarios: {', '.join(options.scenarios)}; checked: {seen}",
            f"actions: {options.action_dtype} [{options.horizon}, n, {options.action_dim}]; features offered: "
            + (", ".join(sorted(options.features)) or "none"),
        ]
        if STEP_DIGEST in options.features and options.horizon > 1:
            report.preamble.append(
                f"not compared: the digests of the steps themselves, since a chunk has {options.horizon} of them; only "
                "--horizon 1 compares them"
            )
        for at, name in enumerate(options.scenarios):
            logger.info("%s: scenario %s, waiting for a client", address, name)
            try:
                with contextlib.ExitStack() as stack:
                    process = None
                    if options.client is not None:
                        process = stack.enter_context(ClientProcess(_command(options, options.client, listener.port)))
                    _Scenario(report, options, listener, process).run(name)
            except Hung:
                left = options.scenarios[at + 1 :]
                if left:
                    report.preamble.append(f"not run, since the client hung in scenario {name}: {', '.join(left)}")
                break
    return report


def _command(options: ClientCheckOptions, command: str, port: int) -> str:
    url = f"ws://{options.host}:{port}"
    for mark, value in (("{url}", url), ("{host}", options.host), ("{port}", str(port))):
        command = command.replace(mark, value)
    return command


class _Scenario:
    """One scenario with one client.

    Args:
        report: Where to write what is found.
        options: Of the run.
        listener: Where the client comes to.
        process: The client; None if it was started elsewhere.
    """

    def __init__(
        self, report: Report, options: ClientCheckOptions, listener: Listener, process: ClientProcess | None
    ) -> None:
        self._report = report
        self._options = options
        self._listener = listener
        self._process = process
        self._digests = DigestChecks(report, options.features)

    def run(self, name: str) -> None:
        """Run it by its name.

        Raises:
            Hung: if the client did nothing for the whole timeout.
        """
        scenario = {"basic": self._basic, "resync": self._resync, "text": self._text}[name]
        try:
            scenario()
        except Finished:
            self._judge_own_end()
        except Hung:
            raise
        except Broken:
            logger.debug("scenario %s was cut short", name)

    # The scenarios ---------------------------------------------------------------------------------------------------

    def _basic(self) -> None:
        steps = self._options.steps
        talk = self._talk(steps)
        self._exchange(talk, steps)
        self._stop(talk)

    def _resync(self) -> None:
        before = max(1, self._options.steps // 2)
        after = max(1, self._options.steps - before)
        talk = self._talk(before)
        self._exchange(talk, before)
        talk.infer()
        talk.end()
        self._drop_others()
        talk.act(then_close=RESYNC)
        talk = self._talk(after, reconnected=True)
        self._report.passed("7.2", "a client that is told to resync comes back")
        self._exchange(talk, after)
        self._stop(talk)

    def _text(self) -> None:
        steps = max(1, self._options.steps // 4)
        talk = self._talk(steps)
        self._exchange(talk, steps)
        talk.infer()
        talk.end()
        self._drop_others()
        try:
            talk.link.send(_TEXT)
            answer = talk.link.receive(self._options.timeout_s)
        except Gone:
            pass
        except Stalled:
            self._hung("7.4", f"the client did not read a text frame within {self._seconds}")
        else:
            if answer is None:
                self._hung("7.4", f"the client was still connected {self._seconds} after a text frame")
            self._fail("7.4", "the client went on after a text frame")
        self._await_exit(talk, "7.4", "a text frame")
        if self._process is None or self._process.status:
            self._report.passed("7.4", "a text frame is a fatal error")
        else:
            self._report.note("7.4", "the client exits with 0 after a fatal error, as if it had finished")

    # Their parts -----------------------------------------------------------------------------------------------------

    @property
    def _seconds(self) -> str:
        return f"{self._options.timeout_s:g} s"

    def _talk(self, wanted: int, *, reconnected: bool = False) -> Talk:
        """Wait for a connection, and open it."""
        process = self._process
        link = self._listener.next(self._options.timeout_s, given_up=lambda: process is not None and process.ended)
        clause, what = ("7.2", "come back after a resync") if reconnected else ("1", "connect")
        if link is None:
            if process is not None and process.ended:
                self._fail(clause, f"the client did not {what}; it ended with exit status {process.status}")
            self._hung(clause, f"the client did not {what} within {self._seconds}")
        talk = Talk(link, self._report, self._options, wanted=wanted, digests=self._digests, reconnected=reconnected)
        talk.open()
        return talk

    def _exchange(self, talk: Talk, count: int) -> None:
        for _ in range(count):
            talk.exchange()

    def _stop(self, talk: Talk) -> None:
        """End the run [7.1]; the infer before it shows what follows the last feedback."""
        talk.infer()
        talk.end()
        self._drop_others()
        talk.link.close(STOP)
        self._await_exit(talk, "7.1", STOP)
        if self._process is not None and self._process.status:
            self._fail("7.1", f"after {STOP} the client ended with exit status {self._process.status}, expected 0")
        self._report.passed("7.1", f"after {STOP} the client exits with 0 and does not come back")

    def _await_exit(self, talk: Talk, clause: str, after: str) -> None:
        """Wait until the client is gone; it must not come back."""
        process, timeout_s = self._process, self._options.timeout_s
        deadline = time.monotonic() + timeout_s
        if process is None:
            if not talk.link.closed_within(timeout_s) and clause == "7.1":
                self._hung(clause, f"the client was still connected {self._seconds} after {after}")
            back = self._listener.next(min(_WATCH_S, timeout_s), given_up=lambda: False)
        else:
            back = self._listener.next(timeout_s, given_up=lambda: process.ended)
        if back is not None:
            back.abort()
            self._fail(clause, f"the client came back after {after}")
        if process is not None and not process.ended:
            self._hung(clause, f"the client was still running {self._seconds} after {after}")
        if clause == "7.1" and talk.link.closed_within(deadline - time.monotonic()) and not talk.link.close_frame_came:
            self._report.note("7.1", f"the client left {after} unanswered: it ended without a close frame")

    def _judge_own_end(self) -> None:
        """Judge a client that finished before it was stopped."""
        process = self._process
        if process is None:
            return
        if not process.wait(self._options.timeout_s):
            self._hung("7.5", f"the client was still running {self._seconds} after it had closed its connection")
        if process.status:
            self._report.violation("7.5", f"the client had finished, but ended with exit status {process.status}")

    def _drop_others(self) -> None:
        """Refuse whoever came beside the connection that is judged."""
        others: list[Link] = []
        while (link := self._listener.next(0.0, given_up=lambda: True)) is not None:
            others.append(link)
            link.close(STOP)
        if others:
            self._report.note("1", "the client opened more connections than one at a time; only the first was judged")

    def _fail(self, clause: str, detail: str) -> NoReturn:
        self._report.violation(clause, detail)
        raise Broken

    def _hung(self, clause: str, detail: str) -> NoReturn:
        self._report.violation(clause, detail)
        raise Hung
