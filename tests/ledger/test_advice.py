"""What was put together in the wrong way is said, with what to do: wrappers, rows, folders, runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from click.testing import CliRunner
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecFrameStack, VecNormalize

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv, LedgerVectorEnv, compare
from plugrl_bridges.ledger.cli import main
from tests.ledger.envs import CountingEnv, FaultyVecEnv

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ENVS = 3


def sync() -> Any:
    return SyncVectorEnv([CountingEnv], autoreset_mode=AutoresetMode.SAME_STEP)


def dummy() -> VecEnv:
    return DummyVecEnv([CountingEnv])


def record(
    folder: Path,
    between: Callable[[VecEnv], VecEnv] = lambda venv: venv,
    *,
    env_run: str = "",
    run: str = "",
    order: tuple[int, ...] = (0, 1, 2),
) -> Path:
    made: list[Callable[[], gym.Env[Any, Any]]] = [
        partial(LedgerEnv, CountingEnv(row), f"{folder}/envs/", env_index=number, run=env_run)
        for row, number in enumerate(order)
    ]
    env = LedgerVecEnv(between(DummyVecEnv(made)), folder / "trainer.ledger", run=run)
    env.reset()
    for step in range(12):
        env.step(np.stack([np.full(2, step + row, np.float32) for row in range(NUM_ENVS)]))
    env.close()
    return folder / "trainer.ledger"


# Wrappers ------------------------------------------------------------------------------------------------------------


VEC_ENV, VECTOR_ENV = "Stable-Baselines3 VecEnv", "Gymnasium vector env"


@pytest.mark.parametrize(
    ("wrapper", "env", "said"),
    [
        (LedgerVecEnv, sync, f"is for a {VEC_ENV}, got SyncVectorEnv, a {VECTOR_ENV}; use LedgerVectorEnv for it"),
        (LedgerVecEnv, partial(gym.make, "CartPole-v1"), "got TimeLimit, a Gymnasium env; use LedgerEnv for it"),
        (LedgerVecEnv, dict, f"is for a {VEC_ENV}, got an object of type dict"),
        (LedgerVectorEnv, dummy, f"is for a {VECTOR_ENV}, got DummyVecEnv, a {VEC_ENV}; use LedgerVecEnv for it"),
        (
            LedgerVectorEnv,
            CountingEnv,
            f"is for a {VECTOR_ENV}, got CountingEnv, a Gymnasium env; use LedgerEnv for it",
        ),
        (LedgerEnv, sync, f"is for a Gymnasium env, got SyncVectorEnv, a {VECTOR_ENV}; use LedgerVectorEnv for it"),
        (LedgerEnv, dummy, f"is for a Gymnasium env, got DummyVecEnv, a {VEC_ENV}; use LedgerVecEnv for it"),
    ],
)
def test_a_wrong_wrapper_names_the_right_one(tmp_path: Path, wrapper: Any, env: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        wrapper(env(), tmp_path / "a.ledger")
    assert str(caught.value).startswith(f"{wrapper.__name__} is for a ")
    assert said in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["env_index", "rank"])
def test_a_number_must_be_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number from 0 to 2147483647, got str '0'"):
        LedgerEnv(CountingEnv(), tmp_path / "a.ledger", **{name: "0"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{name} must be a whole number from 0 to "):
        LedgerEnv(CountingEnv(), tmp_path / "a.ledger", **{name: -1})  # type: ignore[arg-type]
    env = LedgerEnv(CountingEnv(), tmp_path / "a.ledger", **{name: np.int64(3)})  # type: ignore[arg-type]
    env.reset()
    env.close()
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "a.ledger")]).stdout
    assert f"envs      {3 if name == 'env_index' else 0}\n" in shown


# Values that do not fit ----------------------------------------------------------------------------------------------


class Misfit(CountingEnv):
    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros(4, np.float32), {}


def test_a_value_that_does_not_fit_names_its_env(tmp_path: Path) -> None:
    env = LedgerEnv(Misfit(), tmp_path / "a.ledger", env_index=4, rank=2)
    with pytest.raises(LedgerError, match=r"entry 'obs' of env 4 of rank 2 has shape \[4\], expected \[3\]"):
        env.reset()
    env.close()


def test_a_terminal_observation_that_does_not_fit_names_its_row(tmp_path: Path) -> None:
    def spoil(returned: Any) -> Any:
        returned[3][1]["terminal_observation"] = np.zeros(2, np.float32)
        return returned

    env = LedgerVecEnv(FaultyVecEnv(DummyVecEnv([CountingEnv] * 2), 5, spoil), tmp_path / "trainer.ledger")
    env.reset()
    for _ in range(4):
        env.step(np.zeros((2, 2), np.float32))
    said = r"entry 'obs' of terminal_observation of row 1 has shape \[2\], expected \[3\]"
    with pytest.raises(LedgerError, match=said):
        env.step(np.zeros((2, 2), np.float32))
    env.close()


# Paths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path, lambda path: [path], lambda path: (str(path),), lambda path: iter([path])])
def test_one_path_or_several(tmp_path: Path, kind: Callable[[Path], Any]) -> None:
    trainer = record(tmp_path)
    assert compare(trainer, kind(tmp_path / "envs")).equal
    [file] = (tmp_path / "envs").iterdir()
    assert compare(str(trainer), kind(file)).env_steps == 12 * NUM_ENVS


def test_ledgers_in_deeper_folders_are_named(tmp_path: Path) -> None:
    trainer = record(tmp_path / "run" / "one")
    for folder in (tmp_path, tmp_path / "run" / "one"):  # the latter holds the trainer's
        with pytest.raises(LedgerError) as caught:
            compare(trainer, folder)
        said = str(caught.value)
        assert f"no ledger of an env in {folder} (of a folder, the files that are named *.ledger count; " in said
        assert "folders in it are not searched" in said
        assert f"Some are in {tmp_path / 'run' / 'one' / 'envs'}: give these" in said
    (tmp_path / "run" / "one" / "broken.ledger").write_text("no ledger", encoding="utf-8")
    with pytest.raises(LedgerError, match=r"broken\.ledger is no step ledger"):
        compare(trainer, tmp_path / "run" / "one")


# Runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_on_one_side_alone_is_noted(tmp_path: Path) -> None:
    found = compare(record(tmp_path / "a", run="first"), tmp_path / "a" / "envs")
    [note] = found.notes
    assert found.equal
    assert note.startswith("the trainer's ledger has run 'first', and 1 of its envs' have none, such as ")
    assert note.endswith("give run= on both sides")
    [note] = compare(record(tmp_path / "b", env_run="first"), tmp_path / "b" / "envs").notes
    assert "has run 'first', and the trainer's ledger has none" in note
    assert compare(record(tmp_path / "c"), tmp_path / "c" / "envs").notes == []
    assert compare(record(tmp_path / "d", run="x", env_run="x"), tmp_path / "d" / "envs").notes == []


# Rows ----------------------------------------------------------------------------------------------------------------


def test_rows_in_another_order_are_named(tmp_path: Path) -> None:
    found = compare(record(tmp_path, order=(1, 2, 0)), tmp_path / "envs")
    assert not found.equal
    [note] = found.notes
    assert note.startswith(
        "the rows seem to be in another order: row 0 of the trainer began with the first observation of "
    )
    for row, env in ((0, 1), (1, 2), (2, 0)):
        assert f"row {row} of the trainer began with the first observation of env {env} (rank 0, index {env})" in note
    assert note.endswith("; give clients their --rank, and envs their env_index")


def test_two_rows_that_are_swapped_are_named(tmp_path: Path) -> None:
    [note] = compare(record(tmp_path, order=(0, 2, 1)), tmp_path / "envs").notes
    assert "row 1 of the trainer began with the first observation of env 2 " in note
    assert "row 0" not in note


def test_a_ledger_above_a_wrapper_that_changes_values_is_named(tmp_path: Path) -> None:
    found = compare(record(tmp_path, VecNormalize), tmp_path / "envs")
    assert not found.equal
    [note] = found.notes
    assert note.startswith("nearly every observation of every env differs: either a wrapper between")


def test_a_ledger_above_stacked_frames_is_refused_with_what_to_do(tmp_path: Path) -> None:
    trainer = record(tmp_path, partial(VecFrameStack, n_stack=4))
    with pytest.raises(
        LedgerError, match=r"trainer's has obs \[12\] <f4, the env's has obs \[3\] <f4: .* below wrappers"
    ):
        compare(trainer, tmp_path / "envs")


def test_files_of_two_runs_are_not_taken_for_a_wrapper(tmp_path: Path) -> None:
    trainer = record(tmp_path, VecNormalize)
    env = LedgerEnv(CountingEnv(7), tmp_path / "envs" / "another.ledger")
    env.reset()
    env.close()
    notes = compare(trainer, tmp_path / "envs").notes
    assert notes[-1].startswith("files of an earlier run seem to be among these")
    assert not [note for note in notes if "a wrapper" in note]


class FirstOnly(VecEnvWrapper):
    """Swap what two rows begin with, and nothing else."""

    def reset(self) -> Any:
        observation: Any = self.venv.reset()
        return observation[[1, 0, 2]]

    def step_wait(self) -> Any:
        return self.venv.step_wait()


def test_one_fault_has_no_such_hint(tmp_path: Path) -> None:
    found = compare(record(tmp_path / "a", FirstOnly), tmp_path / "a" / "envs")
    assert (found.equal, found.notes) == (False, [])

    def spoil(returned: Any) -> Any:
        returned[0][...] = returned[0][[1, 0, 2]]
        return returned

    found = compare(record(tmp_path / "b", partial(FaultyVecEnv, at=2, spoil=spoil)), tmp_path / "b" / "envs")
    assert (found.equal, found.notes) == (False, [])


# Words ---------------------------------------------------------------------------------------------------------------


def test_a_field_of_one_cell_is_named_once(tmp_path: Path) -> None:
    def spoil(returned: Any) -> Any:
        returned[1][1] = np.nan
        return returned

    found = compare(record(tmp_path, partial(FaultyVecEnv, at=2, spoil=spoil)), tmp_path / "envs")
    assert str(found.first).endswith("step 2 (vector step 2), reward is nan at the trainer and 2.1 at the env")
    assert found.as_json()["resets"] == found.resets == found.episodes == 3 * NUM_ENVS
