"""Own where a client takes the digests of feature ``step-digest`` from: a ``DigestEnv`` around each env.

A digest is made of the env's own values, before anything else of the client has touched them. ``envs`` is the caller;
``vector_env`` keeps the digests of a batched simulator itself. Knows no messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from plugrl_bridges.digest.env import DigestEnv
from plugrl_bridges.digest.shared import SharedDigests

if TYPE_CHECKING:
    from collections.abc import Sequence

    import gymnasium

    from plugrl_bridges.wire.arrays import Array

__all__ = ["Digests", "digest_env_in", "with_digests"]

Env: TypeAlias = "gymnasium.Env[Any, Any]"


class Digests(Protocol):
    """The digests of a batch; `SharedDigests` and `StepDigests` are such."""

    @property
    def values(self) -> Array:
        """The chain of each env, uint64 ``[n]``, in an array that is never changed."""


def with_digests(envs: Sequence[Env]) -> tuple[list[Env], Digests]:
    """Return the envs, each with a `DigestEnv` around or inside it.

    One that an env has already, such as a ``LedgerEnv``, is used, the innermost of several: it stands where the factory
    put it.

    Args:
        envs: All with the same spaces.

    Returns:
        What to step, and the digests of all.
    """
    inside = [digest_env_in(env) for env in envs]
    first = inside[0] or DigestEnv(envs[0])
    shared = SharedDigests(len(envs), *first.entries)
    made: list[Env] = []
    for row, (env, found) in enumerate(zip(envs, inside, strict=True)):
        if found is None:
            made.append(DigestEnv(env, shared.row(row)))
        else:
            found.keep_digest(shared.row(row))
            made.append(env)
    return made, shared


def digest_env_in(env: Any) -> DigestEnv | None:  # noqa: ANN401 - each wrapper has an ``env`` of some kind
    """Return the innermost `DigestEnv` of an env and its wrappers; None if there is none."""
    found = None
    while env is not None:
        if isinstance(env, DigestEnv):
            found = env
        env = getattr(env, "__dict__", {}).get("env")
    return found
