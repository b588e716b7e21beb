"""Ports in a row, as several instances of an env take them."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["first_free_port", "is_free"]


def first_free_port(count: int) -> int:
    """Give the first of so many ports in a row that nobody listens on, below those that the system gives away."""
    start = 20000 + os.getpid() % 400 * 20  # so that two test runs at once look in different places
    for port in range(start, start + 8000, count):
        if all(is_free(each) for each in range(port, port + count)):
            return port
    raise AssertionError("no free ports")


def is_free(port: int) -> bool:
    """Tell whether one could listen there."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
