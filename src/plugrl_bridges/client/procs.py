"""The processes of one ``plugrl-env-client`` command: one client in each, started, watched and ended together.

Each child holds one end of a pipe. Over it the parent says "stop" and the child reports; and when the parent is gone,
however it went, the pipe ends and so does the child. ``spawn`` is used everywhere: it exists on every platform, and
copies neither threads nor a simulator's state.
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
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from plugrl_bridges import console
from plugrl_bridges.client.env_client import EnvClient
from plugrl_bridges.client.factory import env_factory, gym_factory
from plugrl_bridges.client.record import NOTHING, ClientSummary, Progress
from plugrl_bridges.errors import PlugRLError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.process import BaseProcess

__all__ = ["ClientOptions", "Outcome", "run_here", "run_processes"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STOP_GRACE_S = 10.0
_ORPHAN_GRACE_S = 5.0
_STOP = "stop"


@dataclass(frozen=True)
class ClientOptions:
    """What one client needs, as plain values that can be sent to another process; ``keywords`` are for `EnvClient`."""

    env_id: str | None = None
    env_factory: str | None = None
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    ca_file: str | None = None
    num_envs: int | None = None
    rank: int | None = None
    first_env: int | None = None
    keywords: dict[str, Any] = field(default_factory=dict, repr=False)  # the API key is among them
    talk: console.Talk = field(default_factory=lambda: console.Talk("info", quiet=False))

    @property
    def who(self) -> str:
        """What stands in each log line of a client that has a rank."""
        return "" if self.rank is None else f" rank {self.rank}"


@dataclass(frozen=True)
class Outcome:
    """How one client ended: with a summary, or with one line that says why not."""

    summary: ClientSummary
    error: str | None = None


_STOPPED_EARLY = Outcome(replace(NOTHING, reason="stopped"))
"""The outcome of a client that was stopped while it was being made."""


def run_here(
    options: ClientOptions, signals: console.Signals, progress: Callable[[Sequence[Progress]], None] | None
) -> Outcome:
    """Run the only client in this process; ``progress`` is that of `run_processes`."""
    report = None if progress is None else lambda report: progress([report])
    try:
        # Importing the envs may take minutes, and needs no clean end.
        return _run_client(options, report, signals.interrupting(), lambda client: signals.call(client.stop))
    except console.Interrupted:
        return _STOPPED_EARLY


def _run_client(
    options: ClientOptions,
    progress: Callable[[Progress], None] | None,
    making: AbstractContextManager[None],
    made: Callable[[EnvClient], None],
) -> Outcome:
    """Make a client within ``making``, hand it to ``made``, and run it; an unexpected error is logged too."""
    client = None
    try:
        with making:
            client = _make_client(options, progress)
        made(client)
        return Outcome(client.run())
    except Exception as exc:
        if not isinstance(exc, (PlugRLError, ValueError, OSError)):
            logger.exception("the client failed")
        text = " ".join(str(exc).split())
        if not (text and isinstance(exc, (PlugRLError, ValueError))):
            text = f"{type(exc).__name__}: {text}".rstrip(": ")
        return Outcome(NOTHING if client is None else client.summary, text)


def _make_client(options: ClientOptions, progress: Callable[[Progress], None] | None) -> EnvClient:
    if options.env_factory is not None:
        make_env = env_factory(options.env_factory, options.env_kwargs)
    else:
        make_env = gym_factory(options.env_id or "", options.env_kwargs)
    return EnvClient(
        make_env,
        num_envs=options.num_envs,
        rank=options.rank,
        first_env=options.first_env,
        ssl=None if options.ca_file is None else ssl_module.create_default_context(cafile=options.ca_file),
        progress=progress,
        **options.keywords,
    )


def run_processes(
    clients: Sequence[ClientOptions],
    stopping: Callable[[], bool],
    progress: Callable[[Sequence[Progress]], None] | None = None,
) -> list[Outcome]:
    """Run one process per client until all have ended, and return their outcomes in order.

    A client that fails does not end the others: a trainer can go on without it, or say what it does about it.
    ``stopping`` is asked ten times a second, and ``progress`` then gets the last report of every client that made one.

    Raises:
        OSError: A process could not be started; those that were are ended.
    """
    crew: list[_Member] = []
    try:
        _start(crew, clients)
        _watch(crew, stopping, progress)
    finally:
        for member in crew:
            member.pipe.close()  # all hear of it before any is waited for
        for member in crew:
            member.end()
    return [member.outcome or Outcome(NOTHING, "it never started") for member in crew]


class _Member:
    """One child process as the parent sees it."""

    def __init__(self, options: ClientOptions, process: BaseProcess, pipe: Connection) -> None:
        self.options = options
        self.process = process
        self.pipe = pipe
        self.outcome: Outcome | None = None
        self.progress: Progress | None = None

    def read(self) -> None:
        """Read one report, or the end of the process."""
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
        if self.outcome.error is not None:
            logger.error("client of rank %s failed: %s", self.options.rank, self.outcome.error)

    def end(self) -> None:
        """See to it that the process is gone; its pipe is closed."""
        self.process.join(_ORPHAN_GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _start(crew: list[_Member], clients: Sequence[ClientOptions]) -> None:
    """Start the processes; whoever was started is in ``crew`` even if another could not be."""
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches the whole process group; the children must hear of it from us, and already while they start.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for options in clients:
            ours, theirs = context.Pipe()
            # No daemon: those may have no children, and an AsyncVectorEnv or a simulator has some.
            process = context.Process(target=_child, args=(options, theirs))
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            crew.append(_Member(options, process, ours))
    finally:
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
                    _tell(member.pipe, _STOP)
        elif time.monotonic() > give_up_at:
            for member in running:
                logger.warning("client of rank %s does not end (a long env step?); it is killed", member.options.rank)
                member.process.kill()
            give_up_at = time.monotonic() + _STOP_GRACE_S


def _child(options: ClientOptions, pipe: Connection) -> None:
    """Run one client; the target of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    console.configure_logging(options.talk.log_level, terminal=options.talk.terminal, who=options.who)
    client: EnvClient | None = None

    def stop() -> None:
        if client is not None:
            client.stop()
            return
        # The envs' modules are still being imported, which nothing can end from another thread.
        _tell(pipe, _STOPPED_EARLY)
        os._exit(0)

    def made(new: EnvClient) -> None:
        nonlocal client
        client = new
        signal.signal(signal.SIGTERM, lambda *_: new.stop())

    threading.Thread(target=_heed, args=(pipe, stop), name="plugrl-parent-watch", daemon=True).start()
    outcome = _run_client(options, lambda progress: _tell(pipe, progress), nullcontext(), made)
    _tell(pipe, outcome)
    sys.exit(0 if outcome.error is None else 1)


def _tell(pipe: Connection, what: Progress | Outcome | str) -> None:
    with suppress(OSError):  # the other process is gone: a parent without its child goes on, and `_heed` ends a child
        pipe.send(what)


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
