"""The autoreset modes: when the trainer sees an episode that follows another. The one place that knows them.

A client begins the next episode at once, and brings its first observation in the same exchange; so a `StepResult` has
both. `AutoresetViews` makes of it what a trainer gets in its mode, and remembers what that trainer is still to see. To
add a mode, give it a name here, its answers to the enum's questions, and its branch in `AutoresetViews`.

The enum is one of our own, since Gymnasium has one only from release 1.1 on; the names are Gymnasium's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.error import ResetNeeded

from plugrl_bridges.server import report
from plugrl_bridges.server.result import infos_of

if TYPE_CHECKING:
    from plugrl_bridges.server.result import InfoPart, StepResult
    from plugrl_bridges.wire.codec import Array

__all__ = ["AutoresetMode", "AutoresetViews", "View", "to_autoreset_mode"]


class AutoresetMode(enum.Enum):
    """What the trainer gets in the step that ends an episode, and after it."""

    SAME_STEP = "SameStep"
    """The reset observation, with the terminal one in the infos."""
    NEXT_STEP = "NextStep"
    """The terminal observation; the next step ignores the action and gives the reset observation, with reward 0."""
    DISABLED = "Disabled"
    """The terminal observation; the trainer has to reset the slot before it steps again."""

    @property
    def sits_out(self) -> bool:
        """Whether a slot may sit a step out, which a connection can only do as a whole."""
        return self is AutoresetMode.NEXT_STEP

    @property
    def hands_again(self) -> bool:
        """Whether trainers reset some slots and are handed the others' observations once more as a matter of course."""
        return self is AutoresetMode.DISABLED


@dataclass(frozen=True)
class View:
    """A result as the trainer gets it in its mode.

    Attributes:
        step: The result.
        observations: One array ``[num_envs, *shape]`` per leaf.
        over: bool ``[num_envs]``, the slots whose episode ended.
        finals: Terminal observations that ``observations`` does not show, ``[k, *shape]`` per leaf, for the k slots in
            ``over``; None if there are none.
        reset_parts: Infos of the resets whose observations are shown.
    """

    step: StepResult
    observations: list[Array]
    over: Array
    finals: list[Array] | None
    reset_parts: list[InfoPart]

    @property
    def reset_infos(self) -> dict[int, dict[str, Any]]:
        """Info dict per slot whose reset is shown and had something to say; made anew at every call."""
        return infos_of(self.reset_parts)


class AutoresetViews:
    """The views of results in a mode, with a memory of what the trainer is still to see.

    Call `sits_out` before each step, `step` or `reset` with each result.

    Args:
        mode: The trainer's.
        num_envs: Number of slots.

    Attributes:
        unseen: bool ``[num_envs]``, the slots whose next episode has begun and which the trainer has not seen.
    """

    def __init__(self, mode: AutoresetMode, num_envs: int) -> None:
        self.unseen = np.zeros(num_envs, np.bool_)
        self._mode = mode
        self._parts: list[InfoPart] = []  # infos of unseen resets
        self._terminal: list[Array] = []  # what the trainer was handed last of unseen slots

    def sits_out(self) -> Array | None:
        """Return which slots are to sit the next step out, bool ``[num_envs]``, or None for nobody.

        Raises:
            gymnasium.error.ResetNeeded: in mode DISABLED, if an episode has ended.
        """
        if b"\x01" not in self.unseen.tobytes():
            return None
        if self._mode is AutoresetMode.DISABLED:
            slots = report.slots_text(np.flatnonzero(self.unseen).tolist())
            raise ResetNeeded(
                f"the episodes of slots {slots} have ended, and autoreset_mode is DISABLED: "
                'reset them first, as by reset(options={"reset_mask": terminated | truncated})'
            )
        return self.unseen

    def step(self, step: StepResult) -> View:
        """Return what the trainer gets of a step; the result's arrays become the view's."""
        over = step.over
        ended = b"\x01" in over.tobytes()
        if self._mode is AutoresetMode.SAME_STEP:
            finals = _swap(step, over) if ended else None
            return View(step, step.observations, over, finals, step.reset_parts)
        parts = [*_only(self._parts, ~step.begun), *step.reset_parts]  # of a lost client's slot the newcomer's count
        self._parts = _only(parts, over)
        self.unseen = over.copy()
        if ended:
            self._remember(step.observations, over)
        return View(step, step.observations, over, None, _only(parts, ~over))

    def reset(self, step: StepResult, mask: Array | None = None) -> View:
        """Return what the trainer gets of a reset.

        Args:
            step: The result; its arrays become the view's.
            mask: bool ``[num_envs]``, the slots that the trainer has reset; None for all.
        """
        chosen = np.ones_like(self.unseen) if mask is None else mask
        parts = [*_only(self._parts, ~step.begun), *step.reset_parts]
        self._parts = _only(parts, ~chosen)
        self.unseen = self.unseen & ~chosen
        for array, kept in zip(step.observations, self._terminal, strict=False):  # nothing before the first end
            array[self.unseen] = kept[self.unseen]
        return View(step, step.observations, np.zeros_like(chosen), None, _only(parts, chosen))

    def _remember(self, observations: list[Array], over: Array) -> None:
        if not self._terminal:
            self._terminal = [np.empty_like(array) for array in observations]
        for kept, array in zip(self._terminal, observations, strict=True):
            kept[over] = array[over]


def _swap(step: StepResult, over: Array) -> list[Array]:
    """Put the next episodes' first observations in the place of the terminal ones, and return those."""
    finals = [array[over] for array in step.observations]
    for array, first in zip(step.observations, step.first, strict=True):
        array[over] = first[over]
    return finals


def _only(parts: list[InfoPart], wanted: Array) -> list[InfoPart]:
    return [part for part in (part.only(wanted) for part in parts) if len(part.rows)]


def to_autoreset_mode(value: object) -> AutoresetMode:
    """Return the mode for what a user passed: this enum, Gymnasium's, or a name or value of either.

    Raises:
        ValueError: naming the argument, for anything else.
    """
    text = getattr(value, "name", value)
    if isinstance(text, str):
        letters = "".join(filter(str.isalpha, text)).lower()
        for mode in AutoresetMode:
            if mode.value.lower() == letters:
                return mode
    names = ", ".join(mode.name for mode in AutoresetMode)
    raise ValueError(f"autoreset_mode must be one of {names}, got {value!r}")
