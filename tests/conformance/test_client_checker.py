"""The checker itself: our own client, a client that hangs, one that was started elsewhere, and the command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from websockets.sync.client import connect

from plugrl_bridges.client import EnvClient, gym_factory
from plugrl_bridges.conformance import Report, client_checker, client_talk
from plugrl_bridges.conformance.client_checker import check_client
from plugrl_bridges.conformance.client_options import SCENARIOS, ClientCheckOptions
from plugrl_bridges.conformance.client_server import Link, Listener, Stalled
from tests.ledger.envs import MixedEnv
from tests.support import PATIENCE_S, ROOT, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

PROBE = "plugrl_bridges:PlugRL/Probe-v0"
OURS = [sys.executable, "-m", "plugrl_bridges.client", "--url", "{url}", "--log-level", "error"]
COMMAND = [sys.executable, "-W", "error", "-m", "plugrl_bridges.conformance.client_cli"]


def scripted(*words: str) -> str:
    command = [sys.executable, "-m", "tests.conformance.scripted_client", "{url}", *words]
    return f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(command)}"


class TextEnv(MixedEnv):
    """Text, an image, integers and floats to observe; and an action that can travel."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        super().__init__()
        self.action_space = action_space

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return super().step({"go": float(np.sum(action))})


# Our own client -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_delay")
@pytest.mark.parametrize(
    "features", ["", "reuse-feedback-obs", "reuse-feedback-obs,env-spec,step-digest"], ids=["plain", "reuse", "digests"]
)
@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("envs", [1, 3])
def test_our_client_passes_without_notes(envs: int, dtype: str, horizon: int, features: str) -> None:
    digests = "step-digest" in features
    options = ClientCheckOptions(
        client=shlex.join([*OURS, "--env-id", PROBE, "--num-envs", str(envs), *["--verify"] * digests]),
        scenarios=SCENARIOS,
        probe=True,
        steps=10,
        horizon=horizon,
        action_dtype=dtype,
        features=frozenset(filter(None, features.split(","))),
        port=0,
    )
    report = check_client(options)
    assert (report.violations, report.notes) == ([], []), report.to_text()
    clauses = {record.clause for record in report.records}
    assert clauses >= {"1", "4", "4.2", "5.2", "5.3", "5.4", "7.1", "7.2", "7.4", "7.6", "8.1"}
    assert ("step-digest" in clauses) == digests
    # With one env, four steps are an episode: nothing is ever observed that need not be sent.
    assert ("10.1" in clauses) == (bool(features) and (envs, horizon) != (1, 4))


@pytest.mark.usefixtures("little_delay")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["--env-id", PROBE, "--num-envs", "2"], {"probe": True, "features": {"env-spec", "reuse-feedback-obs"}}),
        (["--env-id", PROBE, "--env-kwargs", '{"action_dim": 2}'], {"probe": True, "action_dim": 2}),
        (["--env-id", PROBE, "--no-reuse", "--no-info"], {"probe": True, "action_dtype": "float64"}),
        (["--env-id", "Pendulum-v1", "--num-envs", "2"], {"action_dim": 1, "features": {"env-spec"}}),
        (
            ["--env-id", "CartPole-v1", "--num-envs", "2", "--verify"],
            {"action_dim": 1, "horizon": 1, "features": {"env-spec", "step-digest"}},
        ),
        (["--env-id", PROBE, "--verify"], {"probe": True, "features": {"env-spec"}}),
    ],
    ids=["all features", "narrow", "nothing optional", "any environment", "discrete actions", "digests unasked"],
)
def test_our_client_passes_otherwise_too(command: list[str], options: dict[str, Any]) -> None:
    features = frozenset(options.pop("features", ()))
    report = check_client(
        ClientCheckOptions(client=shlex.join([*OURS, *command]), port=0, steps=8, features=features, **options)
    )
    assert (report.violations, report.notes) == ([], []), report.to_text()


