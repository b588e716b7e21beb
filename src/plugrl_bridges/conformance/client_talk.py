"""One connection with a client under test: metadata, then infer, action and feedback in turn, each checked.

``client_checker`` makes one per connection, says how many exchanges there are to be, and how it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from plugrl_bridges import __version__
from plugrl_bridges.conformance.client_checks import Broken, MessageChecks
from plugrl_bridges.conformance.client_server import Gone, Stalled
from plugrl_bridges.conformance.digest_checks import DigestChecks
from plugrl_bridges.conformance.probe_checks import ProbeModel, probe_actions
from plugrl_bridges.wire.messages import PROTOCOL_VERSION, Action, Infer, Metadata, to_bytes
from plugrl_bridges.wire.session import ENV_SPEC, REUSE_FEEDBACK_OBS, STEP_DIGEST

if TYPE_CHECKING:
    from plugrl_bridges.conformance.client_options import ClientCheckOptions
    from plugrl_bridges.conformance.client_server import Link
    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Value

__all__ = ["Finished", "Hung", "Talk"]

_LATE_S = 0.3
"""So long the server keeps silent at first: a client that does not wait for the metadata gives itself away."""
_PADDING_BYTES = (2 << 20) + 1000
"""More than the libraries' customary bound of 1 MiB on a message."""


class Hung(Broken):
    """The client did nothing for the whole timeout; the violation is in the report."""


class Finished(Exception):
    """The client ended the conversation by itself, where it may."""


