"""Own where a client takes the digests of feature ``step-digest`` from: a ``LedgerEnv`` around each env.

A digest is made of the env's own values, before anything else of the client has touched them. ``envs`` is the caller;
``vector_env`` keeps the digests of a batched simulator itself. Knows no messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from plugrl_bridges.digest.shared import SharedDigests
from plugrl_bridges.ledger.env import LedgerEnv

if TYPE_CHECKING:
    from collections.abc import Sequence

    import gymnasium

    from plugrl_bridges.wire.arrays import Array

__all__ = ["Digests", "ledger_in", "with_digests"]

Env: TypeAlias = "gymnasium.Env[Any, Any]"


class Digests(Protocol):
    """Give the digests of a batch; ``ledger.SharedDigests`` and ``ledger.StepDigests`` do."""

    @property
    def values(self) -> Array:
        """The chain of each env, uint64 ``[n]``, in an array that is never changed."""


def with_digests(envs: Sequence[Env]) -> tuple[list[Env], Digests]:
    """Give the envs, each with a ledger around or inside it that keeps its digest.

    A `LedgerEnv` that an env has already is used, the innermost of several: it stands where the factory put it.

    Args:
        envs: All with the same spaces.

    Returns:
        What to step, and the digests of all.
    """
    inside = [ledger_in(env) for env in envs]
    first = inside[0] or LedgerEnv(envs[0], None)
    shared = SharedDigests(len(envs), *first.entries)
    made: list[Env] = []
    for row, (env, ledger) in enumerate(zip(envs, inside, strict=True)):
        if ledger is None:
            made.append(LedgerEnv(env, None, digest=shared.row(row)))
        else:
            ledger.keep_digest(shared.row(row))
            made.append(env)
    return made, shared


def ledger_in(env: Any) -> LedgerEnv | None:  # noqa: ANN401 - each wrapper has an ``env`` of some kind
    """Give the innermost `LedgerEnv` of an env and its wrappers; None if there is none."""
    found = None
    while env is not None:
        if isinstance(env, LedgerEnv):
            found = env
        env = getattr(env, "__dict__", {}).get("env")
    return found
