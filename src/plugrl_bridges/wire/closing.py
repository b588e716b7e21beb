"""The close codes and reasons that mean something in the protocol [7]; a reason is compared to the letter.

Both ends use these names: ``server`` closes with them, ``client.reconnect`` reads what they ask of a client.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FEEDBACK_TIMEOUT", "GOING_AWAY", "INTERNAL_ERROR", "RESYNC", "STOP"]

GOING_AWAY: Final = 1001
"""Close code of a server that is done with the client or with this connection; the reason says which [7.1] to [7.3]."""
INTERNAL_ERROR: Final = 1011
"""Close code for a fault of the server [7.4]; a client whose environment raised uses it too."""

STOP: Final = "plugrl-server-stop"
"""Reason: the run is over, or this client cannot be served in it; the client does not come back [7.1]."""
RESYNC: Final = "plugrl-server-resync"
"""Reason: the client broke the protocol; it comes back and begins anew, with an infer [7.2]."""
FEEDBACK_TIMEOUT: Final = "Feedback timeout"
"""Reason: the step took longer than the server waits; the client comes back and begins anew [7.3]."""
