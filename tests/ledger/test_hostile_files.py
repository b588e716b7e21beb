"""Files whose checksums fit and that say what cannot be: one clear error each, and no memory for what they claim."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from click.testing import CliRunner
from stable_baselines3.common.vec_env import DummyVecEnv

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVecEnv, compare
from plugrl_bridges.ledger.cli import main
from plugrl_bridges.ledger.format import FRAME, FRAME_BYTES, GUARD, HEAD, MAGIC, frame
from plugrl_bridges.ledger.outcome import Comparison, Difference, HeatMap, Slot
from plugrl_bridges.wire.codec import encode
from tests.ledger.envs import CountingEnv

if TYPE_CHECKING:
    from click.testing import Result

BIG = 2**32 - 1
OBS, ACTION = bytes(8), bytes(4)
"""Of one env: two float32, and one."""


def column(name: Any = "obs", shape: Any = (2,), dtype: Any = "<f4", *, digested: Any = False) -> dict[str, Any]:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"name": name, "shape": shape, "dtype": dtype, "digested": digested}


def trainer(**changed: Any) -> bytes:
    header = {
        "format": 1, "side": "trainer", "dialect": "gymnasium", "observation": [column()],
        "action": [column("action", (1,))], "num_envs": 2, "run": "", "started_ns": 1, "about": {},
    }  # fmt: skip
    return MAGIC + frame(b"".join(encode({**header, **changed})))


def env(**changed: Any) -> bytes:
    return trainer(**{"side": "env", "num_envs": 0, **changed})


def obs(**changed: Any) -> bytes:
    return trainer(observation=[column(**changed)])


def join(rank: int, number: int) -> bytes:
    return frame(HEAD.pack(1, 0, 0, 1) + struct.pack("<ii", rank, number))


def reset(*rows: int, kind: int = 2, data: bytes = OBS) -> bytes:
    return frame(HEAD.pack(kind, 0, 0, len(rows)) + struct.pack(f"<{len(rows)}i", *rows) + data * len(rows))


def step(row: int, flags: int = 0) -> bytes:
    head = HEAD.pack(3, 0, 0, 1) + struct.pack("<i", row)
    return frame(head + ACTION + struct.pack("<d", 1.0) + bytes([flags]) + OBS)


def everybody(kind: int, m: int, data: bytes = OBS) -> bytes:
    return frame(HEAD.pack(kind, 1, 0, m) + data)


def header_of(value: Any) -> bytes:
    return MAGIC + frame(b"".join(encode(value)))


END = frame(HEAD.pack(4, 0, 0, 0))
JOINED = env() + join(0, 0)
TEXT = obs(dtype="<U1", shape=())

HEADERS: dict[str, tuple[bytes, str]] = {
    "an array": (header_of(np.zeros(3)), "is a ndarray, expected a map"),
    "a list": (header_of([1, 2]), "is a list, expected a map"),
    "no entries": (header_of({}), "lacks 'format'"),
    "format of true": (trainer(format=True), "'format' of type bool, expected int"),
    "side": (trainer(side="both"), "the side 'both', expected one of 'env', 'trainer'"),
    "dialect": (trainer(dialect=3), "'dialect' of type int, expected str"),
    "num_envs infinite": (trainer(num_envs=float("inf")), "'num_envs' of type float, expected int"),
    "num_envs true": (trainer(num_envs=True), "'num_envs' of type bool, expected int"),
    "num_envs 2**40": (trainer(num_envs=2**40), "num_envs 1099511627776, expected 1 to 1000000"),
    "num_envs 0": (trainer(num_envs=0), "num_envs 0, expected 1 to 1000000"),
    "num_envs -3": (trainer(num_envs=-3), "num_envs -3, expected 1 to 1000000"),
    "num_envs of an env": (env(num_envs=2), "num_envs 2, expected 0 to 0"),
    "run": (trainer(run=7), "'run' of type int, expected str"),
    "started": (trainer(started_ns=-1), "started_ns -1"),
    "about a list": (trainer(about=[1]), "'about' of type list, expected dict"),
    "about an array": (trainer(about={"a": np.zeros(2)}), "says about what is no map"),
    "columns an array": (trainer(observation=np.zeros(3)), "are a ndarray, expected a list"),
    "columns of arrays": (trainer(action=[np.zeros(3)]), "is no map of name, shape, dtype and digested"),
    "name": (obs(name=3), "a name that is no str"),
    "digested": (obs(digested=1), "a digested that is no bool"),
    "shape an int": (obs(shape=3), "has a shape that no space has"),
    "shape infinite": (obs(shape=[float("inf")]), "has a shape that no space has"),
    "shape negative": (obs(shape=[-1]), "has a shape that no space has"),
    "shape of true": (obs(shape=[True]), "has a shape that no space has"),
    "33 dimensions": (obs(shape=[1] * 33), "has a shape that no space has, expected at most 32 sizes"),
    "shape too large": (obs(shape=[2**62, 2**62]), "'obs' of its header is larger than 1099511627776 bytes"),
    "large but for a 0": (obs(shape=[0, 2**62, 2**62]), "is larger than"),
    "large digested": (obs(shape=[2**62, 4], digested=True), "is larger than"),
    "text with a shape": (obs(shape=[3], dtype="<U4"), "is text of shape"),
    "text too long": (obs(shape=[], dtype="<U2147483647"), "is text of 2147483647 characters"),
    **{
        f"dtype {str(dtype)[:9]}": (obs(dtype=dtype), "a dtype that no space has")
        for dtype in ("<f16", None, ">f4", "1" * 5000, "<U0", "<U" + "9" * 99, "f4,f4", "(2,)f4", "O", "|u2", "<f1")
    },
    "header too long": (MAGIC + FRAME.pack(BIG - 1, (BIG - 1) ^ GUARD, 0), "a record of 4294967294 bytes"),
}

TEXT_BEYOND = TEXT + reset(0, data=struct.pack("<I", 0x110000))
RECORDS: dict[str, tuple[bytes, str]] = {
    "everybody, too many": (trainer() + everybody(2, BIG), r"4294967295 rows are everybody \(mark 1\), and it has 2"),
    "everybody steps": (trainer() + everybody(3, BIG), "4294967295 rows are everybody"),
    "everybody, too few": (trainer() + everybody(2, 1), "1 rows are everybody"),
    "everybody of nothing": (trainer(observation=[]) + everybody(2, 30_000_000, b""), "30000000 rows are everybody"),
    "everybody at an env": (JOINED + everybody(2, 2**31), r"2147483648 rows are everybody .* it has 0"),
    "another mark": (trainer() + frame(HEAD.pack(2, 2, 0, 2) + OBS * 2), r"\(mark 2\)"),
    "many rows": (trainer() + frame(HEAD.pack(2, 0, 0, BIG) + OBS), "16 bytes, expected 51539607548"),
    "row too large": (trainer() + reset(2), "it is of env 2, expected 0 to 1"),
    "row negative": (trainer() + reset(0, 1) + step(-1), "it is of env -1, expected 0 to 1"),
    "row kept negative": (trainer() + reset(-1, kind=5), "it is of env -1, expected 0 to 1"),
    "env negative": (JOINED + reset(-7), "it is of env -7, expected 0 to 2147483647"),
    "a row twice": (trainer() + reset(1, 1), "an env is named twice"),
    "flags": (trainer() + step(0, 0xFF), "the flags 0xff, expected at most 0x0f"),
    "text": (TEXT_BEYOND, r"'obs' has a character beyond U\+10FFFF"),
    "an end with more": (trainer() + frame(HEAD.pack(4, 0, 0, 0) + b"?"), "9 bytes, expected 8"),
    "join without numbers": (env() + frame(HEAD.pack(1, 0, 0, 1)), "a join of 8 bytes, expected 16"),
    "join too long": (env() + frame(HEAD.pack(1, 0, 0, 1) + bytes(9)), "a join of 17 bytes, expected 16"),
    "join of negatives": (env() + join(-5, -7), "env -7 of rank -5 joins, expected numbers from 0"),
    "join at a trainer": (trainer() + join(0, 0), "an env joins, which only those of an env's ledger do"),
    "length": (
        trainer() + FRAME.pack(BIG - 1, (BIG - 1) ^ GUARD, 0) + OBS,
        "a record of 4294967294 bytes, expected at",
    ),
}


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def fails(*words: object) -> str:
    """Give the one line that a command says when it fails."""
    done = call(*words)
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2, done.output
    assert done.output.count("\n") == 1
    return done.output


@pytest.fixture
def good(tmp_path: Path) -> tuple[Path, Path]:
    """A trainer's ledger of two envs, and theirs."""
    files = tmp_path / "good-trainer.ledger", tmp_path / "good-env.ledger"
    rows = reset(0) + reset(1)
    files[0].write_bytes(trainer() + reset(0, 1) + step(0) + step(1) + END)
    files[1].write_bytes(JOINED + join(0, 1) + rows + step(0) + step(1) + END)
    assert compare(*files).equal
    return files


