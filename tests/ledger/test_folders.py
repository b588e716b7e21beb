"""Folders of ledgers that are not of one run, or asked for in the wrong way: each is said, with what to do."""

from __future__ import annotations

import json
import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv, LedgerVectorEnv, compare
from plugrl_bridges.ledger.cli import main
from tests.ledger.envs import CountingEnv

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def make(folder: Path, number: int, run: str = "", dtype: Any = np.float32) -> LedgerEnv:
    return LedgerEnv(CountingEnv(number, dtype=dtype), f"{folder}/", env_index=number, run=run)


def record(trainer: Path, folder: Path, *, num_envs: int = 2, run: str = "", dtype: Any = np.float32) -> None:
    envs = DummyVecEnv([partial(make, folder, number, run, dtype) for number in range(num_envs)])
    env = LedgerVecEnv(envs, trainer, run=run)
    env.reset()
    for step in range(7):
        env.step(np.full((num_envs, 2), step, np.float32))
    env.close()


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def error(*words: object) -> str:
    done = call(*words)
    assert done.exit_code == 2
    assert done.stderr.startswith("stepledger: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


# Two runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["one", "two"])
def test_a_folder_of_two_runs_is_said_to_be_one(tmp_path: Path, which: str) -> None:
    for name in ("one", "two"):
        record(tmp_path / f"{name}.ledger", tmp_path / "envs")
    found = compare(tmp_path / f"{which}.ledger", [tmp_path / "envs"])
    assert not found.equal
    hint = found.notes[-1]
    assert "files of an earlier run seem to be among these: env 0 of rank 0 wrote 2 ledgers" in hint
    assert "the trainer's explains one: " in hint
    assert "take a new folder for each run, or give run= on both sides" in hint
    for path in (tmp_path / "envs").iterdir():
        assert str(path) in hint
    done = call("compare", tmp_path / f"{which}.ledger", tmp_path / "envs")
    assert (done.exit_code, hint in done.stdout) == (1, True)
    assert (
        hint in json.loads(call("compare", "--json", tmp_path / f"{which}.ledger", tmp_path / "envs").stdout)["notes"]
    )


def test_two_runs_of_which_one_has_fewer_envs(tmp_path: Path) -> None:
    record(tmp_path / "one.ledger", tmp_path / "envs", num_envs=3)
    record(tmp_path / "two.ledger", tmp_path / "envs", num_envs=2)
    with pytest.raises(
        LedgerError, match=r"are of 3 .*; files of an earlier run seem to be .* new folder for each run"
    ):
        compare(tmp_path / "two.ledger", [tmp_path / "envs"])


def test_two_runs_of_other_spaces(tmp_path: Path) -> None:
    record(tmp_path / "one.ledger", tmp_path / "envs")
    record(tmp_path / "two.ledger", tmp_path / "envs", dtype=np.float64)
    with pytest.raises(LedgerError, match=r"different spaces; if one is of an earlier run: take a new folder"):
        compare(tmp_path / "two.ledger", [tmp_path / "envs"])


def test_runs_with_an_identity_may_share_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        record(tmp_path / f"{name}.ledger", tmp_path / "envs", run=name, num_envs=2 if name == "one" else 3)
    for name, other in (("one", "two"), ("two", "one")):
        found = compare(tmp_path / f"{name}.ledger", [tmp_path / "envs"])
        assert found.equal
        [note] = found.notes
        assert f"left out 1 ledgers of other runs than '{name}', such as " in note
        (left_out,) = [path for path in (tmp_path / "envs").iterdir() if str(path) in note]
        with pytest.raises(LedgerError, match=f"of run '{name}', .* of run '{other}'"):
            compare(tmp_path / f"{name}.ledger", [left_out])
    record(tmp_path / "three.ledger", tmp_path / "others", run="three")
    with pytest.raises(LedgerError, match=r"no ledger of an env in .* left out 2 ledgers of other runs than 'three'"):
        compare(tmp_path / "three.ledger", [tmp_path / "envs"])


def test_a_difference_within_one_run_has_no_such_hint(tmp_path: Path) -> None:
    record(tmp_path / "one.ledger", tmp_path / "one")
    record(tmp_path / "two.ledger", tmp_path / "two")
    found = compare(tmp_path / "one.ledger", [tmp_path / "two"])
    assert found.equal, "both runs are alike"
    shutil.rmtree(tmp_path / "two")
    other = LedgerVecEnv(DummyVecEnv([partial(make, tmp_path / "two", number) for number in range(2)]), tmp_path / "b")
    other.reset()
    other.close()
    found = compare(tmp_path / "one.ledger", [tmp_path / "two"])
    assert (found.equal, found.notes) == (False, [])


@pytest.mark.parametrize("kind", ["sb3", "gymnasium"])
def test_an_existing_ledger_of_a_trainer_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trainer.ledger"

    def wrap() -> Any:
        if kind == "sb3":
            return LedgerVecEnv(DummyVecEnv([CountingEnv]), path)
        return LedgerVectorEnv(SyncVectorEnv([CountingEnv], autoreset_mode=AutoresetMode.SAME_STEP), path)

    wrap().close()
    assert not path.exists(), "without a reset nothing is left"
    late = wrap()
    env = wrap()
    env.reset()
    env.close()
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=r"trainer\.ledger exists: a ledger is never overwritten"):
        wrap()
    with pytest.raises(LedgerError, match=r"trainer\.ledger exists: a ledger is never overwritten"):
        late.reset()  # it was made in the meantime
    late.close()
    assert path.read_bytes() == before


# Numbers that are shared ---------------------------------------------------------------------------------------------


