"""What the end of a connection means to a client [7], and how long it waits before it tries again.

Pure: time and randomness come in as arguments, nothing sleeps. ``env_client`` performs what is decided here.
"""

from __future__ import annotations

import enum
import math
import random
import ssl
from typing import NamedTuple

from plugrl_bridges.errors import ConnectionClosed, EnvFailed, HandshakeError, RemoteProtocolError
from plugrl_bridges.wire.closing import GOING_AWAY, INTERNAL_ERROR, STOP

__all__ = ["Backoff", "Ending", "TextFrame", "Then", "ending_of"]


class TextFrame(RemoteProtocolError):
    """The server sent a text frame: it is no training server [7.4]."""

    def __init__(self, message: str) -> None:
        super().__init__(message, clause="7.4")


class Then(enum.Enum):
    """What a client does when its connection has ended."""

    FINISH = "finish"
    """The run is over: exit 0, do not come back [7.1]."""
    RETRY = "retry"
    """Come back, with an infer first [7.2], [7.3], [7.4], [7.6]."""
    RAISE = "raise"
    """Let the error out; coming back cannot help."""


class Ending(NamedTuple):
    """What a client does next, and what it closes with where the connection is still open."""

    then: Then
    code: int = 1000
    reason: str = ""


def ending_of(error: BaseException) -> Ending:
    """Return what follows from the error that kept a connection from opening, or that ended an exchange."""
    match error:
        case HandshakeError(status=401 | 403) | HandshakeError(__cause__=ssl.SSLCertVerificationError()):
            return Ending(Then.RAISE)
        case HandshakeError():
            return Ending(Then.RETRY)
        case ConnectionClosed(code=code, reason=reason) if (code, reason) == (GOING_AWAY, STOP):
            return Ending(Then.FINISH)
        case ConnectionClosed():
            return Ending(Then.RETRY)
        case TextFrame():
            return Ending(Then.RAISE, 1003, str(error))
        case RemoteProtocolError():
            return Ending(Then.RETRY, 1002, str(error))
        case EnvFailed():
            return Ending(Then.RAISE, INTERNAL_ERROR, "env failed")
        case _:  # a stop, or an error of our own
            return Ending(Then.RAISE)


class Backoff:
    """How long to wait before the next try, and when to give up.

    The wait doubles from try to try and is jittered, so that a thousand clients do not come back at the same moment. A
    connection starts the count anew only once it has held for ``stable_s``: a server that answers each connection with
    a resync at once must not be stormed. After ``budget_s`` without a server it is time to give up.
    """

    def __init__(
        self,
        *,
        max_backoff_s: float = 5.0,
        budget_s: float = math.inf,
        first_s: float = 0.2,
        stable_s: float = 5.0,
        rng: random.Random | None = None,
    ) -> None:
        self.tries = 0
        """Tries since the last stable connection."""
        self.without_server_s = 0.0
        """Seconds without a server since the last stable connection."""
        self._max_s = max_backoff_s
        self._budget_s = budget_s
        self._first_s = first_s
        self._stable_s = stable_s
        self._rng = random.Random() if rng is None else rng  # noqa: S311 - jitter guards nothing

    @property
    def remaining_s(self) -> float:
        """Seconds left of the budget."""
        return max(0.0, self._budget_s - self.without_server_s)

    def next_wait_s(self) -> float | None:
        """Count one failed try; return the seconds to wait before the next, or None: the budget is used up."""
        self.tries += 1
        remaining = self.remaining_s
        if remaining <= 0:
            return None
        # The exponent is bounded: a client that waits for ever would overflow the float.
        wait = min(self._max_s, self._first_s * 2.0 ** min(self.tries - 1, 60))
        return min(wait * self._rng.uniform(0.5, 1.0), remaining)

    def spent(self, seconds: float) -> None:
        """Record that so much time passed without a server."""
        self.without_server_s += seconds

    def held(self, seconds: float) -> None:
        """Record that a connection was there for so long."""
        if seconds >= self._stable_s:
            self.tries = 0
            self.without_server_s = 0.0
