"""Own what a trainer may ask of remote envs beside stepping them, and what it is told when it asks for more.

Protocol version 1 carries no attributes and no calls: what is known is what a client announced. The adapters ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugrl_bridges.server.lockstep import Lockstep

__all__ = ["known_attribute", "no_call", "no_set"]


def known_attribute(lockstep: Lockstep, name: str) -> object:
    """Give an attribute of the envs as far as it is known here: ``render_mode``, ``spec`` (id and time limit), spaces.

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
    """Give the error for an attribute that was to be set."""
    return AttributeError(
        f"cannot set {name!r} on remote environments: protocol version 1 carries no attributes; set it at the "
        "client (--env-kwargs, --env-factory) or pass it as a reset option"
    )


def no_call(name: str) -> NotImplementedError:
    """Give the error for a method that was to be called."""
    return NotImplementedError(
        f"cannot call {name!r} on remote environments: protocol version 1 carries no calls; call it at the "
        "client, inside an --env-factory"
    )
