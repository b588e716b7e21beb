"""The 64-bit digest of a step: what the live check and the ledger share; below server, client and ledger."""

from __future__ import annotations

from plugrl_bridges.digest.digest import EnvDigest, StepDigests
from plugrl_bridges.digest.env import DigestEnv
from plugrl_bridges.digest.shared import DigestRow, SharedDigests

__all__ = ["DigestEnv", "DigestRow", "EnvDigest", "SharedDigests", "StepDigests"]
