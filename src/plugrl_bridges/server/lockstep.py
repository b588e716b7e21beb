"""The vector step: what a reset and a step mean, in which order things happen, and what a failed one leaves.

This is the core below every adapter: adapters translate its results into their trainer's terms; they decide nothing.
A vector step sends every connection its chunk at once and ends when every slot has its result. ``exchange`` has what is
in flight, ``episodes`` counts, ``hub`` carries.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from plugrl_bridges.arguments import seconds
from plugrl_bridges.errors import ClientLost, EncodeError, EnvPoisoned, RaggedClientError
from plugrl_bridges.server import report
from plugrl_bridges.server.announced import greeting
from plugrl_bridges.server.episodes import EpisodeCounter
from plugrl_bridges.server.exchange import Exchange
from plugrl_bridges.server.roster import known
from plugrl_bridges.server.seats import Stage
from plugrl_bridges.spaces import ActionLayout, ObservationLayout
from plugrl_bridges.wire.codec import encode
from plugrl_bridges.wire.messages import ResetRequest
from plugrl_bridges.wire.session import ENV_SPEC, LATE_RESET, REUSE_FEEDBACK_OBS, SEEDED_RESET, STEP_DIGEST

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from plugrl_bridges.server.announced import Announced
    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.server.result import StepResult
    from plugrl_bridges.server.seats import Seat
    from plugrl_bridges.wire.codec import Array

__all__ = ["FEATURES", "Lockstep"]

T = TypeVar("T")

FEATURES = (REUSE_FEEDBACK_OBS, ENV_SPEC, SEEDED_RESET, LATE_RESET)
"""Optional features that the bridge offers [10]; with the option ``verify``, step-digest too."""


class Lockstep:
    """Step remote environments together.

    Call `connect` before anything that needs the spaces, then `reset`, then `send` and `wait` in turns, then `close`.

    Args:
        options: As the adapters take them.

    Raises:
        OSError: if the port cannot be had; the text names it.
    """

    def __init__(self, options: BridgeOptions) -> None:
        self.options = options
        self._poison: BaseException | None = None
        self._episodes: EpisodeCounter | None = None
        self._ever_reset = False
        self._closed = False
        if options.observation_space is not None:
            ObservationLayout(options.observation_space)  # what cannot travel is told here, and not of a client
        if options.action_space is not None:
            ActionLayout(options.action_space).stacked(options.action_horizon)
        self._exchange = Exchange(options, greeting(options, (*FEATURES, STEP_DIGEST) if options.verify else FEATURES))
        self._hub = self._exchange.hub
        self._roster = self._exchange.roster

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return self._hub.url

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._hub.port

    @property
    def num_envs(self) -> int:
        """Number of slots; `connect` first if the option was None."""
        return known(self._roster.num_envs)

    @property
    def observation_layout(self) -> ObservationLayout:
        """Layout of one env's observation; `connect` first."""
        return known(self._roster.terms).observations

    @property
    def action_layout(self) -> ActionLayout:
        """Layout of one env's action; `connect` first."""
        return known(self._roster.terms).actions

    @property
    def announced(self) -> Announced:
        """What the first client said of its envs; `connect` first."""
        return known(self._roster.terms).announced

    @property
    def verified(self) -> int:
        """How many env steps and first observations the live check has compared."""
        return 0 if self._exchange.verifier is None else self._exchange.verifier.compared

    @property
    def client_losses(self) -> int:
        """How many connections with slots were lost so far."""
        return self._roster.client_losses

    @property
    def stepping(self) -> bool:
        """Whether a `send` has had no `wait`."""
        return self._exchange.step is not None

    def connect(self) -> None:
        """Wait until every slot has an env.

        Raises:
            ConnectTimeout: after ``connect_timeout`` s, saying who is here and how to start a client.
            SpaceError: if the spaces are neither given nor announced nor safe to infer.
            RaggedClientError: if a client cannot be served in lockstep.
            UnverifiedClientError: with ``verify=True``, for a client that sends no digests.
        """
        self._check_usable()
        with self._hub.lock:
            self._exchange.wait_for_clients()

    def reset(
        self,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Mapping[str, Any] | None] | None = None,
        mask: Array | None = None,
        unseen: Array | None = None,
    ) -> StepResult:
        """Have slots begin an episode; continue with `send`.

        Where clients brought first observations that nobody has seen (those without feature ``late-reset``), a first
        reset without seeds and options takes them. Any other one is a real reset at each client that can do it; at
        others the running episodes go on, which is said once. A slot whose episode has ended and whose next one the
        trainer has not seen begins that one, so that an env is reset once per episode. A step in flight is waited for
        and its result dropped, so that it never answers a later one.

        Args:
            seeds: One per slot, or None for none.
            options: One per slot, or None for none; used for this reset alone.
            mask: bool ``[num_envs]``, the slots to reset; None for all. The others go on.
            unseen: bool ``[num_envs]``, the slots whose next episode has begun and which the trainer has not seen; None
                for none.

        Returns:
            Where the envs stand, and in ``reset_parts`` the infos of those that were asked to reset; ``lost`` has the
            slots whose client was lost meanwhile.

        Raises:
            ValueError: if there is not one seed or option per slot, or one cannot travel, or the mask parts envs of one
                connection that cannot be parted; nothing was sent then.
            ConnectTimeout: if the clients did not come in time; and what else `connect` raises.
            StepTimeout: naming the slots that did not answer in time.
            ClientLost: if a client went away and none took its place.
            LedgerMismatch: with ``verify=True``, if an env's first observation is not what it gave.
        """
        self.connect()
        seeds, options = self.checked_for_reset(seeds, options)
        with self._hub.lock:
            if self.stepping:
                self.wait()
            chosen = set(range(self.num_envs)) if mask is None else set(np.flatnonzero(mask).tolist())
            if not self._ever_reset and len(chosen) < self.num_envs:
                raise ValueError("the first reset must be one of all slots")
            waiting = () if unseen is None else np.flatnonzero(unseen).tolist()
            begun = self._begun(chosen, seeds, options, waiting)
            try:
                return self._reset(seeds, options, chosen, begun)
            except BaseException as exc:
                self._poison = exc
                raise

    def checked_for_reset(
        self, seeds: Sequence[int | None] | None, options: Sequence[Mapping[str, Any] | None] | None
    ) -> tuple[list[int | None], list[Mapping[str, Any] | None]]:
        """Return seeds and options with one of each per slot; nothing is waited for or sent.

        Raises:
            ValueError: if there is not one seed or option per slot, or one cannot travel.
        """
        checked = _checked_seeds(_one_per_slot("seeds", seeds, self.num_envs))
        return checked, _checked_options(_one_per_slot("options", options, self.num_envs))

    def send(self, actions: object, idle: Array | None = None, unseen: Array | None = None) -> None:
        """Send every slot its chunk; continue with `wait`.

        Args:
            actions: ``[num_envs, *shape]``, or ``[num_envs, H, *shape]`` with a horizon above 1.
            idle: bool ``[num_envs]``: slots whose env, at the first observation of an episode, is to wait. A connection
                of such envs alone is not answered; one that carries others too is asked to reset them once more.
            unseen: bool ``[num_envs]``: slots that wait likewise, and whose next episode the trainer has not seen, so
                that the loss of their client ends none. Each is alone on its connection.

        Raises:
            ValueError: for actions of a wrong shape or with NaN; nothing was sent then.
            RaggedClientError: if an env is to wait whose client cannot let it; nothing was sent then.
            EnvPoisoned: before the first reset, after a step that failed, or on a closed environment.
        """
        self.check_ready()
        if idle is not None and self._exchange.verifier is not None:
            raise ValueError("verify cannot follow envs that are idle: step all of them")
        wire = self.action_layout.to_wire(actions, self.num_envs, self.options.action_horizon)
        out = idle if unseen is None else unseen if idle is None else idle | unseen
        with self._hub.lock:
            paused = {} if out is None else {seat.peer.number: _paused(seat, out) for seat in self._roster.sitting}
            try:
                self._exchange.begin(unseen)
                if out is not None:
                    self._exchange.keep(out)
                if self._exchange.verifier is not None:
                    self._exchange.verifier.sent(actions)
                for seat in list(self._roster.sitting):
                    # One that took a lost slot since the last step was not meant by this action, and one whose envs
                    # all wait sits it out: its infer stays unanswered until the next.
                    request = paused.get(seat.peer.number)
                    all_paused = request is not None and len(request.env_ids) == len(seat.envs)
                    if not all_paused and seat.stage is not Stage.ARRIVED:
                        self._exchange.answer(seat, wire, request)
            except BaseException as exc:  # some have their action and some have not
                self._poison = exc
                raise

    def wait(self, timeout_s: float | None = None) -> StepResult:
        """Collect the step begun by `send`.

        Args:
            timeout_s: Replaces the option ``timeout`` for this step.

        Raises:
            ValueError: for a timeout that is no number of seconds above 0.
            StepTimeout: naming the missing slots; the environment is poisoned.
            ClientLost: if a client went away and, by policy, this is an error or nobody took its place.
            RaggedClientError: if a client cannot be served in lockstep.
            LedgerMismatch: with ``verify=True``, naming the slot whose env took or gave something else.
            EnvPoisoned: if no step is in flight, or an earlier one failed.
        """
        if timeout_s is not None:
            seconds("timeout", timeout_s)
        self._check_usable()
        if not self.stepping:
            raise EnvPoisoned("no step is in flight: call step_async first")
        with self._hub.lock:
            try:
                self._exchange.gather(self.options.timeout if timeout_s is None else timeout_s)
                step = self._exchange.finish_step()
                self._verify(step)
                known(self._episodes).count(step)
            except BaseException as exc:
                self._poison = exc
                raise
            return step

    def close(self) -> None:
        """Tell every client that the run is over, and free the port; idempotent, bounded as a whole."""
        if self._closed:
            return
        self._closed = True
        self._hub.close()
        if self._episodes is not None:
            self._episodes.close()
        if self._exchange.verifier is not None:
            self._exchange.verifier.close()

    def _verify(self, step: StepResult, *, reset: bool = False) -> None:
        """Compare a finished result with what the clients say that their envs took and gave."""
        if self._exchange.verifier is not None:
            self._exchange.verifier.check(step, reset=reset)

    def check_ready(self) -> None:
        """See to it that a step can be sent.

        Raises:
            EnvPoisoned: before the first reset, after a step that failed, while one is in flight, or when closed.
        """
        self._check_usable()
        if not self._ever_reset:
            raise EnvPoisoned("step before the first reset: call reset() first")
        if self.stepping:
            raise EnvPoisoned("a step is in flight already: call step_wait first")

    def _check_usable(self) -> None:
        if self._hub.forked:
            raise EnvPoisoned("this environment belongs to the process that forked this one: make one here")
        if self._closed:
            raise EnvPoisoned("this environment is closed: make a new one")
        if self._poison is not None:
            raise EnvPoisoned(
                "an earlier call failed, so the environments are in an unknown state: make a new one. It was: "
                f"{self._poison!r}"
            ) from self._poison

    def _begun(
        self,
        chosen: set[int],
        seeds: Sequence[int | None],
        options: Sequence[Mapping[str, Any] | None],
        unseen: Collection[int],
    ) -> set[int]:
        """Return those of the chosen slots whose next episode has begun already, so that no client need be asked."""
        begun = {slot for slot in chosen.intersection(unseen) if seeds[slot] is None and not options[slot]}
        for seat in self._roster.sitting:
            slots = set(seat.slots)
            if seat.amid_episodes and slots <= chosen:
                begun -= slots
            asked = (slots & chosen) - begun
            if asked and not slots <= chosen:
                raise ValueError(
                    f"cannot reset slots {report.slots_text(sorted(asked))} alone: the connection of "
                    f"{seat.peer.address} carries slots {report.slots_text(seat.slots)}, and the others go on. Use one "
                    "env per connection (--num-procs), or reset only slots whose episode has ended, in autoreset_mode "
                    "DISABLED and without seed and options"
                )
            if asked:
                begun -= slots
        return begun

    def _reset(
        self,
        seeds: Sequence[int | None],
        options: Sequence[Mapping[str, Any] | None],
        chosen: set[int],
        begun: set[int],
    ) -> StepResult:
        n, exchange = self.num_envs, self._exchange
        if self._episodes is None:
            self._episodes = EpisodeCounter(n, self.options.action_horizon, self.options.episode_log)
        step = exchange.begin()
        for array, last in zip(step.observations, exchange.last, strict=False):  # none before the first reset
            array[...] = last
        exchange.resetting, exchange.asks_newcomers = True, len(chosen) == n
        try:
            going_on = self._reset_seats(seeds, options, chosen, begun)
        finally:
            exchange.resetting = exchange.asks_newcomers = False
        step = exchange.finish_reset(chosen)
        self._verify(step, reset=True)
        exchange.prepare_spares()
        self._ever_reset = True
        self._episodes.restart([slot for slot in sorted(chosen) if slot not in going_on or slot in step.lost])
        return step

    def _reset_seats(
        self,
        seeds: Sequence[int | None],
        options: Sequence[Mapping[str, Any] | None],
        chosen: set[int],
        begun: set[int],
    ) -> set[int]:
        """Reset every seat, also those taken only while others reset; return the slots whose episodes go on."""
        timeout_s = self.options.timeout
        if not self._ever_reset:  # a simulator's first reset may take as long as its start
            limit = self.options.connect_timeout
            timeout_s = max(timeout_s, math.inf if limit is None else limit)
        give_up_at = time.monotonic() + self.options.timing.reset_patience * timeout_s
        asked: set[int] = set()
        going_on: set[int] = set()

        def to_ask() -> list[Seat]:
            return [
                seat
                for seat in self._roster.sitting
                if seat.peer.number not in asked
                and chosen.issuperset(seat.slots)
                and (seat.stage is Stage.UNBEGUN or not begun.issuperset(seat.slots))
            ]

        while True:
            for seat in to_ask():
                asked.add(seat.peer.number)
                if not self._reset_seat(seat, seeds, options):
                    going_on.update(seat.slots)
            self._exchange.gather(timeout_s)
            if not to_ask():
                return going_on
            if time.monotonic() > give_up_at:
                raise ClientLost(f"clients come and go during one reset at {self.url}: see the log for their losses")

    def _reset_seat(self, seat: Seat, seeds: Sequence[int | None], options: Sequence[Mapping[str, Any] | None]) -> bool:
        """Ask a client to reset its envs, if need be; return whether they begin an episode, now or before."""
        seeded = any(seeds[slot] is not None for slot in seat.slots)
        with_options = any(options[slot] for slot in seat.slots)
        if seat.stage is Stage.ARRIVED and not seat.returned and not seeded and not with_options:
            return True  # it brought a first observation that nobody has seen
        if SEEDED_RESET not in seat.features:
            self._say_what_cannot_be_reset(seat, seeded=seeded, with_options=with_options)
            return seat.stage is Stage.ARRIVED
        self._exchange.reset(seat, seeds, options)
        return True

    def _say_what_cannot_be_reset(self, seat: Seat, *, seeded: bool, with_options: bool) -> None:
        who = f"the client of slots {report.slots_text(seat.slots)} at {seat.peer.address} does not know seeded-reset"
        if seeded:
            self._roster.warn_once(f"{who}, so the seed of reset() cannot reach its envs: seed them there", kind="seed")
        if with_options:
            self._roster.warn_once(
                f"{who}, so the options of reset() cannot reach its envs: set them there", kind="options"
            )
        if seat.stage is not Stage.ARRIVED:
            self._roster.warn_once(f"{who}: reset() lets its running episodes go on", kind="going on")