@pytest.mark.parametrize("name", HEADERS)
def test_header(tmp_path: Path, name: str) -> None:
    content, said = HEADERS[name]
    path = tmp_path / "hostile.ledger"
    path.write_bytes(content + END)
    with pytest.raises(LedgerError, match=said):
        LedgerReader(path)
    assert "hostile.ledger" in fails("show", path)


@pytest.mark.parametrize("name", RECORDS)
def test_record(tmp_path: Path, good: tuple[Path, Path], name: str) -> None:
    content, said = RECORDS[name]
    path = tmp_path / "hostile.ledger"
    path.write_bytes(content + END)
    reader = LedgerReader(path)
    with pytest.raises(LedgerError, match=rf"hostile\.ledger is corrupted at byte \d+: .*{said}"):
        list(reader.records())
    fails("show", path)
    if content is not TEXT_BEYOND:  # its columns are others than those of the good ones
        both = (path, good[1]) if reader.header.side.value == "trainer" else (good[0], path)
        fails("compare", *both)


def test_a_length_beyond_the_file_takes_no_memory(tmp_path: Path) -> None:
    """A header may allow large records; what the file has left decides what is read."""
    path = tmp_path / "cut.ledger"
    path.write_bytes(obs(shape=[1 << 28]) + FRAME.pack(1 << 30, (1 << 30) ^ GUARD, 0) + OBS)
    tracemalloc.start()
    try:
        tail = LedgerReader(path).tail
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tail.records, tail.lost_bytes) == (0, FRAME_BYTES + len(OBS))
    assert peak < 1 << 24


