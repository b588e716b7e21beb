"""What RLinf is told of episodes: return, length, success, per env, as it reports them under ``env/``.

Pure bookkeeping over arrays; ``rlinf.env`` feeds it. The episode log of the bridge counts for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.wire.codec import Array

__all__ = ["EpisodeTally"]


class EpisodeTally:
    """Counts of the running episodes of all envs."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._success = np.zeros(num_envs, np.bool_)

    def add(self, rewards: Array, lengths: Array, infos: Sequence[Mapping[str, Any]], stepped: Array) -> None:
        """Record one exchange of the envs in the mask ``stepped``, whose infos are those of its last step.

        Arrays are ``[num_envs]``: rewards summed over the steps of the exchange, lengths in env steps.
        """
        self._returns[stepped] += rewards[stepped]
        self._lengths[stepped] += lengths[stepped]
        for env, info in enumerate(infos):
            if info and stepped[env] and _succeeded(info):
                self._success[env] = True

    def restart(self, which: Array | None = None) -> None:
        """Begin the episodes of some envs, or of all."""
        for array in (self._returns, self._lengths, self._success):
            array[slice(None) if which is None else which] = 0

    def set_length(self, env: int, length: int) -> None:
        """Correct the length of an episode that the client knows better: it ended within a chunk."""
        self._lengths[env] = length

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return RLinf's ``episode``: tensors ``[num_envs]`` of their own."""
        return {
            "success_once": torch.from_numpy(self._success.copy()),
            "return": torch.from_numpy(self._returns.copy()),
            "episode_len": torch.from_numpy(self._lengths.copy()),
            "reward": torch.from_numpy(self._returns / np.maximum(self._lengths, 1)),
        }


def _succeeded(info: Mapping[str, Any]) -> bool:
    """Return whether an info says so: Gymnasium's custom, or the record of an ended episode [5.4]."""
    record = info.get("episode")
    if isinstance(record, dict) and _true(record.get("mask", True)) and _true(record.get("s")):
        return True
    return _true(info.get("is_success", info.get("success")))


def _true(value: object) -> bool:
    """Return whether a client's value is one true number: what it means by an array of several, nobody knows."""
    return isinstance(value, (bool, int, float, np.generic, np.ndarray)) and np.size(value) == 1 and bool(value == 1)
