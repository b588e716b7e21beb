"""The minimal client as a program, with both servers of this library."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from click.testing import CliRunner

from plugrl_bridges.conformance.client_cli import main as grade_client
from plugrl_bridges.server.policy_server import PolicyServer
from tests.conformance.foreign_server import ForeignServer
from tests.support import PATIENCE_S, bridge, resync

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "minimal_client.py"
ACTIONS = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)


@contextlib.contextmanager
def client(url: str, *options: str, status: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run the client; it must end with this status."""
    command = [sys.executable, str(CLIENT), "--url", url, *options]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        yield process
        output = process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == status, output


def test_uses_nothing_else() -> None:
    found = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(CLIENT.read_text(encoding="utf-8")))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert found - set(sys.stdlib_module_names) == {"msgpack", "websockets"}


@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_policy_server_serves_its_probe(horizon: int, dtype: Any) -> None:
    seen: list[Any] = []
    sent: list[Any] = []

    def policy(observation: Any) -> Any:
        seen.append(observation)
        step, env, dim = np.ogrid[:horizon, :3, :2]
        sent.append((10000 * step + 10 * env + dim).astype(dtype) + len(sent))
        return np.moveaxis(sent[-1], 0, 1)

    server = PolicyServer(policy, port=0, action_horizon=horizon, episodes=12, connect_timeout=PATIENCE_S)
    with client(server.url, "--num-envs", "3", "--action-dim", "2"):
        summary = server.run()
    assert [episode.ret for episode in summary.episodes if episode.env == 0] == [3.0] * 4
    assert [episode.ret for episode in summary.episodes if episode.env == 1] == [5.0] * 4
    assert [episode.ret for episode in summary.episodes if episode.env == 2] == [7.0] * 4
    for before, actions, observation in zip(seen, sent, seen[1:], strict=False):
        for env in range(3):
            taken = int(observation["t"][env, 0] - before["t"][env, 0])
            if taken > 0:  # else its episode has ended
                assert observation["a"][env].tolist() == actions[taken - 1, env].tolist()


def test_bridge_steps_its_probe() -> None:
    options = {"observation_space": None, "action_space": ACTIONS, "num_envs": 3}
    with bridge(**options) as lockstep, client(lockstep.url, "--num-envs", "3"):
        action, time = lockstep.reset().observations
        assert (action.tolist(), time.tolist()) == ([[0, 0]] * 3, [[0]] * 3)
        for step in range(1, 16):
            lockstep.send(np.full((3, 2), step, np.float32))
            done = lockstep.wait()
            assert done.rewards.tolist() == [1.0] * 3
            assert done.terminated.tolist() == [step % 3 == 0, step % 5 == 0, step % 7 == 0]
            assert done.observations[0].tolist() == [[step, step]] * 3
        lockstep.close()


def test_sensor_learns_nothing_but_works() -> None:
    server = PolicyServer(
        lambda degrees: (degrees < 20.0).astype(np.float32), port=0, episodes=4, connect_timeout=PATIENCE_S
    )
    with client(server.url, "--env", "sensor", "--num-envs", "2"):
        summary = server.run()
    assert {episode.length for episode in summary.episodes} == {50}
    assert all(-500 < ret < 0 for ret in summary.returns)


def test_text_frame_is_fatal() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ForeignServer("answers in text").running())
        process = stack.enter_context(client(f"ws://127.0.0.1:{server.port}", status=1))
        process.wait(PATIENCE_S)


def test_comes_back_after_a_drop() -> None:
    """It asks first, and its episodes go on."""
    times: list[list[float]] = []

    def policy(observation: Any) -> Any:
        times.append(observation["t"][:, 0].tolist())
        if len(times) == 3:
            resync(server)
        return np.zeros((2, 1))

    server = PolicyServer(policy, port=0, steps=20, connect_timeout=PATIENCE_S)
    with client(server.url, "--num-envs", "2"):
        summary = server.run()
    assert [client.steps for client in summary.clients] == [4, 16]
    assert times[:6] == [[0, 0], [1, 1], [2, 2], [2, 2], [0, 3], [1, 4]]


@pytest.mark.parametrize("features", [(), ("--features", "reuse-feedback-obs")], ids=["plain", "reuse offered"])
@pytest.mark.parametrize("horizon", ["1", "4"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_conforms(dtype: str, horizon: str, features: tuple[str, ...]) -> None:
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(CLIENT))} --num-envs 3 --url {{url}}"
    arguments = [
        "--port",
        "0",
        "--probe",
        "--scenario",
        "all",
        "--action-dtype",
        dtype,
        "--horizon",
        horizon,
        *features,
    ]
    done = CliRunner().invoke(grade_client, [*arguments, *features, "--report", "json", "--client", command])
    report = json.loads(done.output)
    assert (done.exit_code, report["violations"]) == (0, 0), done.output
    assert {each["clause"] for each in report["clauses"] if each["notes"]} == ({"10.1"} if features else set())


def test_nobody_is_there() -> None:
    with client("ws://127.0.0.1:9", "--patience", "0.3", status=1):
        pass
