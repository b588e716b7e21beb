"""How the clients of a run hear that it is over [7.1]: RLinf never closes an env.

Its workers are killed, or exit without running what Python runs at its exit. Three ways remain, in this order:

1. When its runner returns, fails or is interrupted, the driver leaves a word in Ray's store of keys. A thread in each
   worker with open envs looks for it and closes them. (A call of the worker would wait until its rollout is over.)
2. A worker that gets SIGTERM closes its envs first: Ray may end it so when the driver of a local Ray goes.
3. After SIGKILL nothing of this runs. The system closes the sockets, and the clients give up by themselves.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Closable", "close_after_runs", "close_here", "close_in_workers", "close_on_sigterm", "remember"]

logger = logging.getLogger(__name__)

_RUNNERS = {
    "rlinf.runners.embodied_runner": "EmbodiedRunner",
    "rlinf.runners.async_embodied_runner": "AsyncEmbodiedRunner",
    "rlinf.runners.async_ppo_embodied_runner": "AsyncPPOEmbodiedRunner",
    "rlinf.runners.embodied_eval_runner": "EmbodiedEvalRunner",
}
_WORKERS_TIMEOUT_S = 20.0  # for all workers to have closed their envs
_LOOK_EVERY_S = 0.5
_OVER = "plugrl-bridges:over:"
_CLOSED = "plugrl-bridges:closed:"


class Closable(Protocol):
    """An env, as far as its end goes."""

    def close(self) -> None:
        """Tell its clients that the run is over."""


_OPEN: weakref.WeakSet[Closable] = weakref.WeakSet()
_WATCH = threading.Lock()  # held by the thread that waits for the end of this process's run


def remember(env: Closable) -> None:
    """Have an env of this process closed when the run ends; it is not kept alive by this."""
    _OPEN.add(env)
    if "ray" in sys.modules and sys.modules["ray"].is_initialized() and _WATCH.acquire(blocking=False):
        threading.Thread(target=_watch, name="plugrl-end-of-run", daemon=True).start()


def close_here() -> None:
    """Close every env of this process."""
    for env in list(_OPEN):
        try:
            env.close()
        except Exception:  # noqa: PERF203 - the others are to be closed all the same
            logger.exception("%r could not be closed", env)


def _watch() -> None:
    """Close the envs of this process once the driver has said that the run is over; ends with the envs, or with Ray."""
    from ray.experimental import internal_kv  # noqa: PLC0415 - only where Ray is

    try:
        over = _key(_OVER)
        while _OPEN:
            if internal_kv._internal_kv_exists(over):
                close_here()
                internal_kv._internal_kv_put(_key(_CLOSED) + str(os.getpid()).encode(), b"1")
                return
            time.sleep(_LOOK_EVERY_S)
    except Exception as exc:  # noqa: BLE001 - whatever Ray raises when it goes: SIGTERM or the system comes next
        logger.debug("no longer waiting for the end of the run: %s", exc)
    finally:
        _WATCH.release()


def _key(prefix: str) -> bytes:
    """Return a key of this run: driver and workers have the same job, and no other run has it."""
    import ray  # noqa: PLC0415 - only where Ray is

    return f"{prefix}{ray.get_runtime_context().get_job_id()}:".encode()


def close_in_workers(group: Any) -> None:  # noqa: ANN401 - RLinf has no types
    """Close the envs of a launched group of env workers, from the driver; bounded, and silent if Ray is gone."""
    import ray  # noqa: PLC0415 - only the driver needs it here
    from ray.experimental import internal_kv  # noqa: PLC0415

    if not ray.is_initialized():
        return
    workers = len(group.worker_info_list)
    deadline = time.monotonic() + _WORKERS_TIMEOUT_S
    before = _deaf_to_failures()
    try:
        internal_kv._internal_kv_put(_key(_OVER), b"1")
        while (closed := len(internal_kv._internal_kv_list(_key(_CLOSED)))) < workers:
            if time.monotonic() > deadline:
                logger.warning(
                    "%d of %d env workers did not close their envs within %.0f s", workers - closed, workers,
                    _WORKERS_TIMEOUT_S,
                )  # fmt: skip
                return
            time.sleep(_LOOK_EVERY_S / 5)
    except Exception as exc:  # noqa: BLE001 - whatever Ray's end raises: the run's own error counts
        logger.warning("the env workers could not be asked to close their envs: %s", exc)
    finally:
        if before is not None:
            signal.signal(signal.SIGUSR1, before)


def _deaf_to_failures() -> Any:  # noqa: ANN401 - a handler
    """Ignore the signal by which RLinf tells its driver that a worker failed, and return its handler.

    A worker in the middle of a rollout fails when its env is closed; RLinf would then kill those that are not done.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return None
    return signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def close_after_runs() -> None:
    """Have RLinf's runners close the envs when ``run`` ends in any way; idempotent.

    Only runners that are imported already are touched, which is so in a driver and nowhere else.
    """
    for module, name in _RUNNERS.items():
        runner = getattr(sys.modules.get(module), name, None)
        if runner is not None and "run" in vars(runner) and not getattr(runner.run, "of_plugrl", False):
            runner.run = _closing(runner.run)


def _closing(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_and_close(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - RLinf's signature
        try:
            return run(self, *args, **kwargs)
        finally:
            close_in_workers(self.env)

    run_and_close.of_plugrl = True  # type: ignore[attr-defined] # a mark of ours
    return run_and_close


def close_on_sigterm() -> None:
    """Have SIGTERM close the envs of this process before it does what it did so far; idempotent.

    RLinf registers extensions in the main thread of a worker, the only one that may set a handler; elsewhere this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)
    if getattr(before, "of_plugrl", False) or before is None:  # None: set by something that is not Python
        return

    def handle(number: int, frame: FrameType | None) -> None:
        close_here()
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    handle.of_plugrl = True  # type: ignore[attr-defined] # a mark of ours
    signal.signal(signal.SIGTERM, handle)
