"""An env of 100 ms per step, for client processes."""

from __future__ import annotations

from tests.support import CountingEnv


def make() -> CountingEnv:
    return CountingEnv(delay_s=0.1)
