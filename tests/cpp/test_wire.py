"""The header's codec, session and frames against the golden vectors, the malformed corpus and mutants of both."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HERE = Path(__file__).resolve().parent
VECTORS = HERE.parent / "vectors"
MANIFEST: dict[str, list[dict[str, Any]]] = json.loads((VECTORS / "manifest.json").read_text(encoding="utf-8"))
GOOD, MALFORMED, SEQUENCES = MANIFEST["good"], MANIFEST["malformed"], MANIFEST["sequences"]
DIGESTS = MANIFEST["digests"]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MUTANTS, SEED = 100_000, 20_240_917
OF_CLIENTS = ("malformed/infer_", "malformed/feedback_")


@pytest.fixture(scope="module")
def wire(build: Callable[..., Path]) -> Path:
    return build(HERE / "wire.cpp", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")


@pytest.fixture(scope="module")
def sanitized(build: Callable[..., Path]) -> Path:
    return build(HERE / "wire.cpp", "-O1", "-g", *SANITIZERS, name="wire-sanitized")


def lines(program: Path, *arguments: str) -> list[str]:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
    return done.stdout.splitlines()


def paths(entries: Sequence[dict[str, Any]]) -> list[str]:
    return [str(VECTORS / entry["file"]) for entry in entries]


def plain(value: Any) -> Any:
    """Bring the manifest's content and the program's into one form: types beside values, no fill, no text."""
    if isinstance(value, dict):
        if "$array" in value:
            array = value["$array"]
            items = array.get("values")
            if items is None:
                count = 1
                for extent in array["shape"]:
                    count *= extent
                items = [array["fill"]] * count
            if array["dtype"][1] == "U":
                items = [_points(item, int(array["dtype"][2:])) for item in items]
            return "array", array["dtype"], array["shape"], [plain(item) for item in items]
        if "$scalar" in value:
            return "scalar", value["$scalar"]["dtype"], plain(value["$scalar"]["value"])
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return type(value).__name__, repr(value)  # so that 1 is not 1.0, and 0.0 not -0.0


def _points(text: Any, length: int) -> list[int]:
    return text if isinstance(text, list) else [ord(c) for c in text] + [0] * (length - len(text))


@pytest.mark.timeout(400)
def test_reads_what_is_good_and_writes_the_canonical_byte_for_byte(wire: Path) -> None:
    found = [json.loads(line) for line in lines(wire, "dump", *paths(GOOD))]
    assert {
        entry["file"] for entry, each in zip(GOOD, found, strict=True) if entry["canonical"] and not each["same"]
    } == set()
    for entry, each in zip(GOOD, found, strict=True):
        assert plain(each["content"]) == plain(entry["content"]), entry["file"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("program", ["wire", "sanitized"])
def test_refuses_the_malformed(program: str, request: pytest.FixtureRequest) -> None:
    """The reader refuses what is no value, a client's session everything."""
    answers = lines(request.getfixturevalue(program), "refuse", *paths(MALFORMED))
    for entry, answer in zip(MALFORMED, answers, strict=True):
        reader, first, later = answer.split()
        if entry["error"] == "DecodeError":
            assert (reader, first, later) == (entry["clause"],) * 3, entry["file"]
        else:
            assert reader == "none", entry["file"]
            assert "none" not in {first, later}, entry["file"]
            if not entry["file"].startswith(OF_CLIENTS):
                assert entry["clause"] in {first, later}, entry["file"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sequence", SEQUENCES, ids=[sequence["what"] for sequence in SEQUENCES])
def test_refuses_what_is_out_of_turn(sequence: dict[str, Any], wire: Path) -> None:
    *before, last = sequence["steps"]
    if last["from"] == "client":
        pytest.skip("it is the server that refuses it")
    said = [
        f"s:{VECTORS / step['file']}" if step["from"] == "server" else _kind(step["file"]) for step in (*before, last)
    ]
    assert lines(wire, "play", *said) == ["ok"] * len(before) + [sequence["clause"]]


def _kind(file: str) -> str:
    return Path(file).name.partition("_")[0]


def entry(of: dict[str, Any], value: np.ndarray[Any, Any], dtype: str | None = None) -> str:
    """Write an entry for the program: the typestr of its space, that of the value, its bytes."""
    carried = value.astype(dtype or of["dtype"])
    return f"{of['dtype']}:{carried.dtype.str}:{carried.tobytes().hex()}"


def value_of(of: dict[str, Any], content: Any) -> np.ndarray[Any, Any]:
    plain_value = content["$array"]["values"] if "$array" in content else content["$scalar"]["value"]
    return np.array(plain_value, of["dtype"]).reshape(of["shape"])


def by_name(entries: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[str]:
    return [text for _, text in sorted(zip([of["name"].encode() for of in entries], texts, strict=True))]


@pytest.mark.timeout(400)
def test_of_a_float_for_an_integer_the_whole_part_counts(sanitized: Path) -> None:
    of = {"dtype": "<i2"}
    sums = [
        lines(sanitized, "digest", "0", "0" * 16, entry(of, np.array(values), dtype))
        for values, dtype in (([0.7, -0.7, 2.9, -3.1], "<f4"), ([0.7, -0.7, 2.9, -3.1], ">f8"), ([0, 0, 2, -3], "<i8"))
    ]
    assert sums[0] == sums[1] == sums[2] != ["0" * 16]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("vector", DIGESTS, ids=[vector["file"] for vector in DIGESTS])
def test_digests_are_those_of_the_vectors(vector: dict[str, Any], sanitized: Path) -> None:
    """The sum of each row of words, chained; an action may come in another dtype than that of its space."""
    chain = 0
    for event in vector["events"]:
        chain = 0 if event["reset"] else chain * 0xD1342543DE82EF95
        taken = [np.zeros(of["shape"], of["dtype"]) for of in vector["action"]]
        if not event["reset"]:
            taken = [value_of(*each) for each in zip(vector["action"], event["action"], strict=True)]
        flags = 4 if event["reset"] else event["terminated"] + 2 * event["truncated"]
        row = [str(flags), struct.pack(">d", event.get("reward", 0.0)).hex()]
        given = by_name(
            vector["observation"],
            [
                entry(of, value_of(of, content))
                for of, content in zip(vector["observation"], event["observation"], strict=True)
            ],
        )
        sums = set()
        for wider in ("f8", "i8", ">f8", ">i4"):
            actions = [
                entry(of, value, wider if wider[-2] == ("f" if of["dtype"][1] == "f" else "i") else None)
                for of, value in zip(vector["action"], taken, strict=True)
            ]
            sums.update(lines(sanitized, "digest", *row, *by_name(vector["action"], actions), *given))
        [sum_of_words] = sums
        chain = (chain + int(sum_of_words, 16)) % 2**64
        assert f"{chain:016x}" == event["chain"]


@pytest.mark.timeout(400)
def test_frames(wire: Path) -> None:
    assert lines(wire, "frames") == ["ok"]


@pytest.mark.timeout(400)
def test_frames_and_good_files_under_sanitizers(sanitized: Path) -> None:
    assert lines(sanitized, "frames") == ["ok"]
    assert len(lines(sanitized, "dump", *paths(GOOD))) == len(GOOD)


@pytest.mark.timeout(400)
def test_refuses_what_is_out_of_bounds_under_sanitizers(sanitized: Path) -> None:
    """Sizes that wrap, names below 0, observations of a wrong count, unusable spaces."""
    assert lines(sanitized, "bounds") == ["ok"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mutants_under_sanitizers(sanitized: Path) -> None:
    answer = lines(sanitized, "fuzz", str(MUTANTS), str(SEED), *paths([*GOOD, *MALFORMED]))
    assert len(answer) == 1
    assert answer[0].startswith(f"ok, {MUTANTS} mutants: "), answer
