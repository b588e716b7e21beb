"""The short road out: its bytes must be those of the general road."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plugrl_bridges.errors import EncodeError
from plugrl_bridges.wire import learned_writer
from plugrl_bridges.wire.learned_writer import LearnedWriter
from plugrl_bridges.wire.messages import (
    Action,
    Feedback,
    Infer,
    Message,
    Metadata,
    Observation,
    ResetRequest,
    to_bytes,
)

RNG = np.random.default_rng(0)


def _feedback(m: int, *, names: tuple[str, ...] = ("obs",), info: bool = False, wide: int = 3) -> Feedback:
    return Feedback(
        Observation({}, {name: RNG.random((m, wide)) for name in names}),
        RNG.permutation(m),
        RNG.integers(0, 99, m),
        RNG.random(m),
        RNG.random(m) < 0.5,
        RNG.random(m) < 0.5,
        {"speed": RNG.random(m)} if info else {},
    )


def _infer(n: int, *, marked: int = 0, text: bool = False) -> Infer:
    sent = n - marked
    texts = np.array([f"text {i}" for i in range(sent)]) if text and sent else None
    image = RNG.integers(0, 256, (sent, 8, 8, 3), np.uint8)
    observation = Observation({"camera": image}, {"obs": RNG.random((sent, 2))}, texts)
    return Infer(observation, np.arange(n), np.arange(n), (np.arange(n) < marked) if marked else None)


def _digested(message: Feedback | Infer) -> Message:
    return replace(message, digest=RNG.integers(0, 1 << 64, len(message.env_indices), np.uint64))


MESSAGES: dict[str, list[Message]] = {
    "feedbacks": [_feedback(3), _feedback(3), _feedback(4), _feedback(3)],
    "feedbacks of other names": [_feedback(3), _feedback(3, names=("other",)), _feedback(3, names=("obs", "more"))],
    "feedbacks with and without info": [_feedback(3), _feedback(3, info=True), _feedback(3)],
    "empty feedbacks": [_feedback(0), _feedback(0)],
    "large feedbacks": [_feedback(16, wide=9000), _feedback(16, wide=9000)],
    "infers": [_infer(3), _infer(3), _infer(3, marked=1), _infer(3, marked=3), _infer(3, marked=3), _infer(3)],
    "infers with text": [_infer(3, text=True), _infer(3, text=True), _infer(3)],
    "feedbacks with digests": [_digested(_feedback(3)), _feedback(3), _digested(_feedback(3)), _digested(_feedback(4))],
    "infers with digests": [
        _digested(_infer(3)), _infer(3), _digested(_infer(3, marked=1)), _infer(3, marked=1), _digested(_infer(3)),
    ],
    "actions": [Action(np.arange(2), np.full((4, 2, 1), v, np.float32)) for v in range(3)],
    "actions of other dtypes": [Action(np.arange(2), np.zeros((1, 2, 1), d)) for d in ("<f4", "<i8", "<f8")],
    "actions in another order": [Action(np.arange(2), np.asfortranarray(RNG.random((4, 2, 3)))) for _ in range(3)],
    "actions with a reset": [
        Action(np.arange(2), np.zeros((1, 2, 1)), ResetRequest(np.array([1]), (7,), (None,))),
        Action(np.arange(2), np.ones((1, 2, 1))),
        Action(np.arange(2), np.ones((1, 2, 1)), ResetRequest(np.array([0]), (8,), ({"a": 1},))),
    ],
    "metadata": [Metadata({"features": ["a"]}), Metadata({})],
}  # fmt: skip


@pytest.mark.parametrize("messages", MESSAGES.values(), ids=list(MESSAGES))
def test_the_bytes_are_those_of_the_general_road(messages: list[Message]) -> None:
    writer = LearnedWriter()
    for message in messages:
        assert b"".join(writer(message)) == b"".join(to_bytes(message))


def test_layouts_that_take_turns_are_learned_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LearnedWriter()
    messages = [_infer(3, marked=marked) for marked in (0, 1, 2, 3)]
    for message in messages:
        writer(message)
    monkeypatch.setattr(learned_writer, "to_bytes", None)
    for message in messages:
        assert b"".join(writer(message)) == b"".join(to_bytes(message))


def test_ever_new_layouts_are_not_kept() -> None:
    writer = LearnedWriter()
    for m in range(1, 50):
        message = _feedback(m)
        assert b"".join(writer(message)) == b"".join(to_bytes(message))
    assert sum(map(len, writer._layouts.values())) <= 8


def test_an_image_and_a_state_of_the_same_name_are_told_apart() -> None:
    writer = LearnedWriter()
    array = np.zeros((1, 2, 2, 3), np.uint8)
    ids = np.arange(1)
    for observation in (Observation({"a": array}, {}), Observation({}, {"a": array})):
        message = Infer(observation, ids, ids)
        assert b"".join(writer(message)) == b"".join(to_bytes(message))


def test_large_arrays_are_not_copied() -> None:
    writer = LearnedWriter()
    message = _feedback(16, wide=9000)
    writer(message)
    obs = message.observation.states["obs"]
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), obs) for part in writer(message))


def test_text_that_is_no_unicode_is_refused_on_the_short_road_too() -> None:
    writer = LearnedWriter()
    ids = np.arange(1)
    writer(Infer(Observation({}, {}, np.array(["a"])), ids, ids))
    with pytest.raises(EncodeError, match="surrogate"):
        writer(Infer(Observation({}, {}, np.array(["\ud800"])), ids, ids))
