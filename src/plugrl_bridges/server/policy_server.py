"""The server that answers every infer by itself, from a policy, instead of gathering vector steps for a trainer.

It is for evaluation, for deployment, and for clients that a lockstep cannot serve: the other consumer of ``server.hub``
beside ``exchange``. Nothing is gathered here: an infer for any of a connection's
envs is one call of the policy, so what the policy returns does not depend on who else is connected. Knows no trainer:
a policy is a function, or has a ``predict`` like that of Stable-Baselines3. ``plugrl-bridges serve-policy`` is the
command around it.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from plugrl_bridges.arguments import whole_or_none
from plugrl_bridges.errors import ConnectTimeout, EnvPoisoned, SpaceError
from plugrl_bridges.server import report
from plugrl_bridges.server.announced import Announced, first_observations, greeting, surfaced_layout
from plugrl_bridges.server.hub import Hub
from plugrl_bridges.server.options import BridgeOptions, ListenOptions, takes
from plugrl_bridges.server.tally import ServedClient, ServedEpisode, Tally
from plugrl_bridges.spaces import ActionLayout, ObservationLayout
from plugrl_bridges.wire.arrays import Array, Value
from plugrl_bridges.wire.closing import FEEDBACK_TIMEOUT, GOING_AWAY
from plugrl_bridges.wire.messages import Action
from plugrl_bridges.wire.session import ENV_SPEC, REUSE_FEEDBACK_OBS, Due

if TYPE_CHECKING:
    from gymnasium import spaces
    from typing_extensions import Unpack

    from plugrl_bridges.server.hub import Peer
    from plugrl_bridges.wire.messages import Feedback, Infer, Observation

__all__ = ["FEATURES", "Ending", "Policy", "PolicyServer", "PolicySummary", "Predicts"]

logger = logging.getLogger(__name__)

Space: TypeAlias = "spaces.Space[Any]"

FEATURES = (REUSE_FEEDBACK_OBS, ENV_SPEC)
"""Optional features that it offers [10]; it never resets anybody."""

_NORMAL_CLOSURE = 1000
_SLICE_S = 0.1
_FAST_LANE_S = 0.05  # how long one connection alone is listened to before newcomers get a look
_PROGRESS_S = 0.5


Policy: TypeAlias = Callable[[Value], Array]
"""A function of a batch of observations, nested as their space is, that returns actions."""


@runtime_checkable
class Predicts(Protocol):
    """A model of Stable-Baselines3, or what looks like one."""

    def predict(self, observation: Any, *, deterministic: bool) -> tuple[Any, Any]:  # noqa: ANN401 - its own signature
        """Return the actions for a batch of observations, and the state of a recurrent policy or None."""


class Ending(enum.Enum):
    """Why a run ended."""

    EPISODES = "episodes"
    STEPS = "steps"
    STOPPED = "stopped"


@dataclass(frozen=True)
class PolicySummary:
    """What came of a run.

    Attributes:
        episodes: Finished episodes in the order of their ends; with a number of episodes asked for, each env's share.
        steps: Env steps of everybody.
        clients: What each connection did, in the order of arrival.
        ending: Why it ended; None while it has not.
    """

    episodes: tuple[ServedEpisode, ...]
    steps: int
    clients: tuple[ServedClient, ...]
    ending: Ending | None

    @property
    def returns(self) -> list[float]:
        """Returns of the episodes."""
        return [episode.ret for episode in self.episodes]


class _Held:
    """The last reported observation of each env, which ``reuse-feedback-obs`` [10.1] may ask for again.

    Call `keep` with each feedback, and `batch` with each infer. A lockstep needs none: its batch holds them.

    Args:
        layout: Of one env's observation.
    """

    def __init__(self, layout: ObservationLayout) -> None:
        self._layout = layout
        self._row_of: dict[int, int] = {}
        self._arrays = layout.allocate(0)

    def keep(self, env_indices: Array, observation: Observation) -> None:
        """Copy a feedback's observations.

        Raises:
            RemoteProtocolError: if they do not fit the layout [5.2].
        """
        names = env_indices.tolist()
        for env in names:
            self._row_of.setdefault(env, len(self._row_of))
        self._make_room(len(self._row_of))
        self._layout.read(observation, self._arrays, self._rows(names))

    def batch(self, infer: Infer) -> list[Array]:
        """Return the observations of all envs of an infer, in its order: one fresh array ``[n, *shape]`` per leaf.

        Raises:
            RemoteProtocolError: if what the infer brings does not fit the layout [5.2].
        """
        n = len(infer.env_indices)
        arrays = self._layout.allocate(n)
        if infer.reuse is None:
            self._layout.read(infer.observation, arrays, slice(0, n))
            return arrays
        brought, marked = np.flatnonzero(~infer.reuse), np.flatnonzero(infer.reuse)
        if len(brought):
            self._layout.read(infer.observation, arrays, brought)
        rows = self._rows(infer.env_indices[marked].tolist())
        for array, held in zip(arrays, self._arrays, strict=True):
            array[marked] = held[rows]
        return arrays

    def _rows(self, names: list[int]) -> Array:
        return np.array([self._row_of[env] for env in names], np.int64)

    def _make_room(self, rows: int) -> None:
        have = len(self._arrays[0]) if self._arrays else rows
        if rows <= have:
            return
        grown = self._layout.allocate(max(rows, 2 * have))
        for array, old in zip(grown, self._arrays, strict=True):
            array[:have] = old
        self._arrays = grown


@dataclass
class _Served:
    """One connection."""

    peer: Peer
    layout: ObservationLayout
    actions: ActionLayout | None
    held: _Held
    answered_at: float = 0.0


@takes(ListenOptions)
class PolicyServer:
    """Serve a policy to env clients, each at its own pace.

    Listens at once; call `run`, which ends when enough is done, and tells every client that the run is over.

    Args:
        policy: A function of a batch of observations, nested as the observation space is: an array ``[n, ...]``, or
            dicts and tuples of such arrays. It returns actions ``[n, *action_shape]``, or ``[n, H, *action_shape]``,
            which a horizon above 1 demands. Or an object whose ``predict(observation, deterministic=True)`` gives the
            like first in a tuple, such as a model of Stable-Baselines3.
        episodes: End when so many are finished, spread evenly over the envs; None: no matter how many.
        steps: End after so many env steps; None: no matter how many.
        num_envs: Answer nobody before so many envs are there; None answers whoever comes.
        action_horizon: Actions per env in one exchange.
        accepts: Tells whether the policy takes a client's observation space; others are refused [7.1].
        on_progress: Called with a `PolicySummary` twice a second, by the thread that is in `run`.
        observation_space: One env's space; None takes what each client announces, else infers it.
        action_space: One env's space; None takes what each client announces, else whatever the policy returns.
        image_key: Give the policy only this image entry of the observations.
        state_key: Give the policy only this state entry of the observations.
        timeout: Seconds that a client may take from an action to its feedback.
        connect_timeout: Seconds without any client after which to give up; None: never.
        **options: Those of `BridgeOptions`.

    Raises:
        ValueError: naming the argument that is out of range (`TypeError` for a wrong type).
        SpaceError: if a space cannot travel.
        OSError: if the port cannot be had; the text names it and the option.
    """

    def __init__(
        self,
        policy: Policy | Predicts,
        *,
        episodes: int | None = None,
        steps: int | None = None,
        num_envs: int | None = None,
        action_horizon: int = 1,
        accepts: Callable[[Space], bool] | None = None,
        on_progress: Callable[[PolicySummary], None] | None = None,
        **options: Unpack[ListenOptions],
    ) -> None:
        self._episodes = whole_or_none("episodes", episodes, 1)
        self._steps = whole_or_none("steps", steps, 1)
        self._policy = _as_function(policy)
        self._accepts, self._on_progress = accepts, on_progress
        self._options = BridgeOptions(num_envs=num_envs, action_horizon=action_horizon, **options)
        if self._options.observation_space is not None:
            ObservationLayout(self._options.observation_space)  # what cannot travel is told here, and not of a client
        self._served: dict[int, _Served] = {}
        self._asking: deque[tuple[_Served, list[Array]]] = deque()
        self._warned: set[str] = set()
        self._stop = threading.Event()
        self._ending: Ending | None = None
        self._opened = num_envs is None
        self._tally = Tally(action_horizon)
        self._hub = Hub(self._options, greeting(self._options, FEATURES), self)
        if self._options.episode_log is not None:  # only now: a port that is taken must not cost an old log
            with self._hub.lock:
                self._tally.write_to(self._options.episode_log)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._hub.port

    @property
    def url(self) -> str:
        """The URL for ``plugrl-env-client --url``."""
        return self._hub.url

    @property
    def summary(self) -> PolicySummary:
        """What came of it so far."""
        with self._hub.lock:
            tally = self._tally
            shares = self._episodes if self._ending is Ending.EPISODES else None
            clients = tuple(replace(client, returns=list(client.returns)) for client in tally.clients.values())
            return PolicySummary(tuple(tally.counted(shares)), tally.steps, clients, self._ending)

    def run(self) -> PolicySummary:
        """Serve until enough is done or `stop` is called, then `close`.

        Returns:
            What came of it.

        Raises:
            ConnectTimeout: if nobody is connected for ``connect_timeout`` s, or fewer than ``num_envs`` envs come.
            ValueError: if what the policy returns are no actions for the envs that asked.
            EnvPoisoned: if it was closed before.
        """
        if self._hub.closing:
            raise EnvPoisoned("this policy server is closed: make a new one")
        try:
            self._serve()
        finally:
            self.close()
        return self.summary

    def stop(self) -> None:
        """Have `run` end soon; only sets a flag, so that a signal handler may call it."""
        self._stop.set()

    def close(self) -> None:
        """Tell every client that the run is over, and free the port; idempotent, bounded as a whole."""
        self._stop.set()
        if not self._hub.forked:
            with self._hub.lock:
                self._finish(Ending.STOPPED)
        self._hub.close()
        self._tally.close()

    # What the hub tells -----------------------------------------------------------------------------------------

    def on_infer(self, peer: Peer, infer: Infer) -> None:
        """Accept an infer; `run` answers it, in its own thread."""
        served = self._served.get(peer.number)
        if served is None:
            served, batch = self._welcome(peer, infer)
        else:
            batch = served.held.batch(infer)
        self._tally.ask(peer.number, infer)
        self._asking.append((served, batch))

    def on_feedback(self, peer: Peer, feedback: Feedback, dropped: tuple[int, ...]) -> None:  # noqa: ARG002 - gone already
        """Record a feedback: hold its observations, count the rest."""
        self._served[peer.number].held.keep(feedback.env_indices, feedback.observation)
        if self._ending is not None:
            return
        self._tally.feed_back(peer.number, feedback)
        if self._episodes is not None and self._tally.complete(self._episodes):
            self._finish(Ending.EPISODES)
        elif self._steps is not None and self._tally.steps >= self._steps:
            self._finish(Ending.STEPS)

    def on_lost(self, peer: Peer, why: str) -> None:
        """Record the end of a connection; the others go on."""
        if self._served.pop(peer.number, None) is None:
            return
        finished = peer.websocket.close_code == _NORMAL_CLOSURE  # [7.5]
        logger.log(logging.INFO if finished else logging.WARNING, "the client at %s is gone: %s", peer.address, why)
        if self._ending is None:
            self._tally.leave(peer.number)

    def _welcome(self, peer: Peer, infer: Infer) -> tuple[_Served, list[Array]]:
        """Agree with a newcomer on its spaces; return what is kept of it, and its first observations.

        Raises:
            RemoteProtocolError: for an ``env_spec`` or an observation that is not as it should be.
            SpaceError: if its spaces will not do.
        """
        options = self._options
        announced = Announced.from_wire(infer.env_spec, FEATURES)
        try:
            layout = surfaced_layout(options, announced.observation_space, infer.observation)
            announced.surfaced(options).check_against(layout.space, options.action_space, self._warn_once)
            if self._accepts is not None and not self._accepts(layout.space):
                raise SpaceError(f"the policy does not take its observation space {layout.space}")
            action_space = announced.action_space if options.action_space is None else options.action_space
            actions = None if action_space is None else ActionLayout(action_space)
            batch = first_observations(options, announced, layout, infer)
        except SpaceError as exc:
            raise SpaceError(f"the client at {peer.address} does not fit: {exc}") from exc
        served = self._served[peer.number] = _Served(peer, layout, actions, _Held(layout))
        self._tally.arrive(peer.number, peer.address, announced.client)
        return served, batch

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def _finish(self, ending: Ending) -> None:
        """Count nothing any more; hold the lock."""
        if self._ending is None:
            self._ending = ending

    def _going_on(self) -> bool:
        return self._ending is None and not self._stop.is_set()

    # What `run` does --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        waiting = _Waiting(self._options.connect_timeout, self._options.timing.first_report_s)
        progress_at = 0.0
        while self._going_on():
            with self._hub.lock:
                self._look(0.0 if self._asking and self._opened else _SLICE_S)
                self._end_silent(time.monotonic())
                self._opened = self._opened or self._tally.envs_here >= (self._options.num_envs or 0)
                waiting.check(self.url, self._options.num_envs, self._tally.envs_here, opened=self._opened)
            while self._opened and self._asking and self._going_on():
                served, batch = self._asking.popleft()
                if not served.peer.lost:
                    self._answer(served, batch)
            if self._on_progress is not None and time.monotonic() >= progress_at:
                progress_at = time.monotonic() + _PROGRESS_S
                self._on_progress(self.summary)

    def _look(self, wait_s: float) -> None:
        """Handle what comes; from one connection alone by the shortest road, with a look at newcomers now and then."""
        if len(self._served) == 1 and wait_s:
            [served] = self._served.values()
            self._hub.poll_if_due()
            if served.peer.lost or self._hub.poll_peer(served.peer, min(_FAST_LANE_S, wait_s)):
                return
            wait_s = 0.0
        self._hub.poll(wait_s)

    def _answer(self, served: _Served, batch: list[Array]) -> None:
        """Compute the answer without the lock, so that the keeper can look after the others meanwhile; send it."""
        peer = served.peer
        actions = self._policy(served.layout.nest(batch))
        with self._hub.lock:
            asked = peer.session.asked
            if peer.lost or asked is None or self._hub.closing:
                return
            try:
                wire = _to_wire(actions, served.actions, len(asked.env_indices), self._options.action_horizon)
            except ValueError as exc:
                raise ValueError(f"the policy gave no actions for {peer.address}: {exc}") from exc
            served.answered_at = time.monotonic()
            self._hub.send(peer, peer.session.answer(Action(asked.env_indices, wire)))

    def _end_silent(self, now: float) -> None:
        """End the connections that owe a feedback for too long [7.3]."""
        limit = self._options.timeout
        for served in list(self._served.values()):
            if served.peer.session.state is Due.FEEDBACK and now - served.answered_at > limit:
                self._hub.end(served.peer, GOING_AWAY, FEEDBACK_TIMEOUT, f"no feedback for {limit:.1f} s")


class _Waiting:
    """The time without clients, bounded and reported.

    Args:
        limit_s: Seconds after which to give up, or None.
        first_report_s: Seconds after which to report for the first time.
    """

    def __init__(self, limit_s: float | None, first_report_s: float) -> None:
        self._limit_s = limit_s
        self._first_report_s = first_report_s
        self._since = time.monotonic()
        self._report_s = first_report_s

    def check(self, url: str, num_envs: int | None, here: int, *, opened: bool) -> None:
        """Report, or give up with a `ConnectTimeout`, if ``num_envs`` or any envs have been awaited for long enough."""
        now = time.monotonic()
        if opened and here:
            self._since, self._report_s = now, self._first_report_s
            return
        elapsed = now - self._since
        if elapsed < self._report_s and (self._limit_s is None or elapsed < self._limit_s):
            return
        text = f"waiting for env clients at {url} for {elapsed:.0f} s: {here} of {num_envs or '?'} envs are here"
        text += f". Start a client with: {report.client_command(url, num_envs)}"
        if self._limit_s is not None and elapsed >= self._limit_s:
            raise ConnectTimeout(f"gave up {text}")
        self._report_s *= 2
        logger.warning("%s", text)


def _as_function(policy: Policy | Predicts) -> Policy:
    """Return the function of a policy; a model's deterministic actions."""
    if isinstance(policy, Predicts):
        return lambda observation: _predicted(policy, observation)
    if not callable(policy):
        raise TypeError(f"policy must be callable or have a predict method, got {type(policy).__name__} {policy!r}")
    return policy


def _predicted(model: Predicts, observation: Value) -> Array:
    actions, state = model.predict(observation, deterministic=True)
    if state is not None:
        raise ValueError("a recurrent policy cannot be served: nobody keeps its state for it from call to call")
    return np.asarray(actions)


def _to_wire(actions: object, layout: ActionLayout | None, n: int, horizon: int) -> Array:
    """Make ``[H, n, *da]`` of what a policy gave for n envs.

    Raises:
        ValueError: naming what is wrong with it.
    """
    array = np.asarray(actions)
    if layout is not None:
        if horizon == 1 and array.shape == (n, 1, *layout.shape):
            array = array[:, 0]
        return layout.to_wire(array, n, horizon)
    steps = () if horizon == 1 else (horizon,)
    if array.shape[: 1 + len(steps)] != (n, *steps) or array.dtype.kind not in "biuf":
        raise ValueError(f"an array {array.dtype}{list(array.shape)}, expected numbers {[n, *steps, '...']}")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ValueError("there is NaN in it")
    array = array[None] if horizon == 1 else np.moveaxis(array, 1, 0)
    return array[..., None] if array.ndim == 2 else array
