"""Own what each wrapper takes: one env, a Gymnasium vector env, or a Stable-Baselines3 one; and refuse the others.

``env``, ``vec_env`` and ``vector_env`` ask when they are made. Stable-Baselines3 is not imported for it.
"""

from __future__ import annotations

import operator
import sys

import gymnasium

__all__ = ["expect_env", "number_of"]

_ENV, _VECTOR_ENV, _VEC_ENV = "a Gymnasium env", "a Gymnasium vector env", "a Stable-Baselines3 VecEnv"
_TAKES = {"LedgerEnv": _ENV, "LedgerVectorEnv": _VECTOR_ENV, "LedgerVecEnv": _VEC_ENV}
_BASE = "stable_baselines3.common.vec_env.base_vec_env"


def expect_env(env: object, wrapper: str) -> None:
    """Refuse what a wrapper is not for.

    Args:
        env: What it was given.
        wrapper: ``"LedgerEnv"``, ``"LedgerVectorEnv"`` or ``"LedgerVecEnv"``.

    Raises:
        TypeError: naming what came, what is expected, and the wrapper for what came.
    """
    kind = _kind(env)
    due = _TAKES[wrapper]
    if kind == due:
        return
    came = f"{type(env).__name__}, {kind}" if kind else f"an object of type {type(env).__name__}"
    right = next((name for name, takes in _TAKES.items() if takes == kind), None)
    advice = f"; use {right} for it" if right else ""
    if kind == _ENV:
        advice += f", inside {due}, and {wrapper} around that"
    elif right:
        advice += ", and LedgerEnv for each env inside it"
    raise TypeError(f"{wrapper} is for {due}, got {came}{advice}")


def _kind(env: object) -> str | None:
    base = sys.modules.get(_BASE)  # without it there is no VecEnv either
    if base is not None and isinstance(env, base.VecEnv):
        return _VEC_ENV
    if isinstance(env, gymnasium.vector.VectorEnv):  # before Gymnasium 1.0 it is an Env as well
        return _VECTOR_ENV
    return _ENV if isinstance(env, gymnasium.Env) else None


def number_of(name: str, value: object) -> int:
    """Give a number of an env or of a rank.

    Args:
        name: Of the argument.
        value: What was given.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is negative, or too large for the file.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what has no index is refused
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}") from None
    if not 0 <= number < 1 << 31:
        raise ValueError(f"{name} must be from 0 to 2**31 - 1, got {number}")
    return number
