"""The short road for messages that look like the one before: it must be indistinguishable from the general one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire import learned
from plugrl_bridges.wire.learned import LearnedParser
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Message, Observation, parse_bytes, to_bytes


def _feedback(seed: int, m: int = 3, *, image: bool = False, info: bool = False) -> Feedback:
    rng = np.random.default_rng(seed)
    images = {"camera": rng.integers(0, 256, (m, 4, 5, 3), np.uint8)} if image else {}
    return Feedback(
        Observation(images, {"obs": rng.random((m, 4)), "mode": rng.integers(0, 9, m)}, None),
        np.arange(m),
        rng.integers(0, 1000, m),
        rng.random(m),
        rng.random(m) < 0.5,
        rng.random(m) < 0.5,
        {"speed": rng.random(m), "inner": {"on": rng.random(m) < 0.5, "unit": "m/s"}} if info else {},
    )


def _infer(seed: int, n: int = 3, *, reused: int = 0) -> Infer:
    rng = np.random.default_rng(seed)
    reuse = np.arange(n) < reused if reused else None
    return Infer(Observation({}, {"obs": rng.random((n - reused, 2), np.float32)}), np.arange(n), np.arange(n), reuse)


def _digested(message: Feedback | Infer, seed: int) -> Message:
    digest = np.random.default_rng(seed).integers(0, 1 << 64, len(message.env_indices), np.uint64)
    return replace(message, digest=digest)


def _bytes(message: Message) -> bytes:
    return b"".join(to_bytes(message))


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (Observation, Feedback, Infer, Action)):
        return type(one) is type(other) and all(
            _same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    return bool(one == other)


STREAMS: dict[str, list[Message]] = {
    "feedback": [_feedback(seed) for seed in range(4)],
    "feedback with images": [_feedback(seed, image=True) for seed in range(4)],
    "feedback with info": [_feedback(seed, info=True) for seed in range(4)],
    "infer": [_infer(seed) for seed in range(4)],
    "infer that reuses some": [_infer(seed, reused=2) for seed in range(4)],
    "infer that reuses all": [_infer(seed, reused=3) for seed in range(4)],
    "feedback with digests": [_digested(_feedback(seed, info=True), seed) for seed in range(4)],
    "infer with digests": [_digested(_infer(seed, reused=2), seed) for seed in range(4)],
    "action": [Action(np.arange(3), np.full((2, 3, 1), seed, np.float32)) for seed in range(4)],
    "feedback with text in its states": [
        Feedback(
            Observation({}, {"said": np.array(["push", text])}),
            np.arange(2),
            np.arange(2),
            np.zeros(2),
            np.zeros(2, np.bool_),
            np.zeros(2, np.bool_),
            {"task": np.array([text, "pick"])},
        )
        for text in ("left", "back", "down", "away")
    ],
    "feedback with arrays without dimensions": [
        Feedback(
            Observation({}, {"s": np.zeros(1)}),
            np.arange(1),
            np.arange(1),
            np.zeros(1),
            np.zeros(1, np.bool_),
            np.zeros(1, np.bool_),
            {"on": np.array(on), "speed": np.array(0.5), "none": np.empty((0, 2))},
        )
        for on in (True, False, True, False)
    ],
    "shapes that change": [_feedback(0, 3), _feedback(1, 4), _feedback(2, 3), _feedback(3, 4)],
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=list(STREAMS))
def test_a_stream_is_parsed_as_by_the_general_road(stream: list[Message]) -> None:
    parser = LearnedParser()
    for message in stream:
        data = _bytes(message)
        assert _same(parser(data), parse_bytes(data))


@pytest.mark.parametrize("stream", list(STREAMS.values())[:7], ids=list(STREAMS)[:7])
def test_the_second_message_of_a_layout_is_not_decoded(stream: list[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    parser = LearnedParser()
    parser(_bytes(stream[0]))

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(learned, "decode", refuse)
    for message in stream[1:]:
        assert _same(
            parser(_bytes(message)),
            message if not isinstance(message, (Feedback, Infer)) else parse_bytes(_bytes(message)),
        )


def test_arrays_are_views_of_the_message_and_not_of_an_older_one() -> None:
    parser = LearnedParser()
    parser(_bytes(_feedback(0)))
    data = bytearray(_bytes(_feedback(1)))
    parsed = parser(memoryview(data))
    assert isinstance(parsed, Feedback)
    assert np.shares_memory(parsed.rewards, np.frombuffer(data, np.uint8))


def test_a_text_frame_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"\[1\]"):
        LearnedParser()("text")


def test_other_env_indices_of_the_same_length_take_the_general_road() -> None:
    parser = LearnedParser()
    first = _feedback(0)
    parser(_bytes(first))
    other = Feedback(
        first.observation, np.array([0, 2, 2]), first.step_ids, first.rewards, first.terminated, first.truncated
    )
    with pytest.raises(RemoteProtocolError, match="twice"):
        parser(_bytes(other))


@pytest.mark.parametrize("where", ["states", "info"])
def test_text_is_checked_in_every_message(where: str) -> None:
    parser = LearnedParser()
    first = STREAMS["feedback with text in its states"][0]
    parser(_bytes(first))
    data = _bytes(first)
    letter = "p".encode("utf-32-le") if where == "states" else "k".encode("utf-32-le")
    broken = data.replace(letter, (0x110000).to_bytes(4, "little"))
    assert len(broken) == len(data)
    with pytest.raises(RemoteProtocolError, match=r"\[3\.4\]"):
        parser(broken)


def test_long_constant_parts_are_not_remembered() -> None:
    parser = LearnedParser()
    first = _feedback(0)
    parser(_bytes(replace(first, info={"x": np.zeros(3), "note": "n" * 100_000})))
    assert not parser._layouts


def test_layouts_are_forgotten_when_there_are_many() -> None:
    parser = LearnedParser()
    for m in range(1, 100):
        parser(_bytes(_feedback(m, m)))
    assert len(parser._layouts) <= 8


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(STREAMS)), st.integers(0, 10_000), st.integers(0, 255))
def test_one_changed_byte_means_what_it_means_to_the_general_road(name: str, at: int, value: int) -> None:
    stream = STREAMS[name]
    parser = LearnedParser()
    parser(_bytes(stream[0]))
    data = bytearray(_bytes(stream[2]))
    data[at % len(data)] = value
    try:
        expected: Message | str = parse_bytes(bytes(data))
    except RemoteProtocolError as exc:
        expected = str(exc)
    try:
        found: Message | str = parser(bytes(data))
    except RemoteProtocolError as exc:
        found = str(exc)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert _same(found, parse_bytes(bytes(data))) or _has_nan(found)


def _has_nan(message: object) -> bool:
    if isinstance(message, np.ndarray):
        return message.dtype.kind == "f" and bool(np.isnan(message).any())
    if isinstance(message, dict):
        return any(map(_has_nan, message.values()))
    if isinstance(message, (Observation, Feedback, Infer, Action)):
        return any(_has_nan(getattr(message, field.name)) for field in fields(message))
    return False


def test_a_layout_that_never_fits_is_not_learned_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = LearnedParser()
    learns: list[Message] = []

    def learn(message: Message, *rest: Any) -> None:
        learns.append(message)
        LearnedParser._learn(parser, message, *rest)

    monkeypatch.setattr(parser, "_learn", learn)
    ids = np.arange(1)
    for at in range(100):
        message = Infer(Observation({}, {"obs": np.zeros((1, 2))}, np.array([f"say {at:03d}"])), ids, ids)
        assert _same(parser(_bytes(message)), parse_bytes(_bytes(message)))
    assert len(learns) < 20
