"""The ledger on the trainer's side: vector steps as column arrays, one row per env.

``vec_env`` and ``vector_env`` know how their trainer is told of the end of an episode, and hand it over in one form: a
step holds what the env's step returned, so on an episode's last step the terminal observation, and a reset of these
envs follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_bridges.digest.entries import Entries
from plugrl_bridges.ledger.columns import Columns
from plugrl_bridges.ledger.schema import Flag, Header, Side, stored
from plugrl_bridges.ledger.writer import LedgerWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from gymnasium import spaces

    from plugrl_bridges.ledger.schema import Dialect, StepRow
    from plugrl_bridges.wire.arrays import Array, Value

__all__ = ["Recorder"]

Space: TypeAlias = "spaces.Space[Any]"


class Recorder:
    """Write what a trainer sends and receives.

    Args:
        path: File to write, which must not exist.
        observation_space: Of one env.
        action_space: Of one env.
        num_envs: n.
        dialect: How the trainer is told of ends.
        run: Identity of the run.
        full: Record large entries whole too.
        env_id: Of the envs, or the class.

    Raises:
        LedgerError: for a space that cannot be recorded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        dialect: Dialect,
        run: str,
        full: bool,
        env_id: str,
    ) -> None:
        self.num_envs = num_envs
        self.observation = Entries(observation_space, "obs")
        self.action = Entries(action_space, "action")
        self._observations = Columns.of(self.observation.all, full=full)
        self._actions = Columns.of(self.action.all, full=full)
        header = Header(Side.TRAINER, dialect, self._observations, self._actions, run)
        self._writer = LedgerWriter(path, header, env_id)
        self._begun = False
        self._under_way: list[bytes | None] | None = None
        """Actions of the step that is under way; of a reset, None for each env."""
        self._handed = [b""] * num_envs
        """What each env was handed last."""
        self._episodes = [-1] * num_envs
        self._steps = [1] * num_envs
        self._vector_step = 0

    def reset(self, observations: Sequence[Array], rows: Sequence[int] | None = None) -> None:
        """Write down that envs were reset.

        Args:
            observations: Per entry ``[n, *shape]``; only the rows named are written.
            rows: Which envs; None: all.
        """
        self._begin([None] * self.num_envs)
        packed = self._observations.pack(observations)
        written: list[StepRow] = []
        for row in range(self.num_envs) if rows is None else rows:
            if self._steps[row]:  # a reset behind a reset begins no other episode
                self._episodes[row] += 1
                self._steps[row] = 0
            self._handed[row] = packed[row]
            written.append((row, self._episodes[row], 0, self._vector_step, Flag.RESET, None, None, packed[row]))
        self._writer.write(written)
        self._under_way = None

    def kept(self, observations: Sequence[Array], rows: Sequence[int]) -> None:
        """Write down what a reset of other envs handed these again, where it is not bit by bit what it was.

        Args:
            observations: Per entry ``[n, *shape]``.
            rows: Those that were not reset.
        """
        packed = self._observations.pack(observations)
        changed = [row for row in rows if packed[row] != self._handed[row]]
        for row in changed:
            self._handed[row] = packed[row]
        if self._under_way is None:  # else they show what came of a step that failed, in other envs
            self._writer.write(
                [
                    (
                        row, self._episodes[row], self._steps[row], self._vector_step, Flag.AGAIN, None, None,
                        packed[row],
                    )
                    for row in changed
                ]
            )  # fmt: skip

    def take(self, actions: Value) -> None:
        """Note the actions that the trainer sends, before it may change them.

        Until `step` is called a step is under way whose outcome the trainer does not have.
        """
        self._begin(list(self._actions.pack(self.action.batch(actions, self.num_envs))))

    def _begin(self, actions: list[bytes | None]) -> None:
        if not self._begun:
            self._writer.begin([(0, row) for row in range(self.num_envs)])
            self._begun = True
        self._note_failed()
        self._under_way = actions

    def _note_failed(self) -> None:
        """Write down the step or reset whose outcome the trainer will never have, if there is one."""
        if self._under_way is not None:
            self._writer.write(
                [
                    (row, self._episodes[row], step + 1, self._vector_step + 1, Flag.FAILED, None, action, None)
                    for row, (step, action) in enumerate(zip(self._steps, self._under_way, strict=True))
                ]
            )
            self._under_way = None

    def step(
        self,
        rewards: Array,
        flags: Array,
        observations: Sequence[Array],
        *,
        rows: Sequence[int] | None = None,
        without_final: Sequence[int] = (),
    ) -> None:
        """Write down the vector step of which the actions were taken.

        Args:
            rewards: ``[n]``.
            flags: uint8 ``[n]``, see `Flag`.
            observations: Per entry ``[n, *shape]``: what the envs' steps returned.
            rows: Which envs made a step; None: all.
            without_final: Rows whose episode ended, but the trainer was given no terminal observation.
        """
        self._vector_step += 1
        packed: list[bytes | None] = list(self._observations.pack(observations))
        for row in without_final:
            packed[row] = None
        paid = np.asarray(rewards, np.float64).tolist()
        said = flags.tolist()
        actions = self._under_way or [None] * self.num_envs
        written: list[StepRow] = []
        for row in range(self.num_envs) if rows is None else rows:
            self._steps[row] = step = self._steps[row] + 1
            shown = packed[row]
            self._handed[row] = shown or b""
            written.append(
                (
                    row, self._episodes[row], step, self._vector_step, said[row], stored(paid[row]), actions[row], shown
                )
            )  # fmt: skip
        self._writer.write(written)
        self._under_way = None

    @staticmethod
    def with_finals(
        observations: Sequence[Array], finals: Mapping[int, Sequence[Array] | None]
    ) -> tuple[list[Array], list[int]]:
        """Put terminal observations in the place of those that the next episodes begin with.

        Args:
            observations: Per entry ``[n, *shape]``; not changed.
            finals: Row to the terminal observation, entry by entry; None where the trainer was given none.

        Returns:
            The observations; and the rows that have none.
        """
        replaced = [array.copy() for array in observations]
        for row, final in finals.items():
            for array, value in zip(replaced, final or (), strict=False):
                array[row] = value
        return replaced, [row for row, final in finals.items() if final is None]

    def close(self) -> None:
        """Write down the step that is under way as one without outcome, and close the file; idempotent."""
        if not self._writer.closed and self._begun:
            self._note_failed()
        self._writer.close()
