"""What a ledger says of itself when writing it fails, is interrupted, or is tried by a process that may not."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVecEnv
from plugrl_bridges.ledger import writer as writers
from plugrl_bridges.ledger.format import Kind
from tests.ledger.envs import CountingEnv

if TYPE_CHECKING:
    from pathlib import Path

ACTION = np.zeros(2, np.float32)


class Faulty:
    """A file that behaves, but for one write."""

    def __init__(self, file: Any, taken: float | None, error: BaseException) -> None:
        self._file = file
        self._taken = taken
        self._error: BaseException | None = error

    def write(self, data: bytes) -> int:
        error, self._error = self._error, None
        if error is None:
            return int(self._file.write(data))
        if self._taken is not None:
            self._file.write(data[: int(self._taken * len(data))])
        raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def started(path: Path, num_envs: int = 1) -> list[LedgerEnv]:
    envs = [LedgerEnv(CountingEnv(number), path, env_index=number) for number in range(num_envs)]
    for env in envs:
        env.reset()
    return envs


def spoil(env: LedgerEnv, taken: float | None, error: BaseException) -> None:
    assert env._writer is not None
    env._writer._file = Faulty(env._writer._file, taken, error)  # type: ignore[assignment]


def steps_of(path: Path) -> list[tuple[int, ...]]:
    return [record.envs for record in LedgerReader(path).records() if record.kind is Kind.STEP]


FULL = """
    import os, resource, sys
    import numpy as np
    from plugrl_bridges.errors import LedgerError
    from plugrl_bridges.ledger import LedgerEnv
    from tests.ledger.envs import CountingEnv

    env, action = LedgerEnv(CountingEnv(), sys.argv[1]), np.zeros(2, np.float32)
    env.reset()
    for _ in range(3):
        env.step(action)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(sys.argv[1]) + 20, hard))
    texts = set()
    for number in range(4):
        if number == 2:  # somebody makes room
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        try:
            env.step(action)
        except LedgerError as exc:
            texts.add(str(exc))
        else:
            raise SystemExit(f"step {number} was no error")
    env.close()
    [text] = texts
    print(text)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes here")
def test_file_that_cannot_grow_is_whole_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "full.ledger"
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), str(path)], check=True, timeout=60, capture_output=True, text=True
    )
    assert f"the ledger {path} cannot be written: [Errno {errno.EFBIG}]" in run.stdout
    assert "can be read" in run.stdout
    assert run.stderr == ""
    assert len(steps_of(path)) == 3
    tail = LedgerReader(path).tail
    assert (tail.closed, tail.lost_bytes) == (False, 0)


@pytest.mark.parametrize(("taken", "whole"), [(None, 0), (0.1, 0), (0.5, 1), (0.9, 2), (1.0, 3)])
def test_what_was_written_whole_of_a_vector_step_is_kept(tmp_path: Path, taken: float | None, whole: int) -> None:
    path = tmp_path / "envs.ledger"
    envs = started(path, 3)
    for env in envs:
        env.step(ACTION)
    spoil(envs[0], taken, OSError(errno.ENOSPC, "No space left on device"))
    for env in envs[:2]:
        env.step(ACTION)
    for env in (envs[2], *envs):
        with pytest.raises(LedgerError, match=r"cannot be written: .*No space left"):
            env.step(ACTION)
    with pytest.raises(LedgerError, match=r"cannot be written: .*No space left"):
        envs[0].reset()
    for env in envs:
        env.close()
    assert steps_of(path) == [(0,), (1,), (2,), *[(number,) for number in range(whole)]]
    tail = LedgerReader(path).tail
    assert (tail.closed, tail.lost_bytes) == (False, 0)


@pytest.mark.parametrize("taken", [None, 0.5, 1.0])
def test_interrupted_write_loses_and_doubles_nothing(tmp_path: Path, taken: float | None) -> None:
    path = tmp_path / "envs.ledger"
    envs = started(path, 2)
    spoil(envs[0], taken, KeyboardInterrupt())
    envs[0].step(ACTION)
    with pytest.raises(KeyboardInterrupt):
        envs[1].step(ACTION)
    for env in envs:
        env.step(ACTION)
        env.close()
    assert steps_of(path) == [(0,), (1,), (0,), (1,)]
    assert not LedgerReader(path).tail.closed, "who was interrupted cannot say that nothing is missing"


