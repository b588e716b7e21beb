"""What happens to a hub while nobody calls it: the keeper thread, the interpreter's exit, and a fork.

Holds no hub alive: a trainer that drops its environment drops the hub with it. ``server.hub`` makes one per hub.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LifeLine"]

logger = logging.getLogger(__name__)

_KEEPER_ROUNDS = 16  # then the trainer gets the lock, however much the clients have to say


class _Hub(Protocol):
    lock: threading.RLock
    closing: bool

    @property
    def forked(self) -> bool: ...

    def poll(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class LifeLine:
    """Look after a hub from now on, until `let_go`.

    Args:
        hub: Is polled by the keeper thread, closed at exit, abandoned in a forked process.
        name: Of the keeper thread.
        period_s: How often it looks.
    """

    def __init__(self, hub: _Hub, name: str, period_s: float) -> None:
        ref = weakref.ref(hub)
        self._done = threading.Event()
        self._keeper = threading.Thread(target=_keep, args=(ref, self._done, period_s), name=name, daemon=True)
        self._keeper.start()
        self._unregister_exit = _close_at_exit(ref)
        _HUBS.add(hub)

    def let_go(self) -> None:
        """End all this, soon; idempotent."""
        self._done.set()
        self._unregister_exit()

    def forget(self) -> None:
        """End what a forked process has of all this: no keeper lives there, and its locks may be held for ever."""
        self._unregister_exit()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the keeper thread, unless this is it."""
        if threading.current_thread() is not self._keeper:
            self._keeper.join(timeout=timeout_s)


def _keep(ref: Callable[[], _Hub | None], done: threading.Event, period_s: float) -> None:
    """Look after the connections while the trainer does not; holds no hub alive."""
    while not done.wait(period_s):
        hub = ref()
        if hub is None:
            return
        if hub.lock.acquire(timeout=period_s):
            try:
                for _ in range(_KEEPER_ROUNDS):
                    if done.is_set() or not hub.poll(0.0):
                        break
            except Exception:
                logger.exception("a fault of this library in the keeper thread")
            finally:
                hub.lock.release()
        del hub


def _close_at_exit(ref: Callable[[], _Hub | None]) -> Callable[[], None]:
    """Close the hub when the interpreter ends normally [7.1]; return what undoes this."""

    def close() -> None:
        hub = ref()
        if hub is not None:
            hub.close()

    atexit.register(close)
    return lambda: atexit.unregister(close)


_HUBS: weakref.WeakSet[_Hub] = weakref.WeakSet()


def _abandon_all() -> None:
    """Free a forked process of its parent's sockets: they would keep the port taken, and connections open."""
    for hub in list(_HUBS):
        hub.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