# Clients that hang, and what is left of them --------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="process groups")
def test_a_client_that_hangs_is_reported_in_time_and_ended(capfd: pytest.CaptureFixture[str]) -> None:
    report = check_client(
        ClientCheckOptions(client=scripted("2", "hangs"), scenarios=SCENARIOS, probe=True, port=0, timeout_s=10.0)
    )
    assert report.violations == ["4.2"]
    [record] = [record for record in report.records if record.clause == "4.2"]
    assert record.violation_details == ["no feedback came within 10 s"]
    assert report.preamble[-1] == "not run, since the client hung in scenario basic: resync, text"
    found = re.search(r"hanging: (\d+) (\d+)", capfd.readouterr().err)
    assert found is not None
    wait_until(lambda: not any(_runs(int(pid)) for pid in found.groups()))


@pytest.mark.skipif(os.name != "posix", reason="SIGSTOP")
@pytest.mark.parametrize(
    ("scenario", "clause", "detail"),
    [
        ("basic", "4.2", "the client did not read an action within 10 s"),
        ("resync", "7.2", "the client did not come back after a resync within 10 s"),
    ],
)
def test_a_client_that_stops_reading_is_reported_in_time(
    scenario: str, clause: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scenario == "resync":  # the action that is stuck is then the one right before the close frame
        monkeypatch.setattr(client_checker._Scenario, "_exchange", lambda *_: None)
    report = check_client(
        ClientCheckOptions(
            client=scripted("3", "stops reading"), scenarios=(scenario,), horizon=20000, action_dim=100, port=0,
            timeout_s=10.0,
        )
    )  # fmt: skip
    assert report.violations == [clause], report.to_text()
    [record] = [record for record in report.records if record.clause == clause]
    assert record.violation_details == [detail]


def test_metadata_that_nobody_reads_are_reported() -> None:
    link = mock.Mock(Link, extensions="", **{"receive.return_value": None, "send.side_effect": Stalled})
    report = Report("")
    with pytest.raises(client_talk.Hung):
        client_talk.Talk(link, report, ClientCheckOptions(timeout_s=3), wanted=1).open()
    assert report.violations == ["5.1"]
    assert "did not read the metadata within 3 s" in report.to_text()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("fault", "clause", "detail"),
    [
        ("lingers after stop", "7.1", "the client was still running 10 s after plugrl-server-stop"),
        ("nobody", "1", "the client did not connect within 0.5 s"),
    ],
)
def test_waiting_has_an_end(fault: str, clause: str, detail: str) -> None:
    client = "sleep 60" if fault == "nobody" else scripted("1", fault)
    report = check_client(
        ClientCheckOptions(client=client, steps=2, port=0, timeout_s=0.5 if fault == "nobody" else 10.0)
    )
    assert report.violations == [clause], report.to_text()
    assert report.records[[r.clause for r in report.records].index(clause)].violation_details == [detail]


def test_a_command_that_does_not_exist_is_a_client_that_did_not_come() -> None:
    report = check_client(ClientCheckOptions(client="no-such-client-anywhere 2>&-", port=0))
    assert report.violations == ["1"]
    assert "did not connect; it ended with exit status 127" in report.to_text()


# Clients that were started elsewhere ----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def meanwhile(work: Callable[[str], object], **options: Any) -> Report:
    """Check while ``work`` is done in another thread, given the URL."""
    port = free_port()
    faults: list[BaseException] = []

    def run() -> None:
        try:
            work(f"ws://127.0.0.1:{port}")
        except BaseException as exc:  # noqa: BLE001 - raised below
            faults.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        report = check_client(ClientCheckOptions(port=port, timeout_s=PATIENCE_S, **{"steps": 4, **options}))
    finally:
        thread.join(PATIENCE_S)
    assert not faults, faults
    return report


def test_a_client_may_be_started_elsewhere() -> None:
    report = meanwhile(lambda url: EnvClient(gym_factory(PROBE), url=url, connect_timeout=PATIENCE_S).run(), probe=True)
    assert (report.violations, report.notes) == ([], []), report.to_text()
    assert "7.1" in {record.clause for record in report.records}


