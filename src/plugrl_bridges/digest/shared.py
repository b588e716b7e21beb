"""The digests of the envs of one process: each env puts its values into its row, all are digested at once.

A batch costs hardly more than one env, so this is what a process with several envs should use: give `SharedDigests.row`
to each `LedgerEnv`, and read `values` once per vector step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.digest.digest import TERMINATED, TRUNCATED, StepDigests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.digest.digest import Entry
    from plugrl_bridges.wire.arrays import Array

__all__ = ["DigestRow", "SharedDigests"]

_STEP, _RESET = 1, 2


class SharedDigests:
    """The chained digests of envs that are stepped one after another, in one thread.

    Args:
        num_envs: n.
        actions: Entries of the action.
        observations: Entries of the observation.
    """

    def __init__(self, num_envs: int, actions: Sequence[Entry], observations: Sequence[Entry]) -> None:
        self._digests = StepDigests(num_envs, actions, observations)
        self.actions = [np.zeros((num_envs, *entry.shape), entry.dtype) for entry in actions]
        """Per entry ``[n, *shape]``: where the rows put what their envs take."""
        self.observations = [np.zeros((num_envs, *entry.shape), entry.dtype) for entry in observations]
        """Per entry ``[n, *shape]``: where the rows put what their envs return."""
        # Lists, which take single values quicker than arrays do.
        self.rewards = [0.0] * num_envs
        self.flags = [0] * num_envs
        self.pending = bytearray(num_envs)
        """Per row, what was put there and is not in the chains yet: nothing, a step or a reset."""
        self._nothing = bytes(num_envs)
        self._all_steps = bytes([_STEP]) * num_envs

    def row(self, number: int) -> DigestRow:
        """Return one env's row; hand it to a `LedgerEnv` as ``digest``."""
        return DigestRow(self, number)

    @property
    def values(self) -> Array:
        """The chains, uint64 ``[n]``: of each env, after its last step or reset."""
        self.fold()
        return self._digests.values

    def fold(self) -> None:
        """Add what is pending to the chains."""
        pending = self.pending
        if pending == self._nothing:
            return
        digests, before = self._digests, self._digests.values
        what = np.frombuffer(bytes(pending), np.uint8)
        if _STEP in pending:
            chains = digests.step_with_flags(self.actions, self.rewards, self.flags, self.observations)
            if pending != self._all_steps:
                digests.values = np.where(what == _STEP, chains, before)
        if _RESET in pending:
            digests.reset(self.observations, np.flatnonzero(what == _RESET))
        pending[:] = self._nothing


class DigestRow:
    """One env's row of `SharedDigests`, with the methods of an `EnvDigest`.

    Args:
        shared: Where the row is.
        number: Which row.
    """

    __slots__ = ("_actions", "_number", "_observations", "_pending", "_shared")

    def __init__(self, shared: SharedDigests, number: int) -> None:
        self._shared = shared
        self._number = number
        self._pending = shared.pending
        # "..." keeps a view where one env's value has no dimension.
        self._actions = [array[number, ...] for array in shared.actions]
        self._observations = [array[number, ...] for array in shared.observations]

    @property
    def value(self) -> int:
        """The chain of this env."""
        return int(self._shared.values[self._number])

    def take(self, actions: Sequence[Any]) -> None:
        """Record the action of a step, before the env may change it; call `give` next."""
        if self._pending[self._number]:
            self._shared.fold()
        _put(self._actions, actions)

    def give(self, reward: float, terminated: bool, truncated: bool, observations: Sequence[Any]) -> None:
        """Add the step whose action was taken; the arguments are those of `EnvDigest.give`."""
        shared, number = self._shared, self._number
        shared.rewards[number] = reward
        shared.flags[number] = (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
        _put(self._observations, observations)
        self._pending[number] = _STEP

    def reset(self, observations: Sequence[Any]) -> None:
        """Begin the chain anew; the arguments are those of `EnvDigest.reset`."""
        if self._pending[self._number]:
            self._shared.fold()
        _put(self._observations, observations)
        self._pending[self._number] = _RESET


def _put(views: list[Array], values: Sequence[Any]) -> None:
    if len(views) == 1:
        views[0][...] = values[0]
        return
    for view, value in zip(views, values, strict=True):
        view[...] = value
