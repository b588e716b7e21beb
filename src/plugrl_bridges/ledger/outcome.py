"""Own what comes of a comparison: the first difference, counts per field, and where the differences lie.

``comparing`` fills it in, ``cli`` and ``plot`` show it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.ledger.files import escaped

if TYPE_CHECKING:
    from plugrl_bridges.wire.arrays import Array

__all__ = ["FIELDS", "Comparison", "Difference", "HeatMap", "Slot"]

FIELDS = ("action", "obs", "terminal_obs", "reward", "terminated", "truncated", "reset_obs", "step_count")
"""What is compared. Within a step the first of these that differs is the one that is named."""
_BINS = 1024


@dataclass(frozen=True)
class Slot:
    """Say which env a row of the trainer is.

    Attributes:
        number: Row of the trainer.
        rank: Rank of the env's client.
        env_index: Number of the env within it.
    """

    number: int
    rank: int
    env_index: int


@dataclass(frozen=True)
class Difference:
    """Say where, and in what, both sides differ.

    Attributes:
        slot: Which env.
        episode: How many episodes the env had begun before this one, as the trainer counts.
        step: Number of the step within the episode, from 1; 0 is the reset.
        vector_step: Number of the vector step within the run, from 1; 0 before the first.
        field: One of `FIELDS`.
        cell: The first cell that differs, such as ``obs[2]``.
        trainer: The cell's value on the trainer's side; None if there is none.
        env: The cell's value on the env's side; None if there is none.
        cells: How many cells of the field differ in this step.
    """

    slot: Slot
    episode: int
    step: int
    vector_step: int
    field: str
    cell: str
    trainer: Any
    env: Any
    cells: int

    def __str__(self) -> str:
        """Say it in one line."""
        what = self.field if self.cell == self.field else f"{self.field}: {escaped(self.cell)}"
        return (
            f"env {self.slot.number} (rank {self.slot.rank}, index {self.slot.env_index}), episode {self.episode}, "
            f"step {self.step} (vector step {self.vector_step}), {what} is {_shown(self.trainer)} at the trainer and "
            f"{_shown(self.env)} at the env"
        )

    def as_json(self) -> dict[str, Any]:
        """Give it for programs."""
        return {
            "slot": self.slot.number, "rank": self.slot.rank, "env_index": self.slot.env_index, "episode": self.episode,
            "step": self.step, "vector_step": self.vector_step, "field": self.field, "cell": self.cell,
            "trainer_value": _plain(self.trainer), "env_value": _plain(self.env), "cells": self.cells,
        }  # fmt: skip


class HeatMap:
    """Count differing cells per env and vector step, in a bounded number of bins that widen as the run grows.

    Args:
        num_envs: Rows.
    """

    def __init__(self, num_envs: int) -> None:
        self.steps_per_bin = 1
        self.steps = 0
        """The last vector step that was counted or reached."""
        self._cells = np.zeros((num_envs, _BINS), np.int64)

    def add(self, slot: int, vector_step: int, cells: int) -> None:
        """Count cells that differ."""
        self.reach(vector_step)
        self._cells[slot, vector_step // self.steps_per_bin] += cells

    def reach(self, vector_step: int) -> None:
        """Make room up to a vector step."""
        self.steps = max(self.steps, vector_step)
        while vector_step // self.steps_per_bin >= _BINS:
            halved = self._cells.reshape(len(self._cells), _BINS // 2, 2).sum(axis=2)
            self._cells[:, : _BINS // 2], self._cells[:, _BINS // 2 :] = halved, 0
            self.steps_per_bin *= 2

    @property
    def cells(self) -> Array:
        """int64 ``[envs, bins]``, as many bins as the run has."""
        found: Array = self._cells[:, : self.steps // self.steps_per_bin + 1]
        return found


@dataclass
class Comparison:
    """Say what came of comparing a trainer's ledger with those of its envs.

    Attributes:
        slots: Which env each row of the trainer is.
        first: The first difference; None if both sides are equal.
        cells: Per field, how many cells differ; for ``step_count``, how many steps have no counterpart.
        env_steps: Steps that were compared, of all envs together.
        episodes: Resets that were compared, of all envs together.
        not_compared: Steps of the trainer for which the env's ledger, which was not closed, holds nothing any more.
        lost_steps: Steps that the bridge made up because a client was lost.
        notes: What else there is to say of the files.
        heat: Where the differences lie.
    """

    slots: tuple[Slot, ...]
    heat: HeatMap
    first: Difference | None = None
    cells: Counter[str] = field(default_factory=Counter)
    env_steps: int = 0
    episodes: int = 0
    not_compared: int = 0
    lost_steps: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def resets(self) -> int:
        """Resets that were compared: each begins an episode, so it is `episodes` by the name that reports use."""
        return self.episodes

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return self.first is None

    def add(self, difference: Difference) -> None:
        """Count a difference; the earliest by vector step, then by env, is kept as the first."""
        self.cells[difference.field] += difference.cells
        self.heat.add(difference.slot.number, difference.vector_step, difference.cells)
        if self.first is None or _order(difference) < _order(self.first):
            self.first = difference

    def as_json(self) -> dict[str, Any]:
        """Give it for programs."""
        return {
            "equal": self.equal, "envs": len(self.slots), "env_steps": self.env_steps, "resets": self.resets,
            "not_compared": self.not_compared, "lost_steps": self.lost_steps,
            "first": None if self.first is None else self.first.as_json(),
            "cells": {name: self.cells[name] for name in FIELDS if self.cells[name]}, "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        """Say it for people."""
        about = f"{len(self.slots)} envs, {self.env_steps} env steps and {self.resets} resets compared"
        lines = [f"equal: {about}" if self.equal else f"DIFFERENT: {about}"]
        if self.first is not None:
            counts = ", ".join(f"{name} {self.cells[name]}" for name in FIELDS if self.cells[name])
            lines += [f"first difference: {self.first}", f"differing cells: {counts}"]
        if self.not_compared:
            lines.append(f"not compared: {self.not_compared} env steps, which the envs' ledgers no longer hold")
        if self.lost_steps:
            lines.append(f"not compared: {self.lost_steps} env steps at which a client was lost")
        return "\n".join([*lines, *(f"note: {escaped(note)}" for note in self.notes)])


def _order(difference: Difference) -> tuple[int, ...]:
    at = (difference.vector_step, difference.slot.number, difference.episode, difference.step)
    return *at, FIELDS.index(difference.field)


def _plain(value: object) -> object:
    """Give a value as JSON can hold it; what is no finite number as text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _shown(value: object) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    return "absent" if value is None else repr(value)
