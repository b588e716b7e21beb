"""Own the comparison of both sides: events are paired env by env, and every field of a pair is compared.

Both sides are sequences of resets and steps per env, whatever autoreset mode the trainer used. Where one side has an
event that the other lacks (a spurious or dropped end, a skipped step), the two are brought into step again by looking
some events ahead, so that one fault is counted as one. What was reset again before any step does not count.
``streams`` gives the events, ``following`` looks ahead, ``outcome`` keeps what is found.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.common import Cell, Common, differing
from plugrl_bridges.ledger.following import ENDS, Lookout, same, same_reward
from plugrl_bridges.ledger.format import Dialect, Flag, Kind
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

_AHEAD = 32
"""Events of the trainer that are looked ahead to bring both sides into step."""
_ALONE = 8
"""Events that one side may have alone, at one place."""


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
    for kind, events in _trainer_records(reader, observation, action):
        if kind is Kind.FAILED:
            for pairing in pairings:
                pairing.take_failed()
        for slot, event in events:
            if kind is Kind.KEPT:
                pairings[slot].take_kept(event)
            else:
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
        if sb3 and flags & ENDS == ENDS:
            flags &= ~Flag.TRUNCATED
        return event._replace(
            flags=flags, action=action.from_env(event.action), observation=observation.from_env(event.observation)
        )

    return convert


def _trainer_records(
    reader: LedgerReader, observation: Common, action: Common
) -> Iterator[tuple[Kind, Sequence[tuple[int, Event]]]]:
    """Give each record: its kind, and rows and events."""
    for record in reader.records():
        events: Sequence[Event] = record.events
        if observation.converts or action.converts:
            events = [
                event._replace(
                    action=action.from_trainer(event.action), observation=observation.from_trainer(event.observation)
                )
                for event in events
            ]
        yield record.kind, list(zip(record.envs, events, strict=True))


class _Way(NamedTuple):
    """Hold one way to go on: how many of the trainer's next events it explains, and how many of each side are alone.

    If neither side has events alone, a pair is made of the trainer's next event and the env's, ``skipped`` behind.
    """

    explains: float
    skipped: int = 0
    trainer_alone: int = 0
    env_alone: int = 0
    missing: bool = True


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
        self._lookout = Lookout(env, self._trainer)
        self._episode = -1
        self._step = 0
        self._parted = False
        self._afloat = False
        self._taken = 0
        self._kept: dict[int, bytes] = {}
        """Number of the trainer's event, from 1, to its observation as it was handed over again, and otherwise."""
        self.losses = 0
        """Ends that the bridge made up because a client was lost."""

    def take(self, event: Event) -> None:
        """Take the trainer's next event."""
        self._trainer.append(event)
        self._taken += 1
        if len(self._trainer) > _AHEAD:
            self._advance()

    def take_kept(self, event: Event) -> None:
        """Take what the trainer's last event showed when others were reset, which is not what it had shown."""
        self._kept.setdefault(self._taken, event.observation)

    def take_failed(self) -> None:
        """Take that the env may have made a step here of which the trainer has no outcome."""
        failed = self._lookout.failed
        failed[self._taken + 1] = failed.get(self._taken + 1, 0) + 1

    def finish(self, *, closed: bool, vector_step: int) -> None:
        """Pair what is left; if the trainer's ledger is complete, the env may have no step beyond it."""
        self._lookout.complete = closed
        while self._trainer:
            self._advance()
        if self._parted:  # the trainer never heard how its client, or another, went on
            return
        if failed := self._lookout.failed.pop(self._taken + 1, 0):
            self._pass_failed(failed)
        while closed and (event := self._env.peek()) is not None:
            if not event.is_reset:
                self._step += 1
                self._report("step_count", vector_step, Cell("step", None, "made"))
            self._env.pop()

    def _advance(self) -> None:
        """Deal with the trainer's next event."""
        ours = self._trainer[0]
        if failed := self._lookout.failed.pop(self._lookout.passed + 1, 0):
            self._pass_failed(failed)
        if ours.is_reset and len(self._trainer) > 1 and self._trainer[1].is_reset:
            self._pop_trainer()
            return
        if ours.flags & Flag.LOST:
            self._lose(ours)
            return
        afloat, self._afloat = self._afloat, False
        if afloat and ours.is_reset and self._rejoin(ours):
            return
        theirs = self._env.peek()
        if theirs is None:
            self._trainer_alone(ours, missing=self._env.closed)
        elif not same(ours, theirs):
            self._part(ours, theirs)
        elif not ours.is_reset:
            self._found.env_steps += 1
            self._count_trainer()
            self._env.pop()
        elif (following := self._env.peek(1)) is not None and following.is_reset:
            self._part(ours, theirs)
        else:
            self._pair_resets(ours, theirs)

    def _count_trainer(self) -> None:
        """Go on to the trainer's next event."""
        ours, kept = self._pop_trainer()
        if ours.is_reset:
            self._episode += 1
            self._step = 0
        else:
            self._step += 1
        if kept is not None:
            self._report_cells("obs", ours, differing(self._observation, kept, ours.observation))

    def _pop_trainer(self) -> tuple[Event, bytes | None]:
        self._lookout.passed += 1
        return self._trainer.popleft(), self._kept.pop(self._lookout.passed, None)

    def _pass_failed(self, steps: int) -> None:
        """Pass over what the env did in steps of which the trainer has no outcome, as fits what follows best."""
        look, ours = self._lookout, self._trainer[0] if self._trainer else None

        def fits(place: int) -> tuple[int, bool, int]:
            theirs = self._env.peek(place)
            alike = (theirs and theirs.is_reset) == (ours and ours.is_reset)
            return look.explained(0, place), alike, -place

        for _ in range(max(look.after_failed(0, steps), key=fits)):
            self._env.pop()

    # Pairs --------------------------------------------------------------------------------------------------------

    def _pair_resets(self, ours: Event, theirs: Event) -> None:
        self._count_trainer()
        self._env.pop()
        self._found.episodes += 1
        if ours.observation != theirs.observation:
            self._report_cells("reset_obs", ours, differing(self._observation, ours.observation, theirs.observation))

    def _pair_steps(self, ours: Event, theirs: Event) -> None:
        """Compare two steps that differ."""
        self._found.env_steps += 1
        self._count_trainer()
        self._env.pop()
        if ours.action != theirs.action:
            self._report_cells("action", ours, differing(self._action, ours.action, theirs.action))
        if ours.flags & Flag.NO_FINAL:
            cells = sum(int(np.prod(entry.shape)) for entry in self._observation.entries)
            self._report("terminal_obs", ours.at, Cell("terminal observation", None, "given"), cells)
        elif ours.observation != theirs.observation:
            field = "terminal_obs" if ours.flags & ENDS else "obs"
            self._report_cells(field, ours, differing(self._observation, ours.observation, theirs.observation))
        if not same_reward(ours.reward, theirs.reward):
            self._report("reward", ours.at, Cell("reward", ours.reward, theirs.reward))
        for field, flag in (("terminated", Flag.TERMINATED), ("truncated", Flag.TRUNCATED)):
            if (ours.flags ^ theirs.flags) & flag:
                self._report(field, ours.at, Cell(field, bool(ours.flags & flag), bool(theirs.flags & flag)))

    # Several ways to go on ----------------------------------------------------------------------------------------

    def _part(self, ours: Event, theirs: Event) -> None:
        """Go on where both sides differ, or the env was reset twice, in the way that explains most of what follows."""
        best = _Way(-1)
        for way in self._ways(ours, theirs):
            if way.explains > best.explains:
                best = way
            if way.explains == math.inf:
                break
        if best.trainer_alone or best.env_alone:
            for _ in range(best.trainer_alone):
                self._trainer_alone(self._trainer[0], missing=best.missing)
            for _ in range(best.env_alone):
                self._env_alone(ours)
            return
        for _ in range(best.skipped):
            self._env.pop()
        if (theirs_now := self._env.peek()) is None:
            return
        (self._pair_resets if ours.is_reset else self._pair_steps)(ours, theirs_now)

    def _ways(self, ours: Event, theirs: Event) -> Iterator[_Way]:
        """Give the ways to go on, the most likely ones first."""
        look = self._lookout
        resets = look.resets(0)
        if ours.is_reset:
            for place in reversed(resets):
                alike = same(ours, self._env.peek(place))
                explains = look.explained(1, place + 1)
                yield _Way(explains + 1 if alike else explains, skipped=place)
        elif not theirs.is_reset:
            yield _Way(look.in_place())
            alike = ours.action == theirs.action or ours.observation == theirs.observation
            yield _Way(look.explained(1, 1) + (1 if alike else -0.5))
        if gone := look.unwritten(0, ours, 0):
            yield _Way(look.explained(1, 0, missing=gone), trainer_alone=1, missing=False)
        for alone in range(1, _ALONE + 1):
            if alone <= len(self._trainer) and not any(self._trainer[at].flags & Flag.LOST for at in range(alone)):
                yield _Way(look.explained(alone, 0), trainer_alone=alone)
            if self._env.peek(alone - 1) is not None:
                yield _Way(look.explained(0, alone) - alone + 0.5, env_alone=alone)

    # Without a counterpart ----------------------------------------------------------------------------------------

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

    def _lose(self, ours: Event) -> None:
        """Deal with a step in which the client was lost."""
        look = self._lookout
        own = look.own_end(ours, 0) and look.explained(1, 1, afloat=True) >= look.explained(1, 0, afloat=True)
        self._count_trainer()
        self.losses += 1
        if own:
            self._found.env_steps += 1  # the env's own end: the client was lost in the reset behind it
            self._env.pop()
        else:
            self._found.lost_steps += 1
        self._afloat = bool(self._trainer) and self._trainer[0].is_reset
        self._parted = len(self._trainer) < 2 or not self._afloat

    def _rejoin(self, ours: Event) -> bool:
        """Find the env's event with which the trainer's episode begins after a loss; tell whether there is one.

        It is another episode, or the same going on, from where it stood or a step later. Observations may repeat: of
        several places it is the one that explains most of what the trainer saw next; none, if neither the observation
        is there nor the next event.
        """
        look = self._lookout
        best, behind = 0.0, None
        for place in look.reachable(0):
            shown = self._env.observation_before(place + 1)
            explains = look.explained(1, place + 1) + (1 if shown == ours.observation else -0.5)
            if explains > best:
                best, behind = explains, place + 1
        if (gone := look.unwritten(0, ours, 0)) and look.explained(1, 0, missing=gone) > best:
            self._trainer_alone(ours, missing=False)
            return True
        if behind is None:
            return False
        for _ in range(behind):
            self._env.pop()
        self._count_trainer()
        self._found.episodes += 1
        if ours.observation != (shown := self._env.last_observation):
            self._report_cells("reset_obs", ours, differing(self._observation, ours.observation, shown))
        return True

    # Reports ------------------------------------------------------------------------------------------------------

    def _report_cells(self, field: str, ours: Event, cells: Sequence[Cell]) -> None:
        first = cells[0]
        self._report(field, ours.at, first, len(cells))

    def _report(self, field: str, vector_step: int, cell: Cell, cells: int = 1) -> None:
        episode = max(self._episode, 0)
        self._found.add(Difference(self._env.slot, episode, self._step, vector_step, field, *cell, cells))
