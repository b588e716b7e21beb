"""Own what every adapter is beside its trainer's view: the one who listens, and who stops listening.

Each adapter derives from this and from its trainer's class, and translates what ``server.lockstep`` gives.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from plugrl_bridges.server.lockstep import Lockstep

if TYPE_CHECKING:
    from plugrl_bridges.server.options import BridgeOptions

__all__ = ["Adapter"]


class Adapter:
    """Hold the lockstep below an adapter; call `_listen` first, and `_stop_listening` when it is closed."""

    def _listen(self, options: BridgeOptions) -> None:
        """Listen at once; clients are waited for later.

        Raises:
            OSError: if the port cannot be had; the text names it and the option.
        """
        self._lockstep = Lockstep(options)
        self._finalizer = weakref.finalize(self, self._lockstep.close)
        self._finalizer.atexit = False  # the hub sees to the interpreter's exit

    def _stop_listening(self) -> None:
        """Tell every client that the run is over, and free the port; idempotent, bounded."""
        self._finalizer.detach()
        self._lockstep.close()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._lockstep.port

    @property
    def url(self) -> str:
        """The URL for ``plugrl-env-client --url``."""
        return self._lockstep.url

    @property
    def client_losses(self) -> int:
        """How many times a client with slots was lost."""
        return self._lockstep.client_losses

    @property
    def verified(self) -> int:
        """How many env steps and first observations the live check has compared; 0 without ``verify``."""
        return self._lockstep.verified

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Refuse to be pickled or copied: a listening socket and its clients cannot be.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{self!r} can be neither pickled nor copied: its clients are connected to this one; make another"
        )
