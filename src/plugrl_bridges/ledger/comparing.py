"""Own the comparison of both sides: events are paired env by env, and every field of a pair is compared.

Both sides are sequences of resets and steps per env, whatever autoreset mode the trainer used. Where one side has an
event that the other lacks (a spurious or dropped end, a skipped step), the two are brought into step again by looking a
few events ahead, so that one fault is counted as one. What was reset again before any step does not count.
``streams`` gives the events, ``outcome`` keeps what is found.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.common import Cell, Common, differing
from plugrl_bridges.ledger.format import Dialect, Flag
from plugrl_bridges.ledger.hints import of_earlier_runs, of_one_sided_run, of_shared_numbers
from plugrl_bridges.ledger.outcome import Comparison, Difference, HeatMap
from plugrl_bridges.ledger.paths import env_paths
from plugrl_bridges.ledger.rows import of_rows
from plugrl_bridges.ledger.streams import env_events, env_readers, trainer_reader

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from plugrl_bridges.ledger.paths import Paths
    from plugrl_bridges.ledger.reader import Event, LedgerReader
    from plugrl_bridges.ledger.streams import EnvEvents

__all__ = ["compare"]

_AHEAD = 8
"""Events that are looked ahead to bring both sides into step."""
_AHEAD_AFTER_LOSS = 4096
_ENDS = Flag.TERMINATED | Flag.TRUNCATED


def compare(trainer: str | os.PathLike[str], envs: Paths, *, float32: bool = False) -> Comparison:
    """Compare a trainer's ledger with those of its envs, step by step; look at ``first`` of what comes back.

    Rewards are compared as float32, in which they cross the boundary. Observations and actions are compared bit by bit,
    in the narrower of both sides' dtypes.

    Args:
        trainer: What a `LedgerVecEnv` or `LedgerVectorEnv` wrote.
        envs: What the `LedgerEnv` of its envs wrote: a file or a folder of them, or several.
        float32: Compare floats of 64 bits as float32, for a client that sends them so.

    Returns:
        The first difference, and how many cells differ per field.

    Raises:
        LedgerError: if a file cannot be read, or they are not of one run.
    """
    reader = trainer_reader(trainer)
    header = reader.header
    readers, notes = env_readers(env_paths(envs), header.run)
    notes += of_one_sided_run(reader, readers)
    for other in readers:
        if header.run and other.header.run and header.run != other.header.run:
            raise LedgerError(
                f"{reader.path} is of run {header.run!r}, {other.path} of run {other.header.run!r}: compare ledgers of "
                "one run"
            )
    first = readers[0].header
    observation = Common(header.observation, first.observation, "observations", float32=float32)
    action = Common(header.action, first.action, "actions", float32=float32)
    sb3 = header.dialect is Dialect.SB3
    streams = env_events(readers, _convert_env(observation, action, sb3=sb3))
    if len(streams) != header.num_envs:
        few = len(streams) < header.num_envs
        hint = of_shared_numbers(streams) if few else of_earlier_runs(streams, [0] * len(streams))
        raise LedgerError(
            f"{reader.path} is of {header.num_envs} envs, but the envs' ledgers are of {len(streams)} (rank, index): "
            f"{', '.join(str((s.slot.rank, s.slot.env_index)) for s in streams[:16])}: give those of all envs of the "
            f"run, and of no other{f'; {hint}' if hint else ''}"
        )
    found = Comparison(tuple(stream.slot for stream in streams), HeatMap(len(streams)), notes=notes)
    found.notes += [f"{each.path}: {each.tail}" for each in (reader, *readers) if not each.tail.closed]
    found.notes += [f"env {s.slot.number} wrote {len(s.readers)} ledgers" for s in streams if len(s.readers) > 1]
    pairings = [_Pairing(stream, found, observation, action) for stream in streams]
    vector_step = 0
    for events in _trainer_records(reader, observation, action):
        for slot, event in events:
            pairings[slot].take(event)
            vector_step = event.at
    for pairing in pairings:
        pairing.finish(closed=reader.tail.closed, vector_step=vector_step)
    found.heat.reach(vector_step)
    if not found.equal:
        hint = of_earlier_runs(streams, [pairing.losses for pairing in pairings])
        found.notes += [hint] if hint else of_rows(reader, streams, observation, found)
    return found


def _convert_env(observation: Common, action: Common, *, sb3: bool) -> Callable[[Event], Event] | None:
    if not (sb3 or observation.converts or action.converts):
        return None

    def convert(event: Event) -> Event:
        flags = event.flags
        if sb3 and flags & _ENDS == _ENDS:
            flags &= ~Flag.TRUNCATED
        return event._replace(
            flags=flags, action=action.from_env(event.action), observation=observation.from_env(event.observation)
        )

    return convert


def _trainer_records(
    reader: LedgerReader, observation: Common, action: Common
) -> Iterator[Sequence[tuple[int, Event]]]:
    for record in reader.records():
        events: Sequence[Event] = record.events
        if observation.converts or action.converts:
            events = [
                event._replace(
                    action=action.from_trainer(event.action), observation=observation.from_trainer(event.observation)
                )
                for event in events
            ]
        yield list(zip(record.envs, events, strict=True))


class _Pairing:
    """Pair the events of one env.

    Args:
        env: The env's events.
        found: Where differences go.
        observation: Form of the observations.
        action: Form of the actions.
    """

    def __init__(self, env: EnvEvents, found: Comparison, observation: Common, action: Common) -> None:
        self._env = env
        self._found = found
        self._observation = observation.columns
        self._action = action.columns
        self._trainer: deque[Event] = deque()
        self._episode = -1
        self._step = 0
        self._parted = False
        self.losses = 0
        """Ends that the bridge made up because a client was lost."""

    def take(self, event: Event) -> None:
        """Take the trainer's next event."""
        self._trainer.append(event)
        if len(self._trainer) > _AHEAD:
            self._advance()

    def finish(self, *, closed: bool, vector_step: int) -> None:
        """Pair what is left; if the trainer's ledger is complete, the env may have no step beyond it."""
        while self._trainer:
            self._advance()
        if self._parted:  # the trainer never heard how its client, or another, went on
            return
        while closed and (event := self._env.peek()) is not None:
            if not event.is_reset:
                self._step += 1
                self._report("step_count", vector_step, Cell("step", None, "made"))
            self._env.pop()

    def _advance(self) -> None:
        """Deal with the trainer's next event."""
        ours = self._trainer[0]
        following = self._later(1)
        if ours.is_reset and following is not None and following.is_reset:
            self._trainer.popleft()
            return
        if ours.flags & Flag.LOST:
            self._lose(ours)
            return
        lost_next = following is not None and bool(following.flags & Flag.LOST)
        theirs = self._env.peek()
        while theirs is not None and theirs.is_reset and (later := self._env.peek(1)) is not None and later.is_reset:
            if lost_next and self._env.begins_file(1):
                break  # the client was lost in the first step of its episode
            self._env.pop()
            theirs = later
        if theirs is None:
            self._trainer_alone(ours, missing=self._env.closed)
        elif self._env.follows_a_kill() and self._unwritten(ours, theirs):
            self._trainer_alone(ours, missing=False)
        elif ours.is_reset and theirs.is_reset:
            self._pair_resets(ours, theirs)
        elif ours.is_reset:
            self._trainer_reset_alone(ours, theirs)
        elif theirs.is_reset:
            self._env_reset_alone(ours, theirs)
        elif _same(ours, theirs):
            self._found.env_steps += 1
            self._count_trainer()
            self._env.pop()
        else:
            self._pair_steps(ours, theirs)

    def _later(self, ahead: int) -> Event | None:
        return self._trainer[ahead] if ahead < len(self._trainer) else None

    def _count_trainer(self) -> None:
        """Go on to the trainer's next event."""
        if self._trainer.popleft().is_reset:
            self._episode += 1
            self._step = 0
        else:
            self._step += 1

    # Pairs --------------------------------------------------------------------------------------------------------

    def _pair_resets(self, ours: Event, theirs: Event) -> None:
        self._count_trainer()
        self._env.pop()
        self._found.episodes += 1
        if ours.observation != theirs.observation:
            self._report_cells("reset_obs", ours, differing(self._observation, ours.observation, theirs.observation))

    def _pair_steps(self, ours: Event, theirs: Event) -> None:
        """Compare two steps that differ, unless one of both sides has a step that the other lacks."""
        if self._skip_unpaired(ours, theirs):
            return
        self._found.env_steps += 1
        self._count_trainer()
        self._env.pop()
        if ours.action != theirs.action:
            self._report_cells("action", ours, differing(self._action, ours.action, theirs.action))
        if ours.flags & Flag.NO_FINAL:
            cells = sum(int(np.prod(entry.shape)) for entry in self._observation.entries)
            self._report("terminal_obs", ours.at, Cell("terminal observation", None, "given"), cells)
        elif ours.observation != theirs.observation:
            field = "terminal_obs" if ours.flags & _ENDS else "obs"
            self._report_cells(field, ours, differing(self._observation, ours.observation, theirs.observation))
        if not _same_reward(ours.reward, theirs.reward):
            self._report("reward", ours.at, Cell("reward", ours.reward, theirs.reward))
        for field, flag in (("terminated", Flag.TERMINATED), ("truncated", Flag.TRUNCATED)):
            if (ours.flags ^ theirs.flags) & flag:
                self._report(field, ours.at, Cell(field, bool(ours.flags & flag), bool(theirs.flags & flag)))

    def _skip_unpaired(self, ours: Event, theirs: Event) -> bool:
        """Go on behind steps of one side alone, if both are alike there."""
        for ahead in range(1, _AHEAD):
            later_ours, later_theirs = self._later(ahead), self._env.peek(ahead)
            if _same(later_ours, later_theirs):
                return False  # both go on alike as they are
            if _same(later_ours, theirs):
                for _ in range(ahead):
                    self._trainer_alone(self._trainer[0], missing=True)
                return True
            if _same(ours, later_theirs):
                for _ in range(ahead):
                    self._env_alone(ours)
                return True
        return False

    # Without a counterpart ----------------------------------------------------------------------------------------

    def _trainer_reset_alone(self, ours: Event, theirs: Event) -> None:
        """Deal with a reset of the trainer's where the env made a step."""
        if not _same(self._later(1), theirs):
            for ahead in range(1, _AHEAD + 1):
                later = self._env.peek(ahead)
                if later is not None and later.is_reset and later.observation == ours.observation:
                    for _ in range(ahead):
                        self._env_alone(ours)
                    return
        self._trainer_alone(ours, missing=True)

    def _env_reset_alone(self, ours: Event, theirs: Event) -> None:
        """Deal with a reset of the env's where the trainer made a step."""
        if not _same(ours, self._env.peek(1)):
            for ahead in range(1, _AHEAD + 1):
                later = self._later(ahead)
                if later is not None and later.is_reset and later.observation == theirs.observation:
                    for _ in range(ahead):
                        self._trainer_alone(self._trainer[0], missing=True)
                    return
        self._env_alone(ours)

    def _trainer_alone(self, ours: Event, *, missing: bool) -> None:
        """Go on behind an event that only the trainer has; it is a difference if the env's is ``missing``."""
        self._count_trainer()
        if not missing:
            self._found.not_compared += not ours.is_reset
        elif ours.is_reset:
            self._report("reset_obs", ours.at, Cell("reset", "made", None))
        else:
            self._report("step_count", ours.at, Cell("step", "made", None))

    def _env_alone(self, ours: Event) -> None:
        """Go on behind an event that only the env has, before the trainer's ``ours``."""
        theirs = self._env.peek()
        self._env.pop()
        if theirs is not None and theirs.is_reset:
            self._report("reset_obs", ours.at, Cell("reset", None, "made"))
        else:
            self._report("step_count", ours.at, Cell("step", None, "made"))

    # Lost clients -------------------------------------------------------------------------------------------------

    def _unwritten(self, ours: Event, theirs: Event) -> bool:
        """Say whether the trainer's event is one of the last before a kill, which the env's process kept back."""
        following = self._later(1)
        if ours.is_reset and ours.observation == theirs.observation and _same(following, self._env.peek(1)):
            return False
        if any(event.flags & Flag.LOST for event in self._trainer):
            return True
        ended = ours.is_reset or ours.flags & _ENDS
        return not ended and _same(following, theirs)  # the trainer reset all envs, and lost the client there

    def _lose(self, ours: Event) -> None:
        """Deal with a step in which the client was lost, and find what the trainer was given after it."""
        self._count_trainer()
        self.losses += 1
        if _same(ours._replace(flags=ours.flags & ~Flag.LOST), self._env.peek()) and not self._env.begins_file():
            self._found.env_steps += 1  # the env's own end: the client was lost in the reset behind it
            self._env.pop()
        else:
            self._found.lost_steps += 1
        ours_next = self._later(0)
        if ours_next is None or not ours_next.is_reset:
            self._parted = True
            return
        self._parted = self._later(1) is None
        ahead = self._rejoined(ours_next)
        if ahead == -1:
            self._count_trainer()
            self._found.episodes += 1
        elif ahead is not None:
            for _ in range(ahead):
                self._env.pop()
            if (begun := self._env.peek()) is not None:
                self._pair_resets(ours_next, begun)

    def _rejoined(self, ours: Event) -> int | None:
        """Say how many events ahead the env is where the trainer's episode after a loss begins; -1 is the last event.

        It is another episode, or the same going on, from where it stood or a step later. Observations may repeat: of
        several places it is the one from where most of what the trainer saw next is the same; nowhere, if neither the
        observation nor the next event is.
        """
        best, place = 0, None
        known = len(self._trainer)
        for ahead in range(-1, _AHEAD_AFTER_LOSS):
            observation = self._env.last_observation
            if ahead >= 0:
                if (theirs := self._env.peek(ahead)) is None:
                    break
                observation = theirs.observation
            elif self._env.begins_file():
                continue
            score = int(observation == ours.observation)
            for number in range(1, known):
                if not _same(self._trainer[number], self._env.peek(ahead + number)):
                    break
                score += 1
            if score > best:
                best, place = score, ahead
            if score == known:
                break
        return place

    # Reports ------------------------------------------------------------------------------------------------------

    def _report_cells(self, field: str, ours: Event, cells: Sequence[Cell]) -> None:
        first = cells[0]
        self._report(field, ours.at, first, len(cells))

    def _report(self, field: str, vector_step: int, cell: Cell, cells: int = 1) -> None:
        episode = max(self._episode, 0)
        self._found.add(Difference(self._env.slot, episode, self._step, vector_step, field, *cell, cells))


def _same(ours: Event | None, theirs: Event | None) -> bool:
    """Say whether both sides hold the same; not, if one side has nothing."""
    return (
        ours is not None
        and theirs is not None
        and ours.observation == theirs.observation
        and ours.action == theirs.action
        and ours.flags == theirs.flags
        and ours.is_reset == theirs.is_reset
        and (ours.reward == theirs.reward or _same_reward(ours.reward, theirs.reward))
    )


def _same_reward(ours: float, theirs: float) -> bool:
    with np.errstate(over="ignore"):
        return struct.pack("<f", np.float32(ours)) == struct.pack("<f", np.float32(theirs))
