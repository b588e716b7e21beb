"""What is read off any env or vector env: its name, and how a vector env begins the next episode.

In every release of Gymnasium. The ledger and the client of a batched simulator ask.
"""

from __future__ import annotations

import enum

import gymnasium

__all__ = ["HAS_MODES", "Autoreset", "autoreset_of", "env_name"]

HAS_MODES = hasattr(gymnasium.vector, "AutoresetMode")
"""Whether Gymnasium knows the modes: from 1.1 on; 0.29 is always SAME_STEP, 1.0 always NEXT_STEP."""


class Autoreset(enum.Enum):
    """Gymnasium's autoreset modes, under names without punctuation."""

    NEXT_STEP = "nextstep"
    SAME_STEP = "samestep"
    DISABLED = "disabled"


def env_name(env: object) -> str:
    """Return the id of an env or vector env; its class where it has none."""
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def autoreset_of(env: object) -> Autoreset:
    """Read a vector env's autoreset mode, an enum or a str, from its metadata; or know what the release does.

    Raises:
        ValueError: naming the env, for a mode that Gymnasium does not have.
    """
    if not HAS_MODES:
        return Autoreset.SAME_STEP if gymnasium.__version__.startswith("0.") else Autoreset.NEXT_STEP
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        return Autoreset.NEXT_STEP  # what Gymnasium itself assumes then
    letters = "".join(filter(str.isalpha, str(getattr(mode, "name", mode)))).lower()
    try:
        return Autoreset(letters)
    except ValueError:
        raise ValueError(f'{env_name(env)} has an unknown metadata["autoreset_mode"]: {mode!r}') from None
