"""The socket options and the waiting for readiness, with what each platform lacks.

This module must not know of WebSockets. ``connect`` and ``listen`` set the options, ``websocket`` waits.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket

__all__ = ["Waiter", "format_address", "set_options"]

_DEAD_PEER_S = 60
"""A peer that acknowledges nothing for so long is lost; on Linux also one that leaves its receive window full."""
_LONGEST_WAIT_S = 1e6


def format_address(name: object) -> str:
    """Return a socket name as ``host:port``, IPv6 hosts in brackets; of another family as it is."""
    if isinstance(name, tuple) and len(name) >= 2:
        host, port = name[0], name[1]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return str(name) or "unix socket"


def set_options(sock: socket.socket) -> None:
    """Make a stream socket non-blocking, without Nagle's delay, and let it notice a peer that has vanished.

    Options that the socket or the platform does not have are passed over.
    """
    sock.setblocking(False)
    # A small message behind another one waits 40 ms for an acknowledgement otherwise.
    _try_option(sock, socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _try_option(sock, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Silence for half the time, then three probes in the other half. macOS calls the first of them TCP_KEEPALIVE.
    idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
    for option, value in (
        (idle, _DEAD_PEER_S // 2),
        (getattr(socket, "TCP_KEEPINTVL", None), _DEAD_PEER_S // 6),
        (getattr(socket, "TCP_KEEPCNT", None), 3),
        (getattr(socket, "TCP_USER_TIMEOUT", None), _DEAD_PEER_S * 1000),
    ):
        if option is not None:
            _try_option(sock, socket.IPPROTO_TCP, option, value)


def _try_option(sock: socket.socket, level: int, option: int, value: int) -> None:
    # A Unix socket, or a system that defines the constant without having the option.
    with contextlib.suppress(OSError):
        sock.setsockopt(level, option, value)


def _milliseconds(timeout_s: float | None) -> int | None:
    # Rounded up: a wait of 0.2 ms must not become a busy loop of polls of 0 ms.
    return None if timeout_s is None else math.ceil(min(timeout_s, _LONGEST_WAIT_S) * 1000)


class Waiter:
    """Waits until one socket can be read or written.

    ``select.poll`` has no limit on the file descriptor and is set up once; where it does not exist (Windows),
    ``select.select`` has no such limit either.
    """

    __slots__ = ("_fd", "_polls")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._polls: list[select.poll] | None = None
        if hasattr(select, "poll"):
            # Index: 1 if reading is waited for, plus 2 if writing is.
            self._polls = [select.poll() for _ in range(4)]
            for index, poller in enumerate(self._polls):
                poller.register(fd, (select.POLLIN if index & 1 else 0) | (select.POLLOUT if index & 2 else 0))

    def readable(self, timeout_s: float | None) -> bool:
        """Wait until the socket can be read, has ended or has failed; None waits for ever."""
        if self._polls is not None:
            return bool(self._polls[1].poll(_milliseconds(timeout_s)))
        return self.either(read=True, write=False, timeout_s=timeout_s)[0]

    def either(self, *, read: bool, write: bool, timeout_s: float | None) -> tuple[bool, bool]:
        """Wait until the socket can be read or written, whichever is asked for; at least one of them must be.

        Returns:
            (readable, writable); an error makes true what was asked for, so that the next call meets it.
        """
        if self._polls is None:
            fds = [self._fd]
            # Windows reports a failed connection only in the third set.
            ready = select.select(fds if read else [], fds if write else [], fds, timeout_s)
            return read and bool(ready[0] or ready[2]), write and bool(ready[1] or ready[2])
        found = self._polls[read + 2 * write].poll(_milliseconds(timeout_s))
        if not found:
            return False, False
        bits = found[0][1]
        broken = bits & (select.POLLERR | select.POLLHUP | select.POLLNVAL)
        return read and bool(bits & select.POLLIN or broken), write and bool(bits & select.POLLOUT or broken)
