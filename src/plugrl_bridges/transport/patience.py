"""The decision how long to look for a message before going to sleep for it. Times come in as arguments.

A thread that sleeps in the kernel is woken in 20 to 60 µs, more on a virtual machine, and waking it costs the sender
as much: for a step of 200 µs that is the larger part of the boundary's price. So a wait that is expected to be short
is begun by looking again and again. What is expected is learned from the last waits: where they are long (a slow
simulator, a policy that computes, more clients than cores) nobody spins.

``websocket`` asks it at every wait, and yields the processor between two looks, so that whoever could run does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

__all__ = ["LIMIT_S", "Patience", "usable_processors", "yield_processor"]

LIMIT_S: Final = 400e-6
"""Longest look; a wait that is expected to be longer sleeps at once."""
_WEIGHT: Final = 0.25  # of the last wait in what is expected: three or four long waits end the spinning
_MARGIN: Final = 1.5


_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The quota of a container on Linux, where control groups are of version 2."""


def _processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        text = _CPU_MAX.read_text(encoding="ascii")
    except (OSError, ValueError):  # no container, no Linux, or an older one
        return allowed
    return usable_processors(allowed, text)


def usable_processors(allowed: int, cpu_max: str) -> int:
    """Return how many processors can be used at a time under a quota.

    A container's quota leaves every processor visible, but time spent looking is taken from whoever should answer.

    Args:
        allowed: How many the process may run on.
        cpu_max: What ``cpu.max`` holds: quota and period in µs, or ``max`` for no quota; anything else is none either.
    """
    quota, _, period = cpu_max.strip().partition(" ")
    if not (quota.isdecimal() and period.isdecimal() and int(period)):
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def yield_processor() -> None:
    """Let another thread or process run now, if one can."""
    _YIELD()


_YIELD = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)


class Patience:
    """How long a connection's waits have been, and so for how long it pays to look; one per connection.

    Args:
        processors: How many this process may use; with one alone nobody else could run meanwhile. None asks the system.
    """

    __slots__ = ("_enabled", "_expected_s")

    def __init__(self, processors: int | None = None) -> None:
        self._enabled = (_processors() if processors is None else processors) > 1
        self._expected_s = LIMIT_S  # worth one try

    def budget_s(self) -> float:
        """Return for how many seconds to look before sleeping; 0 to sleep at once."""
        if not self._enabled or self._expected_s > LIMIT_S:
            return 0.0
        return min(LIMIT_S, _MARGIN * self._expected_s + LIMIT_S / 8)

    def learn(self, waited_s: float) -> None:
        """Record how long a wait was, whether it was looked or slept through."""
        bounded = min(waited_s, 4 * LIMIT_S)  # one long pause is forgotten after a few short waits
        self._expected_s += _WEIGHT * (bounded - self._expected_s)
