"""Own the client under test as a process: start it by a shell command, wait for it, and leave nothing of it behind.

A command may start more processes than one; they are ended as a group, by the number of the process that was started.
``client_checker`` is the caller.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ClientProcess"]

_TICK_S = 0.02
_GRACE_S = 1.0


class ClientProcess:
    """Run a shell command until it ends or the context does. What it prints goes to stderr.

    Args:
        command: For the shell.
    """

    def __init__(self, command: str) -> None:
        # Own group: what the shell starts can then be ended with it, and a Ctrl-C here does not reach it unawares.
        self._posix = os.name == "posix"
        self._process = subprocess.Popen(  # noqa: S602 - a shell command is what the user gave
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=self._posix,
            creationflags=0 if self._posix else getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        self._swept = False

    def __enter__(self) -> ClientProcess:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Number of the process, and on POSIX of its group."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the command has ended by itself, or was ended."""
        if self._process.returncode is not None:
            return True
        if hasattr(os, "waitid"):
            # Looks without reaping: as long as nobody has reaped it, its number is nobody else's.
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the command to end; give whether it did."""
        deadline = time.monotonic() + timeout_s
        while not self.ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_TICK_S)
        return True

    @property
    def status(self) -> int:
        """Exit status of an ended command; -N if signal N ended it."""
        self.kill()
        return self._process.wait()

    def kill(self) -> None:
        """End whatever of it still runs: first with a request, then by force."""
        if self._swept:
            return
        if not self.ended:
            self._signal(signal.SIGTERM)
            self.wait(_GRACE_S)
        # The command is over or deaf; what it started and did not wait for goes with it.
        self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        self._process.wait()
        self._swept = True

    def _signal(self, number: signal.Signals) -> None:
        if self._posix:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        elif sys.platform == "win32" and self._process.poll() is None:
            subprocess.run(  # noqa: S603 - a number of ours
                ["taskkill", "/F", "/T", "/PID", str(self.pid)],  # noqa: S607 - Windows' own, found as everyone does
                check=False,
                capture_output=True,
            )