def test_names_are_shown_with_escapes(tmp_path: Path) -> None:
    path = tmp_path / "names.ledger"
    nasty = "a\nside env\x1b[31m"
    path.write_bytes(
        trainer(observation=[column(nasty)], run=nasty, about={"env_id": nasty, nasty: 1}) + reset(0) + END
    )
    done = call("show", path)
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert done.output.count(r"a\nside env\x1b[31m") == 4
    assert [line for line in done.output.splitlines() if line.startswith("side")] == ["side      trainer (gymnasium)"]


class Broken(gym.Env[Any, Any]):
    """Observe half a pair of surrogates, and control characters."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Text(8, charset="x\ud800\n")
        self.action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "x\ud800\n", {}


def test_recorded_text_is_shown_with_escapes(tmp_path: Path) -> None:
    env = LedgerEnv(Broken(), tmp_path / "text.ledger", env_index=0)
    env.reset()
    env.close()
    done = call("show", tmp_path / "text.ledger")
    assert done.exit_code == 0, done.exception
    assert r"reset -> [x\ud800\n]" in done.output


def test_pipes_and_devices_are_refused(tmp_path: Path, good: tuple[Path, Path]) -> None:
    os.mkfifo(tmp_path / "pipe.ledger")
    read, write = os.pipe()
    try:
        for path in (tmp_path / "pipe.ledger", f"/dev/fd/{read}", "/dev/zero"):
            assert "is no regular file" in fails("show", path)
            assert "is no regular file" in fails("compare", path, good[1])
    finally:
        os.close(read)
        os.close(write)
    assert "pipe.ledger is no regular file" in fails("compare", good[0], tmp_path)


def test_what_the_system_refuses_is_one_error(tmp_path: Path, good: tuple[Path, Path]) -> None:
    with pytest.raises(LedgerError, match=r"'nul\\x00' cannot be read: embedded null byte"):
        compare("nul\0", good[1])
    with pytest.raises(LedgerError, match=r"'nul\\x00' cannot be read: embedded null byte"):
        compare(good[0], "nul\0")
    paths = [tmp_path / ("x" * 300), tmp_path / "loop.ledger"]
    (tmp_path / "loop.ledger").symlink_to("loop.ledger")
    if Path("/proc/self/mem").exists():
        paths.append(Path("/proc/self/mem"))  # it opens, and cannot be read
    for path in paths:
        assert "cannot be read" in fails("show", path)
        assert "cannot be read" in fails("compare", path, good[1])
        assert "cannot be read" in fails("compare", good[0], path)


def test_json_of_any_value() -> None:
    slot = Slot(0, 0, 0)
    found = Comparison((slot,), HeatMap(1))
    found.add(Difference(slot, 0, 0, 0, "obs", "obs\x1b", np.longdouble(1.5), b"\xff", 1))
    first = json.loads(json.dumps(found.as_json()))["first"]
    assert (first["trainer_value"], first["env_value"]) == ("1.5", r"b'\xff'")
    assert "\x1b" not in str(found)


def test_picture_is_bounded_and_named(tmp_path: Path, good: tuple[Path, Path]) -> None:
    from plugrl_bridges.ledger.plot import plot_differences  # noqa: PLC0415 - matplotlib is an extra

    done = call("plot", *good, "--out", tmp_path / "pic")
    assert done.exit_code == 0
    assert done.output.endswith(f"written: {tmp_path / 'pic.png'}\n")
    assert (tmp_path / "pic.png").stat().st_size
    tall = Comparison(tuple(Slot(row, 0, row) for row in range(3000)), HeatMap(3000))
    written = plot_differences(tall, tmp_path / "tall.png")
    _, height = struct.unpack(">II", written.read_bytes()[16:24])
    assert height <= 40 * 120


def test_spoilt_records_of_real_ledgers(tmp_path: Path) -> None:
    """Whatever stands in frames whose checksums fit: an answer, or one error."""
    files = tmp_path / "trainer.ledger", tmp_path / "env.ledger"
    venv = DummyVecEnv([partial(LedgerEnv, CountingEnv(n), files[1], env_index=n) for n in range(2)])
    recorded = LedgerVecEnv(venv, files[0])
    recorded.reset()
    for _ in range(12):
        recorded.step(np.zeros((2, 2), np.float32))
    recorded.close()
    whole = [path.read_bytes() for path in files]
    seen = {0: 0, 1: 0, 2: 0}
    for seed in range(150):
        chance = random.Random(seed)
        side = seed % 2
        files[side].write_bytes(spoilt(whole[side], chance))
        for words in (("compare", "--json", *files), ("show", files[side], "--events", 100)):
            done = call(*words)
            assert done.exception is None or isinstance(done.exception, SystemExit), (seed, done.exception)
            seen[done.exit_code] += 1
        files[side].write_bytes(whole[side])
    assert all(seen.values()), seen


def spoilt(content: bytes, chance: random.Random) -> bytes:
    """Change some bytes of one frame, or of the header's, and make its checksum fit."""
    pieces, at = [], len(MAGIC)
    while at < len(content):
        length = FRAME.unpack_from(content, at)[0]
        pieces.append(bytearray(content[at + FRAME_BYTES : at + FRAME_BYTES + length]))
        at += FRAME_BYTES + length
    piece = chance.choice([pieces[0], *pieces[1:4], chance.choice(pieces)])
    for _ in range(chance.choice((1, 1, 3))):
        piece[chance.randrange(len(piece))] = chance.choice((0, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return MAGIC + b"".join(frame(bytes(each)) for each in pieces)