class Talk:
    """The conversation with a client over one connection.

    Args:
        link: Nothing was sent or received yet.
        report: Where to write what is found.
        options: Of the run.
        wanted: How many exchanges are planned on it.
        digests: Of this client, over all its connections; None: it has none before.
        reconnected: Whether the client was here before and was told to come back.
    """

    def __init__(
        self,
        link: Link,
        report: Report,
        options: ClientCheckOptions,
        *,
        wanted: int,
        digests: DigestChecks | None = None,
        reconnected: bool = False,
    ) -> None:
        self.link = link
        self._report = report
        self._options = options
        self._wanted = wanted
        self._reconnected = reconnected
        self._checks = MessageChecks(report, options.features, fresh=not reconnected)
        self._digests = DigestChecks(report, options.features) if digests is None else digests
        self._digests.begin(fresh=not reconnected)
        self._model = ProbeModel(report, options.action_dim) if options.probe else None
        self._envs: list[int] = []
        self._messages = self._actions = self._exchanges = 0

    def open(self) -> None:
        """Wait a little, and then send the metadata.

        Raises:
            Broken: if the client is gone.
            Hung: if it does not read the metadata.
        """
        self._report.check(
            not self.link.extensions,
            "1",
            "no compression is offered in the handshake",
            f"the handshake offers {self.link.extensions!r}; no extension is used in this protocol",
        )
        try:
            early = self.link.receive(_LATE_S)
            if early is not None:
                self._report.violation("4", "the client sent a message before it had read the metadata")
                self.link.put_back(early)
            else:
                self._report.passed("4", "the client says nothing before it has read the metadata")
            self.link.send(b"".join(to_bytes(Metadata(self._metadata()))))
        except Gone as exc:
            self._report.violation("4", f"the client left before the metadata came: {exc}")
            raise Broken from exc
        except Stalled as exc:
            self._stalled("5.1", "the metadata", exc)

    def _metadata(self) -> dict[str, Value]:
        """Return metadata over 2 MiB; on a second connection without whatever a client must not require."""
        data: dict[str, Value] = {
            "conformance_padding": "." * _PADDING_BYTES,
            "conformance_unknown": {"list": [1, 2.5, None, True], "array": np.arange(3)},
        }
        if self._options.features:
            data["features"] = sorted(self._options.features)
        if not self._reconnected:
            data |= {
                "protocol_version": PROTOCOL_VERSION,
                "server": "plugrl-conformance",
                "server_version": __version__,
                "action_horizon": self._options.horizon,
                "action_dim": self._options.action_dim,
            }
        return data

    def exchange(self) -> None:
        """Receive an infer, answer it, receive the feedback."""
        self.infer()
        self.act()
        self._receive("feedback")
        self._exchanges += 1

    def infer(self) -> None:
        """Receive an infer and leave it unanswered."""
        self._receive("infer")

    def act(self, *, then_close: str | None = None) -> None:
        """Answer the infer; close with the reason ``then_close``, if there is one, right after it."""
        options, envs = self._options, self._envs
        # Without the probe environment there may be a robot at the other end: zeros are the least surprising.
        action = probe_actions(envs, options.horizon, options.action_dim, options.action_dtype)
        if self._model is None:
            action = np.zeros_like(action)
        else:
            self._model.action(envs, action)
        self._digests.action(envs, action)
        self._checks.holding.update(envs)
        self._actions += 1
        message = b"".join(to_bytes(Action(np.array(envs, np.int64), action)))
        if then_close is not None:
            self.link.close(then_close, last=message)
            return
        try:
            self.link.send(message)
        except Gone as exc:
            self._left(exc, "infer")
        except Stalled as exc:
            self._stalled("4.2", "an action", exc)

    def end(self) -> None:
        """Look back on what the client made of the offered features."""
        checks = self._checks
        for name, possible, used, cost in (
            (REUSE_FEEDBACK_OBS, checks.chances, checks.marks, "each observation travels twice"),
            (ENV_SPEC, True, checks.announced, "the trainer must be told spaces"),
            (STEP_DIGEST, True, self._digests.announced, "a trainer cannot verify steps"),
        ):
            clause = "10.1" if name == REUSE_FEEDBACK_OBS else name
            if used:
                self._report.passed(clause, f"{name} was offered and used")
            elif name in self._options.features and possible:
                self._report.note(clause, f"{name} was offered and not used: {cost}")

    def _receive(self, due: str) -> None:
        while True:
            try:
                data = self.link.receive(self._options.timeout_s)
            except Gone as exc:
                self._left(exc, due)
            if data is None:
                self._report.violation("4.2", f"no {due} came within {self._options.timeout_s:g} s")
                raise Hung
            message = self._checks.parsed(data)
            kind = "infer" if isinstance(message, Infer) else "feedback"
            self._messages += 1
            if self._messages > 1 or not self._reconnected or self._starts_anew(kind):
                break
        if not self._report.check(
            kind == due, "4.2", "infer, action and feedback alternate strictly", f"expected {due}, got {kind}"
        ):
            raise Broken
        if isinstance(message, Infer):
            asked = self._checks.infer(message)
            self._digests.infer(asked)
            self._envs = asked.envs
            if self._model is not None:
                self._model.infer(asked)
        else:
            told = self._checks.feedback(message)
            self._digests.feedback(told)
            if self._model is not None:
                self._model.feedback(told)

    def _starts_anew(self, kind: str) -> bool:
        """Check the first message after a reconnect."""
        return self._report.check(
            kind == "infer",
            "7.6",
            "after a reconnect the first message is an infer",
            f"the first message after a reconnect is a {kind}: what the client still holds must be dropped",
        )

    def _stalled(self, clause: str, what: str, cause: Stalled) -> NoReturn:
        self._report.violation(clause, f"the client did not read {what} within {self._options.timeout_s:g} s")
        raise Hung from cause

    def _left(self, gone: Gone, due: str) -> NoReturn:
        """Judge that the client left when this message was due of it.

        Raises:
            Finished: if it may.
            Broken: if not.
        """
        size = f"{_PADDING_BYTES / 2**20:.1f} MiB"
        if self._messages == 0:
            if gone.code == 1009:
                self._report.violation("1", f"the client refused metadata of {size} as too large ({gone})")
            else:
                self._report.violation(
                    "5.1", f"the client left at the metadata, which was {size} with keys nobody knows: {gone}"
                )
            raise Broken
        if self._actions and not self._exchanges:
            options = self._options
            shape = [options.horizon, len(self._envs), options.action_dim]
            self._report.violation(
                "5.3",
                f"the client left at its first action, an array {np.dtype(options.action_dtype).str}{shape}: {gone}",
            )
            raise Broken
        if due != "infer" or gone.code not in {1000, 1006}:
            self._report.violation("4.2", f"the client left when its {due} was due: {gone}")
            raise Broken
        if gone.code == 1000:
            self._report.passed("7.5", "a client that has finished closes with 1000")
        else:
            self._report.note("7.5", "the client finished without a close frame: a server takes that for a loss")
        if self._exchanges < self._wanted:
            self._report.note(
                "7.1", f"the client finished by itself after {self._exchanges} of {self._wanted} exchanges"
            )
        raise Finished
