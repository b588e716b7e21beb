"""The servers of this library, graded: the policy server in everything, the bridge in what a lockstep can do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from click.testing import CliRunner

from plugrl_bridges.conformance import Report
from plugrl_bridges.conformance.server_checker import Phase, ServerChecker, ServerCheckOptions
from plugrl_bridges.conformance.server_cli import main
from plugrl_bridges.conformance.server_talk import CannotGoOn, Line
from plugrl_bridges.errors import PlugRLError, RaggedClientError
from plugrl_bridges.server.lockstep import Lockstep
from plugrl_bridges.server.options import BridgeOptions
from plugrl_bridges.server.policy_server import PolicyServer
from tests.conformance.foreign_server import ForeignServer
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from websockets.sync.server import ServerConnection

ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
LOCKSTEP = [Phase.EXCHANGE, Phase.ERRORS, Phase.REUSE, Phase.STOP]


@contextlib.contextmanager
def policy_server(horizon: int = 1, **options: Any) -> Iterator[PolicyServer]:
    def policy(observation: Any) -> Any:
        n = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        return np.zeros((n, *((horizon,) if horizon > 1 else ()), 2), np.float32)

    settings = {"action_space": ACTIONS, "action_horizon": horizon, "connect_timeout": PATIENCE_S, **options}
    server = PolicyServer(policy, port=0, **settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class Trainer:
    """Step a bridge with random actions, so many times or until something is raised, and close it."""

    def __init__(self, steps: int, **options: Any) -> None:
        settings = {"action_space": ACTIONS, "timeout": 5.0, "connect_timeout": PATIENCE_S, **options}
        self.lockstep = Lockstep(BridgeOptions(port=0, **settings))
        self.steps = 0
        self.error: PlugRLError | None = None
        self._limit = steps
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        space = self.lockstep.options.action_space
        assert space is not None
        try:
            self.lockstep.reset()
            while self.steps < self._limit:
                n, horizon = self.lockstep.num_envs, self.lockstep.options.action_horizon
                chunks = [[space.sample() for _ in range(horizon)] for _ in range(n)]
                self.lockstep.send(np.array(chunks) if horizon > 1 else np.array(chunks)[:, 0])
                self.lockstep.wait()
                self.steps += 1
        except PlugRLError as exc:
            self.error = exc
        finally:
            self.lockstep.close()

    def check(self, phases: list[Phase], **options: Any) -> Any:
        try:
            settings = {"port": self.lockstep.port, "timeout_s": 5.0, **options}
            return ServerChecker(ServerCheckOptions(**settings)).run(phases)
        finally:
            if phases != LOCKSTEP:
                self.lockstep.close()
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()


@pytest.mark.parametrize("horizon", [1, 4])
def test_policy_server_passes(horizon: int) -> None:
    with policy_server(horizon, steps=2000) as server:
        done = CliRunner().invoke(main, ["--port", str(server.port), "--until-stop", "--report", "json"])
    report = json.loads(done.output)
    assert done.exit_code == 0, done.output
    assert (report["violations"], report["notes"], report["preamble"]) == (0, 0, [])
    clauses = {record["clause"] for record in report["clauses"]}
    assert clauses == {"1", "4.2", "4.3", "4.4", "5.1", "5.2", "5.3", "5.4", "7.1", "7.2", "10.1"}


def test_policy_server_passes_with_images() -> None:
    with policy_server(steps=300) as server:
        arguments = ["--port", str(server.port), "--image-key", "camera", "--image-size", "96", "--state-key", "joints"]
        done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "PASSED" in done.output


@pytest.mark.parametrize("horizon", [1, 4])
def test_lockstep_passes_what_it_can(horizon: int) -> None:
    trainer = Trainer(60, num_envs=3, action_horizon=horizon)
    report = trainer.check(LOCKSTEP, until_stop=True)
    assert (report.violations, report.notes, report.preamble) == ([], [], []), report.to_text()
    assert {"7.1", "7.2", "10.1"} <= {record.clause for record in report.records}
    assert trainer.error is None


def test_lockstep_keeps_connections_apart() -> None:
    trainer = Trainer(1000, num_envs=6)
    report = trainer.check([Phase.SCOPING])
    assert (report.violations, report.notes) == ([], []), report.to_text()


def test_lockstep_keeps_a_surplus_client_waiting() -> None:
    trainer = Trainer(1000, num_envs=3)
    report = trainer.check([Phase.SCOPING], timeout_s=3.0)
    assert (report.violations, report.notes) == ([], ["4.4"]), report.to_text()


@pytest.mark.parametrize("horizon", [1, 4])
def test_lockstep_refuses_ragged_use_at_once(horizon: int) -> None:
    trainer = Trainer(1000, num_envs=3, action_horizon=horizon, timeout=PATIENCE_S)
    report = trainer.check([Phase.RAGGED, Phase.STOP], until_stop=True, timeout_s=5.0)
    assert (report.violations, report.notes) == ([], ["4.3"]), report.to_text()
    assert report.preamble == ["not checked, since ragged use may have ended the run: stop"]
    assert isinstance(trainer.error, RaggedClientError)
    assert "one env per connection" in str(trainer.error)
    assert trainer.steps == 0


def test_lockstep_passes_with_notes() -> None:
    trainer = Trainer(1000, num_envs=3)
    report = trainer.check(list(Phase), timeout_s=5.0, until_stop=True)
    assert (report.violations, report.notes, report.exit_code) == ([], ["4.3", "4.4"], 0), report.to_text()


def test_an_empty_frame_is_not_overlooked() -> None:
    """It came before it was asked for, and must be judged all the same."""

    class Server(ForeignServer):
        def serve(self, connection: ServerConnection, own: set[int]) -> None:
            connection.send(b"")
            super().serve(connection, own)

    report = Report("")
    with Server().running() as server, Line(report, "127.0.0.1", server.port, PATIENCE_S) as line:
        assert line.has_frame()
        with pytest.raises(CannotGoOn):
            line.action([0], clause="4.4", what="an infer")
    assert report.violations == ["3"], report.to_text()
    assert "a frame of 0 bytes is no message" in report.to_text()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = CliRunner().invoke(main, ["--port", str(port), "--timeout", "0.2"])
    assert done.exit_code == 1
    assert "no WebSocket connection" in done.output
    assert "not checked, since the server is gone" in done.output


def test_a_host_that_cannot_be_one_is_said_in_a_line() -> None:
    done = CliRunner().invoke(main, ["--host", "a..b"])
    assert done.exit_code == 2
    assert done.output.startswith("plugrl-conformance-server: 'a..b' is no name of a host: ")
    assert done.output.count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_the_check(name: str, status: int) -> None:
    class Server(ForeignServer):
        def metadata(self) -> bytes:
            checker.send_signal(getattr(signal, name))
            assert checker.wait(PATIENCE_S) == status
            return super().metadata()

    with Server().running() as server:
        checker = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "plugrl_bridges.conformance.server_cli", "--port", str(server.port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        output, _ = checker.communicate(timeout=PATIENCE_S)
    assert (checker.returncode, output) == (status, "")


def test_listener_that_is_no_server() -> None:
    """It accepts, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        report = ServerChecker(ServerCheckOptions(port=port, timeout_s=0.2)).run()
    assert report.violations == ["1"]
