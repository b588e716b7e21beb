"""What is on disk: whole records up to a crash, one clear error for everything else that is not a ledger."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVecEnv, compare
from plugrl_bridges.ledger.format import FRAME_BYTES, MAGIC, Kind
from plugrl_bridges.ledger.writer import shared
from tests.ledger.envs import CountingEnv

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ledgers(tmp_path: Path) -> tuple[Path, Path]:
    """Two envs, 12 vector steps; the trainer's ledger and the envs'."""
    trainer, envs = tmp_path / "trainer.ledger", tmp_path / "envs.ledger"
    venv = DummyVecEnv([partial(LedgerEnv, CountingEnv(n), envs, env_index=n, run="first") for n in range(2)])
    env = LedgerVecEnv(venv, trainer, run="first")
    env.reset()
    for step in range(12):
        env.step(np.full((2, 2), step, np.float32))
    env.close()
    return trainer, envs


def test_header_says_whose_it_is(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = map(LedgerReader, ledgers)
    assert (trainer.header.side.value, trainer.header.dialect.value) == ("trainer", "sb3")
    assert (trainer.header.num_envs, trainer.header.run) == (2, "first")
    assert envs.header.side.value == "env"
    assert envs.joined() == [(0, 0), (0, 1)]
    assert envs.header.about["pid"] == os.getpid()
    assert envs.header.about["env_id"] == "CountingEnv"
    assert envs.tail.closed
    assert [record.kind for record in trainer.records()].count(Kind.STEP) == 12


def test_events_are_what_happened(ledgers: tuple[Path, Path]) -> None:
    reader = LedgerReader(ledgers[1])
    mine = [event for record in reader.records() if record.envs == (1,) for event in record.events]
    assert [event.is_reset for event in mine[:7]] == [True, False, False, False, False, False, True]
    assert [reader.header.action.split(event.action)[0].tolist() for event in mine[1:4]] == [[0, 0], [1, 1], [2, 2]]
    assert [event.reward for event in mine[1:4]] == [0.1, 1.1, 2.1]
    assert [event.flags for event in mine[1:6]] == [0, 0, 0, 0, 2]


def test_cut_anywhere_compares_clean_up_to_the_last_whole_record(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = ledgers
    data = envs.read_bytes()
    begin = LedgerReader(envs)._begin
    seen = set()
    for size in range(begin, len(data), 7):
        envs.write_bytes(data[:size])
        reader = LedgerReader(envs)
        assert reader.tail.at_byte + reader.tail.lost_bytes == size
        if len(reader.joined()) < 2:
            continue
        found = compare(trainer, [envs])
        assert found.equal
        assert found.env_steps + found.not_compared == 24
        assert len(found.notes) == 1
        assert "ends without an end mark" in found.notes[0]
        seen.add(found.env_steps)
    assert seen == set(range(25))


def test_zeros_behind_the_last_record_are_no_record(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = ledgers
    data = envs.read_bytes()
    end = LedgerReader(envs).tail.at_byte - FRAME_BYTES - 8
    envs.write_bytes(data[:end] + bytes(5000))
    assert LedgerReader(envs).tail.lost_bytes == 5000
    assert compare(trainer, [envs]).env_steps == 24


def test_a_damaged_byte_is_found_wherever_it_is(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = ledgers
    data = bytearray(envs.read_bytes())
    for at in range(0, len(data), 5):
        data[at] ^= 0x10
        envs.write_bytes(data)
        with pytest.raises(LedgerError, match=r"envs\.ledger (is corrupted at byte|is no step ledger|cannot be read)"):
            compare(trainer, [envs])
        data[at] ^= 0x10


def test_trainer_that_was_killed(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = ledgers
    trainer.write_bytes(trainer.read_bytes()[:-200])
    found = compare(trainer, [envs])
    whole = sum(record.kind is Kind.STEP for record in LedgerReader(trainer).records())
    assert 0 < whole < 12
    assert (found.equal, found.env_steps) == (True, 2 * whole)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is empty"),
        (b"slot,return,length\n", "is no step ledger"),
        (MAGIC, "ends within its header"),
        (MAGIC + bytes(12), "ends within its header"),
        (MAGIC + b"\x01" * 40, "is corrupted at byte 8"),
    ],
)
def test_foreign_file(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(data)
    with pytest.raises(LedgerError, match=f"foreign {text}"):
        LedgerReader(path)


def test_another_version_is_refused(ledgers: tuple[Path, Path]) -> None:
    from plugrl_bridges.ledger.format import frame  # noqa: PLC0415

    payload = LedgerReader(ledgers[0]).header.to_bytes().replace(b"\xa6format\x01", b"\xa6format\x02")
    ledgers[0].write_bytes(MAGIC + frame(payload))
    with pytest.raises(LedgerError, match="format 2, and this release reads format 1"):
        LedgerReader(ledgers[0])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="absent cannot be read: No such file"):
        LedgerReader(tmp_path / "absent")


def test_sides_are_not_confused(ledgers: tuple[Path, Path]) -> None:
    trainer, envs = ledgers
    with pytest.raises(LedgerError, match="was kept at an env, expected one that was kept at the trainer"):
        compare(envs, [envs])
    with pytest.raises(LedgerError, match="was kept at the trainer, expected one that was kept at an env"):
        compare(trainer, [trainer])


def test_envs_that_are_missing(ledgers: tuple[Path, Path], tmp_path: Path) -> None:
    env = LedgerEnv(CountingEnv(), tmp_path / "other.ledger", rank=3)
    env.reset()
    env.close()
    with pytest.raises(LedgerError, match=r"of 2 envs, but the envs' ledgers are of 1 .*\(3, 0\)"):
        compare(ledgers[0], [tmp_path / "other.ledger"])


def test_runs_are_not_mixed(ledgers: tuple[Path, Path], tmp_path: Path) -> None:
    env = LedgerEnv(CountingEnv(), tmp_path / "other.ledger", run="second")
    env.reset()
    env.close()
    with pytest.raises(LedgerError, match=r"of run 'first', .* of run 'second'"):
        compare(ledgers[0], [tmp_path / "other.ledger"])


def test_an_existing_file_is_kept(ledgers: tuple[Path, Path]) -> None:
    before = ledgers[1].read_bytes()
    env = LedgerEnv(CountingEnv(), ledgers[1])
    with pytest.raises(LedgerError, match="exists: a ledger is never overwritten"):
        env.reset()
    env.close()
    assert ledgers[1].read_bytes() == before


def test_a_folder_gets_a_file_per_process_and_rank(tmp_path: Path) -> None:
    folder = tmp_path / "ledgers"
    envs = [LedgerEnv(CountingEnv(n), f"{folder}/", env_index=n % 2, rank=n // 2) for n in range(4)]
    assert not folder.exists(), "an env that is never reset leaves nothing"
    trainer = LedgerVecEnv(DummyVecEnv([partial(lambda env: env, env) for env in envs]), tmp_path / "trainer.ledger")
    trainer.reset()
    for _ in range(7):
        trainer.step(np.zeros((4, 2), np.float32))
    trainer.close()
    files = sorted(folder.iterdir())
    assert [LedgerReader(file).joined() for file in files] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert compare(tmp_path / "trainer.ledger", [folder]).env_steps == 28


def test_an_env_goes_on_in_another_file(tmp_path: Path) -> None:
    """As a client does that was started again: the trainer's ledger is one, the env's are two."""
    inner = CountingEnv()
    first, second = LedgerEnv(inner, tmp_path / "a.ledger"), LedgerEnv(inner, tmp_path / "b.ledger")
    trainer = LedgerVecEnv(DummyVecEnv([lambda: first]), tmp_path / "trainer.ledger")
    trainer.reset()
    for _ in range(2):
        trainer.step(np.zeros((1, 2), np.float32))
    first.close()
    trainer.venv.envs[0] = second  # type: ignore[attr-defined]
    trainer.reset()
    trainer.step(np.zeros((1, 2), np.float32))
    trainer.close()
    found = compare(tmp_path / "trainer.ledger", [tmp_path / "b.ledger", tmp_path / "a.ledger"])
    assert (found.equal, found.env_steps, found.episodes) == (True, 3, 2)
    assert found.notes == ["env 0 wrote 2 ledgers"]


def test_other_spaces_need_another_file(tmp_path: Path) -> None:
    one = LedgerEnv(CountingEnv(dtype=np.float32), tmp_path / "a.ledger")
    other = LedgerEnv(CountingEnv(dtype=np.float64), tmp_path / "a.ledger", env_index=1)
    one.reset()
    with pytest.raises(LedgerError, match="with other spaces or of another run"):
        other.reset()
    one.close()
    other.close()


KILLED = """
    import os, sys
    import numpy as np
    from plugrl_bridges.ledger import LedgerEnv
    from tests.ledger.envs import CountingEnv

    envs = [LedgerEnv(CountingEnv(n), sys.argv[1], env_index=n) for n in range(2)]
    for env in envs:
        env.reset()
    for step in range(1_000_000):
        for env in envs:
            if env.step(np.full(2, step % 10, np.float32))[3]:
                env.reset()
        if step == 100:
            print("running", flush=True)
