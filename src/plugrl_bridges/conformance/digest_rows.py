"""Own the digest of one step or reset as the checker makes it: of values as they travelled, over announced spaces.

Part of ``digest_checks``, which is the caller. The arithmetic is that of ``ledger.digest``, which golden vectors hold
to the protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.digest.digest import RESET, TERMINATED, TRUNCATED, EnvDigest
from plugrl_bridges.digest.locating import locate
from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.spaces import ActionLayout, ObservationLayout, space_from_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.wire.codec import Array, Value
    from plugrl_bridges.wire.observation import Observation

__all__ = ["DigestRow", "DigestSpaces"]


class DigestSpaces:
    """Hold the spaces that a client announced.

    Args:
        observation: As in its env_spec.
        action: As in its env_spec.

    Raises:
        RemoteProtocolError: if one of them describes no space [env-spec].
        SpaceError: for a space of which nothing can travel.
    """

    def __init__(self, observation: Value, action: Value) -> None:
        self.observations = ObservationLayout(space_from_wire(observation))
        self._actions = ActionLayout(space_from_wire(action))
        self.action_leaf = ObservationLayout(self._actions.space).leaves[0]
        self.digest = EnvDigest([self.action_leaf], self.observations.leaves)

    def actions(self, action: Array) -> Array | None:
        """Give the first step of a chunk ``[H, n, d]`` as ``[n, *shape]``; None if it does not fit the space."""
        try:
            first = self._actions.from_wire(action)[0]
        except RemoteProtocolError:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            taken: Array = first.astype(self.action_leaf.dtype)
        return taken

    def read(self, observation: Observation, n: int) -> list[Array]:
        """Give one array ``[n, *shape]`` per entry.

        Raises:
            RemoteProtocolError: if they are not of the space [5.2].
        """
        arrays = self.observations.allocate(n)
        if n:  # else all are marked reuse: there is nothing to read
            self.observations.read(observation, arrays, slice(None))
        return arrays


class DigestRow:
    """Own the digest of one step, or of a reset.

    Args:
        spaces: What the values are of.
        observation: Per entry its value.
        action: Of the step; None for a reset.
        reward: Of the step.
        flags: 1 for terminated, 2 for truncated, 4 for a reset.
    """

    def __init__(
        self,
        spaces: DigestSpaces,
        observation: Sequence[Array],
        *,
        action: Array | None = None,
        reward: float = 0.0,
        flags: int = RESET,
    ) -> None:
        leaf, digest = spaces.action_leaf, spaces.digest
        self._spaces = spaces
        self._observation = observation
        self._action = np.zeros(leaf.shape, leaf.dtype) if action is None else action
        self._reward = reward
        self._flags = flags
        if action is None:
            self.sum = digest.reset(observation)
            """What it adds to a chain: the sum of its words, each times its key."""
        else:
            digest.value = 0
            digest.take([action])
            self.sum = digest.give(reward, bool(flags & TERMINATED), bool(flags & TRUNCATED), observation)

    def difference(self, theirs: int, ours: int) -> str:
        """Say which value makes two digests differ; or that it is no single one."""
        leaves = self._spaces.observations.leaves
        found = locate(
            theirs - ours,
            flags=self._flags,
            reward=self._reward,
            actions=[("action", self._spaces.action_leaf, self._action)],
            observations=[(leaf.name, leaf, value) for leaf, value in zip(leaves, self._observation, strict=True)],
        )
        if found is None:
            return ": several values differ, or the digest is made in another way"
        what = f"observation {found.cell}" if found.field == "obs" else found.cell
        return f": {what} is {found.ours} on the wire and {found.theirs} in the digest"
