"""Own the ledger on the trainer's side: vector steps as column arrays, one record each.

``vec_env`` and ``vector_env`` know how their trainer is told of the end of an episode, and hand it over in one form: a
step holds what the env's step returned, so on an episode's last step the terminal observation, and a reset of these
envs follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from plugrl_bridges.ledger.columns import Columns
from plugrl_bridges.ledger.format import HEAD, Flag, Kind, Side, frame
from plugrl_bridges.ledger.writer import LedgerWriter, Subject

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from gymnasium import spaces

    from plugrl_bridges.ledger.format import Dialect
    from plugrl_bridges.wire.arrays import Array, Value

__all__ = ["Recorder", "recorded"]

_MOST_HANDED = 256

Space: TypeAlias = "spaces.Space[Any]"


_Returned = TypeVar("_Returned")


def recorded(call: Callable[[], _Returned], record: Callable[[_Returned], None]) -> _Returned:
    """Return what a call returns, once it is written down."""
    returned = call()
    record(returned)
    return returned


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
        env_id: For the header.

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
        self.observation = Columns.of(observation_space, "obs", full=full)
        self.action = Columns.of(action_space, "action", full=full)
        subject = Subject(Side.TRAINER, dialect, self.observation, self.action, num_envs, run, env_id)
        self._writer = LedgerWriter(path, subject)
        self._begun = False
        self._waiting = False
        self._handed: list[tuple[Sequence[int], bytes]] = []
        """Since each env was last handed an observation: which envs, and the columns."""
        self._everybody = HEAD.pack(Kind.STEP, 1, 0, num_envs)

    def reset(self, observations: Sequence[Array], rows: Sequence[int] | None = None) -> None:
        """Write down that envs were reset.

        Args:
            observations: Per entry ``[n, *shape]``; only the rows named are written.
            rows: Which envs; None: all.
        """
        self._note_failed()
        self._waiting = True  # until it is written: an interrupt leaves no ledger that says it is whole
        if not self._begun:
            self._writer.begin()
            self._begun = True
        if rows is None:
            head = HEAD.pack(Kind.RESET, 1, 0, self.num_envs)
            columns = b"".join(self.observation.pack(observations))
        else:
            head = HEAD.pack(Kind.RESET, 0, 0, len(rows)) + _numbers(rows)
            columns = b"".join(self.observation.pack([array[list(rows)] for array in observations]))
        self._hand(rows, columns)
        self._writer.write(frame(head + columns))
        self._waiting = False

    def kept(self, observations: Sequence[Array], rows: Sequence[int]) -> None:
        """Write down what a reset of other envs handed these again, where it is not bit by bit what it was.

        Args:
            observations: Per entry ``[n, *shape]``.
            rows: Those that were not reset.
        """
        before = self._last_handed()
        columns = b"".join(self.observation.pack([array[list(rows)] for array in observations]))
        now = self.observation.rows(columns, 0, len(rows))
        changed = [row for row, value in zip(rows, now, strict=True) if value != before.get(row, value)]
        if changed:
            head = HEAD.pack(Kind.KEPT, 0, 0, len(changed)) + _numbers(changed)
            columns = b"".join(self.observation.pack([array[changed] for array in observations]))
            self._hand(changed, columns)
            if not self._waiting:  # else they show what came of a step that failed, in other envs
                self._writer.write(frame(head + columns))

    def _hand(self, rows: Sequence[int] | None, columns: bytes) -> None:
        if rows is None:
            self._handed = [(range(self.num_envs), columns)]
            return
        self._handed.append((tuple(rows), columns))
        if len(self._handed) > _MOST_HANDED:
            last = self._last_handed()
            self._handed = [((row,), value) for row, value in last.items()]

    def _last_handed(self) -> dict[int, bytes]:
        """Give the bytes of the observation that each env was last handed."""
        found: dict[int, bytes] = {}
        for rows, columns in self._handed:
            found.update(zip(rows, self.observation.rows(columns, 0, len(rows)), strict=True))
        return found

    def taken(self, actions: Value) -> list[Array]:
        """Give the columns of the actions that the trainer sends; copies, since it may change them afterwards.

        Until `step` is called, or `reset`, a step is under way whose outcome the trainer does not have.
        """
        self._note_failed()
        self._waiting = True
        return [np.array(array) for array in self.action.batch(actions, self.num_envs)]

    def _note_failed(self) -> None:
        """Write down that a step is under way whose outcome the trainer will never have, if there is one."""
        if self._begun and self._waiting:
            self._writer.write(frame(HEAD.pack(Kind.FAILED, 1, 0, self.num_envs)))

    def step(
        self,
        actions: Sequence[Array],
        rewards: Array,
        flags: Array,
        observations: Sequence[Array],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Write down a vector step.

        Args:
            actions: From `taken`.
            rewards: ``[n]``.
            flags: uint8 ``[n]``, see `Flag`.
            observations: Per entry ``[n, *shape]``: what the envs' steps returned.
            rows: Which envs made a step; None: all.
        """
        rewards = np.asarray(rewards, "<f8")
        if rows is None:
            head = self._everybody
        else:
            picked = list(rows)
            head = HEAD.pack(Kind.STEP, 0, 0, len(picked)) + _numbers(rows)
            actions = [array[picked] for array in actions]
            observations = [array[picked] for array in observations]
            rewards, flags = rewards[picked], flags[picked]
        shown = b"".join(self.observation.pack(observations))
        self._hand(rows, shown)
        columns = (*self.action.pack(actions), rewards.tobytes(), flags.tobytes(), shown)
        self._writer.write(frame(b"".join((head, *columns))))
        self._waiting = False

    def with_finals(
        self, observations: Sequence[Array], flags: Array, finals: Mapping[int, Sequence[Array] | None]
    ) -> list[Array]:
        """Put terminal observations in the place of those that the next episodes begin with.

        Args:
            observations: Per entry ``[n, *shape]``; not changed.
            flags: uint8 ``[n]``; `Flag.NO_FINAL` is set where there is none.
            finals: Row to the terminal observation, entry by entry; None where the trainer was given none.
        """
        replaced = [array.copy() for array in observations]
        for row, final in finals.items():
            if final is None:
                flags[row] |= Flag.NO_FINAL
                continue
            for array, value in zip(replaced, final, strict=True):
                array[row] = value
        return replaced

    def close(self) -> None:
        """Close the file, with the end mark unless a step is under way or failed; idempotent."""
        self._writer.close(whole=not self._waiting)


def _numbers(rows: Sequence[int]) -> bytes:
    return np.asarray(rows, "<i4").tobytes()
