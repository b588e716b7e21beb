"""The ``plugrl-env-client`` command as a person or a script meets it: real processes, exit codes, one clear line."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

import click
import gymnasium
import numpy as np
import psutil
import pytest
import trustme
from click.testing import CliRunner

from plugrl_bridges.client.cli import _split, main, progress_text
from plugrl_bridges.client.procs import ClientOptions, run_processes
from plugrl_bridges.client.record import Progress
from tests.client.scripted import ALL_FEATURES, WAIT_S, Peer, Server, serve_steps, unanswered

if TYPE_CHECKING:
    from pathlib import Path


COMMAND = [sys.executable, "-m", "plugrl_bridges.client"]
ENVS = """
import os, gymnasium, numpy as np
class Crashing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    def reset(self, *, seed=None, options=None): return np.zeros(1, np.float32), {}
    def step(self, action): raise RuntimeError("the arm fell off")
class Dying(Crashing):
    def step(self, action): os._exit(7)
class Seeded(Crashing):
    def reset(self, *, seed=None, options=None): return np.full(1, seed or -1, np.float32), {}
    def step(self, action): return np.zeros(1, np.float32), 1.0, True, False, {}
def make(kind="Crashing"): return globals()[kind]()
def make_async():
    modes = getattr(gymnasium.vector, "AutoresetMode", None)
    options = {"autoreset_mode": modes.SAME_STEP} if modes else {}
    return gymnasium.vector.AsyncVectorEnv([Seeded] * 2, **options)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "cli_envs.py").write_text(ENVS, encoding="utf-8")
    return tmp_path


def start(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_stop_is_exit_0_with_a_summary(home: Path) -> None:
    with Server(serve_steps(3)) as server:
        arguments = ("--env-factory", "cli_envs:make", "--env-kwargs", '{"kind": "Seeded"}', "--num-envs", "2")
        code, out, err = finish(start(home, *arguments, "--url", server.url))
    assert (code, out) == (0, "6 episodes, 6 env steps, mean return 1.00 (last 6: 1.00)\n"), err
    assert "connected to" in err
    assert "\x1b" not in err  # no progress line: not a terminal


def test_quiet(home: Path) -> None:
    with Server(serve_steps(1)) as server:
        result = finish(start(home, "--env-id", "Pendulum-v1", "--quiet", "--url", server.url))
    assert result == (0, "", "")


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize("procs", ["1", "2"])
def test_signals_close_with_1000(home: Path, name: str, code: int, procs: str) -> None:
    codes: list[int] = []
    started = [threading.Event() for _ in range(int(procs))]
    with Server(*[serve_steps(1, codes, event) for event in started]) as server:
        process = start(home, "--env-id", "Pendulum-v1", "--num-procs", procs, "--url", server.url)
        assert all(event.wait(WAIT_S) for event in started)
        process.send_signal(getattr(signal, name))
        exit_code, out, err = finish(process)
    assert codes == [1000] * int(procs)
    assert exit_code == code
    assert last_line(err) == f"plugrl-env-client: ended by {name}"
    assert "Traceback" not in err
    assert f"{procs} env steps" in out


SLOW = """
import os, sys, threading, gymnasium
def say(what): os.write(2, f"{what}\\n".encode())  # in one piece, for two processes may say it at once
if "importing" in sys.argv[-1]:
    say("importing")
    threading.Event().wait()
def make(when):
    env = gymnasium.make("Pendulum-v1")
    say("making")
    sys.stdin.readline()
    return env
"""


@pytest.mark.skipif(os.name != "posix", reason="Windows ends a process that is sent SIGTERM")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(("when", "procs"), [("importing", 1), ("importing", 2), ("making", 1)])
def test_signals_are_heard_before_there_is_a_connection(
    home: Path, name: str, code: int, when: str, procs: int
) -> None:
    (home / "slow_envs.py").write_text(SLOW, encoding="utf-8")
    kwargs = ("--num-envs", "3", "--num-procs", str(procs), "--env-kwargs", json.dumps({"when": when}))
    with Server() as server:
        command = [*COMMAND, "--env-factory", "slow_envs:make", "--url", server.url, *kwargs]
        with subprocess.Popen(
            command, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            try:
                for _ in range(procs):
                    assert process.stderr.readline() == f"{when}\n"
                process.send_signal(getattr(signal, name))
                if when == "making":  # half a simulator cannot be closed: this one is still made, and no other
                    process.stdin.write("\n")
                    process.stdin.flush()
                assert process.wait(WAIT_S) == code
            finally:
                process.kill()
            err = process.stderr.read()
    assert server.connections == 0
    assert last_line(err) == f"plugrl-env-client: ended by {name}"
    assert "making" not in err
    assert "Traceback" not in err
    assert "killed" not in err


def test_a_crashing_env_is_one_line_and_a_traceback_in_the_log(home: Path) -> None:
    codes: list[int] = []
    with Server(unanswered(codes)) as server:
        code, _, err = finish(start(home, "--env-factory", "cli_envs:make", "--url", server.url))
    assert (code, codes) == (1, [1011])
    assert last_line(err) == "plugrl-env-client: env 0 (Crashing) failed in step(): RuntimeError: the arm fell off"
    assert 'raise RuntimeError("the arm fell off")' in err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--env-factory", "nowhere:make"], "env factory nowhere:make: there is no module 'nowhere'"),
        (["--env-factory", "cli_envs:none"], "env factory cli_envs:none: cli_envs has no 'none'"),
        (["--env-id", "Nope-v0"], "no Gymnasium environment has the id 'Nope-v0'"),
        (
            ["--env-id", "Pendulum-v1", "--url", "ws://127.0.0.1:9", "--connect-timeout", "0.3"],
            "no training server served this client at ws://127.0.0.1:9",
        ),
    ],
)
def test_errors_are_one_clear_line(home: Path, arguments: list[str], line: str) -> None:
    code, _, err = finish(start(home, *arguments))
    assert code == 1
    assert last_line(err).startswith(f"plugrl-env-client: {line}")
    assert "Traceback" not in err


