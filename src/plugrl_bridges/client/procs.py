"""Own the processes of one ``plugrl-env-client`` command: one client in each, started, watched and ended together.

Each child holds one end of a pipe. Over it the parent says "stop" and the child reports; and when the parent is gone,
however it went, the pipe ends and so does the child. ``spawn`` is used everywhere: it exists on every platform, and
copies neither threads nor a simulator's state. ``cli`` is the caller.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import ssl as ssl_module
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from plugrl_bridges import console
from plugrl_bridges.client.env_client import EnvClient
from plugrl_bridges.client.factory import env_factory, gym_factory
from plugrl_bridges.client.record import ClientSummary, Progress
from plugrl_bridges.errors import PlugRLError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.process import BaseProcess

__all__ = ["NOTHING", "ClientOptions", "Outcome", "describe", "make_client", "run_processes", "who"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_GRACE_S = 10.0
_ORPHAN_GRACE_S = 5.0
_STOP = "stop"


@dataclass(frozen=True)
class ClientOptions:
    """Hold what one client needs, as plain values that can be sent to another process; see `EnvClient`."""

    url: str
    env_id: str | None = None
    env_factory: str | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    num_envs: int | None = None
    seed: int | None = None
    rank: int | None = None
    first_env: int | None = None
    group_num_envs: int | None = None
    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    reuse: bool = True
    send_info: bool = True
    verify: bool = False
    connect_timeout: float | None = 300.0
    ping_interval: float | None = 20.0
    ping_timeout: float | None = 60.0
    log_level: str = "info"
    terminal: bool = False
    """Whether a progress line is being written, which log lines must not run into."""


@dataclass(frozen=True)
class Outcome:
    """Say how one client ended: with a summary, or with one line that says why not."""

    summary: ClientSummary
    error: str | None = None


def make_client(options: ClientOptions, progress: Callable[[Progress], None] | None = None) -> EnvClient:
    """Make the client that the options describe.

    Raises:
        FactoryError: There is no such env.
        ValueError: An option is unusable.
        OSError: The CA file cannot be read.
    """
    if options.env_factory is not None:
        make_env = env_factory(options.env_factory, options.env_kwargs)
    else:
        make_env = gym_factory(options.env_id or "", options.env_kwargs)
    context = None if options.ca_file is None else ssl_module.create_default_context(cafile=options.ca_file)
    return EnvClient(
        make_env,
        num_envs=options.num_envs,
        url=options.url,
        seed=options.seed,
        rank=options.rank,
        first_env=options.first_env,
        group_num_envs=options.group_num_envs,
        api_key=options.api_key,
        ssl=context,
        reuse=options.reuse,
        send_info=options.send_info,
        verify=options.verify,
        connect_timeout=options.connect_timeout,
        ping_interval=options.ping_interval,
        ping_timeout=options.ping_timeout,
        progress=progress,
    )


def who(options: ClientOptions) -> str:
    """Return what stands in each log line of a client that has a rank."""
    return "" if options.rank is None else f" rank {options.rank}"


def describe(exc: BaseException) -> str:
    """Put an error on one line."""
    text = " ".join(str(exc).split())
    return text if isinstance(exc, (PlugRLError, ValueError)) and text else f"{type(exc).__name__}: {text}".rstrip(": ")


def run_processes(
    clients: Sequence[ClientOptions],
    *,
    stopping: Callable[[], bool],
    progress: Callable[[Sequence[Progress]], None] | None = None,
) -> list[Outcome]:
    """Run one process per client until all have ended.

    A client that fails does not end the others: a trainer can go on without it, or say what it does about it.

    Args:
        clients: One set of options per process.
        stopping: Whether to end; asked ten times a second.
        progress: Called with the last report of every client, whenever there is a new one.

    Returns:
        One outcome per client, in order.

    Raises:
        OSError: A process could not be started; those that were are ended.
    """
    crew: list[_Member] = []
    try:
        _start(crew, clients, report_progress=progress is not None)
        _watch(crew, stopping, progress)
    finally:
        for member in crew:
            member.pipe.close()  # all hear of it before any is waited for
        for member in crew:
            member.end()
    return [member.outcome or Outcome(NOTHING, "it never started") for member in crew]


NOTHING = ClientSummary(0, 0, float("nan"), (), 0, "failed")
"""The summary of a client that never came to anything."""


class _Member:
    """One child process as the parent sees it."""

    def __init__(self, options: ClientOptions, process: BaseProcess, pipe: Connection) -> None:
        self.options = options
        self.process = process
        self.pipe = pipe
        self.outcome: Outcome | None = None
        self.progress: Progress | None = None

    def read(self) -> None:
        """Take in one report, or the end of the process."""
        try:
            report = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_STOP_GRACE_S)
            code = self.process.exitcode
            self.outcome = Outcome(NOTHING, f"its process ended without a word (exit code {code})")
        else:
            if isinstance(report, Progress):
                self.progress = report
                return
            self.outcome = report
        if self.outcome is not None and self.outcome.error is not None:
            logger.error("client of rank %s failed: %s", self.options.rank, self.outcome.error)

    def tell_to_stop(self) -> None:
        """Ask the child to end; if it is gone already, so much the better."""
        with suppress(OSError):
            self.pipe.send(_STOP)

    def end(self) -> None:
        """See to it that the process is gone; its pipe is closed."""
        self.process.join(_ORPHAN_GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _start(crew: list[_Member], clients: Sequence[ClientOptions], *, report_progress: bool) -> None:
    """Start the processes; whoever was started is in ``crew`` even if another could not be."""
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches the whole process group; the children must hear of it from us, and already while they start.
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if on_main_thread else None
    try:
        for options in clients:
            ours, theirs = context.Pipe()
            # No daemon: those may have no children, and an AsyncVectorEnv or a simulator has some.
            process = context.Process(target=_child, args=(options, theirs, report_progress))
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            crew.append(_Member(options, process, ours))
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _watch(
    crew: Sequence[_Member], stopping: Callable[[], bool], progress: Callable[[Sequence[Progress]], None] | None
) -> None:
    give_up_at: float | None = None
    while running := [member for member in crew if member.outcome is None]:
        ready = wait([member.pipe for member in running], _POLL_S)
        for member in running:
            if member.pipe in ready:
                member.read()
        if progress is not None:
            progress([member.progress for member in crew if member.progress is not None])
        if give_up_at is None:
            if stopping():
                give_up_at = time.monotonic() + _STOP_GRACE_S
                for member in running:
                    member.tell_to_stop()
        elif time.monotonic() > give_up_at:
            for member in running:
                logger.warning("client of rank %s does not end (a long env step?); it is killed", member.options.rank)
                member.process.kill()
            give_up_at = time.monotonic() + _STOP_GRACE_S


def _child(options: ClientOptions, pipe: Connection, report_progress: bool) -> None:
    """Run one client; the target of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    console.configure_logging(options.log_level, terminal=options.terminal, who=who(options))
    client: EnvClient | None = None

    def stop() -> None:
        if client is not None:
            client.stop()
            return
        # The envs' modules are still being imported, which nothing can end from another thread.
        _tell(pipe, Outcome(replace(NOTHING, reason="stopped")))
        os._exit(0)

    try:
        threading.Thread(target=_heed, args=(pipe, stop), name="plugrl-parent-watch", daemon=True).start()
        client = make_client(options, (lambda progress: _tell(pipe, progress)) if report_progress else None)
        signal.signal(signal.SIGTERM, lambda *_: client.stop())
        outcome = Outcome(client.run())
    except Exception as exc:
        if not isinstance(exc, PlugRLError):
            logger.exception("the client failed")
        outcome = Outcome(NOTHING if client is None else client.summary, describe(exc))
    _tell(pipe, outcome)
    sys.exit(0 if outcome.error is None else 1)


def _tell(pipe: Connection, report: Progress | Outcome) -> None:
    with suppress(OSError):  # the parent is gone; `_heed` ends this process
        pipe.send(report)


def _heed(pipe: Connection, stop: Callable[[], None]) -> None:
    """Call ``stop`` when the parent says so or is gone."""
    try:
        while pipe.recv() != _STOP:
            pass
        stop()
        pipe.recv()
    except (EOFError, OSError):
        stop()
        # An env may be in the middle of a long step, and nobody is left to kill this process.
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(1)
