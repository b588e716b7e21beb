"""The ``stepledger`` command: what it says, and its exit codes."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv
from plugrl_bridges.ledger.cli import main
from plugrl_bridges.ledger.outcome import HeatMap
from tests.ledger.envs import CountingEnv, FaultyVecEnv

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def record(folder: Path, at: int) -> tuple[str, str]:
    def spoil(returned: Any) -> Any:
        returned[0][1, 2] = np.nan
        return returned

    envs = DummyVecEnv([partial(LedgerEnv, CountingEnv(n), folder / "envs", env_index=n) for n in range(2)])
    env = LedgerVecEnv(FaultyVecEnv(envs, at, spoil), folder / "trainer", run="a run")
    env.reset()
    for _ in range(12):
        env.step(np.zeros((2, 2), np.float32))
    env.close()
    return str(folder / "trainer"), str(folder / "envs")


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_equal(tmp_path: Path) -> None:
    done = call("compare", *record(tmp_path, 0))
    assert (done.exit_code, done.stdout) == (0, "equal: 2 envs, 24 env steps and 6 resets compared\n")


def test_different(tmp_path: Path) -> None:
    done = call("compare", *record(tmp_path, 7))
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "DIFFERENT: 2 envs, 24 env steps and 6 resets compared",
        (
            "first difference: env 1 (rank 0, index 1), episode 1, step 2 (vector step 7), obs: obs[2] is 'nan' at the "
            "trainer and 0.5 at the env"
        ),
        "differing cells: obs 1",
    ]


def test_json(tmp_path: Path) -> None:
    done = call("compare", "--json", *record(tmp_path, 7))
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["equal"] is False
    assert found["cells"] == {"obs": 1}
    assert found["first"] == {
        "env": 1, "rank": 0, "env_index": 1, "episode": 1, "step": 2, "vector_step": 7, "field": "obs",
        "cell": "obs[2]", "trainer_value": "nan", "env_value": 0.5, "cells": 1,
    }  # fmt: skip


@pytest.mark.parametrize("command", ["compare", "plot", "show"])
def test_unreadable(tmp_path: Path, command: str) -> None:
    (tmp_path / "foreign").write_text("no ledger", encoding="utf-8")
    words = [str(tmp_path / "foreign")] * (1 if command == "show" else 2)
    done = call(command, *words)
    assert done.exit_code == 2
    assert done.stderr.startswith("stepledger: ")
    assert done.stderr.count("\n") == 1
    assert "is no step ledger" in done.stderr


def test_wrong_command_line(tmp_path: Path) -> None:
    assert call("compare", str(tmp_path / "a")).exit_code == 2


def test_show(tmp_path: Path) -> None:
    trainer, envs = record(tmp_path, 7)
    done = call("show", trainer, "--env", "1", "--skip", "7", "--events", "2")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == ["side      trainer (sb3)", "run       a run"]
    assert "end       closed after 16 records" in lines
    assert lines[-1].startswith("       7 env 1: step [0 0] -> reward 0.1")
    assert lines[-1].endswith("nan]")
    assert "envs      0, 1" in call("show", envs).stdout


def test_plot(tmp_path: Path) -> None:
    out = tmp_path / "differences.png"
    done = call("plot", *record(tmp_path, 7), "--out", str(out))
    assert done.exit_code == 1
    assert f"written: {out}" in done.stdout
    assert out.read_bytes().startswith(b"\x89PNG")
    done = call("plot", str(tmp_path / "trainer"), str(tmp_path / "envs"), "--out", str(tmp_path / "a.nosuch"))
    assert done.exit_code == 2


def test_heat_map_is_bounded_and_loses_nothing() -> None:
    heat = HeatMap(2)
    for step in range(0, 10_000, 10):
        heat.add(step % 20 // 10, step, 3)
    assert heat.cells.sum() == 3000
    assert heat.steps_per_bin == 16
    assert heat.cells.shape == (2, 9990 // 16 + 1)
