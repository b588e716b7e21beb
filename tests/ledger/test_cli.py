"""The ``stepledger`` command: what it says, and its exit codes."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv, LedgerVectorEnv, compare
from plugrl_bridges.ledger.cli import main
from tests.docs.markdown import ROOT, table
from tests.ledger.envs import CountingEnv, FaultyVecEnv, MixedEnv

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def record(folder: Path, at: int) -> tuple[str, str]:
    def spoil(returned: Any) -> Any:
        returned[0][1, 2] = np.nan
        return returned

    envs = DummyVecEnv(
        [partial(LedgerEnv, CountingEnv(n), folder / "envs", env_index=n, run="a run") for n in range(2)]
    )
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
        "DIFFERENT: 2 envs, 18 env steps and 5 resets compared",
        (
            "first difference: env 1 (rank 0, index 1), episode 1, step 2 (vector step 7), obs: obs[2] is nan at the "
            "trainer and 0.5 at the env"
        ),
    ]


def test_json(tmp_path: Path) -> None:
    done = call("compare", "--json", *record(tmp_path, 7))
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["equal"] is False
    assert found["differences"] == [found["first"]]
    assert found["first"] == {
        "slot": 1, "rank": 0, "env_index": 1, "episode": 1, "step": 2, "vector_step": 7, "field": "obs",
        "cell": "obs[2]", "trainer_value": "nan", "env_value": 0.5, "cells": 1,
    }  # fmt: skip


def test_the_keys_of_the_json_are_documented(tmp_path: Path) -> None:
    found = json.loads(call("compare", "--json", *record(tmp_path, 7)).stdout)
    keys = {*found, *(f"first.{key}" for key in found["first"])}
    rows = table(ROOT / "docs" / "ledger.md", "The report as JSON")
    documented = [key for row in rows for key in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(documented) == sorted(keys)


@pytest.mark.parametrize("command", ["compare", "show"])
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
    assert "end       closed after 30 rows" in lines
    assert lines[-2].startswith("env 1, episode 1, step 1 (vector step 6): [0 0] -> reward 0.1")
    assert lines[-1].startswith("env 1, episode 1, step 2 (vector step 7): [0 0] -> reward 0.1")
    assert lines[-1].endswith("nan]")
    assert "envs      0, 1" in call("show", envs).stdout


def test_show_finds_the_place_that_compare_names(tmp_path: Path) -> None:
    trainer, envs = record(tmp_path, 7)
    assert "env 1 (rank 0, index 1), episode 1, step 2 (vector step 7), obs" in call("compare", trainer, envs).stdout
    place = ("--env", "1", "--episode", "1", "--step", "2")
    for path, at, value in ((trainer, " (vector step 7)", "nan]"), (envs, "", "0.5]")):
        shown = [line for line in call("show", path, *place).stdout.splitlines() if line.startswith("env ")]
        [line] = shown
        assert line.startswith(f"env 1, episode 1, step 2{at}: ")
        assert line.endswith(value)
    resets = [line for line in call("show", envs, "--step", "0").stdout.splitlines() if line.startswith("env ")]
    assert [line.partition(":")[0] for line in resets] == [
        f"env {env}, episode {episode}, step 0" for episode in range(3) for env in range(2)
    ]


def test_show_counts_a_reset_behind_a_reset_once(tmp_path: Path) -> None:
    env = LedgerEnv(CountingEnv(), tmp_path / "env.ledger")
    for _ in range(2):
        env.reset()
        env.reset()
        env.step(np.zeros(2, np.float32))
    env.close()
    lines = [line for line in call("show", str(tmp_path / "env.ledger")).stdout.splitlines() if line.startswith("env ")]
    assert [line.partition(":")[0].partition(", ")[2] for line in lines] == [
        "episode 0, step 0", "episode 0, step 0", "episode 0, step 1",
        "episode 1, step 0", "episode 1, step 0", "episode 1, step 1",
    ]  # fmt: skip


@pytest.mark.parametrize("side", ["trainer", "envs"])
def test_show_says_that_there_is_nothing(tmp_path: Path, side: str) -> None:
    path = dict(zip(("trainer", "envs"), record(tmp_path, 0), strict=True))[side]
    done = call("show", path, "--env", "9")
    assert done.exit_code == 2
    assert done.stderr == f"stepledger: {path} has no env 9: its envs are 0, 1\n"
    done = call("show", path, "--skip", "700")
    last = "nothing to show: the ledger has 30 events; --skip 700 leaves out all of them"
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, last)
    last = "nothing to show: the ledger has 0 events of env 1, episode 7"
    assert call("show", path, "--env", "1", "--episode", "7").stdout.splitlines()[-1] == last
    assert call("show", path, "--events", "0").stdout.splitlines()[-1].startswith("end ")


def test_show_and_compare_name_a_digest_alike(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        inner = SyncVectorEnv([partial(LedgerEnv, MixedEnv(), tmp_path / name)], autoreset_mode=AutoresetMode.SAME_STEP)
        env = LedgerVectorEnv(inner, tmp_path / f"{name}.ledger")
        env.reset(seed=seed)
        env.close()
    first = compare(tmp_path / "one.ledger", tmp_path / "two").first
    assert first is not None
    assert first.cell == "digest of image"
    for path, value in ((tmp_path / "one.ledger", first.trainer), (tmp_path / "two", first.env)):
        shown = call("show", str(path), "--step", "0").stdout
        assert f"[digest {value}]" in shown
        assert "obs       image [32, 32, 3] |u1 by digest; full=True records it whole\n" in shown
        assert shown.count("full=True") == 1
