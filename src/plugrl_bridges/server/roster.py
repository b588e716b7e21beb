"""Who is here: the connections that offer envs, their seats, the spaces they agree on, and the losses.

Joins the pure slot table with what connections announce. Sends nothing and waits for nothing; ``server.exchange`` tells
it of arrivals and losses, under the hub's lock, and makes steps of whoever sits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from plugrl_bridges.errors import (
    EnvPoisoned,
    PlugRLError,
    RaggedClientError,
    SpaceError,
    UnverifiedClientError,
)
from plugrl_bridges.server import report
from plugrl_bridges.server.announced import Announced, first_observations, surfaced_layout
from plugrl_bridges.server.seats import Brought, Event, Loss, Seat, Stage
from plugrl_bridges.server.slots import Candidate, SlotTable
from plugrl_bridges.server.verify import check_spaces
from plugrl_bridges.spaces import ActionLayout
from plugrl_bridges.wire.info import own
from plugrl_bridges.wire.session import LATE_RESET, STEP_DIGEST

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from plugrl_bridges.server.hub import Peer
    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.spaces import ObservationLayout
    from plugrl_bridges.wire.messages import Infer

__all__ = ["Roster", "Terms", "known"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnError = TypeVar("AnError", bound=PlugRLError)


def known(value: T | None) -> T:
    """Return what is known as soon as a client is here.

    Raises:
        EnvPoisoned: if it is not.
    """
    if value is None:
        raise EnvPoisoned("no client has connected yet: call reset() first")
    return value


@dataclass(frozen=True)
class Terms:
    """What the first client decides for all.

    Attributes:
        num_envs: Number of slots.
        announced: What it said of its envs.
        observations: Layout of one env's observation.
        actions: Layout of one env's action.
    """

    num_envs: int
    announced: Announced
    observations: ObservationLayout
    actions: ActionLayout


class Roster:
    """The seats of a lockstep.

    Args:
        options: As the adapters take them.
        offered: Optional features that the metadata lists.

    Attributes:
        sitting: Seats that fill slots, in slot order.
        losses: Those of which the trainer has not been told, or whose slots nobody has taken; in the order they came.
        client_losses: Connections with slots that were lost so far.
        failure: An error that the trainer must hear of, or None.
        terms: None while no client has come to decide them.
    """

    def __init__(self, options: BridgeOptions, offered: Collection[str]) -> None:
        self.sitting: list[Seat] = []
        self.losses: list[Loss] = []
        self.client_losses = 0
        self.failure: PlugRLError | None = None
        self.terms: Terms | None = None
        self._options = options
        self._offered = offered
        self._table = SlotTable(0)
        self._seats: dict[int, Seat] = {}
        self._candidates: dict[int, Candidate] = {}
        self._warned: set[str] = set()
        self._refusal: tuple[float, str] | None = None  # the latest, and when it was

    @property
    def num_envs(self) -> int | None:
        """Number of slots, or None while no client has come to decide it."""
        return self._options.num_envs if self.terms is None else self.terms.num_envs

    @property
    def filled(self) -> bool:
        """Whether every slot has been filled once."""
        return self._table.filled

    def seat_of(self, peer: Peer) -> Seat | None:
        """Return the seat of a connection, or None if it is new."""
        return self._seats.get(peer.number)

    def unprepared(self) -> list[Seat]:
        """Return those without slots whose envs wait for a first reset that nobody has asked for."""
        return [seat for seat in self._seats.values() if seat.stage is Stage.UNRESET]

    def vacancies(self) -> list[Loss]:
        """Return the losses with slots that nobody has taken."""
        return [loss for loss in self.losses if loss.vacant]

    def untold(self) -> list[Loss]:
        """Return the losses of which the trainer has not been told."""
        return [loss for loss in self.losses if loss.untold]

    def tell(self, slots: Collection[int]) -> tuple[int, ...]:
        """Record that the trainer is told of what was lost in these slots; return those that were lost, in order."""
        lost: set[int] = set()
        for loss in self.losses:
            lost |= loss.untold.intersection(slots)
            loss.untold.difference_update(slots)
        self._forget_settled()
        return tuple(sorted(lost))

    def _forget_settled(self) -> None:
        self.losses = [loss for loss in self.losses if loss.vacant or loss.untold]

    def warn_once(self, text: str, *, kind: str) -> None:
        """Log a warning the first time that one of its kind is given: texts differ with every address."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)

    def _warn_of_spaces(self, text: str) -> None:
        self.warn_once(text, kind="spaces")

    def waiting_text(self, url: str, elapsed_s: float) -> str:
        """Return who is here before the first step."""
        waiting = list(self._seats.values())
        notes: list[str] = []
        if sum(len(seat.envs) for seat in waiting) >= (self.num_envs or 1):
            notes.append(
                "these do not add up to the slots, since a connection gets slots for all its envs or for none: give "
                "the trainer another num_envs, or the clients another number of envs"
            )
        notes += self._refusals()
        return report.waiting_for_clients(url, self.num_envs, waiting, elapsed_s, notes, verify=self._verify)

    def vacant_text(self, url: str, elapsed_s: float) -> str:
        """Return which slots nobody has, and who wanted them but was refused."""
        n = known(self.num_envs)
        return report.vacant_slots(url, self.vacancies(), n, elapsed_s, self._refusals(), verify=self._verify)

    def still_waiting_text(self, url: str, elapsed_s: float) -> str:
        """Return who owes a result, or else which slots nobody has."""
        owing = [seat for seat in self.sitting if seat.owes]
        if owing:
            return f"still waiting: {report.still_acting(url, owing, known(self.num_envs), elapsed_s)}"
        return f"still waiting: {self.vacant_text(url, elapsed_s)}"

    @property
    def _verify(self) -> bool:
        return bool(self._options.verify)

    def _refusals(self) -> list[str]:
        """Return what is to be said of the latest client that was refused."""
        if self._refusal is None:
            return []
        at, text = self._refusal
        return [f"{text} ({time.monotonic() - at:.1f} s ago)"]

    def welcome(self, peer: Peer, infer: Infer, *, running: bool) -> None:
        """Accept a connection's first infer; it sits, or is a spare, or is to be reset before it is either.

        Args:
            peer: The connection.
            infer: Its first message.
            running: Whether the trainer has had its first observations, and no reset is under way.

        Raises:
            RaggedClientError: if one env of it could not wait for the trainer while the others step.
            UnverifiedClientError: if it sends no digests, and the trainer wants every step verified.
            RemoteProtocolError: for an ``env_spec`` or an observation that is not as it should be.
            SpaceError: if its spaces are not those in use; while slots are open, ``failure`` has it too.
        """
        try:
            announced = Announced.from_wire(infer.env_spec, self._offered)
            seat = Seat(
                peer, tuple(infer.env_indices.tolist()), announced.features,
                Stage.UNRESET if announced.unreset else Stage.SPARE,
                # One that leaves its first reset to the trainer, and brings real observations, was here before.
                returned=LATE_RESET in announced.features and not announced.unreset,
            )  # fmt: skip
            self._check_can_wait(seat)
            self._check_can_be_verified(seat)
            self._agree(peer, announced, infer)
            self.hold(seat, infer)
        except PlugRLError as exc:
            self._refusal = time.monotonic(), f"the client at {peer.address} was sent away: {exc}"
            raise
        self._seats[peer.number] = seat
        self._candidates[peer.number] = Candidate(peer.number, len(seat.envs), announced.rank)
        if not (running and announced.unreset):
            self.admit(seat)

    def admit(self, seat: Seat) -> None:
        """Let a connection sit, or be a spare."""
        candidate = self._candidates[seat.peer.number]
        self._sit(self._table.arrive(candidate))
        if not seat.slots:
            why = self._table.why_spare(candidate)
            logger.info("%s is a spare: %s", seat.peer.address, why)
            if not self.filled and candidate.num_envs > self._table.num_envs:
                self.warn_once(f"{seat.peer.address} cannot be given slots: {why}", kind="unseatable")

    def prepare(self, seat: Seat) -> None:
        """Keep a connection apart while its envs are reset for the first time; `admit` it then."""
        self._table.leave(seat.peer.number)
        seat.note(Event.PREPARE)
        seat.brought = None

    def address_of(self, slot: int) -> str:
        """Return the address of a slot's client, for texts."""
        return next((seat.peer.address for seat in self.sitting if slot in seat.slots), "gone meanwhile")

    def hold(self, seat: Seat, infer: Infer, *, from_reset: bool = False) -> None:
        """Keep the first observations and infos that a seat's envs bring, until a step hands them to the trainer.

        Args:
            seat: Whose.
            infer: What came.
            from_reset: Whether this side had asked for a reset. Else a step id of 0 tells that an env took no step
                since one [step-digest].

        Raises:
            RemoteProtocolError: if the observations do not fit the layout [5.2].
        """
        layout, n = known(self.terms).observations, len(seat.envs)
        observations = layout.allocate(n)
        order = [seat.envs.index(env) for env in infer.env_indices.tolist()]
        layout.read(infer.observation, observations, np.array(order))
        reset = np.full(n, from_reset)
        reset[order] |= infer.step_ids == 0
        digest = None
        if infer.digest is not None:
            digest = np.empty(n, np.uint64)
            digest[order] = infer.digest
        info = {key: own(value) for key, value in infer.reset_info.items()} if infer.reset_info else None
        seat.brought = Brought(observations, reset, info, digest)

    def leave(self, peer: Peer, why: str) -> None:
        """Record the end of a connection; spares that fit move up."""
        seat = self._seats.pop(peer.number, None)
        self._candidates.pop(peer.number, None)
        if seat is None:
            return
        seat.note(Event.LEAVE)
        if seat in self.sitting:
            self.sitting.remove(seat)
            self.client_losses += 1
            logger.warning("lost the client of slots %s at %s: %s", report.slots_text(seat.slots), peer.address, why)
            self.losses.append(Loss(seat.slots, peer.address, why, peer.last_words(), time.monotonic()))
        self._sit(self._table.leave(peer.number))
        if not self.filled and not self._seats:  # who is gone decides nothing for those who come
            self.terms = None

    def _check_can_wait(self, seat: Seat) -> None:
        """In NEXT_STEP a slot sits out the step after an end: an infer for several envs cannot be answered for some."""
        if not self._options.autoreset_mode.sits_out or len(seat.envs) == 1:
            return
        text = (
            f"[5.3] the client at {seat.peer.address} has {len(seat.envs)} envs on one connection, and "
            "autoreset_mode=NEXT_STEP needs one env per connection, since an env sits out the step after its episode's "
            "end: start the client with as many --num-procs as envs, or use SAME_STEP"
        )
        raise self._failing(RaggedClientError(text))

    def _check_can_be_verified(self, seat: Seat) -> None:
        if not self._options.verify or STEP_DIGEST in seat.features:
            return
        text = (
            f"[step-digest] verify is on, but the client at {seat.peer.address} sends no digests of its steps: start "
            "it with --verify (EnvClient(..., verify=True))"
        )
        if self._options.verify == "warn":
            self.warn_once(f"{text}; its slots are not checked", kind="unverified")
            return
        raise self._failing(UnverifiedClientError(f'{text}, or give the bridge verify="warn" to go on without'))

    def _failing(self, error: AnError) -> AnError:
        """Let the trainer hear of an error, if it still waits for all its slots; return it."""
        if not self.filled:
            self.failure = error
        return error

    def _agree(self, peer: Peer, announced: Announced, infer: Infer) -> None:
        """Fix the spaces on the first client, and hold later ones to them."""
        try:
            terms = self.terms or self._terms_of(announced, infer)
            surfaced = announced.surfaced(self._options)
            surfaced.check_against(terms.observations.space, terms.actions.space, self._warn_of_spaces)
            if self._options.verify and STEP_DIGEST in announced.features:
                check_spaces(surfaced, terms.observations, terms.actions)
            if self.terms is None:
                first_observations(self._options, announced, terms.observations, infer)
                self.terms, self._table = terms, SlotTable(terms.num_envs)
        except SpaceError as exc:
            raise self._failing(SpaceError(f"the client at {peer.address} does not fit: {exc}")) from exc

    def _terms_of(self, announced: Announced, infer: Infer) -> Terms:
        observations = surfaced_layout(self._options, announced.observation_space, infer.observation)
        action_space = self._options.action_space or announced.action_space
        if action_space is None:
            raise SpaceError("it announces no action space: pass action_space=")
        actions = ActionLayout(action_space)
        actions.stacked(self._options.action_horizon)
        offered = max(announced.group_num_envs or 0, len(infer.env_indices))
        return Terms(self._options.num_envs or offered, announced, observations, actions)

    def _sit(self, seated: Mapping[int, tuple[int, ...]]) -> None:
        """Let connections have the slots that the table gives them."""
        for number, slots in seated.items():
            seat = self._seats[number]
            seat.sit(slots)
            self.sitting.append(seat)
            self.sitting.sort(key=lambda each: each.slots)
            for loss in self.losses:
                loss.vacant.difference_update(slots)
            self._forget_settled()
            if self.filled and not self.vacancies():
                self._refusal = None  # whoever was meant, the slots are taken now
            logger.info("%s has slots %s", seat.peer.address, report.slots_text(slots))
