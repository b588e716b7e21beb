"""What comes of a comparison: the first difference of each env, and what was not compared.

``comparing`` fills it in, ``cli`` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plugrl_bridges.ledger.reader import escaped

__all__ = ["FIELDS", "Comparison", "Difference", "Slot"]

FIELDS = ("action", "obs", "terminal_obs", "reward", "terminated", "truncated", "reset_obs", "step_count")
"""What is compared. Within a step the first of these that differs is the one that is named."""
_SHOWN_ENVS = 8


@dataclass(frozen=True)
class Slot:
    """Which env a row of the trainer is.

    Attributes:
        number: Row of the trainer.
        rank: Rank of the env's client.
        env_index: Number of the env within it.
    """

    number: int
    rank: int
    env_index: int

    def __str__(self) -> str:
        """Name it."""
        return f"env {self.number} (rank {self.rank}, index {self.env_index})"


@dataclass(frozen=True)
class Difference:
    """Where, and in what, both sides of an env differ first.

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
        more = f" ({self.cells} cells of it differ)" if self.cells > 1 else ""
        return (
            f"{self.slot}, episode {self.episode}, step {self.step} (vector step {self.vector_step}), {what} is "
            f"{_shown(self.trainer)} at the trainer and {_shown(self.env)} at the env{more}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "slot": self.slot.number, "rank": self.slot.rank, "env_index": self.slot.env_index, "episode": self.episode,
            "step": self.step, "vector_step": self.vector_step, "field": self.field, "cell": self.cell,
            "trainer_value": _plain(self.trainer), "env_value": _plain(self.env), "cells": self.cells,
        }  # fmt: skip


@dataclass
class Comparison:
    """What came of comparing a trainer's ledger with those of its envs.

    Attributes:
        slots: Which env each row of the trainer is.
        differences: The first difference of each env that has one, the earliest by vector step first.
        env_steps: Steps that were compared, of all envs together; of an env none behind its first difference.
        episodes: Resets that were compared, likewise.
        not_compared: Steps of the trainer that were not compared: of episodes in which a client was lost or a step had
            no outcome, and those that the ledger of an env, which was not closed, does not hold.
        lost_steps: Ends that the bridge made up because a client was lost.
        notes: What else there is to say of the files.
    """

    slots: tuple[Slot, ...]
    differences: list[Difference] = field(default_factory=list)
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
    def first(self) -> Difference | None:
        """The first difference of all, by vector step, then by env; None if both sides are equal."""
        return self.differences[0] if self.differences else None

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not self.differences

    def add(self, difference: Difference) -> None:
        """Add the first difference of an env."""
        self.differences.append(difference)
        self.differences.sort(key=lambda each: (each.vector_step, each.slot.number))

    def as_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "equal": self.equal, "envs": len(self.slots), "env_steps": self.env_steps, "resets": self.resets,
            "not_compared": self.not_compared, "lost_steps": self.lost_steps,
            "first": None if self.first is None else self.first.as_json(),
            "differences": [each.as_json() for each in self.differences], "notes": self.notes,
        }  # fmt: skip

    def __str__(self) -> str:
        """Say it for people."""
        about = f"{len(self.slots)} envs, {self.env_steps} env steps and {self.resets} resets compared"
        lines = [f"equal: {about}" if self.equal else f"DIFFERENT: {about}"]
        if self.first is not None:
            lines.append(f"first difference: {self.first}")
            lines += [f"and first in {each}" for each in self.differences[1:_SHOWN_ENVS]]
            if len(self.differences) > _SHOWN_ENVS:
                lines.append(f"and in {len(self.differences) - _SHOWN_ENVS} more envs")
        if self.not_compared:
            lines.append(f"not compared: {self.not_compared} env steps")
        if self.lost_steps:
            lines.append(f"ends at which a client was lost: {self.lost_steps}")
        return "\n".join([*lines, *(f"note: {escaped(note)}" for note in self.notes)])


def _plain(value: object) -> object:
    """Return a value as JSON can hold it; what is no finite number as text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _shown(value: object) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    return "absent" if value is None else repr(value)
