"""What is in a ledger, a SQLite file: after a run, a kill, an interrupt, a full disk; and what is no ledger."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVecEnv, compare
from plugrl_bridges.ledger.cli import main
from plugrl_bridges.ledger.schema import MAX_ROWS, Flag
from tests.ledger.envs import CountingEnv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ACTION = np.zeros(2, np.float32)


def record(trainer: Path, folder: Path, *, run: str = "", steps: int = 12, **env: Any) -> None:
    venv = DummyVecEnv(
        [partial(LedgerEnv, CountingEnv(n, **env), f"{folder}/", env_index=n, run=run) for n in range(2)]
    )
    recorded = LedgerVecEnv(venv, trainer, run=run)
    recorded.reset()
    for step in range(steps):
        recorded.step(np.full((2, 2), step, np.float32))
    recorded.close()


@pytest.fixture
def ledgers(tmp_path: Path) -> tuple[Path, Path]:
    """Two envs, 12 vector steps; the trainer's ledger and that of the envs."""
    record(tmp_path / "trainer.ledger", tmp_path / "envs", run="first")
    [envs] = (tmp_path / "envs").iterdir()
    return tmp_path / "trainer.ledger", envs


def query(path: Path, text: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(text).fetchall()


def started(path: Path, num_envs: int = 1) -> list[LedgerEnv]:
    envs = [LedgerEnv(CountingEnv(number, 1000), path, env_index=number) for number in range(num_envs)]
    for env in envs:
        env.reset()
    return envs


# What is in it --------------------------------------------------------------------------------------------------------


def test_any_sqlite_reads_it(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = ledgers
    assert query(envs, "SELECT env, rank FROM envs") == [(0, 0), (1, 0)]
    assert dict(query(trainer, "SELECT name, value FROM meta"))["side"] == "trainer"
    assert query(trainer, "SELECT part, name, shape, dtype, digested, at FROM columns") == [
        ("action", "action", "[2]", "<f4", 0, 0), ("obs", "obs", "[3]", "<f4", 0, 0)
    ]  # fmt: skip
    rows = query(envs, "SELECT episode, step, flags, reward, action, obs FROM steps WHERE env = 1 ORDER BY id")
    assert [row[:3] for row in rows[:7]] == [
        (0, 0, 4),
        (0, 1, 0),
        (0, 2, 0),
        (0, 3, 0),
        (0, 4, 0),
        (0, 5, 2),
        (1, 0, 4),
    ]
    assert [row[3] for row in rows[:4]] == [None, 0.1, 1.1, 2.1]
    assert np.frombuffer(rows[3][4], "<f4").tolist() == [2, 2]
    assert np.frombuffer(rows[1][5], "<f4").tolist() == [1002.001953125, -1002.001953125, 0.5]
    assert [path.name for path in trainer.parent.glob("*.ledger*")] == [trainer.name], "one file, nothing beside it"


def test_reader_says_whose_it_is(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = map(LedgerReader, ledgers)
    assert (trainer.header.side.value, trainer.header.dialect.value, trainer.header.run) == ("trainer", "sb3", "first")
    assert (envs.envs, envs.closed, trainer.closed) == ([(0, 0), (0, 1)], True, True)
    assert (envs.header.about["pid"], envs.header.about["env_id"]) == (os.getpid(), "CountingEnv")
    assert [each.vector_step for each in trainer.records(0) if not each.is_reset] == list(range(1, 13))


@pytest.mark.parametrize("reward", [float("nan"), -0.0, float("inf"), 1e300])
def test_every_reward_is_kept_bit_by_bit(tmp_path: Path, reward: float) -> None:
    class Paying(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, info

    env = LedgerEnv(Paying(), tmp_path / "env")
    env.reset()
    env.step(ACTION)
    env.close()
    _, step = LedgerReader(tmp_path / "env").records()
    assert np.float64(step.reward).tobytes() == np.float64(reward).tobytes()


def test_a_folder_gets_a_file_per_rank_and_an_env_that_is_never_reset_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "ledgers"
    envs = [LedgerEnv(CountingEnv(n), f"{folder}/", env_index=n % 2, rank=n // 2) for n in range(4)]
    assert not folder.exists()
    for env in envs:
        env.reset()
    for env in envs:
        env.close()
    files = [LedgerReader(file) for file in sorted(folder.iterdir())]
    assert [file.envs for file in files] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


# Crashes --------------------------------------------------------------------------------------------------------------

KILLED = """
    import sys
    import numpy as np
    from plugrl_bridges.ledger import LedgerEnv
    from tests.ledger.envs import CountingEnv

    env = LedgerEnv(CountingEnv(0, 1 << 30), sys.argv[1])
    env.reset()
    for step in range(1_000_000):
        env.step(np.full(2, step % 10, np.float32))
        if step % 50 == 0:
            print(step, flush=True)
"""


def test_kill_leaves_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "killed.ledger"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 1000:
            pass
        process.kill()
        done = max(map(int, process.stdout.read().split()[:-1] or ["1000"]))
    for each in (path, copied(path, tmp_path / "without", "-shm")):
        reader = LedgerReader(each)
        assert not reader.closed
        steps = [step for step in reader.records() if not step.is_reset]
        assert len(steps) > done - MAX_ROWS
        actions = [reader.header.action.split(step.action)[0][0] for step in steps]
        assert actions == [step % 10 for step in range(len(steps))]
    assert LedgerReader(copied(path, tmp_path / "alone", "-shm", "-wal")).tail.startswith("ends without")


def copied(path: Path, folder: Path, *but: str) -> Path:
    folder.mkdir()
    for each in path.parent.glob(f"{path.name}*"):
        if not each.name.endswith(but):
            shutil.copyfile(each, folder / each.name)
    return folder / path.name


def test_an_interpreter_that_ends_without_close_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "open.ledger"
    code = KILLED.replace("1_000_000", "7")
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path)], check=True, timeout=60, capture_output=True
    )
    reader = LedgerReader(path)
    assert (reader.count("step > 0"), reader.closed) == (7, False)


FULL = """
    import os, resource, sys
    import numpy as np
    from plugrl_bridges.errors import LedgerError
    from plugrl_bridges.ledger import LedgerEnv
    from tests.ledger.envs import CountingEnv

    env, action = LedgerEnv(CountingEnv(0, 1 << 30), sys.argv[1]), np.zeros(2, np.float32)
    env.reset()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    texts = []
    for _ in range(20_000):
        try:
            env.step(action)
        except LedgerError as exc:
            texts.append(str(exc))
            if len(texts) == 3:
                break
    env.close()
    assert len(set(texts)) == 1
    print(texts[0])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes here")
def test_file_that_cannot_grow_can_be_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "full.ledger"
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(path)]
    run = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert f"the ledger {path} cannot be written: " in run.stdout
    assert "can be read" in run.stdout
    reader = LedgerReader(path)
    assert reader.count("1") > MAX_ROWS
    assert not reader.closed


class Interrupting:
    """A connection in which one statement is interrupted, before or after it."""

    def __init__(self, db: sqlite3.Connection, name: str, *, after: bool) -> None:
        self._db, self._name, self._after = db, name, after

    def executemany(self, statement: str, rows: Any) -> None:
        self._run(self._db.executemany, statement, rows)

    def execute(self, statement: str) -> None:
        self._run(self._db.execute, statement)

    def _run(self, call: Callable[..., Any], statement: str, *rows: Any) -> None:
        due = statement.startswith(self._name)
        if due:
            self._name = "never"
        if not due or self._after:
            call(statement, *rows)
        if due:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["BEGIN", "INSERT", "COMMIT"])
def test_interrupted_commit_loses_and_doubles_nothing(tmp_path: Path, name: str, after: bool) -> None:
    [env] = started(tmp_path / "env.ledger")
    writer: Any = env._writer
    writer._db = Interrupting(writer._db, name, after=after)
    interrupted = 0
    for _ in range(2 * MAX_ROWS):
        try:
            env.step(ACTION)
        except KeyboardInterrupt:  # noqa: PERF203 - once
            interrupted += 1
    env.close()
    reader = LedgerReader(tmp_path / "env.ledger")
    assert interrupted == 1
    assert [each.step for each in reader.records()] == list(range(2 * MAX_ROWS + 1))
    assert not reader.closed, "who was interrupted cannot say that nothing is missing"


def test_not_closed_where_an_env_failed_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [env] = started(tmp_path / "env.ledger")

    def failing(_: object) -> None:
        raise RuntimeError("out of joint")

    monkeypatch.setattr(env.env, "step", failing)
    with pytest.raises(RuntimeError, match="out of joint"):
        env.step(ACTION)
    env.close()
    assert not LedgerReader(tmp_path / "env.ledger").closed


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_each_step_of_a_forked_process_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "envs.ledger"
    envs = started(path, 2)
    envs[0].step(ACTION)  # waits
    pid = os.fork()
    if pid == 0:
        told = 0
        try:
            for env in (*envs, *envs):
                try:
                    env.step(ACTION)
                except LedgerError as exc:  # noqa: PERF203 - each of them is to raise
                    told += "belongs to the process that forked this one" in str(exc)
            for env in envs:
                env.close()
        finally:
            os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
    for env in envs:
        env.step(ACTION)
        env.close()
    reader = LedgerReader(path)
    assert (reader.count("step > 0"), reader.closed) == (3, True)


def test_an_env_that_was_dropped_is_counted_out(tmp_path: Path) -> None:
    envs = started(tmp_path / "envs.ledger", 2)
    envs.pop()
    envs[0].close()
    assert LedgerReader(tmp_path / "envs.ledger").closed


# Who may write --------------------------------------------------------------------------------------------------------


def test_an_existing_file_is_kept(ledgers: tuple[Path, Path]) -> None:
    before = ledgers[1].read_bytes()
    env = LedgerEnv(CountingEnv(), ledgers[1])
    with pytest.raises(LedgerError, match="exists: a ledger is never overwritten"):
        env.reset()
    env.close()
    assert ledgers[1].read_bytes() == before
    with pytest.raises(LedgerError, match="exists"):
        LedgerVecEnv(DummyVecEnv([CountingEnv]), ledgers[0])


def test_envs_that_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    [env] = started(path)
    for other, text in (
        (LedgerEnv(CountingEnv(dtype=np.float64), path, env_index=1), "with other spaces or of another run"),
        (LedgerEnv(CountingEnv(), path, env_index=1, run="another"), "with other spaces or of another run"),
        (LedgerEnv(CountingEnv(), path), "two envs of this process write env_index 0 of rank 0"),
        (LedgerEnv(CountingEnv(), path, rank=1), "envs of rank 0 and of rank 1 write env_index 0"),
    ):
        with pytest.raises(LedgerError, match=text):
            other.reset()
        other.close()
    env.close()
    assert LedgerReader(path).closed


@pytest.mark.parametrize("digest", [False, True])
def test_planner_may_copy_an_env_and_look_ahead(tmp_path: Path, digest: bool) -> None:
    env = LedgerEnv(CountingEnv(), tmp_path / "env.ledger", digest=digest)
    env.reset()
    env.step(ACTION)
    ahead = copy.deepcopy(env)
    expected = [ahead.step(ACTION)[0].tolist() for _ in range(3)]
    with pytest.raises(AttributeError, match="keeps no digest"):
        _ = ahead.digest
    ahead.close()
    assert [env.step(ACTION)[0].tolist() for _ in range(3)] == expected
    env.close()
    reader = LedgerReader(tmp_path / "env.ledger")
    assert (reader.count("step > 0"), reader.closed) == (4, True)


def test_env_can_be_pickled_until_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "env.ledger"
    env = pickle.loads(pickle.dumps(LedgerEnv(CountingEnv(), path, env_index=3)))  # noqa: S301 - our own bytes
    env.reset()
    with pytest.raises(LedgerError, match=r"writes to .*env\.ledger and cannot be pickled: pickle the env inside"):
        pickle.dumps(env)
    env.close()
    assert LedgerReader(path).envs == [(0, 3)]
    with pytest.raises(LedgerError, match="keeps a digest and cannot be pickled"):
        pickle.dumps(LedgerEnv(CountingEnv(), None, digest=True))


# Which files belong together ------------------------------------------------------------------------------------------


def test_runs_and_sides_are_not_mixed(tmp_path: Path, ledgers: tuple[Path, Path]) -> None:
    trainer, envs = ledgers
    record(tmp_path / "second.ledger", envs.parent, run="second")
    found = compare(trainer, envs.parent)
    assert found.equal
    assert "left out 1 ledgers of other runs than 'first'" in found.notes[0]
    [other] = set(envs.parent.iterdir()) - {envs}
    with pytest.raises(LedgerError, match=r"of run 'first', .* of run 'second'"):
        compare(trainer, other)
    with pytest.raises(LedgerError, match="was kept at an env, expected one that was kept at the trainer"):
        compare(envs, envs)
    with pytest.raises(LedgerError, match="was kept at the trainer, expected one that was kept at an env"):
        compare(trainer, trainer)
    with pytest.raises(LedgerError, match="is a folder, expected the trainer's ledger"):
        compare(envs.parent, trainer)


def test_folders_that_are_not_of_one_run(tmp_path: Path) -> None:
    record(tmp_path / "one.ledger", tmp_path / "deep" / "envs")
    record(tmp_path / "two.ledger", tmp_path / "deep" / "envs")
    found = compare(tmp_path / "two.ledger", tmp_path / "deep" / "envs")
    assert any(
        "env 0 of rank 0 wrote 2 ledgers" in note and "take a new folder for each run" in note for note in found.notes
    )
    with pytest.raises(LedgerError, match=r"no ledger of an env in .*deep .*Some are in .*envs: give these"):
        compare(tmp_path / "two.ledger", tmp_path / "deep")
    record(tmp_path / "three.ledger", tmp_path / "deep" / "envs", dtype=np.float64)
    with pytest.raises(LedgerError, match="of envs with different spaces; if one is of an earlier run"):
        compare(tmp_path / "two.ledger", tmp_path / "deep" / "envs")
    (lone,) = started(tmp_path / "lone.ledger")
    lone.close()
    with pytest.raises(LedgerError, match=r"of 2 envs, but the envs' ledgers are of 1 .*\(0, 0\)"):
        compare(tmp_path / "one.ledger", tmp_path / "lone.ledger")
    record(tmp_path / "named.ledger", tmp_path / "unnamed")
    assert compare(tmp_path / "named.ledger", str(tmp_path / "unnamed")).notes == []


def test_run_on_one_side_alone_is_noted(tmp_path: Path, ledgers: tuple[Path, Path]) -> None:
    record(tmp_path / "other.ledger", tmp_path / "others")
    assert "the trainer's ledger has none" in compare(tmp_path / "other.ledger", ledgers[1]).notes[0]
    assert "has run 'first', and" in compare(ledgers[0], tmp_path / "others").notes[0]


# What is no ledger ----------------------------------------------------------------------------------------------------


def fails(*words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("stepledger: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is empty"),
        (b"slot,return\n" * 99, "is no step ledger"),
        (b"\x89PLEDGR\n" + bytes(99), "is no step ledger"),
    ],
)
def test_foreign_file(tmp_path: Path, ledgers: tuple[Path, Path], data: bytes, text: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(data)
    for words in (("show", path), ("compare", path, ledgers[1]), ("compare", ledgers[0], path)):
        assert text in fails(*words)


def test_what_is_no_file(tmp_path: Path, ledgers: tuple[Path, Path]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path / "pipe", "/dev/zero", "x" * 5000):
        assert "cannot be read" in fails("show", path)
        assert "cannot be read" in fails("compare", ledgers[0], path)


@pytest.mark.parametrize(
    "statement",
    [
        "PRAGMA user_version = 7",
        "PRAGMA application_id = 7",
        "DROP TABLE steps",
        "DROP TABLE meta",
        "CREATE TABLE more (a)",
        "CREATE TRIGGER t AFTER INSERT ON steps BEGIN SELECT 1; END",
        "DELETE FROM meta",
        "UPDATE meta SET value = x'ff' WHERE name = 'run'",
        "UPDATE meta SET value = 'elsewhere' WHERE name = 'side'",
        "UPDATE meta SET value = -1 WHERE name = 'started_ns'",
        "UPDATE columns SET shape = '[4]'",
        "UPDATE columns SET shape = '[1e99]'",
        "UPDATE columns SET shape = printf('%.*c', 100000, '[')",
        "UPDATE columns SET shape = '[99999999999999999999]'",
        "UPDATE columns SET dtype = 'O'",
        "UPDATE columns SET dtype = '<U4294967295'",
        "UPDATE columns SET name = NULL",
        "UPDATE columns SET digested = 2",
        "UPDATE columns SET at = 1",
        "DELETE FROM columns",
        "UPDATE steps SET env = 99 WHERE id = 3",
        "UPDATE steps SET env = 'x' WHERE id = 3",
        "UPDATE steps SET episode = 1 << 62 WHERE id = 3",
        "UPDATE steps SET step = -1 WHERE id = 3",
        "UPDATE steps SET flags = 64 WHERE id = 3",
        "UPDATE steps SET vector_step = 0.5 WHERE id = 3",
        "UPDATE steps SET reward = 'much' WHERE id = 3",
        "UPDATE steps SET reward = x'00' WHERE id = 3",
        "UPDATE steps SET obs = NULL WHERE id = 3",
        "UPDATE steps SET obs = zeroblob(50000000) WHERE id = 3",
        "UPDATE steps SET action = 'abcdefgh' WHERE id = 5",
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_hostile_tables_are_one_error(ledgers: tuple[Path, Path], side: int, statement: str) -> None:
    query(ledgers[side], statement)
    assert str(ledgers[side]) in fails("show", ledgers[side], "--events", 100)
    assert fails("compare", *ledgers)


def test_damaged_and_cut_files_are_an_answer_or_one_error(ledgers: tuple[Path, Path]) -> None:
    whole = ledgers[1].read_bytes()
    seen = {0: 0, 1: 0, 2: 0}
    for seed in range(60):
        chance = random.Random(seed)
        data = bytearray(whole)
        if seed % 3 == 0:
            del data[chance.randrange(100, len(data)) :]
        for _ in range(8):
            data[chance.randrange(len(data))] = chance.randrange(256)
        ledgers[1].write_bytes(data)
        for words in (["compare", "--json", *map(str, ledgers)], ["show", str(ledgers[1]), "--events", "100"]):
            done = CliRunner().invoke(main, words)
            assert done.exception is None or isinstance(done.exception, SystemExit), (seed, done.exception)
            seen[done.exit_code] += 1
    assert all(seen.values()), seen


def test_text_beyond_unicode_is_one_error(tmp_path: Path) -> None:
    from tests.ledger.envs import MixedEnv  # noqa: PLC0415 - of this test alone

    env = LedgerEnv(MixedEnv(), tmp_path / "env")
    env.reset(seed=0)
    env.close()
    [(at,)] = query(tmp_path / "env", "SELECT at FROM columns WHERE name = 'words'")
    [(obs,)] = query(tmp_path / "env", "SELECT obs FROM steps")
    spoilt = obs[:at] + b"\xff\xff\xff\x7f" + obs[at + 4 :]
    query(tmp_path / "env", f"UPDATE steps SET obs = x'{spoilt.hex()}'")  # noqa: S608 - our own bytes
    assert "has a character beyond U+10FFFF" in fails("show", tmp_path / "env")


def test_flags_are_what_the_docs_say() -> None:
    assert [(flag.name, int(flag)) for flag in Flag] == [
        ("TERMINATED", 1), ("TRUNCATED", 2), ("RESET", 4), ("LOST", 8), ("AGAIN", 16), ("FAILED", 32),
    ]  # fmt: skip
