"""Own how the clients of a run hear that it is over [7.1]: RLinf never closes an env.

Its workers are killed, or exit without running what Python runs at its exit. Three ways remain, in this order:

1. The driver closes the envs inside the workers once its runner returns, fails or is interrupted.
2. A worker that gets SIGTERM closes its envs first: Ray ends them so when the driver of a local Ray goes.
3. After SIGKILL nothing of this runs. The system closes the sockets, and the clients give up by themselves.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
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
_WORKERS_TIMEOUT_S = 15.0  # a worker that is in the middle of a rollout answers only after it


class Closable(Protocol):
    """Stand for an env, as far as its end goes."""

    def close(self) -> None:
        """Tell its clients that the run is over."""


_OPEN: weakref.WeakSet[Closable] = weakref.WeakSet()


def remember(env: Closable) -> None:
    """Have an env of this process closed when the run ends; it is not kept alive by this."""
    _OPEN.add(env)


def close_here(_worker: object = None) -> int:
    """Close every env of this process; give how many there were. Ray calls it on a worker, hence the argument."""
    envs = list(_OPEN)
    for env in envs:
        _close(env)
    return len(envs)


def _close(env: Closable) -> None:
    try:
        env.close()
    except Exception:
        logger.exception("%r could not be closed", env)


def close_in_workers(group: Any) -> None:  # noqa: ANN401 - RLinf has no types
    """Close the envs of RLinf's group of env workers, from the driver; bounded, and silent if Ray is gone already.

    Args:
        group: What ``EnvWorker.create_group(cfg).launch(...)`` returned.
    """
    import ray  # noqa: PLC0415 - only the driver needs it here

    if not ray.is_initialized():
        return
    try:
        # Every Ray actor has this method: it calls a function on the actor's object, in its process.
        calls = [rank.worker.__ray_call__.remote(close_here) for rank in group.worker_info_list]
        _, late = ray.wait(calls, num_returns=len(calls), timeout=_WORKERS_TIMEOUT_S)
    except Exception as exc:  # noqa: BLE001 - whatever Ray's end raises: the run's own error counts
        logger.warning("the env workers could not be asked to close their envs: %s", exc)
        return
    if late:
        logger.warning("%d of %d env workers did not close their envs within %.0f s", len(late), len(calls),
                       _WORKERS_TIMEOUT_S)  # fmt: skip


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
