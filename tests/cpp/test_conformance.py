"""Both programs before the checker of clients, and the header's conduct where a checker cannot look."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner
from websockets.sync.server import serve

from plugrl_bridges.conformance.client_cli import main as grade_client
from plugrl_bridges.server.policy_server import PolicyServer
from tests.conformance.foreign_server import ForeignServer
from tests.support import PATIENCE_S, resync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from websockets.sync.server import ServerConnection

pytestmark = pytest.mark.timeout(400)


@contextlib.contextmanager
def running(program: Path, url: str, *options: str, status: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run a client; it must end with this status."""
    command = [str(program), "--url", url, *options]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
        output = process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status, output


def counts(output: str) -> dict[str, float]:
    """Read the line that a program prints at its end."""
    found = re.search(r"^steps=.*$", output, re.MULTILINE)
    assert found is not None, output
    return {key: float(value) for key, _, value in (part.partition("=") for part in found[0].split())}


@pytest.mark.usefixtures("little_delay")
@pytest.mark.parametrize(
    "features", ["", "reuse-feedback-obs", "reuse-feedback-obs,env-spec", "reuse-feedback-obs,env-spec,step-digest"]
)
@pytest.mark.parametrize("num_envs", ["1", "3"])
@pytest.mark.parametrize("horizon", ["1", "4"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("program", ["probe", "pendulum"])
def test_conforms(
    program: str, dtype: str, horizon: str, num_envs: str, features: str, request: pytest.FixtureRequest
) -> None:
    path = shlex.quote(str(request.getfixturevalue(program)))
    arguments = ["--port", "0", "--scenario", "all", "--action-dtype", dtype, "--horizon", horizon, "--report", "json"]
    arguments += ["--probe"] if program == "probe" else ["--action-dim", "1"]
    arguments += ["--features", features] if features else []
    arguments += ["--client", f"{path} --num-envs {num_envs} --quiet --url {{url}}"]
    done = CliRunner().invoke(grade_client, arguments)
    report = json.loads(done.output)
    assert (done.exit_code, report["violations"], report["notes"]) == (0, 0, 0), done.output


def test_text_frame_is_fatal(probe: Path) -> None:
    with (
        ForeignServer("answers in text").running() as server,
        running(probe, f"ws://127.0.0.1:{server.port}", status=1),
    ):
        pass


def test_comes_back_after_a_drop(probe: Path) -> None:
    """It asks first, and its episodes go on."""
    times: list[list[float]] = []

    def policy(observation: dict[str, np.ndarray]) -> np.ndarray:
        times.append(observation["t"][:, 0].tolist())
        if len(times) == 3:
            resync(server)
        return np.zeros((2, 2))

    server = PolicyServer(policy, port=0, steps=20, connect_timeout=PATIENCE_S)
    with running(probe, server.url, "--num-envs", "2", "--action-dim", "2"):
        summary = server.run()
    assert [client.steps for client in summary.clients] == [4, 16]
    assert times[:6] == [[0, 0], [1, 1], [2, 2], [2, 2], [0, 3], [1, 4]]


def test_connects_over_ipv6(probe: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = PolicyServer(lambda seen: np.zeros((len(seen["t"]), 2)), host="::1", port=0, episodes=2)
    with running(probe, f"ws://[::1]:{server.port}/some/path", "--action-dim", "2"):
        assert [episode.length for episode in server.run().episodes] == [3, 3]


@pytest.mark.parametrize("key", ["open-sesame", "wrong"])
def test_api_key(key: str, probe: Path) -> None:
    server = PolicyServer(
        lambda seen: np.zeros((len(seen["t"]), 2)),
        port=0,
        episodes=1,
        api_key="open-sesame",
        connect_timeout=PATIENCE_S,
    )
    if key == "wrong":
        done = subprocess.run(
            [probe, "--url", server.url, "--api-key", key], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "401" in done.stderr
        server.close()
        return
    with running(probe, server.url, "--action-dim", "2", "--api-key", key):
        server.run()


def test_gives_up_without_a_server(probe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(probe, f"ws://127.0.0.1:{port}", "--connect-timeout", "0.3", status=1):
        pass


@pytest.mark.parametrize("answer", [b"HTTP/1.1 404 Not Found\r\n\r\n", b"SSH-2.0-OpenSSH\r\n\r\n", b""])
def test_says_what_is_no_websocket_server(answer: bytes, probe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as peer:
                        peer.recv(4096)
                        peer.sendall(answer)

        threading.Thread(target=speak, daemon=True).start()
        command: list[str | Path] = [
            probe,
            "--url",
            f"ws://127.0.0.1:{listener.getsockname()[1]}",
            "--connect-timeout",
            "0.3",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        listener.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 1
    assert "cannot reach ws://127.0.0.1" in done.stderr


def test_answers_pings_while_it_waits_and_closes_with_1000_on_sigterm(probe: Path) -> None:
    """The server is silent: no metadata comes, but the pings of a long learning phase are answered."""
    closed: list[int] = []
    answered = threading.Event()

    def handle(connection: ServerConnection) -> None:
        for _ in range(3):
            assert connection.ping(b"are you there").wait(PATIENCE_S)
        answered.set()
        for _ in connection:
            pass
        assert connection.close_code is not None
        closed.append(connection.close_code)

    with serve(handle, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        with running(probe, f"ws://127.0.0.1:{port}", status=128 + signal.SIGTERM) as process:
            assert answered.wait(PATIENCE_S)
            process.send_signal(signal.SIGTERM)
        server.shutdown()
        thread.join()
    assert closed == [1000]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "wss://host"],
        ["--num-envs", "0"],
        ["--num-envs", "1.5"],
        ["--num-envs", "100001"],
        ["--nonsense", "1"],
        ["--url"],
    ],
)
def test_bad_arguments_are_said(arguments: list[str], pendulum: Path) -> None:
    done = subprocess.run([pendulum, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr
    assert not done.stdout


def test_help_is_no_error(pendulum: Path) -> None:
    done = subprocess.run([pendulum, "--help"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "options: see docs/cpp-client.md\n", "")
