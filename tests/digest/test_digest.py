"""Hold the digest to its definition, as the golden vectors and a second implementation state it."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from plugrl_bridges.digest.digest import EnvDigest, StepDigests, keys, sum_of_words, words_of
from plugrl_bridges.digest.shared import SharedDigests
from plugrl_bridges.ledger import LedgerEnv
from tests.ledger.envs import CountingEnv
from tests.vectors.digest_cases import CASES, Case, Happening, Part, chained, events_of, key, words_of_event
from tests.vectors.generate import HERE

VECTORS = json.loads((HERE / "manifest.json").read_text(encoding="ascii"))["digests"]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def give(digest: EnvDigest, event: Happening) -> int:
    if event.action is None:
        return digest.reset(event.observation)
    digest.take(event.action)
    return digest.give(event.reward, event.terminated, event.truncated, event.observation)


def test_keys_are_those_of_the_definition() -> None:
    assert [int(each) for each in keys(3000)[[0, 1, 2, 299, 2999]]] == [key(at) for at in (0, 1, 2, 299, 2999)]
    assert (keys(5000)[:3000] == keys(3000)).all()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["file"])
def test_vectors_follow_from_their_words(vector: dict[str, Any]) -> None:
    words = np.frombuffer((HERE / vector["file"]).read_bytes(), "<u4").reshape(-1, vector["words"]).tolist()
    chain = 0
    for row, event in zip(words, vector["events"], strict=True):
        chain = chained(chain, row)
        assert f"{chain:016x}" == event["chain"]
        assert (row[0] == 4) is event["reset"]


@each_case
def test_one_env_is_digested_as_defined(case: Case) -> None:
    digest, chain = EnvDigest(case.action, case.observation), 0
    for event in events_of(case):
        chain = chained(chain, words_of_event(case, event))
        assert give(digest, event) == chain


@each_case
def test_a_batch_is_digested_as_its_envs(case: Case) -> None:
    events: list[Happening] = list(events_of(case))
    batch = StepDigests(3, case.action, case.observation)
    singles = [EnvDigest(case.action, case.observation) for _ in range(3)]

    def stacked(parts: tuple[Part, ...], values: list[tuple[Any, ...]]) -> list[Any]:
        return [np.array([value[at] for value in values], each.dtype) for at, each in enumerate(parts)]

    def reset(number: int, rows: list[int] | None) -> None:
        event = events[number]
        before = batch.values
        batch.reset(stacked(case.observation, [event.observation] * 3), rows)
        for row in rows or range(3):
            give(singles[row], Happening(None, 0.0, terminated=False, truncated=False, observation=event.observation))
        assert batch.values is not before

    reset(0, None)
    steps = [event for event in events if event.action is not None]
    for number in range(len(steps)):
        now = [steps[(number + row) % len(steps)] for row in range(3)]
        batch.step(
            stacked(case.action, [event.action for event in now if event.action is not None]),
            np.array([event.reward for event in now]),
            np.array([event.terminated for event in now]),
            np.array([event.truncated for event in now]),
            stacked(case.observation, [event.observation for event in now]),
        )
        assert batch.values.tolist() == [give(single, event) for single, event in zip(singles, now, strict=True)]
        reset(number, [1])
    assert batch.values.tolist() == [single.value for single in singles]


def test_float32_and_float64_on_the_wire_are_the_same() -> None:
    wide = np.random.default_rng(0).normal(size=(2, 5))
    narrow = wide.astype(np.float32)
    sent: list[Any] = [wide, narrow, narrow.astype(np.float64)]
    dtypes = [np.dtype(name) for name in ("f8", "f4", "f8")]
    parts = [StepDigests(2, [Part(dtype, (1,))], [Part(dtype, (5,))]) for dtype in dtypes]
    digests = [
        part.step([values[:, :1]], values[:, 0], np.zeros(2, bool), np.zeros(2, bool), [values]).tolist()
        for part, values in zip(parts, sent, strict=True)
    ]
    assert digests[0] == digests[1] == digests[2]


def test_every_changed_bit_and_every_swap_changes_the_digest() -> None:
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 32, (1, 40), np.uint32)
    base = int(sum_of_words(words)[0])
    for at in range(40):
        for bit in range(32):
            changed = words.copy()
            changed[0, at] ^= np.uint32(1 << bit)
            assert int(sum_of_words(changed)[0]) != base
        swapped = words.copy()
        swapped[0, [at, (at + 1) % 40]] = words[0, [(at + 1) % 40, at]]
        assert int(sum_of_words(swapped)[0]) != base


def test_a_chain_that_differs_stays_so_until_the_reset() -> None:
    left, right = (EnvDigest([Part(np.dtype("f4"), (1,))], [Part(np.dtype("f4"), (2,))]) for _ in range(2))
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    for digest, observation in ((left, zeros), (right, ones)):
        digest.reset([observation])
    for _ in range(100):
        for digest in (left, right):
            digest.take([ones[:1]])
            digest.give(1.0, False, False, [ones])
        assert left.value != right.value
    assert left.reset([ones]) == right.reset([ones])


def test_words_of_an_image_are_its_bytes() -> None:
    image = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8)
    words = words_of(image, Part(image.dtype, (8, 8)))
    assert words.tobytes() == image.tobytes()
    assert struct.unpack("<I", image[0].tobytes()[:4])[0] == words[0, 0]


@each_case
def test_shared_rows_are_digested_as_single_envs(case: Case) -> None:
    """Rows are stepped and reset in any order, and read now and then."""
    shared, singles = (
        SharedDigests(3, case.action, case.observation),
        [EnvDigest(case.action, case.observation) for _ in range(3)],
    )
    rows = [shared.row(number) for number in range(3)]
    events = list(events_of(case))
    order = np.random.default_rng(0).integers(0, 3, 60).tolist()
    places = [0, 0, 0]
    for turn, number in enumerate(order):
        event = events[places[number] % len(events)]
        places[number] += 1
        expected = give(singles[number], event)
        if event.action is None:
            rows[number].reset(event.observation)
        else:
            rows[number].take(event.action)
            rows[number].give(event.reward, event.terminated, event.truncated, event.observation)
        if turn % 4 == 0:
            assert rows[number].value == expected
            assert shared.values.tolist() == [single.value for single in singles]
    assert shared.values.tolist() == [single.value for single in singles]


def test_ledger_envs_share_their_digests() -> None:
    plain = [LedgerEnv(CountingEnv(n), None, digest=True) for n in range(2)]
    shared = SharedDigests(2, *plain[0].entries)
    together = [LedgerEnv(CountingEnv(n), None, digest=shared.row(n)) for n in range(2)]
    for env in (*plain, *together):
        env.reset()
        for step in range(4):
            env.step(np.full(2, step, np.float32))
    assert [env.digest for env in together] == [env.digest for env in plain] == shared.values.tolist()
