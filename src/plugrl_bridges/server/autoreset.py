"""Own the choice of when an episode that follows another begins: Gymnasium's autoreset modes, under Gymnasium's names.

An enum of our own, since Gymnasium has one only from release 1.1 on. ``server.options`` takes it, ``server.exchange``
and ``server.lockstep`` act on it.
"""

from __future__ import annotations

import enum

__all__ = ["AutoresetMode", "to_autoreset_mode"]


class AutoresetMode(enum.Enum):
    """Say what the trainer gets in the step that ends an episode, and after it.

    The client begins the next episode at once in every mode, exactly once; the mode decides when the trainer sees it.
    """

    SAME_STEP = "SameStep"
    """The reset observation, with the terminal one in the infos."""
    NEXT_STEP = "NextStep"
    """The terminal observation; the next step ignores the action and gives the reset observation, with reward 0."""
    DISABLED = "Disabled"
    """The terminal observation; the trainer has to reset the slot before it steps again."""


def to_autoreset_mode(value: object) -> AutoresetMode:
    """Give the mode for what a user passed: this enum, Gymnasium's, or a name or value of either.

    Raises:
        ValueError: naming the argument, for anything else.
    """
    text = getattr(value, "name", value)
    if isinstance(text, str):
        letters = "".join(filter(str.isalpha, text)).lower()
        for mode in AutoresetMode:
            if mode.value.lower() == letters:
                return mode
    names = ", ".join(mode.name for mode in AutoresetMode)
    raise ValueError(f"autoreset_mode must be one of {names}, got {value!r}")
