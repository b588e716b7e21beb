"""What each wrapper takes: one env, a Gymnasium vector env, or a Stable-Baselines3 one; others are refused.

``env``, ``vec_env`` and ``vector_env`` ask when they are made. Stable-Baselines3 is not imported for it.
"""

from __future__ import annotations

import sys

import gymnasium

__all__ = ["expect_env"]

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
