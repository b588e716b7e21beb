"""The comparison of both sides, env by env, up to the first difference of each.

Both sides are sequences of resets and steps per env, whatever autoreset mode the trainer used, and are compared in
order. What was reset again before any step does not count. An episode that carries ``client_lost``, or what follows a
step without outcome in it, is not compared: then both sides meet again where the trainer's next episode begins.
"""

from __future__ import annotations

import math
import struct
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plugrl_bridges.ledger.choosing import by_env, env_readers, several_files, trainer_reader
from plugrl_bridges.ledger.common import Cell, Common, differing
from plugrl_bridges.ledger.outcome import Comparison, Difference, Slot
from plugrl_bridges.ledger.schema import MAX_ROWS, Dialect, Flag

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from plugrl_bridges.ledger.choosing import Paths
    from plugrl_bridges.ledger.reader import LedgerReader, Record

__all__ = ["compare"]

_ENDS = Flag.TERMINATED | Flag.TRUNCATED
_AHEAD = 32
"""Events in which the actions tell whether one side has steps that the other has not."""
_UNWRITTEN = 1 << 31
"""Added to the events that agree up to a kill: better than a difference, less than agreeing to the end."""
_ALONE = 8
"""Steps that one side may have alone, at one place."""


def compare(trainer: str | os.PathLike[str], envs: Paths, *, float32: bool = False) -> Comparison:
    """Compare a trainer's ledger with those of its envs, step by step; look at ``first`` of what comes back.

    Rewards are compared as float32, in which they cross the boundary. Observations and actions are compared bit by bit,
    in the narrower of both sides' dtypes.

    Args:
        trainer: What a `LedgerVecEnv` or `LedgerVectorEnv` wrote.
        envs: What the `LedgerEnv` of its envs wrote: a file or a folder of them, or several.
        float32: Compare floats of 64 bits as float32, for a client that sends them so.

    Returns:
        The first difference of each env.

    Raises:
        LedgerError: if a file cannot be read, or they are not of one run.
    """
    ours = trainer_reader(trainer)
    readers, notes = env_readers(envs, ours)
    first = readers[0].header
    observation = Common(ours.header.observation, first.observation, "observations", float32=float32)
    action = Common(ours.header.action, first.action, "actions", float32=float32)
    sb3 = ours.header.dialect is Dialect.SB3

    def of_trainer(record: Record) -> Record:
        return record._replace(
            action=action.from_trainer(record.action), observation=observation.from_trainer(record.observation)
        )

    def of_env(record: Record) -> Record:
        flags = record.flags & ~Flag.TRUNCATED if sb3 and record.flags & _ENDS == _ENDS else record.flags
        return record._replace(
            flags=flags, action=action.from_env(record.action), observation=observation.from_env(record.observation)
        )

    files = by_env(readers, ours)
    found = Comparison(tuple(Slot(row, *key) for row, key in enumerate(files)), notes=notes)
    found.notes += [f"{each.path} {each.tail}" for each in (ours, *readers) if not each.closed]
    for slot, (key, own) in zip(found.slots, files.items(), strict=True):
        run = _Env(slot, _Trail([ours], slot.number, of_trainer), _Trail(own, slot.env_index, of_env), found)
        run.compare(observation, action)
        if len(own) > 1 + run.losses:
            found.notes.append(several_files(key, own))
    return found


class _Event(NamedTuple):
    """A reset or a step of one env.

    Attributes:
        record: As it is in the file, in the common form of both sides.
        file: Number of the file.
        killed: Whether it is the first behind a file whose process was killed, so that steps before it may be missing.
    """

    record: Record
    file: int
    killed: bool


