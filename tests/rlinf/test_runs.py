"""Real runs: PPO of RLinf on a CPU, with its MLP policy, on Pendulum in real env clients.

Starting RLinf takes most of the time, so two runs serve several tests: ``whole``, which ends by itself, and beside it
on the same machine ``spread``, with two env workers of two pipeline stages, which loses a client and is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import pytest

from tests.rlinf.ports import first_free_port, is_free
from tests.rlinf.runs import PATIENCE_S, Client, Driver, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)

CPP = Path(__file__).resolve().parents[2] / "examples" / "cpp"
BATCH = 256
"""Vector steps of an update, as the config has it."""
STAGES = 4
"""Instances of the run with two env workers of two pipeline stages."""


class Both(NamedTuple):
    """Two runs at once, with their clients, after their ends."""

    whole: Driver
    clients: list[Client]
    spread: Driver
    spread_clients: list[Client]
    killed: Client
    seen_before_the_interrupt: list[list[dict[str, str]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("runs")
    port = first_free_port(2 + STAGES)
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(
            Driver(
                folder / "whole", "runner.max_epochs=2", "runner.val_check_interval=2", "algorithm.update_epoch=1",
                f"env.train.port={port}", f"env.train.episode_log={folder / 'whole' / 'episodes.csv'}",
                f"env.eval.port={port + 1}", f"env.eval.episode_log={folder / 'whole' / 'eval.csv'}",
                "env.eval.total_num_envs=2",
            )
        )  # fmt: skip
        clients = [
            stack.enter_context(Client(whole.folder, port, 16, "--num-procs", "2")),
            stack.enter_context(Client(whole.folder, port + 1, 2)),
        ]
        spread = stack.enter_context(
            Driver(
                folder / "spread", "runner.max_epochs=100", "algorithm.update_epoch=1",
                "cluster.component_placement.env='0:0-1'", "rollout.pipeline_stage_num=2",
                f"env.train.port={port + 2}", f"env.train.episode_log={folder / 'spread' / 'episodes.csv'}",
            )
        )  # fmt: skip
        spread_clients = [stack.enter_context(Client(spread.folder, port + 2 + index, 4)) for index in range(STAGES)]
        wait_for(lambda: all(spread.episodes(f"episodes-{index}.csv") for index in range(STAGES)), [spread])
        killed = spread_clients.pop(1)
        killed.kill()
        spread_clients.append(stack.enter_context(Client(spread.folder, port + 3, 4)))
        wait_for(lambda: _goes_on_after_a_loss(spread.episodes("episodes-1.csv")), [spread])
        wait_for(lambda: "Global Step" in spread.text, [spread])
        seen = [spread.episodes(f"episodes-{index}.csv") for index in range(STAGES)]
        spread.interrupt()
        for driver in (spread, whole):
            driver.process.wait(PATIENCE_S)
        for client in (*clients, *spread_clients):
            client.process.wait(PATIENCE_S)
        yield Both(whole, clients, spread, spread_clients, killed, seen)


def _workers(driver: Driver) -> list[str]:
    """Give the command lines of RLinf's workers and managers that are alive."""
    lines: list[str] = []
    for process in driver.processes():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return [line for line in lines if line.startswith("ray::") and "Agent" not in line]


def _goes_on_after_a_loss(rows: list[dict[str, str]]) -> bool:
    ends = [row["end"] for row in rows]
    return "lost" in ends and ends[-1] != "lost"


