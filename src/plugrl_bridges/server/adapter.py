"""What every adapter is beside its trainer's view: who listens, who stops listening, and what envs can be asked.

Each adapter derives from this and from its trainer's class, and translates what ``server.lockstep`` gives. Protocol
version 1 carries no attributes and no calls: what is known of the envs is what a client announced.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from plugrl_bridges.server.lockstep import Lockstep

if TYPE_CHECKING:
    from plugrl_bridges.server.options import BridgeOptions

__all__ = ["Adapter", "known_attribute", "no_call", "no_set"]


class Adapter:
    """What every adapter is beside its trainer's view; call `_listen` first, `_stop_listening` at the end."""

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


def known_attribute(lockstep: Lockstep, name: str) -> object:
    """Return an attribute of the envs that is known here: ``render_mode``, ``spec`` (id and time limit), spaces.

    Args:
        lockstep: Connected.
        name: Of the attribute.

    Raises:
        AttributeError: for anything else, naming what is known.
    """
    announced = lockstep.announced
    known: dict[str, object] = {
        "render_mode": announced.render_mode,
        "observation_space": lockstep.observation_layout.space,
        "action_space": lockstep.action_layout.space,
    }
    if announced.spec is not None:
        known["spec"] = announced.spec
    if name not in known:
        raise AttributeError(
            f"remote environments cannot be asked for {name!r}: protocol version 1 carries no attributes; "
            f"known here are {sorted(known)}"
        )
    return known[name]


def no_set(name: str) -> AttributeError:
    """Return the error for an attribute that was to be set."""
    return AttributeError(
        f"cannot set {name!r} on remote environments: protocol version 1 carries no attributes; set it at the "
        "client (--env-kwargs, --env-factory) or pass it as a reset option"
    )


def no_call(name: str) -> NotImplementedError:
    """Return the error for a method that was to be called."""
    return NotImplementedError(
        f"cannot call {name!r} on remote environments: protocol version 1 carries no calls; call it at the "
        "client, inside an --env-factory"
    )
