"""What is in flight: one exchange with every connection, and the result that it fills.

The hub hands every message to the `Exchange`, which writes it into the open result at once, whoever drives the hub at
that moment; all of it runs under the hub's lock. `Exchange.gather` drives the hub until every slot has its result, and
says who is missing if one has not. What an exchange is for (a step or a reset) is the business of ``server.lockstep``.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.errors import ClientLost, ConnectTimeout, EnvPoisoned, RaggedClientError, StepTimeout
from plugrl_bridges.server import report
from plugrl_bridges.server.hub import Hub
from plugrl_bridges.server.result import InfoPart, StepResult
from plugrl_bridges.server.roster import Roster, known
from plugrl_bridges.server.seats import AFTER, Event, Stage
from plugrl_bridges.server.verify import Verifier
from plugrl_bridges.wire.closing import FEEDBACK_TIMEOUT, GOING_AWAY
from plugrl_bridges.wire.info import episode_records
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Metadata, ResetRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from plugrl_bridges.server.hub import Peer
    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.server.roster import Terms
    from plugrl_bridges.server.seats import Loss, Seat
    from plugrl_bridges.wire.codec import Array

__all__ = ["Exchange"]

logger = logging.getLogger(__name__)

_FAST_LANE_S = 0.05  # how long one connection alone is listened to before the others get a look
_COPY_BELOW_BYTES = 1 << 16

# Looked up once: `Seat.note` would be one more call for every message of a step.
_AFTER_STEP, _AFTER_RESET = AFTER[Event.STEP], AFTER[Event.RESET]
_AFTER_FEEDBACK, _AFTER_INFER = AFTER[Event.FEEDBACK], AFTER[Event.INFER]


class Exchange:
    """Carry one exchange at a time with all seated connections.

    Call `begin`, then `answer` for each seat that is to act, then `gather`, then `finish_step` or `finish_reset`.

    Args:
        options: As the adapters take them.
        metadata: Sent to every client first.

    Attributes:
        roster: Who is here.
        hub: Carries the messages; take its lock around every call.
        step: The open result, or None between exchanges.
        last: Where the envs stand, one array per leaf; never written to, empty before the first reset.
        resetting: Whether the open exchange is a reset.
        asks_newcomers: Whether it is one of all slots, so that newcomers may take a slot before they are reset.
        verifier: Is told the digests that clients send, if steps are to be verified.
        terms: Number of slots and layouts, as soon as the slots are filled.

    Raises:
        OSError: if the port cannot be had; the text names it.
    """

    def __init__(self, options: BridgeOptions, metadata: Metadata) -> None:
        self.roster = Roster(options, metadata.features)
        self.step: StepResult | None = None
        self.last: list[Array] = []
        self.terms: Terms
        self.verifier: Verifier | None = None
        self._options = options
        self._first: list[Array] = []
        self._unseen: Array | None = None
        self._blank: StepResult | None = None  # for the next exchange
        self.resetting = self.asks_newcomers = False
        self._pending = 0
        self.hub = Hub(options, metadata, self)

    def _open(self) -> StepResult:
        if self.step is None:
            raise EnvPoisoned("no exchange is open: call step_async first")
        return self.step

    # What the hub tells -----------------------------------------------------------------------------------------

    def on_infer(self, peer: Peer, infer: Infer) -> None:
        """Accept an infer: a newcomer's first, or the observations that end this step."""
        seat = self.roster.seat_of(peer)
        if seat is None:
            running = bool(self.last) and not self.asks_newcomers
            self.roster.welcome(peer, infer, running=running)
            if running:
                self.prepare_spares()
            return
        if not seat.knows(infer.env_indices):
            names, all_names = infer.env_indices.tolist(), list(seat.envs)
            error = RaggedClientError(
                f"[4.3] {peer.address} asks for a chunk for envs {names} alone, but its connection carries "
                f"{all_names}: a lockstep trainer would wait for ever. Use one env per connection, or action_horizon=1 "
                "and a client that steps all its envs together"
            )
            if seat.slots:
                self.roster.failure = error
            raise error
        if seat.stage is Stage.PREPARING:
            self.roster.hold(seat, infer, from_reset=True)
            seat.note(Event.INFER)
            self.roster.admit(seat)
            return
        step = self._open()
        self._read_next(step, seat, infer)
        if infer.reset_info:
            step.reset_parts.append(InfoPart.of(infer.reset_info, seat.slots_of(infer.env_indices)))
        if self.verifier is not None and infer.digest is not None:
            self.verifier.asked(seat.rows(infer.env_indices), infer.digest, step.begun)
        seat.stage = _AFTER_INFER[seat.stage]
        self._pending -= 1

    def _read_next(self, step: StepResult, seat: Seat, infer: Infer) -> None:
        """Read where a seat's envs stand: first observations of those that begin an episode, and of the others."""
        layout, reuse = self.terms.observations, infer.reuse
        if b"\x01" not in step.begun.tobytes():  # numpy's own any() takes ten times as long
            if reuse is None:
                layout.read(infer.observation, step.observations, seat.rows(infer.env_indices))
            elif b"\x00" in reuse.tobytes():
                layout.read(infer.observation, step.observations, seat.rows(infer.env_indices[~reuse]))
            return
        slots = seat.slots_of(infer.env_indices)
        begun = step.begun[slots]
        reused = np.zeros_like(begun) if reuse is None else reuse
        _copy_rows(step.observations, step.first, slots[begun & reused])
        if not reused.all():
            layout.read(infer.observation, step.first, slots[~reused])
            _copy_rows(step.first, step.observations, slots[~begun & ~reused])

    def on_feedback(self, peer: Peer, feedback: Feedback, dropped: tuple[int, ...]) -> None:  # noqa: ARG002 - gone already
        """Record a feedback: rewards, flags and the last step's observations."""
        seat, m = self.roster.seat_of(peer), len(feedback.env_indices)
        if seat is None or m == 0:  # the session admits feedback only for held actions, and only seats hold any
            return
        step = self._open()
        rows = seat.rows(feedback.env_indices)
        self.terms.observations.read(feedback.observation, step.observations, rows)
        step.rewards[rows] = feedback.rewards
        step.terminated[rows] = feedback.terminated
        step.truncated[rows] = feedback.truncated
        step.stepped[rows] = True
        seat.stage = _AFTER_FEEDBACK[seat.stage]
        if self.verifier is not None and feedback.digest is not None:
            self.verifier.fed_back(rows, feedback.digest)
        done = feedback.terminated | feedback.truncated
        if b"\x01" in done.tobytes():
            step.begun[rows] = done
        if feedback.info:
            numbers = seat.slots_of(feedback.env_indices)
            step.info_parts.append(InfoPart.of(feedback.info, numbers))
            if self._options.action_horizon > 1:
                records = episode_records(feedback.info, m)
                ended = zip(numbers.tolist(), records, strict=True)
                step.lengths.update({slot: record.length for slot, record in ended if record is not None})

    def on_lost(self, peer: Peer, why: str) -> None:
        """Record the end of a connection: the episodes of its slots end with it, which the next result says."""
        seat = self.roster.seat_of(peer)
        if seat is not None and seat.slots:
            self._pending -= seat.owes
            if self.step is not None:
                self.step.begun[list(seat.slots)] = False  # until somebody else is there
        self.roster.leave(peer, why)

    def wait_for_clients(self) -> None:
        """Drive the hub until every slot has been filled once.

        Raises:
            ConnectTimeout: after ``connect_timeout`` s.
            SpaceError: if a client's spaces cannot be used.
            RaggedClientError: if a client cannot be served in lockstep.
            UnverifiedClientError: with ``verify=True``, for a client that sends no digests.
        """
        limit, timing = self._options.connect_timeout, self._options.timing
        started = time.monotonic()
        next_report = timing.first_report_s
        while not self.roster.filled:
            self._check_open()
            elapsed = time.monotonic() - started
            if self.roster.failure is not None:
                raise self.roster.failure
            if limit is not None and elapsed >= limit:
                raise ConnectTimeout(f"gave up {self.roster.waiting_text(self.hub.url, elapsed)}")
            if elapsed >= next_report:
                logger.warning("%s", self.roster.waiting_text(self.hub.url, elapsed))
                next_report *= 2
            self.hub.poll(min(timing.slice_s, next_report - elapsed, math.inf if limit is None else limit - elapsed))
        self.terms = known(self.roster.terms)

    # One exchange -----------------------------------------------------------------------------------------------

    def begin(self, unseen: Array | None = None) -> StepResult:
        """Open a result; hand every seat that is to act its chunk with `answer`.

        Args:
            unseen: bool ``[num_envs]``, the slots whose running episode the trainer has not seen; None for none. Losing
                one cuts nothing short.
        """
        self.step, self._blank = self._blank or self._make_blank(), None
        self._unseen = unseen
        self._pending = 0
        return self.step

    def _make_blank(self) -> StepResult:
        terms, n = self.terms, self.terms.num_envs
        if not self._first:
            self._first = terms.observations.allocate(n)
            if self._options.verify:
                self.verifier = Verifier(self._options, n, terms.observations, terms.actions, self.roster.address_of)
        return StepResult(
            observations=terms.observations.allocate(n),
            rewards=np.zeros(n),
            terminated=np.zeros(n, np.bool_),
            truncated=np.zeros(n, np.bool_),
            stepped=np.zeros(n, np.bool_),
            begun=np.zeros(n, np.bool_),
            first=self._first,
        )

    def keep(self, idle: Array) -> None:
        """Have the rows of slots that are not to be stepped show where their envs stand.

        Args:
            idle: bool ``[num_envs]``.
        """
        _copy_rows(self.last, self._open().observations, idle)

    def answer(
        self, seat: Seat, wire: Array, reset: ResetRequest | None, moves: Mapping[Stage, Stage] = _AFTER_STEP
    ) -> None:
        """Send one connection its envs' rows of ``[H, num_envs, *da]``, or ask it to reset them."""
        asked = seat.peer.session.asked
        if asked is None or seat.peer.lost:  # its connection has just ended
            return
        rows = seat.rows(asked.env_indices)
        message = seat.peer.session.answer(Action(asked.env_indices, wire[:, rows], reset))
        if reset is not None:
            self._open().begun[seat.slots_of(reset.env_ids)] = True
        seat.stage = moves[seat.stage]
        self._pending += 1
        self.hub.send(seat.peer, message)

    def reset(self, seat: Seat, seeds: Sequence[int | None], options: Sequence[Mapping[str, Any] | None]) -> None:
        """Ask a seat's client to reset its envs in place of stepping them; the observations are part of the result.

        Args:
            seat: Its client knows ``seeded-reset``.
            seeds: One per slot.
            options: One per slot.
        """
        asked = seat.peer.session.asked
        if asked is None:
            return
        slots = seat.slots_of(asked.env_indices).tolist()
        request = ResetRequest(
            asked.env_indices, tuple(seeds[slot] for slot in slots), tuple(options[slot] for slot in slots)
        )
        self.answer(seat, self._no_actions(self.terms.num_envs), request, _AFTER_RESET)
        seat.brought = None

    def prepare_spares(self) -> None:
        """Have newcomers reset their envs beside the run, so that they can take a slot with a first observation."""
        for seat in self.roster.unprepared():
            asked = seat.peer.session.asked
            if asked is None or seat.peer.lost:
                continue
            n = len(seat.envs)
            request = ResetRequest(asked.env_indices, (None,) * n, (None,) * n)
            message = seat.peer.session.answer(Action(asked.env_indices, self._no_actions(n), request))
            self.roster.prepare(seat)
            self.hub.send(seat.peer, message)

    def _no_actions(self, num_envs: int) -> Array:
        """Make the rows of an action that are there for form's sake."""
        layout = self.terms.actions
        return np.zeros((self._options.action_horizon, num_envs, *(layout.shape or (1,))), layout.dtype)

    def gather(self, timeout_s: float) -> None:
        """Drive the hub until every slot has its result.

        Args:
            timeout_s: Seconds from now for the result, and seconds that a lost slot may stay vacant.

        Raises:
            StepTimeout: naming the slots that are missing.
            ClientLost: if a client went away and, by policy, this is an error or nobody took its place.
            RaggedClientError: if a client cannot be served in lockstep.
            EnvPoisoned: if the hub was closed meanwhile.
        """
        entered = time.monotonic()
        deadline = entered + timeout_s
        if self._blank is None:  # made while the envs step, which costs nobody anything
            self._blank = self._make_blank()
        self.hub.poll_if_due()
        while self._pending and len(self.roster.sitting) == 1 and not self.hub.closing:
            if time.monotonic() >= deadline or not self.hub.poll_peer(
                self.roster.sitting[0].peer, min(_FAST_LANE_S, timeout_s)
            ):
                break
        timing = self._options.timing
        next_report = timing.first_report_s
        while self._pending or (self.roster.losses and self.roster.vacancies()):
            self._check_failure()
            now = time.monotonic()
            elapsed = now - entered
            if self._pending and now >= deadline:
                self._give_up_on_silent(timeout_s)
                continue
            vacancies = self.roster.vacancies()
            if vacancies:
                since = max(entered, *(loss.at for loss in vacancies))
                if now >= since + timeout_s:
                    self._fail_vacant(now - since)
                limit = since + timeout_s
            else:
                limit = deadline
            if elapsed >= next_report:
                logger.warning("%s", self.roster.still_waiting_text(self.hub.url, elapsed))
                next_report *= 2
            self.hub.poll(max(0.0, min(timing.slice_s, limit - now, entered + next_report - now)))
        self._check_failure()

    def _check_open(self) -> None:
        if self.hub.closing:
            raise EnvPoisoned("this environment was closed while it waited for its clients: make a new one")

    def _check_failure(self) -> None:
        self._check_open()
        if self.roster.failure is not None:
            raise self.roster.failure
        if self._options.on_client_loss != "raise":
            return
        losses = self.roster.untold()  # a spare may sit in the slot already: that the client was lost stays true
        if losses:
            raise _loss_error(losses, report.lost_clients(self.hub.url, losses, self.terms.num_envs))

    def _give_up_on_silent(self, timeout_s: float) -> None:
        """End the connections that owe a result [7.3]; by policy that is an error, or the loss of a client."""
        silent = [seat for seat in self.roster.sitting if seat.owes]
        text = report.still_acting(self.hub.url, silent, self.terms.num_envs, timeout_s)
        logger.warning("%s", text)
        for seat in silent:
            self.hub.end(seat.peer, GOING_AWAY, FEEDBACK_TIMEOUT, FEEDBACK_TIMEOUT)
        if self._options.on_client_loss == "raise":
            raise StepTimeout(text)

    def _fail_vacant(self, elapsed: float) -> None:
        raise _loss_error(self.roster.vacancies(), self.roster.vacant_text(self.hub.url, elapsed))

    def _cut_short(self, loss: Loss, step: StepResult) -> None:
        """End the episodes of a lost connection, but for those that ended by themselves, or with an earlier loss."""
        for slot in sorted(loss.untold):
            if step.terminated[slot] or step.truncated[slot] or (self._unseen is not None and self._unseen[slot]):
                continue
            step.truncated[slot] = True
            step.cut_short += (slot,)
            if not step.stepped[slot]:
                _copy_rows(self.last, step.observations, slot)

    def finish_step(self) -> StepResult:
        """Put the newcomers' observations in their rows, say who was lost, and close the result of a step."""
        step = self._open()
        for parts in (step.info_parts, step.reset_parts):  # whoever answered first, the infos come out the same
            parts.sort(key=lambda part: int(part.slots[0]))
        if self.roster.losses:
            for loss in self.roster.untold():
                self._cut_short(loss, step)
            step.lost = self.roster.tell(range(self.terms.num_envs))
        for seat in self.roster.sitting:
            if seat.stage is Stage.ARRIVED:
                self._hand_over(seat, step)
        return self._close(step)

    def finish_reset(self, slots: Collection[int]) -> StepResult:
        """Close the result of a reset.

        Args:
            slots: Those that are reset. A loss in the others, or in others of the same connection, is left for the next
                step to report.
        """
        step = self._open()
        whole = [seat for seat in self.roster.sitting if all(slot in slots for slot in seat.slots)]
        step.lost = self.roster.tell({slot for seat in whole for slot in seat.slots})
        for seat in whole:
            if seat.stage is Stage.ARRIVED:
                self._hand_over(seat, step)
        return self._close(step, again=True)  # by the mode, rows of it may be replaced before the trainer gets it

    def _close(self, step: StepResult, *, again: bool = False) -> StepResult:
        self.step = None
        if b"\x01" in step.begun.tobytes():
            self.last = [array.copy() for array in step.observations]
            _copy_rows(step.first, self.last, step.begun)
            _copy_rows(step.first, step.observations, step.begun & ~step.over)
            return step
        # The trainer may write into what it gets. A copy of large arrays would cost more than it is worth, except where
        # it is bound to be handed some of them again.
        again = again or self._options.autoreset_mode.hands_again
        self.last = [
            array.copy() if again or array.nbytes < _COPY_BELOW_BYTES else array for array in step.observations
        ]
        return step

    def _hand_over(self, seat: Seat, step: StepResult) -> None:
        """Begin the episodes of what a seat brought."""
        brought, rows = known(seat.brought), list(seat.slots)
        seat.note(Event.HAND_OVER)
        seat.brought = None
        step.begun[rows] = True
        for array, held in zip(step.first, brought.observations, strict=True):
            array[rows] = held
        if brought.reset_info:
            step.reset_parts.append(InfoPart.of(brought.reset_info, np.array(rows)))
        if self.verifier is not None:
            self.verifier.seated(seat.slots, brought.digest, from_reset=brought.from_reset)


def _loss_error(losses: Sequence[Loss], text: str) -> ClientLost | StepTimeout:
    """Return the error for losses: a client that was given up for its silence has missed the step's time."""
    return StepTimeout(text) if any(loss.timed_out for loss in losses) else ClientLost(text)


def _copy_rows(source: Sequence[Array], target: Sequence[Array], rows: Array | int) -> None:
    for array, into in zip(source, target, strict=True):
        into[rows] = array[rows]