def test_two_envs_of_a_process_need_two_numbers(tmp_path: Path) -> None:
    first, second = make(tmp_path / "envs", 0), make(tmp_path / "envs", 0)
    first.reset()
    with pytest.raises(LedgerError, match=r"two envs of this process write env_index 0 of rank 0 .* its own env_index"):
        second.reset()
    first.close()
    second.reset()  # the number is free again
    second.step(np.zeros(2, np.float32))
    second.close()
    assert len(list((tmp_path / "envs").iterdir())) == 2


def test_an_env_that_was_dropped_gives_its_number_back(tmp_path: Path) -> None:
    other = make(tmp_path / "envs", 1)
    other.reset()
    dropped = make(tmp_path / "envs", 0)
    dropped.cycle = dropped  # type: ignore[attr-defined]  # only the garbage collector finds it
    dropped.reset()
    del dropped
    make(tmp_path / "envs", 0).reset()
    other.close()


def test_two_ranks_need_two_files(tmp_path: Path) -> None:
    first, second = (LedgerEnv(CountingEnv(), tmp_path / "a.ledger", rank=rank) for rank in range(2))
    first.reset()
    with pytest.raises(LedgerError, match="envs of rank 0 and of rank 1 write env_index 0 to"):
        second.reset()
    first.close()


def test_processes_that_share_a_number(tmp_path: Path) -> None:
    env = LedgerVecEnv(SubprocVecEnv([partial(make, tmp_path / "envs", 0)] * 3), tmp_path / "trainer.ledger")
    env.reset()
    env.step(np.zeros((3, 2), np.float32))
    env.close()
    said = error("compare", tmp_path / "trainer.ledger", tmp_path / "envs")
    assert "is of 3 envs, but the envs' ledgers are of 1 (rank, index): (0, 0)" in said
    assert "3 processes wrote env 0 of rank 0, and began within " in said
    assert "envs that run at the same time need an env_index of their own each" in said
    for path in (tmp_path / "envs").iterdir():
        assert str(path) in said


# The command line ----------------------------------------------------------------------------------------------------


def test_swapped_arguments(tmp_path: Path) -> None:
    trainer, envs = tmp_path / "trainer.ledger", tmp_path / "envs"
    record(trainer, envs)
    [file] = envs.iterdir()
    assert f"{envs} is a folder, expected the trainer's ledger, a file: it comes first" in error(
        "compare", envs, trainer
    )
    assert "kept at an env, expected one that was kept at the trainer: the trainer's ledger comes first" in error(
        "compare", file, trainer
    )
    assert "was kept at the trainer, expected one that was kept at an env: the trainer's ledger comes first" in error(
        "compare", trainer, trainer
    )


def test_what_else_is_in_the_folder_is_left_out(tmp_path: Path) -> None:
    trainer, envs = tmp_path / "envs" / "trainer.ledger", tmp_path / "envs"
    record(trainer, envs)
    (envs / "README").write_text("no ledger", encoding="utf-8")
    (envs / "curve.png").write_bytes(b"\x89PNG\r\n")
    (envs / "episodes.csv").write_text("episode,slot\n", encoding="utf-8")
    (envs / "older").mkdir()
    done = call("compare", trainer, envs)
    assert (done.exit_code, done.stdout) == (0, "equal: 2 envs, 14 env steps and 4 resets compared\n")
    [file] = envs.glob("env-*.ledger")
    assert call("compare", trainer, envs, file).stdout == done.stdout, "a file that is given twice counts once"
    (envs / "env-r0-killed.ledger").touch()
    done = call("compare", trainer, envs)
    assert done.exit_code == 0
    assert "note: " in done.stdout
    assert "env-r0-killed.ledger is empty and was left out" in done.stdout
    (envs / "notes.ledger").write_text("no ledger", encoding="utf-8")
    assert "notes.ledger is no step ledger" in error("compare", trainer, envs)


def test_an_empty_folder(tmp_path: Path) -> None:
    record(tmp_path / "trainer.ledger", tmp_path / "envs")
    (tmp_path / "empty").mkdir()
    said = error("compare", tmp_path / "trainer.ledger", tmp_path / "empty")
    assert f"no ledger of an env in {tmp_path / 'empty'} (of a folder, the files that are named *.ledger count)" in said
    assert "absent cannot be read: No such file" in error("compare", tmp_path / "trainer.ledger", tmp_path / "absent")


def test_show_of_a_folder_names_what_is_in_it(tmp_path: Path) -> None:
    record(tmp_path / "envs" / "trainer.ledger", tmp_path / "envs")
    said = error("show", tmp_path / "envs")
    assert f"{tmp_path / 'envs'} is a folder: show takes one of the ledgers in it: " in said
    for path in (tmp_path / "envs").iterdir():
        assert path.name in said
    for number in range(20):
        (tmp_path / "envs" / f"x{number}.ledger").touch()
    assert " and 6 more" in error("show", tmp_path / "envs")
    (tmp_path / "empty").mkdir()
    assert "is a folder, and no ledger (*.ledger) is in it" in error("show", tmp_path / "empty")


def test_a_trainers_ledger_is_no_folder(tmp_path: Path) -> None:
    venv = DummyVecEnv([CountingEnv])
    for path in (tmp_path, f"{tmp_path}/new/"):
        with pytest.raises(LedgerError, match=r"a trainer's ledger is one file, .* is a folder: name a file"):
            LedgerVecEnv(venv, path)
    assert list(tmp_path.iterdir()) == []


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    env = LedgerVecEnv(
        DummyVecEnv([lambda: LedgerEnv(CountingEnv(), tmp_path / "a" / "envs.ledger")]), tmp_path / "b" / "c.ledger"
    )
    env.reset()
    env.close()
    assert compare(tmp_path / "b" / "c.ledger", [tmp_path / "a"]).equal
