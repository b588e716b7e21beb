"""Keep a ledger on both sides of the boundary, and compare them step by step.

Wrap each env in a `LedgerEnv` and what the trainer sees in a `LedgerVecEnv` (Stable-Baselines3) or a `LedgerVectorEnv`
(Gymnasium); give the files to `compare`, or to ``stepledger`` on the command line. Works with or without the bridge.

A ledger is a SQLite database: ``schema`` owns its tables, ``columns`` how values become bytes in them, ``writer`` and
``reader`` the files; ``choosing`` and ``comparing`` put both sides together. Nothing is imported before a name is used,
so that an env process needs the base install alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugrl_bridges.ledger.comparing import compare
    from plugrl_bridges.ledger.env import LedgerEnv
    from plugrl_bridges.ledger.outcome import Comparison, Difference
    from plugrl_bridges.ledger.reader import LedgerReader, RecordedEpisode
    from plugrl_bridges.ledger.vec_env import LedgerVecEnv
    from plugrl_bridges.ledger.vector_env import LedgerVectorEnv

__all__ = [
    "Comparison",
    "Difference",
    "LedgerEnv",
    "LedgerReader",
    "LedgerVecEnv",
    "LedgerVectorEnv",
    "RecordedEpisode",
    "compare",
]

_HOMES = {
    "Comparison": "outcome",
    "Difference": "outcome",
    "LedgerEnv": "env",
    "LedgerReader": "reader",
    "LedgerVecEnv": "vec_env",
    "LedgerVectorEnv": "vector_env",
    "RecordedEpisode": "reader",
    "compare": "comparing",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