"""


def test_kill_leaves_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "killed.ledger"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.kill()
    reader = LedgerReader(path)
    assert not reader.tail.closed
    mine = [event for record in reader.records() if record.envs == (0,) for event in record.events]
    steps = [event for event in mine if not event.is_reset]
    assert len(steps) > 99, "what was done is on disk, but for a vector step at most"
    actions = [reader.header.action.split(event.action)[0][0] for event in steps]
    assert actions == [step % 10 for step in range(len(steps))]


def test_an_interpreter_that_ends_without_close_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "open.ledger"
    code = KILLED.replace("1_000_000", "7").replace("step == 100", "False")
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=True, timeout=60)
    reader = LedgerReader(path)
    assert sum(record.kind is Kind.STEP for record in reader.records()) == 14


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_does_not_write_to_its_parents_file(tmp_path: Path) -> None:
    env = LedgerEnv(CountingEnv(), tmp_path / "a.ledger")
    env.reset()
    env.step(np.zeros(2, np.float32))
    pid = os.fork()
    if pid == 0:
        try:
            env.step(np.zeros(2, np.float32))
        except LedgerError as exc:
            os._exit(7 if "belongs to the process that forked this one" in str(exc) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    env.step(np.zeros(2, np.float32))
    env.close()
    reader = LedgerReader(tmp_path / "a.ledger")
    assert reader.tail.closed
    assert sum(record.kind is Kind.STEP for record in reader.records()) == 2


def test_an_env_that_becomes_garbage_while_the_file_is_written(tmp_path: Path) -> None:
    """The collector may run, and count an env out, at any allocation: in the midst of a flush as well."""
    path = tmp_path / "envs.ledger"
    envs = [LedgerEnv(CountingEnv(number), path, env_index=number) for number in range(2)]
    for number in range(2):
        envs[number].reset()
    writer = shared(path, envs[0]._subject, rank=0)
    writer.writers -= 1
    file: Any = writer._file

    class Collecting:
        def write(self, data: bytes) -> int:
            while len(envs) > 1:
                envs.pop()
            return int(file.write(data))

        def close(self) -> None:
            file.close()

    writer._file = Collecting()  # type: ignore[assignment]
    for _ in range(2):
        envs[0].step(np.zeros(2, np.float32))
    assert writer.writers == 1
    envs[0].close()
    reader = LedgerReader(path)
    assert sum(len(record.envs) for record in reader.records()) == 2 + 2 + 2, "two joins, two resets, two steps"
    assert reader.tail.closed


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A record is on disk once every env of the process has written one."""
    envs = [LedgerEnv(CountingEnv(n), tmp_path / "a.ledger", env_index=n) for n in range(3)]
    for env in envs:
        env.reset()
    sizes = []
    for _ in range(4):
        for env in envs:
            env.step(np.zeros(2, np.float32))
        sizes.append((tmp_path / "a.ledger").stat().st_size)
    values = 4 * (2 + 3)
    assert np.diff(sizes).tolist() == [3 * (values + 33)] * 3, "as the docs say"
    for env in envs:
        env.close()
    whole = LedgerReader(tmp_path / "a.ledger")
    assert [record.kind for record in whole.records()].count(Kind.STEP) == 3 * 4