def test_processes_share_the_envs_with_ranks_and_seeds(home: Path) -> None:
    seen: dict[int, Any] = {}

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        assert infer.env_spec is not None
        spec = infer.env_spec
        seen[spec["rank"]] = (spec["num_envs"], spec["group_num_envs"], infer.observation.states["obs"][:, 0].tolist())
        peer.zeros(infer)
        peer.stop()

    with Server(script, script, script) as server:
        arguments = ("--env-factory", "cli_envs:make", "--env-kwargs", json.dumps({"kind": "Seeded"}))
        code, out, err = finish(
            start(home, *arguments, "--num-envs", "5", "--num-procs", "3", "--seed", "10", "--url", server.url)
        )
    assert code == 0, err
    assert seen == {0: (2, 5, [10, 11]), 1: (2, 5, [12, 13]), 2: (1, 5, [14])}
    assert out.startswith("5 episodes, 5 env steps")


@pytest.mark.skipif(gymnasium.__version__.startswith("1.0."), reason="no usable autoreset mode")
def test_a_process_may_have_processes(home: Path) -> None:
    with Server(serve_steps(2), serve_steps(2)) as server:
        arguments = ("--env-factory", "cli_envs:make_async", "--num-envs", "4", "--num-procs", "2")
        code, out, err = finish(start(home, *arguments, "--url", server.url))
    assert code == 0, err
    assert out.startswith("8 episodes, 8 env steps")