class _Trail:
    """The events of one env on one side, over all the files that it wrote one after another.

    Args:
        files: Oldest first.
        env: Its number in them.
        convert: Brings a record into the common form.
    """

    def __init__(self, files: Sequence[LedgerReader], env: int, convert: Callable[[Record], Record]) -> None:
        self.files = files
        self.closed = files[-1].closed
        self._env = env
        self._convert = convert

    def since(self, event: _Event | None = None) -> Iterator[_Event]:
        """Return the events, from one of them on; of resets in a row the last."""
        begin = 0 if event is None else event.file
        reset: _Event | None = None
        for number in range(begin, len(self.files)):
            killed = number > begin and not self.files[number - 1].closed
            if event is not None and number == begin:
                killed = event.killed
            for record in self.files[number].records(
                self._env, since=event.record.id if event is not None and number == begin else 0
            ):
                again = record.is_reset and reset is not None and not killed
                found = _Event(self._convert(record), number, killed or (again and reset is not None and reset.killed))
                killed = False
                if reset is not None and not again:
                    yield reset
                reset = found if record.is_reset else None
                if reset is None:
                    yield found
        if reset is not None:
            yield reset


class _Env:
    """Both sides of one env.

    Args:
        slot: Which.
        trainer: The trainer's side.
        env: The env's.
        found: Where differences go.
    """

    def __init__(self, slot: Slot, trainer: _Trail, env: _Trail, found: Comparison) -> None:
        self.losses = 0
        """Ends that the bridge made up because a client was lost."""
        self._slot, self._trainer, self._env, self._found = slot, trainer, env, found
        # The reset of an episode of which no step has an outcome may have been reset again at the env.
        unknown = f"flags & {int(Flag.LOST)} OR (flags & {int(Flag.FAILED)} AND step = 1)"
        self._lost = {each.episode for each in trainer.files[0].select(f"env = ? AND ({unknown})", (slot.number,))}
        self._events = env.since()
        self._next = next(self._events, None)
        self._guessed = False
        """Whether the env shows at several places what the trainer's episode begins with, so that one was chosen."""

    def compare(self, observation: Common, action: Common) -> None:
        """Compare both sides, up to the first difference."""
        self._observation, self._action = observation.columns, action.columns
        found = self._found
        adrift, unwritten = False, 0
        before: Record | None = None
        for event in self._trainer.since():
            ours, theirs = event.record, self._next
            if ours.flags & Flag.LOST:
                self.losses += 1
                found.lost_steps += 1
            if self._without_outcome(ours):
                adrift, unwritten = True, 0
                found.not_compared += not ours.is_reset
            elif adrift and not ours.is_reset:
                found.not_compared += 1
                unwritten += unwritten > 0
                if unwritten and self._must_be_written(ours, unwritten):
                    return
            elif theirs is None and not self._env.closed:
                found.not_compared += not ours.is_reset
            elif not adrift and theirs is not None and theirs.killed and not ours.is_reset and not _same(ours, theirs):
                adrift, unwritten = True, 1
                found.not_compared += 1
                if self._must_be_written(ours, unwritten):
                    return
            else:
                rejoins = ours.is_reset and (adrift or self._killed_here())
                adrift, unwritten = False, 0
                met = rejoins and self._rejoin(event)
                if self._guessed and not _same(ours, self._next):
                    adrift = True
                    found.not_compared += not ours.is_reset
                elif not met and self._differ(event, before):
                    return
                else:
                    self._step_on(ours)
            before = ours
        if not adrift and not self._guessed and self._trainer.closed and before is not None and self._made_more():
            self._report("step_count", before._replace(step=before.step + 1), Cell("step", None, "made"))

    def _killed_here(self) -> bool:
        """Return whether the env's process was killed here, or behind a reset that the trainer may not have seen."""
        if self._next is None or self._next.killed:
            return self._next is not None
        following = next(islice(self._env.since(self._next), 1, None), None)
        return following is not None and following.killed

    def _made_more(self) -> bool:
        return self._next is not None and _has_step(self._env.since(self._next))

    def _without_outcome(self, ours: Record) -> bool:
        return ours.episode in self._lost or bool(ours.flags & Flag.FAILED)

    def _must_be_written(self, ours: Record, unwritten: int) -> bool:
        """Return whether a process that was killed must have written a step that it has not, and report it.

        It has written all but a few rows, and all that stand before a reset: no end of an episode without a mark. Where
        the place was chosen, the step may have been written elsewhere.
        """
        if self._guessed:
            return False
        if ours.flags & _ENDS:
            name = "terminated" if ours.flags & Flag.TERMINATED else "truncated"
            self._report(name, ours, Cell(name, True, None))
        elif unwritten > MAX_ROWS:
            self._report("step_count", ours, Cell("step", "made", None))
        return bool(ours.flags & _ENDS) or unwritten > MAX_ROWS

    def _step_on(self, ours: Record) -> None:
        if ours.is_reset:
            self._found.episodes += 1
        else:
            self._found.env_steps += 1
        self._next = next(self._events, None)

    # Where both meet again ----------------------------------------------------------------------------------------

    def _rejoin(self, event: _Event) -> bool:
        """Go to where the env shows what the trainer's episode begins with, and agrees with it the longest.

        Returns:
            Whether it does; else it is at the env's next reset.
        """
        if self._next is None:
            return False
        best, longest, places = None, -1.0, 0
        for place in self._env.since(self._next):
            if place.record.observation == event.record.observation:
                places += 1
                agreed = self._agreed(event, place) if longest < math.inf else 0.0
                if agreed > longest:
                    best, longest = place, agreed
                if longest == math.inf and places > 1:
                    break
        # Only a loss that the trainer was told of explains that an env goes on elsewhere.
        self._guessed = bool(self._lost) and (places > 1 or (self._guessed and longest < math.inf))
        begin = best or next((each for each in self._env.since(self._next) if each.record.is_reset), None)
        if begin is not None:
            self._events = self._env.since(begin)
            self._next = next(self._events)
        return best is not None

    def _agreed(self, event: _Event, place: _Event) -> float:
        """Return how many events agree, from these on; infinity if all do until the trainer loses the env again."""
        env = self._env.since(place)
        next(env)
        count = 0
        for each in islice(self._trainer.since(event), 1, None):
            ours, theirs = each.record, next(env, None)
            if self._without_outcome(ours):
                return math.inf
            if theirs is None and not self._env.closed:
                return math.inf
            if theirs is not None and theirs.killed and not _same(ours, theirs):
                return count + _UNWRITTEN
            if not _same(ours, theirs):
                return count
            count += 1
        return count if self._trainer.closed and _has_step(env) else math.inf

    # Differences --------------------------------------------------------------------------------------------------

    def _differ(self, event: _Event, before: Record | None) -> bool:
        """Return whether both sides differ here, and report it."""
        ours, theirs = event.record, self._next
        if ours.flags & Flag.AGAIN:
            if before is not None:
                self._report_cells("obs", ours, differing(self._observation, ours.observation, before.observation))
            return True
        if _same(ours, theirs):
            return False
        if theirs is not None and theirs.record.is_reset and not ours.is_reset and self._follows(ours, theirs):
            self._report("reset_obs", ours, Cell("reset", None, "made"))
        elif theirs is None or (theirs.record.is_reset and not ours.is_reset):
            self._report("step_count", ours, Cell("reset" if ours.is_reset else "step", "made", None))
        elif ours.is_reset and not theirs.record.is_reset:
            last = ours if before is None else before._replace(step=before.step + 1)
            self._report("step_count", last, Cell("step", None, "made"))
        elif not ours.is_reset and (alone := self._alone(event, theirs)) is not None:
            self._report("step_count", ours, alone)
        else:
            self._report_values(ours, theirs.record)
        return True

    def _follows(self, ours: Record, reset: _Event) -> bool:
        """Return whether the trainer's step is what the env did behind a reset that the trainer knows nothing of."""
        return _same(ours, next(islice(self._env.since(reset), 1, None), None))

    def _alone(self, event: _Event, place: _Event) -> Cell | None:
        """Return which side has a step here that the other has not; None if it is only another one.

        It is missing if what follows agrees for longer without it. If all actions agree in place, nothing is missing:
        what is shown lags behind.
        """
        ours = [each.record for each in islice(self._trainer.since(event), _AHEAD)]
        theirs = list(islice(self._env.since(place), _AHEAD))
        pairs = list(zip(ours, theirs, strict=False))
        a, b = pairs[0][0], pairs[0][1].record
        if (a.action, a.observation) == (b.action, b.observation):
            return None
        if all(a.action == b.record.action and a.is_reset == b.record.is_reset for a, b in pairs):
            return None
        best, longest = None, _agreeing(ours[1:], theirs[1:])
        for alone in range(1, _ALONE + 1):
            for cell, agreeing in (
                (Cell("step", "made", None), _agreeing(ours[alone:], theirs)),
                (Cell("step", None, "made"), _agreeing(ours, theirs[alone:])),
            ):
                if agreeing > longest:
                    best, longest = cell, agreeing
        return best

    def _report_values(self, ours: Record, theirs: Record) -> None:
        """Report the first field in which two steps, or two resets, differ."""
        shown = "reset_obs" if ours.is_reset else "terminal_obs" if ours.flags & _ENDS else "obs"
        if ours.action != theirs.action:
            self._report_cells("action", ours, differing(self._action, ours.action, theirs.action))
        elif not ours.observation and theirs.observation:
            cells = sum(math.prod(column.shape) for column in self._observation.all)
            self._report(shown, ours, Cell("terminal observation", None, "given"), cells)
        elif ours.observation != theirs.observation:
            self._report_cells(shown, ours, differing(self._observation, ours.observation, theirs.observation))
        elif not _same_reward(ours.reward, theirs.reward):
            self._report("reward", ours, Cell("reward", ours.reward, theirs.reward))
        else:
            terminated = (ours.flags ^ theirs.flags) & Flag.TERMINATED
            name, flag = ("terminated", Flag.TERMINATED) if terminated else ("truncated", Flag.TRUNCATED)
            self._report(name, ours, Cell(name, bool(ours.flags & flag), bool(theirs.flags & flag)))

    def _report_cells(self, field: str, ours: Record, cells: Sequence[Cell]) -> None:
        if cells:
            self._report(field, ours, cells[0], len(cells))

    def _report(self, field: str, ours: Record, cell: Cell, cells: int = 1) -> None:
        at = (ours.episode, ours.step, ours.vector_step)
        self._found.add(Difference(self._slot, *at, field, cell.name, cell.trainer, cell.env, cells))


def _same(ours: Record, event: _Event | None) -> bool:
    """Return whether both sides hold the same; not, if the env's has nothing."""
    if event is None:
        return False
    theirs = event.record
    return (
        ours.observation == theirs.observation
        and ours.action == theirs.action
        and ours.flags == theirs.flags
        and _same_reward(ours.reward, theirs.reward)
    )


def _agreeing(ours: Sequence[Record], theirs: Sequence[_Event]) -> int:
    """Return how many events agree before the first that does not."""
    pairs = zip(ours, theirs, strict=False)
    return sum(1 for _ in takewhile(lambda pair: _same(*pair), pairs))


def _has_step(events: Iterator[_Event]) -> bool:
    return any(not event.record.is_reset for event in events)


def _same_reward(ours: float, theirs: float) -> bool:
    """Return whether two rewards have the same bits as float32."""
    if ours == theirs:
        return math.copysign(1.0, ours) == math.copysign(1.0, theirs)
    with np.errstate(over="ignore"):
        return struct.pack("<f", np.float32(ours)) == struct.pack("<f", np.float32(theirs))