def _returns(driver: Driver, instances: int = 1, name: str = "episodes") -> dict[int, list[float]]:
    """Give the returns of the episodes that ended in each update, by the episode logs."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for index in range(instances):
        for row in driver.episodes(f"{name}.csv" if instances == 1 else f"{name}-{index}.csv"):
            found[(int(row["step"]) - 1) // BATCH].append(float(row["return"]))
    return dict(found)


def _check_means(reported: dict[int, float], returns: dict[int, list[float]]) -> None:
    for update, value in reported.items():  # both are means of the same numbers in float32
        assert np.isclose(value, np.array(returns[update], np.float32).mean(), rtol=1e-6, atol=0), update


def test_a_run_ends_and_its_clients_hear_it(both: Both) -> None:
    assert both.whole.process.returncode == 0, both.whole.text[-6000:]
    for client in both.clients:
        assert client.process.returncode == 0, client.text
    assert both.clients[0].summary()["reasons"] == ["server stop", "server stop"]
    assert both.clients[1].summary()["reasons"] == ["server stop"]
    assert both.clients[0].summary()["steps"] == 2 * BATCH * 16
    wait_for(lambda: not both.whole.processes(), [])


def test_rlinf_reports_the_returns_of_the_episode_log_batch_for_batch(both: Both) -> None:
    returns, reported = _returns(both.whole), both.whole.metrics("env/return")
    assert [len(returns[update]) for update in reported] == [16, 16]
    _check_means(reported, returns)
    assert both.whole.metrics("env/episode_len") == {0: 200, 1: 200}
    assert both.whole.metrics("env/num_trajectories") == {0: 16, 1: 16}
    assert both.clients[0].summary()["episodes"] == 32


def test_envs_for_training_and_for_evaluation_live_in_one_worker(both: Both) -> None:
    returns = _returns(both.whole, name="eval")
    assert len(returns[0]) == both.clients[1].summary()["episodes"] == 2
    [reported] = both.whole.metrics("eval/return").values()
    _check_means({0: reported}, returns)


def test_each_instance_says_where_it_listens(both: Both) -> None:
    for index in range(STAGES):
        assert f"plugrl env instance {index} of {STAGES} listens on ws://127.0.0.1:" in both.spread.text
    assert "plugrl env instance 0 of 1 listens on ws://127.0.0.1:" in both.whole.text


def test_two_workers_of_two_stages_train_on_envs_of_their_own(both: Both) -> None:
    for index, rows in enumerate(both.seen_before_the_interrupt):
        assert {row["slot"] for row in rows} == {"0", "1", "2", "3"}, index
    reported = both.spread.metrics("env/return")
    assert reported
    _check_means(reported, _returns(both.spread, STAGES))


def test_a_client_that_is_killed_is_replaced_and_the_run_goes_on(both: Both) -> None:
    assert both.killed.process.returncode != 0
    rows = both.seen_before_the_interrupt[1]
    lost = [at for at, row in enumerate(rows) if row["end"] == "lost"]
    assert len(lost) == 4
    assert {row["end"] for row in rows[lost[-1] + 1 :]} == {"truncated"}  # those of the replacement
    assert all(row["end"] != "lost" for each in (0, 2, 3) for row in both.seen_before_the_interrupt[each])


def test_after_an_interrupt_the_clients_hear_that_the_run_is_over(both: Both) -> None:
    assert both.spread.process.returncode == 130
    for client in both.spread_clients:
        assert client.process.returncode == 0, client.text
        assert client.summary()["reasons"] == ["server stop"]
    wait_for(lambda: not both.spread.processes(), [])


def test_a_killed_driver_leaves_no_client_beyond_its_bound_and_no_port(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    port = first_free_port(1)
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(
            Driver(folder / "run", f"env.train.port={port}", f"env.train.episode_log={folder / 'run' / 'episodes.csv'}")
        )
        wait_for(lambda: "listens on" in driver.text, [driver])
        client = stack.enter_context(Client(driver.folder, port, 16, "--connect-timeout", "5"))
        wait_for(driver.episodes, [driver])
        driver.process.kill()
        driver.process.wait()
        client.process.wait(PATIENCE_S)
        # Ray may find time to end its workers by SIGTERM, which tells the client; else it gives up after its 5 s.
        assert ("says that the run is over" in client.text) == (client.process.returncode == 0), client.text
        wait_for(lambda: is_free(port), [])
        # Ray's own agents look for their head for another minute and a half; nothing that steps or learns is left.
        wait_for(lambda: not _workers(driver), [])


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the Pendulum client in C++."""
    if shutil.which("g++") is None and not os.environ.get("CI"):
        pytest.skip("no g++ here")
    build, make = tmp_path_factory.mktemp("cpp"), shutil.which("make") or "make"
    subprocess.run([make, "-C", str(CPP), f"BUILD={build}", f"{build}/pendulum"], check=True, capture_output=True)
    return build / "pendulum"


def test_a_run_on_environments_in_cpp(tmp_path: Path, pendulum: Path) -> None:
    port, processes = first_free_port(1), 4
    folder = tmp_path / "cpp"
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(
            Driver(
                folder, "runner.max_epochs=2", "algorithm.update_epoch=1", f"env.train.port={port}",
                f"env.train.episode_log={folder / 'episodes.csv'}",
            )
        )  # fmt: skip
        clients = []
        for rank in range(processes):
            command = [str(pendulum), "--url", f"ws://127.0.0.1:{port}", "--num-envs", "4", "--rank", str(rank)]
            command += ["--connect-timeout", str(PATIENCE_S)]
            client = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(client.kill)
            clients.append(client)
        assert driver.process.wait(PATIENCE_S) == 0, driver.text[-6000:]
        said = [client.communicate(timeout=PATIENCE_S)[0] for client in clients]
    assert [client.returncode for client in clients] == [0] * processes
    assert [line.split()[:2] for line in said] == [[f"steps={4 * 2 * BATCH}", "episodes=8"]] * processes
    returns, reported = _returns(driver), driver.metrics("env/return")
    assert [len(returns[update]) for update in reported] == [16, 16]
    _check_means(reported, returns)