def _paused(seat: Seat, idle: Array) -> ResetRequest | None:
    """Return the envs of a connection that a step leaves out, as a request to reset them; None if all are stepped."""
    envs = [env for env, slot in zip(seat.envs, seat.slots, strict=True) if idle[slot]]
    if not envs:
        return None
    if len(envs) < len(seat.envs) and SEEDED_RESET not in seat.features:
        raise RaggedClientError(
            f"envs {envs} of {seat.peer.address} are to wait while others of their connection step, but its client "
            "does not know seeded-reset: use one env per connection"
        )
    return ResetRequest(np.array(envs, np.int64), (None,) * len(envs), (None,) * len(envs))


def _checked_seeds(seeds: Sequence[object]) -> list[int | None]:
    """Refuse here what every env would refuse: a client could only end its connection over it."""
    checked: list[int | None] = []
    for slot, seed in enumerate(seeds):
        if seed is None:
            checked.append(None)
        elif isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= int(seed) < 1 << 63:
            checked.append(int(seed))
        else:
            raise ValueError(f"seeds: slot {slot} must have an int from 0 to 2**63 - 1 or None, got {seed!r}")
    return checked


def _checked_options(options: Sequence[Mapping[str, Any] | None]) -> list[Mapping[str, Any] | None]:
    for slot, each in enumerate(options):
        if each:
            _check_travels(slot, each)
    return [each or None for each in options]


def _check_travels(slot: int, options: Mapping[str, Any]) -> None:
    try:
        encode(dict(options))
    except (EncodeError, TypeError, ValueError) as exc:
        raise ValueError(f"options: those of slot {slot} cannot travel: {exc}") from exc


def _one_per_slot(name: str, given: Sequence[T | None] | None, num_envs: int) -> list[T | None]:
    if given is None:
        return [None] * num_envs
    if len(given) != num_envs:
        raise ValueError(f"{name}: expected one per slot, {num_envs}, got {len(given)}")
    return list(given)