@pytest.mark.parametrize("taken", [None, 0.5, 1.0])
def test_interrupted_write_right_before_the_close(tmp_path: Path, taken: float | None) -> None:
    path = tmp_path / "env.ledger"
    [env] = started(path)
    spoil(env, taken, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        env.step(ACTION)
    env.close()
    assert steps_of(path) == [(0,)]
    assert not LedgerReader(path).tail.closed


@pytest.mark.parametrize("taken", [None, 0.5, 1.0])
def test_interrupted_write_of_a_trainer(tmp_path: Path, taken: float | None) -> None:
    path = tmp_path / "trainer.ledger"
    trainer = LedgerVecEnv(DummyVecEnv([CountingEnv]), path)
    trainer.reset()
    writer = trainer._ledger._writer
    writer._file = Faulty(writer._file, taken, KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        trainer.step(ACTION[None])
    trainer.step(ACTION[None])
    trainer.close()
    assert steps_of(path) == [(0,), (0,)]
    assert not LedgerReader(path).tail.closed


def test_env_that_was_interrupted_when_it_joined(tmp_path: Path) -> None:
    path = tmp_path / "envs.ledger"
    [first] = started(path)
    second = LedgerEnv(CountingEnv(), path, env_index=1)
    spoil(first, 0.5, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        second.reset()
    second.reset()
    for env in (first, second):
        env.step(ACTION)
    for env in (first, second):
        env.close()
    assert set(LedgerReader(path).joined()) == {(0, 0), (0, 1)}
    assert steps_of(path) == [(0,), (1,)]
    assert not LedgerReader(path).tail.closed


@pytest.mark.parametrize("name", ["step", "reset"])
def test_no_end_mark_where_a_step_or_reset_is_not_recorded(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "env.ledger"
    [env] = started(path)
    env.step(ACTION)
    with monkeypatch.context() as patch:

        def interrupted(_: object) -> bytes:
            raise KeyboardInterrupt

        patch.setattr(env._observation_columns, "pack_one", interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.step(ACTION) if name == "step" else env.reset()
    env.step(ACTION)
    env.close()
    assert steps_of(path) == [(0,), (0,)]
    assert not LedgerReader(path).tail.closed


def test_no_end_mark_where_an_env_failed_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "env.ledger"
    [env] = started(path)

    def failing(_: object) -> None:
        raise RuntimeError("out of joint")

    monkeypatch.setattr(env.env, "step", failing)
    with pytest.raises(RuntimeError, match="out of joint"):
        env.step(ACTION)
    env.close()
    assert not LedgerReader(path).tail.closed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_each_step_of_a_forked_process_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "envs.ledger"
    envs = started(path, 2)
    envs[0].step(ACTION)  # is kept back
    pid = os.fork()
    if pid == 0:
        told = 0
        try:
            for _ in range(3):
                for env in envs:
                    try:
                        env.step(ACTION)
                    except LedgerError as exc:  # noqa: PERF203 - each of them is to raise
                        told += "belongs to the process that forked this one" in str(exc)
            for env in envs:
                env.close()
            envs.clear()
            gc.collect()
            told += 10 * len(writers._shared)
        finally:
            os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
    envs[1].step(ACTION)
    for env in envs:
        env.close()
    assert steps_of(path) == [(0,), (1,)]
    assert LedgerReader(path).tail.closed


def test_writers_are_forgotten(tmp_path: Path) -> None:
    gc.collect()
    before = len(writers._shared)
    envs = started(tmp_path / "envs.ledger", 2)
    refused = LedgerEnv(CountingEnv(), __file__)
    with pytest.raises(LedgerError, match="exists"):
        refused.reset()
    assert len(writers._shared) == before + 1
    envs[0].close()
    assert len(writers._shared) == before + 1
    envs[1].close()
    assert len(writers._shared) == before


def test_env_that_was_refused_may_try_again(tmp_path: Path) -> None:
    path = tmp_path / "env.ledger"
    path.write_bytes(b"")
    env = LedgerEnv(CountingEnv(), path)
    with pytest.raises(LedgerError, match="exists"):
        env.reset()
    path.unlink()
    env.reset()
    env.close()
    assert LedgerReader(path).tail.closed


# Copies --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", [False, True])
def test_planner_may_copy_an_env_and_look_ahead(tmp_path: Path, digest: bool) -> None:
    path = tmp_path / "env.ledger"
    env = LedgerEnv(CountingEnv(), path, digest=digest)
    env.reset()
    env.step(ACTION)
    ahead = copy.deepcopy(env)
    expected = [ahead.step(ACTION)[0].tolist() for _ in range(3)]
    with pytest.raises(AttributeError, match="keeps no digest"):
        _ = ahead.digest
    ahead.reset()
    ahead.close()
    del ahead
    assert [env.step(ACTION)[0].tolist() for _ in range(3)] == expected
    if digest:
        plain = LedgerEnv(CountingEnv(), None, digest=True)
        plain.reset()
        for _ in range(4):
            plain.step(ACTION)
        assert env.digest == plain.digest
    env.close()
    assert len(steps_of(path)) == 4
    assert LedgerReader(path).tail.closed


def test_env_can_be_pickled_until_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "env.ledger"
    env = pickle.loads(pickle.dumps(LedgerEnv(CountingEnv(), path, env_index=3)))  # noqa: S301 - our own bytes
    env.reset()
    with pytest.raises(LedgerError, match=r"writes to .*env\.ledger and cannot be pickled: pickle the env inside"):
        pickle.dumps(env)
    env.close()
    assert LedgerReader(path).joined() == [(0, 3)]
    with pytest.raises(LedgerError, match="keeps a digest and cannot be pickled"):
        pickle.dumps(LedgerEnv(CountingEnv(), None, digest=True))


class Sparing(CountingEnv):
    """An env whose `reset` takes less than Gymnasium says."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset(seed=5)


def test_env_whose_reset_takes_nothing(tmp_path: Path) -> None:
    env = LedgerEnv(Sparing(), tmp_path / "env.ledger")
    env.reset()
    with pytest.raises(TypeError, match="unexpected keyword argument 'seed'"):
        env.reset(seed=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'options'"):
        env.reset(options={})
    env.close()
    assert LedgerReader(tmp_path / "env.ledger").tail.closed, "nothing happened that is not recorded"
