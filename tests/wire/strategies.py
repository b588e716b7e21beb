"""Random messages that are legal by themselves, for the tests of this directory."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from plugrl_bridges.wire.messages import Action, Feedback, Infer, Message, Metadata, Observation, ResetRequest, to_bytes

__all__ = [
    "FEATURES",
    "action_for",
    "actions",
    "env_sets",
    "feedbacks",
    "ids",
    "infers",
    "metadata",
    "observation_of",
    "sent",
]

FEATURES = ["reuse-feedback-obs", "env-spec", "seeded-reset"]

env_sets = st.lists(st.integers(0, 5) | st.just(2**31 - 1), min_size=1, max_size=4, unique=True)
metadata = st.builds(
    Metadata,
    st.fixed_dictionaries(
        {},
        optional={
            "protocol_version": st.just(1),
            "action_horizon": st.integers(1, 5),
            "features": st.lists(st.sampled_from(FEATURES), unique=True),
            "unknown": st.none() | st.text(max_size=3),
        },
    ),
)


def sent(message: Message) -> bytes:
    return b"".join(to_bytes(message))


def ids(names: list[int]) -> Any:
    return np.array(names, dtype=np.int64)


@st.composite
def observation_of(draw: st.DrawFn, rows: int) -> Observation:
    images = {name: np.full((rows, 2, 3, 3), 7, np.uint8) for name in draw(st.sets(st.sampled_from(["a", "b"])))}
    dtype = draw(st.sampled_from(["<f8", "<f4", "<i8", "|u1", "|b1", ">f4"]))
    shape = draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    states = {name: np.ones((rows, *shape), dtype) for name in draw(st.sets(st.sampled_from(["s", "t"])))}
    text = draw(st.none() | st.lists(st.sampled_from(["", "push", "größer"]), min_size=rows, max_size=rows))
    return Observation(images, states, None if text is None else np.array(text, dtype="<U6"))


@st.composite
def infers(draw: st.DrawFn, envs: st.SearchStrategy[list[int]] = env_sets) -> Infer:
    names = draw(envs)
    n = len(names)
    reuse = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))) if draw(st.booleans()) else None
    sent = n if reuse is None else n - int(reuse.sum())
    spec = draw(st.none() | st.just({"env_id": "x"}))
    info = draw(st.none() | st.just({"k": np.arange(n)}))
    return Infer(draw(observation_of(sent)), ids(names), ids([0] * n), reuse, spec, info)


def action_for(names: list[int], horizon: int = 1, reset: list[int] | None = None) -> Action:
    request = None if reset is None else ResetRequest(ids(reset), (5,) * len(reset), (None,) * len(reset))
    return Action(ids(names), np.zeros((horizon, len(names), 2), np.float32), request)


@st.composite
def actions(draw: st.DrawFn, envs: st.SearchStrategy[list[int]] = env_sets) -> Action:
    names = draw(envs)
    reset = draw(st.none() | st.lists(st.sampled_from(names), unique=True))
    return action_for(names, draw(st.integers(1, 5)), reset)


@st.composite
def feedbacks(draw: st.DrawFn, envs: st.SearchStrategy[list[int]] = env_sets) -> Feedback:
    names = draw(envs)
    m = len(names)
    flags = st.lists(st.booleans(), min_size=m, max_size=m).map(lambda given: np.array(given, dtype=np.bool_))
    rewards = np.ones(m, draw(st.sampled_from(["<f4", "<f8", "<f2"])))
    choices: list[dict[str, Any]] = [{}, {"k": np.arange(m)}, {"episode": {"r": np.ones(m), "l": np.ones(m, np.int64)}}]
    info = draw(st.sampled_from(choices))
    return Feedback(draw(observation_of(m)), ids(names), ids([1] * m), rewards, draw(flags), draw(flags), info)
