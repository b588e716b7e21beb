"""Own the vector step: the ONE place that gathers, scatters, autoresets, keeps terminal observations, counts episodes.

A vector step sends every connection its chunk at once and ends when every slot has its result. What comes back is
written into the step's arrays as it comes, whoever drives the hub at that moment. Adapters translate the result into
their trainer's terms; they decide nothing.

Uses ``hub`` for the messages, ``roster`` for who sits where, ``report`` for the texts. Everything that the hub calls
(``on_…``) runs under the hub's lock.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from plugrl_bridges import __version__
from plugrl_bridges.errors import ClientLost, ConnectTimeout, EnvPoisoned, RaggedClientError, StepTimeout
from plugrl_bridges.server import report
from plugrl_bridges.server.episodes import EpisodeCounter
from plugrl_bridges.server.hub import FEEDBACK_TIMEOUT, GOING_AWAY, Hub
from plugrl_bridges.server.pool import ArrayPool
from plugrl_bridges.server.result import Finals, StepResult
from plugrl_bridges.server.roster import Roster
from plugrl_bridges.spaces import ActionLayout, ObservationLayout
from plugrl_bridges.wire.info import split_info
from plugrl_bridges.wire.messages import PROTOCOL_VERSION, Action, Feedback, Infer, Metadata, ResetRequest
from plugrl_bridges.wire.session import ENV_SPEC, REUSE_FEEDBACK_OBS, SEEDED_RESET

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.server.announced import Announced
    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.server.peer import Peer
    from plugrl_bridges.server.seats import Seat
    from plugrl_bridges.wire.codec import Array

__all__ = ["Lockstep"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
FEATURES = (REUSE_FEEDBACK_OBS, ENV_SPEC, SEEDED_RESET)
_FAST_LANE_S = 0.05  # how long one connection alone is listened to before the others get a look
_SLICE_S = 0.5
_FIRST_REPORT_S = 5.0


class Lockstep:
    """Step remote environments together; the core below every adapter.

    Call `connect` before anything that needs the spaces, then `reset`, then `send` and `wait` in turns, then `close`.

    Args:
        options: As the adapters take them.

    Raises:
        PlugRLError: if the port cannot be had.
    """

    def __init__(self, options: BridgeOptions) -> None:
        self.options = options
        self.roster = Roster(options)
        self._poison: BaseException | None = None
        self._pool: ArrayPool | None = None
        self._episodes: EpisodeCounter | None = None
        self._last: list[Array] = []
        self._step: StepResult | None = None
        self._pending = 0
        self._step_started = 0.0
        self._ever_reset = False
        self._closed = False
        self._hub = Hub(options, self._metadata(), self)

    def _metadata(self) -> Metadata:
        data: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "server": "plugrl-bridges",
            "server_version": __version__,
            "action_horizon": self.options.action_horizon,
            "features": list(FEATURES),
        }
        if self.options.action_space is not None:
            data["action_dim"] = ActionLayout(self.options.action_space).width
        return Metadata(data)

    # What adapters ask ------------------------------------------------------------------------------------------

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
        return self._known(self.roster.num_envs)

    @property
    def observation_layout(self) -> ObservationLayout:
        """Layout of one env's observation; `connect` first."""
        return self._known(self.roster.observation_layout)

    @property
    def action_layout(self) -> ActionLayout:
        """Layout of one env's action; `connect` first."""
        return self._known(self.roster.action_layout)

    @property
    def announced(self) -> Announced:
        """What the first client said of its envs; `connect` first."""
        return self._known(self.roster.announced)

    @property
    def stepping(self) -> bool:
        """Whether a `send` has had no `wait`."""
        return self._step is not None

    def _known(self, value: T | None) -> T:
        if value is None:
            raise EnvPoisoned("no client has connected yet: call reset() first")
        return value

    def connect(self) -> None:
        """Wait until every slot has an env.

        Raises:
            ConnectTimeout: after ``connect_timeout`` s, saying who is here and how to start a client.
            SpaceError: if the spaces are neither given nor announced nor safe to infer.
        """
        self._check_usable()
        with self._hub.lock:
            if self.roster.filled:
                return
            try:
                self._wait_for_clients()
            except BaseException as exc:
                self._poison = exc
                raise

    def reset(
        self,
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> tuple[list[Array], list[dict[str, Any]]]:
        """Give every slot's first observation; continue with `send`.

        The first reset without seeds and options takes the observations that the clients brought. Any other one is a
        real reset at each client that can do it; at others the running episodes go on, which is said once.

        Args:
            seeds: One per slot, or None for none.
            options: One per slot, or None for none; used for this reset alone.

        Returns:
            One array per leaf, and one info dict per slot.

        Raises:
            ConnectTimeout, StepTimeout, ClientLost, SpaceError, RaggedClientError, EnvPoisoned: as they say.
        """
        self.connect()
        with self._hub.lock:
            if self._step is not None:
                self.wait()  # a reset cancels the step in flight, whose late result must not answer a later one
            try:
                return self._reset(seeds, options)
            except BaseException as exc:
                self._poison = exc
                raise

    def send(self, actions: Any) -> None:
        """Send every slot its chunk; continue with `wait`.

        Args:
            actions: ``[num_envs, *shape]``, or ``[num_envs, H, *shape]`` with a horizon above 1.

        Raises:
            ValueError: for actions of a wrong shape or with NaN; nothing was sent then.
            EnvPoisoned: if an earlier step failed, or the environment is closed.
        """
        self._check_usable()
        if not self._ever_reset:
            raise EnvPoisoned("step before the first reset: call reset() first")
        wire = self.action_layout.to_wire(actions, self.num_envs, self.options.action_horizon)
        with self._hub.lock:
            self._begin()
            for seat in list(self.roster.sitting):
                if seat.held is None:  # else it took a lost slot since the last step: this action was not for it
                    self._answer(seat, wire, None)

    def wait(self, timeout_s: float | None = None) -> StepResult:
        """Collect the step begun by `send`.

        Args:
            timeout_s: Replaces the option ``timeout`` for this step.

        Raises:
            StepTimeout: naming the missing slots; the environment is poisoned.
            ClientLost: if a client went away and, by policy, this is an error or nobody took its place.
            RaggedClientError: if a client cannot be served in lockstep.
        """
        self._check_usable()
        with self._hub.lock:
            step = self._step
            if step is None:
                raise EnvPoisoned("wait without a step: call step_async first")
            try:
                self._gather(self.options.timeout if timeout_s is None else timeout_s)
            except BaseException as exc:
                self._poison = exc
                raise
            self._finish(step)
            return step

    def close(self) -> None:
        """Tell every client that the run is over, and free the port; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._hub.close()
        if self._episodes is not None:
            self._episodes.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise EnvPoisoned("this environment is closed: make a new one")
        if self._poison is not None:
            raise EnvPoisoned(
                f"an earlier call failed, so the environments are in an unknown state; make a new one. It was: {self._poison}"
            ) from self._poison

    # What the hub tells -----------------------------------------------------------------------------------------

    def on_infer(self, peer: Peer, infer: Infer) -> None:
        """Take an infer: a newcomer's first, or the observations that end this step."""
        seat = self.roster.seat_of(peer)
        if seat is None:
            self.roster.welcome(peer, infer)
            return
        if not seat.knows(infer.env_indices):
            names, all_names = infer.env_indices.tolist(), list(seat.envs)
            error = RaggedClientError(
                f"[4.3] {peer.address} asks for a chunk for envs {names} alone, but its connection carries {all_names}: a "
                "lockstep trainer would wait for ever. Use one env per connection, or action_horizon=1 and a client that "
                "steps all its envs together; policy_server serves such clients"
            )
            self.roster.failure = error
            raise error
        layout = self.observation_layout
        step = self._step
        assert step is not None
        envs = infer.env_indices if infer.reuse is None else infer.env_indices[~infer.reuse]
        if len(envs):
            layout.read(infer.observation, step.observations, seat.rows(envs))
        if infer.reset_info:
            for env, info in zip(
                infer.env_indices.tolist(), split_info(infer.reset_info, len(infer.env_indices)), strict=True
            ):
                slot = seat.slots[seat.envs.index(env)]
                if info or step.terminated[slot] or step.truncated[slot]:
                    step.reset_infos[slot] = info
        seat.acting = False
        self._pending -= 1

    def on_feedback(self, peer: Peer, feedback: Feedback, dropped: tuple[int, ...]) -> None:
        """Take a feedback: rewards, flags and the last step's observations."""
        seat, step = self.roster.seat_of(peer), self._step
        m = len(feedback.env_indices)
        if m == 0:
            return
        assert seat is not None and step is not None
        layout = self.observation_layout
        rows = seat.rows(feedback.env_indices)
        layout.read(feedback.observation, step.observations, rows)
        step.rewards[rows] = feedback.rewards
        step.terminated[rows] = feedback.terminated
        step.truncated[rows] = feedback.truncated
        seat.fed_back = True
        done = feedback.terminated | feedback.truncated
        if done.any():
            slots = np.arange(self.num_envs)[rows][done]
            step.finals.append(Finals(tuple(slots.tolist()), [array[slots] for array in step.observations]))
        if feedback.info:
            numbers = np.arange(self.num_envs)[rows].tolist()
            for slot, info in zip(numbers, split_info(feedback.info, m), strict=True):
                step.infos[slot] = info
            if self._episodes is not None:
                self._episodes.note_records(numbers, feedback.info)

    def on_lost(self, peer: Peer, why: str) -> None:
        """Take the end of a connection: the episodes of its slots end with it."""
        seat = self.roster.leave(peer, why)
        if seat is None:
            return
        if seat.acting:
            seat.acting = False
            self._pending -= 1
        if self._step is not None:
            self._cut_short(seat, self._step)

    def _wait_for_clients(self) -> None:
        limit = self.options.connect_timeout
        started = time.monotonic()
        next_report = _FIRST_REPORT_S
        while not self.roster.filled:
            elapsed = time.monotonic() - started
            if self.roster.failure is not None:
                raise self.roster.failure
            if limit is not None and elapsed >= limit:
                raise ConnectTimeout(f"gave up {self.roster.waiting_text(self.url, elapsed)}")
            if elapsed >= next_report:
                logger.warning("%s", self.roster.waiting_text(self.url, elapsed))
                next_report *= 2
            self._hub.poll(min(_SLICE_S, next_report - elapsed, _SLICE_S if limit is None else limit - elapsed))

    # One exchange -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        n = self.num_envs
        if self._pool is None:
            self._pool = ArrayPool(self.observation_layout.leaves, n)
        self._step = StepResult(
            observations=self._pool.take(),
            rewards=np.zeros(n),
            terminated=np.zeros(n, np.bool_),
            truncated=np.zeros(n, np.bool_),
            finals=[],
            infos=[{} for _ in range(n)],
            reset_infos={},
            lost=(),
        )
        self._pending = 0
        self._step_started = time.monotonic()

    def _answer(self, seat: Seat, wire: Array, reset: ResetRequest | None) -> None:
        asked = seat.peer.session.asked
        if asked is None or seat.peer.lost:  # its connection has just ended
            return
        rows = seat.rows(asked.env_indices)
        message = seat.peer.session.answer(Action(asked.env_indices, wire[:, rows], reset))
        seat.acting = True
        seat.fed_back = False
        self._pending += 1
        self._hub.send(seat.peer, message)

    def _gather(self, timeout_s: float) -> None:
        """Drive the hub until every slot has its result."""
        deadline = self._step_started + timeout_s
        while self._pending and len(self.roster.sitting) == 1:
            if not self._hub.poll_peer(self.roster.sitting[0].peer, min(_FAST_LANE_S, timeout_s)):
                break
        next_report = _FIRST_REPORT_S
        while self._pending or self.roster.losses:
            self._check_failure()
            if not self._pending and not self.roster.losses:
                break
            now = time.monotonic()
            elapsed = now - self._step_started
            if self._pending and now >= deadline:
                self._give_up_on_silent(timeout_s)
                continue
            if self.roster.losses:
                since = max(self._step_started, *(loss.at for loss in self.roster.losses.values()))
                if now >= since + timeout_s:
                    self._fail_vacant(now - since)
                limit = since + timeout_s
            else:
                limit = deadline
            if elapsed >= next_report:
                self._report_wait(elapsed)
                next_report *= 2
            self._hub.poll(max(0.0, min(_SLICE_S, limit - now, self._step_started + next_report - now)))
        self._check_failure()

    def _check_failure(self) -> None:
        if self.roster.failure is not None:
            raise self.roster.failure
        if self.roster.losses and self.options.on_client_loss == "raise":
            text = report.vacant_slots(self.url, self.roster.losses, self.num_envs, 0.0)
            timed_out = any(loss.timed_out for loss in self.roster.losses.values())
            raise StepTimeout(text) if timed_out else ClientLost(text)

    def _report_wait(self, elapsed: float) -> None:
        acting = [seat for seat in self.roster.sitting if seat.acting]
        if acting:
            logger.warning("still waiting: %s", report.still_acting(self.url, acting, self.num_envs, elapsed))
        else:
            logger.warning(
                "still waiting: %s", report.vacant_slots(self.url, self.roster.losses, self.num_envs, elapsed)
            )

    def _give_up_on_silent(self, timeout_s: float) -> None:
        """End the connections that owe a result [7.3]; by policy that is an error, or the loss of a client."""
        silent = [seat for seat in self.roster.sitting if seat.acting]
        text = report.still_acting(self.url, silent, self.num_envs, timeout_s)
        logger.warning("%s", text)
        for seat in silent:
            self._hub.end(seat.peer, GOING_AWAY, FEEDBACK_TIMEOUT, FEEDBACK_TIMEOUT)
        if self.options.on_client_loss == "raise":
            raise StepTimeout(text)

    def _fail_vacant(self, elapsed: float) -> None:
        text = report.vacant_slots(self.url, self.roster.losses, self.num_envs, elapsed)
        if any(loss.timed_out for loss in self.roster.losses.values()):
            raise StepTimeout(text)
        raise ClientLost(text)

    def _cut_short(self, seat: Seat, step: StepResult) -> None:
        """End the episodes of a connection that went away in the middle of a step."""
        for at, slot in enumerate(seat.slots):
            if seat.fed_back and not (step.terminated[slot] or step.truncated[slot]):
                self._truncate(step, slot, [array[slot : slot + 1].copy() for array in step.observations])
            elif seat.fed_back:
                self.roster.unreported.pop(slot, None)  # its episode had ended by itself
            elif seat.held is not None:  # it had taken the slot of another lost client in this very step
                self._truncate(step, slot, [array[at : at + 1] for array in seat.held])
            else:
                self._truncate(step, slot, [array[slot : slot + 1].copy() for array in self._last])

    def _truncate(self, step: StepResult, slot: int, final: list[Array]) -> None:
        if step.truncated[slot]:
            return
        step.truncated[slot] = True
        step.finals.append(Finals((slot,), final))

    def _finish(self, step: StepResult) -> None:
        """Put the newcomers' observations in their rows, count the episodes, and let go of the step."""
        for slot in self.roster.unreported:  # lost between two steps: nothing of this step reached its env
            self._truncate(step, slot, [array[slot : slot + 1].copy() for array in self._last])
        self._take_held(step.observations, step.reset_infos)
        step.lost = tuple(sorted(self.roster.unreported))
        self.roster.unreported.clear()
        self._last = step.observations
        self._step = None
        if self._episodes is not None:
            self._episodes.count(step.rewards, step.terminated, step.truncated, step.lost)

    def _take_held(self, observations: list[Array], reset_infos: dict[int, dict[str, Any]]) -> None:
        for seat in self.roster.sitting:
            if seat.held is None:
                continue
            rows = list(seat.slots)
            for array, held in zip(observations, seat.held, strict=True):
                array[rows] = held
            reset_infos.update(zip(seat.slots, seat.reset_infos, strict=True))
            seat.held = None
            seat.reset_infos = []

    # Reset ------------------------------------------------------------------------------------------------------

    def _reset(
        self, seeds: Sequence[int | None] | None, options: Sequence[Mapping[str, Any] | None] | None
    ) -> tuple[list[Array], list[dict[str, Any]]]:
        n = self.num_envs
        seeds = [None] * n if seeds is None else list(seeds)
        options = [None] * n if options is None else [dict(each) if each else None for each in options]
        for name, given in (("seeds", seeds), ("options", options)):
            if len(given) != n:
                raise ValueError(f"{name}: expected one per slot, {n}, got {len(given)}")
        if self._episodes is None:
            self._episodes = EpisodeCounter(n, self.options.action_horizon, self.options.episode_log)
        self._begin()
        step = self._step
        assert step is not None
        for array, last in zip(step.observations, self._last, strict=False):
            array[...] = last
        wanted = self._ever_reset or any(s is not None for s in seeds) or any(options)
        if wanted:
            zeros = np.zeros(
                (self.options.action_horizon, n, *(self.action_layout.shape or (1,))), self.action_layout.dtype
            )
            for seat in list(self.roster.sitting):
                self._request_reset(seat, zeros, seeds, options)
            self._gather(self.options.timeout)
        elif self.roster.losses:
            self._gather(self.options.timeout)
        infos: dict[int, dict[str, Any]] = dict(step.reset_infos)
        self._take_held(step.observations, infos)
        self.roster.unreported.clear()
        self._last = step.observations
        self._step = None
        self._ever_reset = True
        self._episodes.restart()
        return step.observations, [infos.get(slot, {}) for slot in range(n)]

    def _request_reset(
        self,
        seat: Seat,
        zeros: Array,
        seeds: Sequence[int | None],
        options: Sequence[Mapping[str, Any] | None],
    ) -> None:
        own_seeds = tuple(seeds[slot] for slot in seat.slots)
        own_options = tuple(options[slot] for slot in seat.slots)
        if SEEDED_RESET in seat.features:
            fresh = seat.held is not None and self._ever_reset  # a client that came since the last step has just reset
            if fresh and not any(s is not None for s in own_seeds) and not any(own_options):
                return
            seat.held = None
            seat.reset_infos = []
            asked = seat.peer.session.asked
            order = range(len(seat.envs)) if asked is None else [seat.envs.index(e) for e in asked.env_indices.tolist()]
            envs = np.array([seat.envs[at] for at in order], np.int64)
            reset = ResetRequest(envs, tuple(own_seeds[at] for at in order), tuple(own_options[at] for at in order))
            self._answer(seat, zeros, reset)
            return
        where = f"the client of slots {report.slots_text(seat.slots)} at {seat.peer.address}"
        if any(seed is not None for seed in own_seeds):
            self.roster.warn_once(
                f"{where} does not know seeded-reset, so the seed of reset() cannot reach its envs: seed them there"
            )
        if any(own_options):
            self.roster.warn_once(
                f"{where} does not know seeded-reset, so the options of reset() cannot reach its envs"
            )
        if self._ever_reset:
            self.roster.warn_once(f"{where} does not know seeded-reset: reset() lets its running episodes go on")
