"""An env client's life: make the envs, find the server, serve it, come back after a loss, end with a summary.

`EnvClient` is the class to use in code; the ``plugrl-env-client`` command is ``cli`` around it. What is said on one
connection is the concern of ``exchange``, what its end means that of ``reconnect``.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from plugrl_bridges import __version__
from plugrl_bridges.arguments import seconds, seconds_or_none, whole_or_none
from plugrl_bridges.client.exchange import Conversation
from plugrl_bridges.client.factory import MakeEnv, build_batch
from plugrl_bridges.client.keeper import KeptConnection
from plugrl_bridges.client.reconnect import Backoff, Ending, Then, ending_of
from plugrl_bridges.client.record import ClientSummary, EpisodeBook, Progress, Stopped, Watch
from plugrl_bridges.errors import (
    ConnectionClosed,
    ConnectTimeout,
    EnvFailed,
    HandshakeError,
)
from plugrl_bridges.transport import check_destination, connect
from plugrl_bridges.wire.session import ENV_SPEC, LATE_RESET, REUSE_FEEDBACK_OBS, SEEDED_RESET, STEP_DIGEST

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Callable

    from plugrl_bridges.client.batch import EnvBatch
    from plugrl_bridges.wire.codec import Value

__all__ = ["EnvClient"]

logger = logging.getLogger(__name__)

_DIAL_TIMEOUT_S = 10.0
_PAUSE_SLICE_S = 0.1
_FEATURES: list[Value] = [REUSE_FEEDBACK_OBS, ENV_SPEC, SEEDED_RESET, LATE_RESET]


class EnvClient:
    """Step environments for a training server; make one, then call `run`.

    Args:
        make_env: Returns a new `gymnasium.Env`, called once per env; or a `gymnasium.vector.VectorEnv`, whose rows are
            then the envs (autoreset mode SAME_STEP or DISABLED). If it has a parameter ``env_index``, it is given the
            env's number, from 0. ``gym_factory`` and ``env_factory`` make one of names.
        num_envs: Number of envs; None: one, or as many as the vector env has rows.
        url: ``ws://host:port`` or ``wss://…``, a path is allowed.
        seed: Env j's very first reset gets ``seed + first_env + j``; later resets are unseeded. A trainer that seeds
            its resets (feature ``seeded-reset``) replaces this.
        rank: Place of this client among the clients of a run; announced to servers that know ``env-spec``, which
            give out their slots in this order.
        first_env: Index of env 0 in the whole run, for the seeds; None: ``rank * num_envs``, or 0 without a rank.
        group_num_envs: Announced number of envs of all the clients that were started together; None: ``num_envs``.
        api_key: Sent as ``Authorization: Api-Key …`` [1.2].
        ssl: Context for ``wss``; None: the system's certificates.
        reuse: Leave out observations that the server has, if it offers that [10.1].
        send_info: Send the envs' infos. The ``episode`` record of [5.4] is sent in any case.
        verify: Keep a digest of what each env takes and gives, and send it to servers that check it (feature
            ``step-digest``).
        connect_timeout: Seconds without a server, over all tries, after which to give up; None: never.
        ping_interval: Seconds between pings; None: none are sent.
        ping_timeout: Seconds beyond ``ping_interval`` for which the server may be silent while this client waits for
            it; then the connection counts as lost. None: for ever, as behind a proxy that eats pings.
        max_backoff: The longest wait between two tries, seconds.
        progress: Called in `run`'s thread about once a second; must be quick.

    Raises:
        ValueError: naming the argument that is unusable (`TypeError` for a wrong type).
    """

    def __init__(  # noqa: PLR0913 - options, keyword-only
        self,
        make_env: MakeEnv,
        *,
        num_envs: int | None = None,
        url: str = "ws://127.0.0.1:8000",
        seed: int | None = None,
        rank: int | None = None,
        first_env: int | None = None,
        group_num_envs: int | None = None,
        api_key: str | None = None,
        ssl: ssl_module.SSLContext | None = None,
        reuse: bool = True,
        send_info: bool = True,
        verify: bool = False,
        connect_timeout: float | None = 300.0,
        ping_interval: float | None = 20.0,
        ping_timeout: float | None = 60.0,
        max_backoff: float = 5.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        if not callable(make_env):
            raise TypeError(f"make_env must be callable, not a {type(make_env).__name__}")
        check_destination(url, api_key=api_key, ssl=ssl)
        self.url = url
        self._make_env = make_env
        self._num_envs = whole_or_none("num_envs", num_envs, 1)
        self._seed = whole_or_none("seed", seed, 0)
        self._rank = whole_or_none("rank", rank, 0)
        self._first_env = whole_or_none("first_env", first_env, 0)
        self._group_num_envs = whole_or_none("group_num_envs", group_num_envs, 1)
        self._api_key = api_key
        self._ssl = ssl
        self._reuse = reuse
        self._send_info = send_info
        self._verify = verify
        self._connect_timeout = seconds_or_none("connect_timeout", connect_timeout)
        self._ping_interval = seconds_or_none("ping_interval", ping_interval)
        self._ping_timeout = seconds_or_none("ping_timeout", ping_timeout)
        self._max_backoff = seconds("max_backoff", max_backoff)
        self._watch = Watch(progress)

    def __repr__(self) -> str:
        return f"<EnvClient of {self._num_envs or 'some'} envs for {self.url}>"

    @property
    def summary(self) -> ClientSummary:
        """What was done so far; after `run` has raised, what had been done until then."""
        return self._watch.book.summary("running")

    def stop(self) -> None:
        """End `run` with close code 1000 [7.5], soon; from any thread or from a signal handler.

        Before there is a connection, `run` returns when the env that is being made, the first reset or the try to
        connect is done, the last in ten seconds at most.
        The connection is closed within a quarter of a second, even in the middle of an env step; `run` returns when
        that step does. A message that is being sent to a server that does not read has half a second more; then the
        connection is dropped without a close frame, which could only go behind the whole message.
        """
        self._watch.stop()

    def run(self) -> ClientSummary:
        """Make the envs and serve until the server says that the run is over, or `stop` is called.

        A lost connection is made again, with backoff, and the same episodes go on; feedback that could not be
        delivered is dropped [7.6].

        Returns:
            What was done.

        Raises:
            FactoryError: The factory is unusable; nothing was connected.
            SpaceError: The envs' spaces cannot travel; nothing was connected.
            EnvFailed: An env raised; the traceback is in the log too, and the server was told with close code 1011.
            ConnectTimeout: There was no server for ``connect_timeout`` seconds.
            HandshakeError: The server refuses this client (401, 403).
            RemoteProtocolError: The server sent a text frame: it is no training server [7.4].
        """
        try:
            batch = build_batch(
                self._make_env, self._num_envs, rank=self._rank or 0, verify=self._verify,
                before_each=self._watch.check,
            )  # fmt: skip
        except Stopped:
            return self._watch.book.summary("stopped")
        try:
            self._watch.book = EpisodeBook(batch.num_envs)
            return self._watch.book.summary(self._serve(batch))
        finally:
            batch.close()

    def _first_seeds(self, batch: EnvBatch) -> list[int | None]:
        """Return what the envs are first seeded with, where the trainer does not seed them."""
        if self._seed is None:
            return [None] * batch.num_envs
        first_env = self._first_env
        if first_env is None:
            first_env = (self._rank or 0) * batch.num_envs
        return [self._seed + first_env + row for row in range(batch.num_envs)]

    def _spec(self, batch: EnvBatch) -> dict[str, Value]:
        """Return the env-spec map; what is not known is left out."""
        spec = {
            **batch.describe(),
            "num_envs": batch.num_envs,
            "group_num_envs": self._group_num_envs or batch.num_envs,
            "features": [*_FEATURES, STEP_DIGEST] if self._verify else _FEATURES,
            "client": "plugrl-bridges",
            "client_version": __version__,
        }
        if self._rank is not None:
            spec["rank"] = self._rank
        return spec

    def _serve(self, batch: EnvBatch) -> str:
        """Connect and serve again and again; return the reason for the end."""
        spec = self._spec(batch)
        backoff = Backoff(
            max_backoff_s=self._max_backoff,
            budget_s=math.inf if self._connect_timeout is None else self._connect_timeout,
            stable_s=max(5.0, self._max_backoff),
        )
        try:
            while True:
                error = self._attempt(batch, spec, backoff)
                if error is None:
                    logger.info("the server at %s says that the run is over", self.url)
                    return "server stop"
                self._pause(backoff, error)
        except Stopped:
            logger.info("stopped; no connection with %s is open", self.url)
            return "stopped"

    def _attempt(self, batch: EnvBatch, spec: dict[str, Value], backoff: Backoff) -> Exception | None:
        """Connect once and serve for as long as it lasts; return the error to come back after, or None: do not."""
        self._look_up()
        started_at = time.monotonic()
        # A budget that is all but used up still buys one honest try.
        timeout_s = max(1.0, min(_DIAL_TIMEOUT_S, backoff.remaining_s))
        try:
            websocket = connect(self.url, api_key=self._api_key, ssl=self._ssl, timeout_s=timeout_s)
        except HandshakeError as exc:
            backoff.spent(time.monotonic() - started_at)
            if ending_of(exc).then is Then.RAISE:
                raise
            return exc
        line = KeptConnection(
            websocket, self._watch, ping_interval=self._ping_interval, ping_timeout=self._ping_timeout
        )
        exchange = Conversation(
            line,
            batch,
            self._watch,
            spec=spec,
            first_seeds=self._first_seeds(batch),
            reuse=self._reuse,
            send_info=self._send_info,
        )
        ending = Ending(Then.RAISE)
        try:
            exchange.run(remaining_s=backoff.remaining_s)
        except Exception as exc:
            if isinstance(exc, ConnectionClosed):
                self._watch.check()  # the close was then our own
            if isinstance(exc, EnvFailed):
                logger.exception("an env failed; its own traceback comes first")
            ending = ending_of(exc)
            if ending.then is Then.RAISE:
                raise
            if ending.then is Then.RETRY:
                return exc
            if self._watch.book.steps == 0:
                logger.warning(
                    "%s stopped this client before it took a step: the run was over, or the server cannot use this "
                    "client; the reason is in the server's log",
                    self.url,
                )
            return None
        finally:
            line.shut(ending.code, ending.reason)
            now = time.monotonic()
            if exchange.connected_at is None:
                backoff.spent(now - started_at)
            else:
                backoff.held(now - exchange.connected_at)

    def _pause(self, backoff: Backoff, error: Exception) -> None:
        """Wait for the next try, or give up."""
        wait_s = backoff.next_wait_s()
        if wait_s is None:
            raise ConnectTimeout(
                f"no training server served this client at {self.url} for {backoff.without_server_s:.0f} s "
                f"({backoff.tries} tries); the last one: {error}"
            ) from error
        if isinstance(error, HandshakeError):
            # Waiting for a trainer that is still starting is ordinary, and said less and less often.
            if backoff.tries & (backoff.tries - 1) == 0:
                left = "for ever" if math.isinf(backoff.remaining_s) else f"for {backoff.remaining_s:.0f} s more"
                logger.warning("%s; trying %s (%d so far)", error, left, backoff.tries)
        else:
            self._watch.book.reconnects += 1
            logger.warning("%s; the running episodes go on, next try in %.1f s", error, wait_s)
        until = time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            self._look_up()
            time.sleep(min(_PAUSE_SLICE_S, left_s))
        self._look_up()
        backoff.spent(wait_s)

    def _look_up(self) -> None:
        """Heed a stop, and report, while there is no connection."""
        self._watch.check()
        self._watch.report("connecting")