@pytest.mark.parametrize(
    ("space", "action_dim"),
    [
        (spaces.Box(-1, 1, (2, 2), np.float64), 4),
        (spaces.Discrete(5, start=-1), 1),
        (spaces.MultiDiscrete([3, 4]), 2),
        (spaces.MultiBinary(3), 3),
    ],
    ids=["wide Box", "Discrete", "MultiDiscrete", "MultiBinary"],
)
def test_digests_of_entries_of_every_kind_are_checked(space: spaces.Space[Any], action_dim: int) -> None:
    def serve(url: str) -> None:
        EnvClient(partial(TextEnv, space), url=url, num_envs=2, connect_timeout=PATIENCE_S, verify=True).run()

    features = frozenset({"env-spec", "step-digest", "reuse-feedback-obs"})
    report = meanwhile(serve, horizon=1, action_dim=action_dim, features=features, steps=6)
    assert (report.violations, report.notes) == ([], []), report.to_text()
    [record] = [record for record in report.records if record.clause == "step-digest"]
    assert record.checks["a digest is that of the step, in the feedback"] == 2 * 6
    assert record.checks["a digest is that of the reset observation, in the infer"] == 2 * 2


def test_one_connection_at_a_time_is_judged() -> None:
    report = check_client(ClientCheckOptions(client=scripted("1", "two connections"), steps=2, probe=True, port=0))
    assert (report.violations, report.notes) == ([], ["1"]), report.to_text()
    assert "only the first was judged" in report.records[0].note_details[0]


def test_whoever_never_shakes_hands_does_not_keep_the_checker() -> None:
    with contextlib.ExitStack() as stack:
        with Listener("127.0.0.1", 0, timeout_s=0.5) as listener:
            stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            with connect(f"ws://127.0.0.1:{listener.port}"):
                # Accepted in the order of arrival, so the silent one was too.
                assert listener.next(PATIENCE_S, given_up=lambda: False) is not None
            begun = time.monotonic()
        assert time.monotonic() - begun < PATIENCE_S


# The command ----------------------------------------------------------------------------------------------------------


def run(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=timeout_s, cwd=ROOT)


def test_the_command_grades_our_client() -> None:
    client = shlex.join([*OURS, "--env-id", PROBE, "--num-envs", "3"])
    done = run("--probe", "--scenario", "all", "--port", "0", "--steps", "20", "--report", "json", "--client", client)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["passed"], report["violations"], report["notes"]) == (True, 0, 0)
    assert "scenario resync, waiting for a client" in done.stderr


def test_the_command_fails_with_a_violation() -> None:
    done = run("--probe", "--port", "0", "--steps", "3", "--client", scripted("1", "last-step reward"))
    assert done.returncode == 1
    assert "[5.4]                VIOLATION" in done.stdout
    assert re.search(r"\nFAILED: \d+ clauses checked, \d+ violations, \d+ notes?\n$", done.stdout)


def test_a_taken_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = run("--port", str(listener.getsockname()[1]))
    assert done.returncode == 2
    assert "plugrl-conformance: cannot listen on 127.0.0.1:" in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--features", "seeded-reset"], "those that can be checked are reuse-feedback-obs, env-spec"),
        (["--features", "step-digest,reuse-feedback-obs"], "step-digest needs env-spec, since a client announces it"),
        (["--timeout", "0"], "timeout"),
        (["--action-dtype", "int8"], "int8"),
        (["--steps", "0"], "steps"),
    ],
)
def test_wrong_words_are_refused(words: list[str], text: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert text in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_ends_the_checker_and_its_client(name: str, status: int) -> None:
    checker = subprocess.Popen(
        [*COMMAND, "--port", "0", "--client", scripted("1", "hangs")], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert checker.stderr is not None
    with checker.stderr as lines:
        found = next(match for line in lines if (match := re.match(r"hanging: (\d+) (\d+)", line)))
        checker.send_signal(getattr(signal, name))
        assert checker.wait(PATIENCE_S) == status
    wait_until(lambda: not any(_runs(int(pid)) for pid in found.groups()))


def test_help_is_quick_and_shows_the_examples() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert '  plugrl-conformance --probe --scenario all --client "./my_client --probe 127.0.0.1 8000"\n' in done.stdout
    heavy = {"websockets", "torch", "plugrl_bridges.conformance.client_checker"}
    code = f"import plugrl_bridges.conformance.client_cli, sys; print({heavy} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout == "set()\n"
