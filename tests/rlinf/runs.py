"""Real runs of RLinf in processes of their own, with a Ray of their own, and real env clients beside them."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

__all__ = ["PATIENCE_S", "Client", "Driver", "wait_for"]

PATIENCE_S = 400.0
"""For a whole phase of a run, on a machine that has other things to do: most of a start is imports."""
_MARK = "PLUGRL_TEST_RUN"  # inherited by whatever a driver starts, and so by the processes of its Ray
_OBJECT_STORE_BYTES = 200_000_000


class Driver:
    """Run ``python -m plugrl_bridges.rlinf``; leave the ``with`` block and nothing of it is alive.

    Args:
        folder: Empty; what the run writes goes there.
        overrides: For Hydra.
    """

    def __init__(self, folder: Path, *overrides: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.log = folder / "driver.log"
        self._mark = uuid.uuid4().hex
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PLUGRL_", "RLINF_"))
        }
        self._temporary = tempfile.mkdtemp(
            prefix="p"
        )  # short, and taken away here: a killed run leaves its Ray's folder
        environment["TMPDIR"] = self._temporary
        environment.update({_MARK: self._mark, "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(_OBJECT_STORE_BYTES)})
        command = [sys.executable, "-m", "plugrl_bridges.rlinf", f"runner.logger.log_path={folder}", *overrides]
        # A shell that starts this in the background has SIGINT ignored, which is inherited; a handler is not.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
                )
        finally:
            signal.signal(signal.SIGINT, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def interrupt(self) -> None:
        """Do what Ctrl-C does: every process of the terminal's foreground gets the signal."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def text(self) -> str:
        """What the run has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Give the processes that this run started and that are alive."""
        found = []
        for process in psutil.process_iter():
            # Read raw: Ray's processes write their titles over the beginning, where psutil then sees the end.
            with contextlib.suppress(psutil.Error, OSError):
                if self._mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process)
        return found

    def episodes(self, name: str = "episodes.csv") -> list[dict[str, str]]:
        """Give the rows of an episode log, as far as it is written."""
        path = self.folder / name
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def metrics(self, tag: str) -> dict[int, float]:
        """Give one of RLinf's own metrics, as it wrote it, by the number of the update."""
        events = EventAccumulator(str(self.folder / "tensorboard"))
        events.Reload()
        return {event.step: event.value for event in events.Scalars(tag)}


class Client:
    """Run ``plugrl-env-client`` with Pendulum; leave the ``with`` block and it is not alive.

    Args:
        folder: Where its log goes.
        port: Of the bridge, on this machine.
        num_envs: How many envs.
        options: More of the command line.
    """

    def __init__(self, folder: Path, port: int, num_envs: int, *options: str) -> None:
        name = f"client-{port}-{uuid.uuid4().hex[:6]}"
        self._log = folder / f"{name}.log"
        self._summary = folder / f"{name}.json"
        command = [
            sys.executable, "-m", "plugrl_bridges.client", "--env-id", "Pendulum-v1", "--num-envs", str(num_envs),
            "--url", f"ws://127.0.0.1:{port}", "--connect-timeout", str(PATIENCE_S), "--summary", str(self._summary),
            *options,
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        """What it has said so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def summary(self) -> dict[str, Any]:
        """Give what it counted, once it has ended."""
        found: dict[str, Any] = json.loads(self._summary.read_text(encoding="utf-8"))
        return found

    def kill(self) -> None:
        """End it without a word to anybody."""
        self.process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        self.process.wait()


def wait_for(done: Callable[[], object], drivers: Sequence[Driver], timeout_s: float = PATIENCE_S) -> None:
    """Poll a predicate until it is true, or a driver that must be alive is not."""
    deadline = time.monotonic() + timeout_s
    while not done():
        for driver in drivers:
            assert driver.process.poll() is None, f"the run is over: {driver.process.returncode}\n{driver.text[-6000:]}"
        assert time.monotonic() < deadline, "\n".join(["it did not happen in time", *(d.text[-4000:] for d in drivers)])
        time.sleep(0.2)