def test_wss_with_a_ca_file(home: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    with Server(serve_steps(1), ssl=context) as server:
        known = ("--env-id", "Pendulum-v1", "--url", f"{server.url}/a/path", "--ca-file", "ca.pem")
        assert finish(start(home, *known))[0] == 0
        assert server.requests[0].path == "/a/path"
        # An unknown certificate does not get better by trying again.
        code, _, err = finish(start(home, "--env-id", "Pendulum-v1", "--url", server.url))
    assert code == 1
    assert "certificate verify failed" in last_line(err)


def test_a_failing_process_fails_the_command_but_not_the_others(home: Path) -> None:
    first_died = threading.Event()

    def dies(peer: Peer) -> None:
        peer.metadata()
        peer.act(peer.infer(), np.zeros((1, 1, 1), np.float32))
        assert peer.close_code() == 1006
        first_died.set()

    def lives(peer: Peer) -> None:
        peer.metadata()
        peer.infer()
        assert first_died.wait(WAIT_S)
        peer.stop()

    with Server(dies, lives) as server:
        arguments = ("--env-factory", "cli_envs:make", "--env-kwargs", json.dumps({"kind": "Dying"}))
        code, _, err = finish(start(home, *arguments, "--num-procs", "2", "--url", server.url))
    assert code == 1
    assert "1 of 2 clients failed" in last_line(err)
    assert "its process ended without a word (exit code 7)" in last_line(err)


def test_a_process_that_cannot_be_started_ends_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[SpawnProcess] = []
    start = SpawnProcess.start
    handler = signal.getsignal(signal.SIGINT)

    def failing(self: SpawnProcess) -> None:
        if len(started) == 2:
            raise OSError("no more processes")
        start(self)
        started.append(self)

    monkeypatch.setattr(SpawnProcess, "start", failing)
    clients = [ClientOptions("Pendulum-v1", keywords={"url": "ws://127.0.0.1:9", "connect_timeout": None})] * 3
    with pytest.raises(OSError, match="no more processes"):
        run_processes(clients, stopping=lambda: False)
    assert [process.is_alive() for process in started] == [False, False]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_process_that_cannot_be_started_is_one_line(home: Path) -> None:
    code = (
        "from multiprocessing.context import SpawnProcess\n"
        "def start(self): raise OSError('no more processes')\n"
        "SpawnProcess.start = start\n"
        "from plugrl_bridges.client.cli import main\n"
        "main()"
    )
    command = [sys.executable, "-c", code, "--env-id", "Pendulum-v1", "--num-procs", "2"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (1, "plugrl-env-client: cannot start 2 processes: no more processes\n")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_no_child_outlives_a_killed_parent(home: Path) -> None:
    codes: list[int] = []
    started = [threading.Event(), threading.Event()]
    with Server(*[serve_steps(1, codes, event) for event in started]) as server:
        process = start(home, "--env-id", "Pendulum-v1", "--num-procs", "2", "--url", server.url)
        assert all(event.wait(WAIT_S) for event in started)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)
        _, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert not alive
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    assert codes == [1000, 1000]


def test_help_imports_nothing_heavy() -> None:
    heavy = ("websockets", "torch", "plugrl_bridges.transport", "plugrl_bridges.client.env_client")
    code = f"import sys, plugrl_bridges.client.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "either --env-id or --env-factory"),
        (["--env-id", "x", "--env-factory", "a:b"], "either --env-id or --env-factory"),
        (["--env-id", "x", "--num-envs", "2", "--num-procs", "3"], "--num-procs 3 is more than --num-envs 2"),
        (["--env-id", "x", "--num-envs", "0"], "--num-envs"),
        (["--env-id", "x", "--env-kwargs", "{"], "no JSON"),
        (["--env-id", "x", "--env-kwargs", "[1]"], "expected a JSON object"),
        (["--env-id", "x", "--seed", "-1"], "--seed"),
        (["--env-id", "x", "--ping-interval", "-1"], "--ping-interval"),
        (["--env-id", "x", "--log-level", "loud"], "--log-level"),
    ],
)
def test_a_wrong_command_line_is_exit_2(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_splitting_with_a_base_rank() -> None:
    clients = _split(ClientOptions(num_envs=4, rank=6), 2)
    assert [(c.rank, c.num_envs, c.first_env) for c in clients] == [(6, 2, 12), (7, 2, 14)]
    with pytest.raises(click.UsageError, match="divide evenly"):
        _split(ClientOptions(num_envs=5, rank=6), 2)


def test_the_api_key_is_not_in_a_repr() -> None:
    assert "s3cret" not in repr(ClientOptions("x", keywords={"api_key": "s3cret"}))


def test_what_the_progress_line_says() -> None:
    connecting = Progress("connecting", 0, 0, 0.0, float("nan"))
    assert progress_text([connecting], 1) == "waiting for a server | 0 episodes | 0 steps/s | mean return -"
    stepping = progress_text([Progress("stepping", 3, 100, 50.4, -2.5)], 1)
    assert stepping == "stepping | 3 episodes | 50 steps/s | mean return -2.50"
    several = progress_text([Progress("waiting", 1, 1, 5.0, 1.0), connecting], 3)
    assert several == "1 of 3 connected | 1 episodes | 5 steps/s | mean return 1.00"


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="POSIX")
def test_progress_on_a_terminal(home: Path) -> None:
    import pty  # noqa: PLC0415

    done = threading.Event()

    def script(peer: Peer) -> None:
        peer.metadata()
        peer.infer()
        done.wait(WAIT_S)
        peer.stop()

    ours, theirs = pty.openpty()
    try:
        with Server(script) as server:
            command = [*COMMAND, "--env-id", "Pendulum-v1", "--url", server.url]
            with subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=theirs) as process:
                os.close(theirs)
                seen = ""
                while "waiting | 0 episodes" not in seen:
                    seen += os.read(ours, 4096).decode()
                done.set()
                assert process.wait(WAIT_S) == 0
    finally:
        os.close(ours)


@pytest.mark.parametrize(
    "args",
    [
        ["--url", "http://127.0.0.1:1"],
        ["--url", "ws://127.0.0.1:99999"],
        ["--connect-timeout", "nan"],
        ["--api-key", "a\nb"],
        ["--summary", "no/such/folder/summary.json"],
    ],
    ids=lambda args: args[0] + " " + args[1][:12].strip(),
)
def test_what_cannot_work_is_a_wrong_command_line(args: list[str]) -> None:
    outcome = CliRunner().invoke(main, ["--env-id", "CartPole-v1", *args])
    assert outcome.exit_code == 2, outcome.output
    assert "Usage:" in outcome.output
