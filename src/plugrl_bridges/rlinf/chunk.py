"""What is collected over a chunk of actions, and which envs of it have ended and wait.

Pure arrays in RLinf's terms; ``rlinf.env`` steps, and asks this for what RLinf is handed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.rlinf.observations import RLinfObservation
    from plugrl_bridges.server.result import StepResult
    from plugrl_bridges.wire.codec import Array

__all__ = ["Chunk", "ChunkResult", "Ended", "Infos"]

Infos: TypeAlias = "dict[str, Any]"
ChunkResult: TypeAlias = "tuple[list[RLinfObservation], torch.Tensor, torch.Tensor, torch.Tensor, list[Infos]]"
"""Observations, rewards ``[N, C]``, terminations ``[N, C]``, truncations ``[N, C]``, infos; lists per exchange."""


class Ended:
    """Remember the envs whose episode has ended and whose next one RLinf has not begun, and how they ended.

    Args:
        num_envs: How many envs there are.

    Attributes:
        terminated: bool ``[num_envs]``.
        truncated: bool ``[num_envs]``.
    """

    def __init__(self, num_envs: int) -> None:
        self.terminated = np.zeros(num_envs, np.bool_)
        self.truncated = np.zeros(num_envs, np.bool_)
        self._finals: list[Array] = []

    @property
    def mask(self) -> Array:
        """All of them, bool ``[num_envs]``, a new array."""
        mask: Array = self.terminated | self.truncated
        return mask

    def take(self, step: StepResult, terminated: Array, truncated: Array) -> None:
        """Record those that ended in a step.

        Args:
            step: Has their terminal observations.
            terminated: bool ``[num_envs]``, new ones only.
            truncated: Likewise.
        """
        new = terminated | truncated
        if not new.any():
            return
        if not self._finals:
            self._finals = [np.empty_like(array) for array in step.observations]
        for kept, array in zip(self._finals, step.observations, strict=True):
            kept[new] = array[new]
        self.terminated |= terminated
        self.truncated |= truncated

    def shown(self, observations: Sequence[Array]) -> Sequence[Array]:
        """Return observations in which these envs show their terminal one."""
        mask = self.mask
        if not mask.any():
            return observations
        shown = [array.copy() for array in observations]
        for array, kept in zip(shown, self._finals, strict=True):
            array[mask] = kept[mask]
        return shown

    def clear(self) -> None:
        """Forget them: their next episodes begin."""
        self.terminated[:] = False
        self.truncated[:] = False


class Chunk:
    """Collect what RLinf is handed for one chunk.

    Args:
        num_envs: How many envs there are.
        chunks: Actions of the chunk.
    """

    def __init__(self, num_envs: int, chunks: int) -> None:
        self.rewards = np.zeros((num_envs, chunks), np.float32)
        self._terminations = np.zeros((num_envs, chunks), np.bool_)
        self._truncations = np.zeros((num_envs, chunks), np.bool_)
        self.observations: list[RLinfObservation] = []
        self.infos: list[Infos] = []

    def append(self, column: int, ended: Ended, observation: RLinfObservation, infos: Infos) -> None:
        """Add what an exchange left; one that ended stays so in all later columns."""
        self._terminations[:, column] = ended.terminated
        self._truncations[:, column] = ended.truncated
        self.observations.append(observation)
        self.infos.append(infos)

    def restarted(self, ended: Ended, observation: RLinfObservation) -> None:
        """Put the first observations of the next episodes last, and what ended beside them."""
        mask = torch.from_numpy(ended.mask)
        self.infos[-1] = {
            **{key: value for key, value in self.infos[-1].items() if key != "episode"},
            "final_info": {"episode": self.infos[-1]["episode"]},
            "final_observation": self.observations[-1],
            "_final_info": mask,
            "_final_observation": mask.clone(),
        }
        self.observations[-1] = observation

    def result(self, *, ends_at_last: bool) -> ChunkResult:
        """Return it all as tensors.

        Args:
            ends_at_last: Report ends in the last column only, whenever they came.
        """
        if ends_at_last:
            self._terminations[:, :-1] = False
            self._truncations[:, :-1] = False
        return (
            self.observations,
            torch.from_numpy(self.rewards),
            torch.from_numpy(self._terminations),
            torch.from_numpy(self._truncations),
            self.infos,
        )
