"""Own looking ahead: how far what a trainer saw of an env agrees with what the env saw, from a place on.

Where both sides part, or a client was lost, they may go on at several places. `Lookout` walks from one of them with
every freedom that a run without a fault has (ends that the bridge made up, resets that were reset again, records that a
killed process kept back), and says how many of the trainer's events it explains. ``comparing`` takes the place that
explains the most.
"""

from __future__ import annotations

import math
import struct
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from plugrl_bridges.ledger.format import Flag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from plugrl_bridges.ledger.reader import Event
    from plugrl_bridges.ledger.streams import EnvEvents

__all__ = ["ENDS", "Lookout", "same", "same_reward"]

ENDS = Flag.TERMINATED | Flag.TRUNCATED
_AHEAD_AFTER_LOSS = 64
"""Events of the env in which the trainer's episode after a loss is looked for, nearly all of them resets."""
_KEPT_BACK, _ENDED, _RESET = 4, 5, 6
"""What is missing at a kill: up to so many steps; one that ended an episode; a reset."""


class Lookout:
    """Look ahead in the events of one env.

    Args:
        env: The env's events.
        trainer: The trainer's events of it that are known so far; only looked at.
    """

    def __init__(self, env: EnvEvents, trainer: Sequence[Event]) -> None:
        self._env = env
        self._trainer = trainer
        self.failed: dict[int, int] = {}
        """Number of a trainer's event, from 1, to how many steps failed at the trainer just before it."""
        self.passed = 0
        """Trainer's events before those that are looked at."""
        self.complete = False
        """Whether the trainer's events are all there are, so that the env has made no step beyond them."""

    def explained(self, number: int, ahead: int, *, afloat: bool = False, missing: int = 0, again: bool = True) -> int:
        """Say how many events of the trainer's, from ``number`` on, agree with the env's from ``ahead`` on.

        Args:
            number: Of the trainer's event.
            ahead: Of the env's event.
            afloat: Whether the client was lost just before, and the trainer's next reset may be anywhere near.
            missing: What is missing before ``ahead``, from `unwritten`.
            again: Go on once behind an event that differs, or that one side has alone; which counts against it.
        """
        places = {(ahead, missing): 0}  # and how many events were not compared on the way there
        for at in range(number, len(self._trainer)):
            ours = self._trainer[at]
            following = self._trainer[at + 1] if at + 1 < len(self._trainer) else None
            if failed := self.failed.get(self.passed + at + 1):
                places = self._behind_failed(places, failed)
            if ours.is_reset and following is not None and following.is_reset:
                continue
            after: dict[tuple[int, int], int] = {}
            for place, passed in places.items():
                for found, more in self._next(at, ours, *place, afloat=afloat):
                    after[found] = min(after.get(found, passed + more), passed + more)
            if not after:
                further = [self._behind(at, place) for place, _ in places] if again else [0]
                return at - number - min(places.values()) + max(further)
            places, afloat = after, bool(ours.flags & Flag.LOST)
        return len(self._trainer) - number - min(passed + self._beyond(*place) for place, passed in places.items())

    def _behind_failed(self, places: dict[tuple[int, int], int], steps: int) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for (ahead, missing), passed in places.items():
            for place in self.after_failed(ahead, steps):
                key = (place, missing)
                found[key] = min(found.get(key, passed), passed)
        return found

    def after_failed(self, ahead: int, steps: int) -> list[int]:
        """Give where the env may be, from ``ahead`` on, after so many steps of which the trainer has no outcome.

        It made each of them or not, or was reset in its place, or behind it.
        """
        found = [ahead]
        for place in range(ahead, ahead + 2 * steps):
            theirs = self._env.peek(place)
            steps -= theirs is not None and not theirs.is_reset
            if theirs is None or steps < 0:
                break
            found.append(place + 1)
        return found

    def _behind(self, at: int, ahead: int) -> int:
        """Say what is explained behind an event that differs, or that one side has alone, less one."""
        ways = [(at, ahead + 1)]
        ours, theirs = self._trainer[at], self._env.peek(ahead)
        if not ours.flags & Flag.LOST:
            ways.append((at + 1, ahead))
            if theirs is not None and ours.is_reset == theirs.is_reset:
                ways.append((at + 1, ahead + 1))
        return max(0, *(self.explained(*way, again=False) - 1 for way in ways))

    def _beyond(self, ahead: int, _missing: int) -> bool:
        """Say whether the env made a step from there on, although the trainer made none any more."""
        if not self.complete:
            return False
        events = map(self._env.peek, range(ahead, ahead + _AHEAD_AFTER_LOSS))
        return any(not event.is_reset for event in events if event is not None)

    def _next(
        self, at: int, ours: Event, ahead: int, missing: int, *, afloat: bool
    ) -> Iterator[tuple[tuple[int, int], int]]:
        """Give where both may be behind the trainer's event: the env's next event, and what is missing before it.

        With it goes 1 if the trainer's event is compared with nothing there, else 0.
        """
        if ours.flags & Flag.LOST:
            yield (ahead, 0), 0
            if self.own_end(ours, ahead):
                yield (ahead + 1, 0), 0
            return
        theirs = self._env.peek(ahead)
        if theirs is None and not self._env.closed:
            yield (ahead, 0), 1
        if ours.is_reset and afloat:
            yield from (((place, 0), 0) for place in self.rejoining(ours, ahead))
        elif ours.is_reset:
            if missing < _ENDED:
                yield from (((place + 1, 0), 0) for place in self.resets(ahead) if self._shows(place, ours))
        elif not missing and same(ours, theirs):
            yield (ahead + 1, 0), 0
        gone = self.unwritten(at, ours, ahead, missing)
        if gone:
            yield (ahead, gone), 1

    def _shows(self, ahead: int, ours: Event) -> bool:
        theirs = self._env.peek(ahead)
        return theirs is not None and theirs.observation == ours.observation

    def resets(self, ahead: int) -> list[int]:
        """Give the resets that stand one after another from there on; all but the last were reset again."""
        found: list[int] = []
        while (theirs := self._env.peek(ahead)) is not None and theirs.is_reset and len(found) < _AHEAD_AFTER_LOSS:
            found.append(ahead)
            ahead += 1
        return found

    def own_end(self, ours: Event, ahead: int) -> bool:
        """Say whether the env really made the step that ends so, and the client was lost in the reset behind it."""
        return same(ours._replace(flags=ours.flags & ~Flag.LOST), self._env.peek(ahead)) and not self._env.begins_file(
            ahead
        )

    def reachable(self, ahead: int) -> list[int]:
        """Give where the env may be with the observation that the trainer is given after a loss.

        It is the event at which the env stood, one less than ``ahead``; or a reset, in whichever file; or the step in
        which its client was lost. No env makes two steps more than the trainer knows of.
        """
        found = [ahead - 1]
        steps = 0
        for place in range(ahead, ahead + _AHEAD_AFTER_LOSS):
            theirs = self._env.peek(place)
            if theirs is None:
                break
            if self._env.begins_file(place):
                steps = 0
            steps += not theirs.is_reset
            if steps > 1:
                break
            found.append(place)
        return found

    def rejoining(self, ours: Event, ahead: int) -> list[int]:
        """Give the env's events behind each of these places that shows what the trainer was given after a loss."""
        return [
            place + 1 for place in self.reachable(ahead) if self._env.observation_before(place + 1) == ours.observation
        ]

    def unwritten(self, at: int, ours: Event, ahead: int, missing: int = 0) -> int:
        """Say whether the trainer's event may be one of the last before a kill, which the env's process kept back.

        Args:
            at: Its number.
            ours: It.
            ahead: Of the env's next event.
            missing: What is missing already.

        Returns:
            What is missing then, for the next call; 0 if it cannot be one.
        """
        if not self._env.follows_a_kill(ahead):
            return 0
        if ours.is_reset:
            kind = 0 if missing == _RESET else _RESET
        elif ours.flags & ENDS:
            kind = _ENDED if missing <= _KEPT_BACK else 0
        else:
            kind = missing + 1 if missing < _KEPT_BACK else 0
        if not kind:
            return 0
        behind = self._from(at + 1)
        if any(each.flags & Flag.LOST for each in [each for each in behind if not each.is_reset][: _KEPT_BACK + 1]):
            return kind
        if kind > _KEPT_BACK:
            return 0
        # Or the trainer reset all envs, and lost the client there; or that was all.
        if not behind or any(self._shows(place, behind[0]) for place in self.resets(ahead) if behind[0].is_reset):
            return kind
        return 0

    def _from(self, number: int) -> list[Event]:
        """Give a few of the trainer's events, without the resets that were reset again."""
        events = list(islice(self._trainer, number, number + 4 * _KEPT_BACK))
        followed = [each.is_reset for each in events[1:]]
        return [
            each
            for each, again in zip(events, [*followed, False], strict=False)  # of no events none is the last
            if not (each.is_reset and again)
        ]

    def in_place(self) -> float:
        """Say how many events of both sides fit as they are paired now: those of which the actions or outcomes agree.

        Where both have something, ends that only one side has are passed over. If nothing speaks against it as far as
        is known, that is infinite. What is the same in all of them fits in any place, and says nothing.
        """
        pairs, whole = self._pairs()
        behind = pairs[1:]  # the first is not held against it: there they differ in any case
        shown = _varies([each.observation for pair in behind for each in pair])
        if behind and not _varies([each.action for pair in behind for each in pair]):
            rewarded = any(not same_reward(behind[0][0].reward, each.reward) for pair in behind for each in pair)
            if not rewarded and pairs[0][0].observation == self._env.observation_before(0):
                return math.inf  # what is shown lags one step behind, and nothing else tells
            return sum(
                (shown and ours.observation == theirs.observation)
                or (rewarded and same_reward(ours.reward, theirs.reward))
                for ours, theirs in behind
            )
        count = 0
        for at, (ours, theirs) in enumerate(pairs):
            if ours.action == theirs.action or ours.observation == theirs.observation:
                count += 1
            elif at:
                return count
        return math.inf if count and whole else count

    def _pairs(self) -> tuple[list[tuple[Event, Event]], bool]:
        """Give the steps that are known of both sides as they are paired now; and False if the env's run out first."""
        pairs: list[tuple[Event, Event]] = []
        at, ahead = 0, 0
        while at < len(self._trainer):
            ours, theirs = self._trainer[at], self._env.peek(ahead)
            if ours.flags & Flag.LOST or (theirs is None and not self._env.closed):
                break
            if theirs is None:
                return pairs, False
            if ours.is_reset != theirs.is_reset:
                at += ours.is_reset
                ahead += theirs.is_reset
                continue
            at, ahead = at + 1, ahead + 1
            if not ours.is_reset:
                pairs.append((ours, theirs))
        return pairs, True


def _varies(values: Sequence[bytes]) -> bool:
    return any(value != values[0] for value in values)


def same(ours: Event | None, theirs: Event | None) -> bool:
    """Say whether both sides hold the same; not, if one side has nothing."""
    return (
        ours is not None
        and theirs is not None
        and ours.observation == theirs.observation
        and ours.action == theirs.action
        and ours.flags == theirs.flags
        and ours.is_reset == theirs.is_reset
        and same_reward(ours.reward, theirs.reward)
    )


def same_reward(ours: float, theirs: float) -> bool:
    """Say whether two rewards have the same bits as float32."""
    if ours == theirs:
        return math.copysign(1.0, ours) == math.copysign(1.0, theirs)
    with np.errstate(over="ignore"):
        return struct.pack("<f", np.float32(ours)) == struct.pack("<f", np.float32(theirs))
