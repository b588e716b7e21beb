from __future__ import annotations

import dataclasses
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import decode, encode
from plugrl_bridges.wire.messages import (
    Action,
    Feedback,
    Infer,
    Message,
    Metadata,
    Observation,
    ResetRequest,
    parse,
    parse_bytes,
)
from tests.wire.strategies import actions, feedbacks, ids, infers, metadata, sent

if TYPE_CHECKING:
    from collections.abc import Callable

quick = settings(deadline=None, max_examples=100)


def refused(wire: Any, clause: str, named: str | None = None) -> None:
    with pytest.raises(RemoteProtocolError, match=named) as caught:
        parse_bytes(b"".join(encode(wire)))
    assert caught.value.clause == clause
    assert len(str(caught.value)) < 600


def plain_infer(n: int = 2, **changes: Any) -> dict[str, Any]:
    return Infer(Observation({}, {"s": np.zeros((n, 3))}), ids(list(range(n))), ids([0] * n)).to_wire() | changes


def plain_feedback(m: int = 2, **changes: Any) -> dict[str, Any]:
    flags = np.zeros(m, np.bool_)
    observation = Observation({}, {"s": np.zeros((m, 3))})
    wire = Feedback(observation, ids(list(range(m))), ids([0] * m), np.zeros(m, np.float32), flags, flags).to_wire()
    wire["data"] |= changes
    return wire


@quick
@given(st.one_of(metadata, infers(), actions(), feedbacks()))
def test_messages_come_back_as_they_were(message: Message) -> None:
    data = sent(message)
    found = parse_bytes(data)
    assert type(found) is type(message)
    assert sent(found) == data


def test_messages_are_frozen() -> None:
    message = parse_bytes(sent(Metadata({})))
    assert isinstance(message, Metadata)
    with pytest.raises(dataclasses.FrozenInstanceError):
        message.data = {}  # type: ignore[misc]


def test_a_text_frame_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="text frame") as caught:
        parse_bytes("{}")
    assert caught.value.clause == "1"


def test_observations_of_a_parsed_message_are_views_of_its_bytes_and_the_names_of_envs_are_not() -> None:
    buffer = bytearray(b"".join(encode(plain_infer())))
    message = parse_bytes(memoryview(buffer))
    assert isinstance(message, Infer)
    for array in (message.observation.states["s"], message.step_ids):
        assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))
    # A session keeps these for longer than the message lives.
    assert not np.shares_memory(message.env_indices, np.frombuffer(buffer, np.uint8))


@pytest.mark.parametrize("data", [{}, {"features": None}, {"features": "reuse"}, {"features": [1]}, {"other": [1, {}]}])
def test_metadata_requires_no_key_and_ignores_unknown_ones(data: dict[str, Any]) -> None:
    message = parse({"message_type": "metadata", "data": data, "more": 1})
    assert isinstance(message, Metadata)
    assert message.data == data
    assert message.features == frozenset()


def test_metadata_without_data_is_empty() -> None:
    assert parse({"message_type": "metadata"}) == Metadata({})


@pytest.mark.parametrize("dtype", ["<i8", "<i4", ">i8", "|u1", "<u2"])
def test_env_indices_of_any_int_dtype_become_int64(dtype: str) -> None:
    message = parse(plain_infer(env_indices=np.array([3, 1], dtype)))
    assert isinstance(message, Infer)
    assert message.env_indices.dtype == np.int64
    assert message.env_indices.tolist() == [3, 1]


@pytest.mark.parametrize("names", [[2**31], [2**63 - 1], [-1], [-(2**63)]])
def test_env_indices_are_small(names: list[int]) -> None:
    refused(plain_infer(1, env_indices=ids(names)), "4.4", "small non-negative")
    refused(plain_infer(1, env_indices=np.array([2**64 - 1], np.uint64)), "4.4", "small non-negative")


def test_the_largest_small_env_index_is_accepted() -> None:
    message = parse(plain_infer(1, env_indices=ids([2**31 - 1])))
    assert isinstance(message, Infer)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (np.array(["a", "bc"]), ["a", "bc"]),
        (np.array(["a", "bc"], dtype=">U9"), ["a", "bc"]),
        (["a", "bc"], ["a", "bc"]),
        (["", ""], ["", ""]),
        ("push", ["push", "push"]),
        ("", ["", ""]),
    ],
    ids=repr,
)
def test_the_three_forms_of_text_are_one_str_per_env(form: Any, expected: list[str]) -> None:
    wire = plain_infer()
    wire["data"]["text"] = form
    message = parse_bytes(b"".join(encode(wire)))
    assert isinstance(message, Infer)
    assert message.observation.text is not None
    assert message.observation.text.tolist() == expected


@pytest.mark.parametrize(
    "form", [[], ["a"], ["a", "b", "c"], ["a", 1], np.array([["a", "b"]]), np.array("a"), b"ab", 1, {}]
)
def test_other_forms_of_text_are_refused(form: Any) -> None:
    wire = plain_infer()
    wire["data"]["text"] = form
    refused(wire, "3.4", "text must hold 2 str")


@pytest.mark.parametrize("form", [np.array(["a", "b"]), ["a", "b"], [], "a", np.array([], "<U1")], ids=repr)
def test_text_of_marked_rows_is_dropped(form: Any) -> None:
    wire = plain_infer(reuse=np.array([True, True]))
    wire["data"] = {"images": {}, "states": {}, "text": form}
    message = parse_bytes(b"".join(encode(wire)))
    assert isinstance(message, Infer)
    assert message.observation.text is not None
    assert message.observation.text.shape == (0,)


@pytest.mark.parametrize("form", ["x" * 100_000, ["x" * 100_000] + [""] * 9999])
def test_long_text_for_many_envs_costs_no_memory(form: Any) -> None:
    """A short message could otherwise cost 4 GB: numpy pads every str to the longest."""
    n = 10_000
    wire = plain_infer(n)
    wire["data"]["text"] = form
    data = b"".join(encode(wire))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="MiB") as caught:
            parse_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.clause == "3.4"


@pytest.mark.parametrize("dtype", ["|b1", "|u1", "<i2", ">i8", "<f2", "<f8", "<U3"])
def test_states_of_any_dtype_and_shape_are_accepted(dtype: str) -> None:
    for shape in ((2,), (2, 1), (2, 3, 4), (2, 0)):
        wire = plain_infer()
        wire["data"]["states"] = {"obs": np.zeros(shape, dtype)}
        message = parse_bytes(b"".join(encode(wire)))
        assert isinstance(message, Infer)
        assert message.observation.states["obs"].shape == shape
        assert message.observation.states["obs"].dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("images", {b"a": np.zeros((2, 1, 1, 1), np.uint8)}),
        ("images", {"a": np.zeros((2, 1, 1, 1), np.int8)}),
        ("images", {"a": np.zeros((2, 1, 1), np.uint8)}),
        ("images", {"a": np.zeros((1, 1, 1, 1), np.uint8)}),
        ("images", {"a": 1}),
        ("images", []),
        ("images", None),
        ("states", {b"a": np.zeros(2)}),
        ("states", {"a": np.zeros(())}),
        ("states", {"a": np.zeros(3)}),
        ("states", {"a": [1.0, 2.0]}),
        ("states", {"a": "text"}),
        ("states", {"a" * 10_000: np.zeros(3)}),
        ("states", np.zeros(2)),
    ],
)
def test_entries_of_the_wrong_form_are_refused(key: str, entry: Any) -> None:
    wire = plain_infer()
    wire["data"][key] = entry
    refused(wire, "5.2")
    wire = plain_feedback(2, obs=wire["data"])
    refused(wire, "5.4")


def test_errors_do_not_repeat_what_a_peer_can_make_long() -> None:
    many = {f"{i}{'k' * 1000}": 1 for i in range(1000)}
    wire = plain_infer()
    refused(wire | {"data": many}, "5.2")
    refused({"message_type": "m" * 10_000}, "2")
    refused({"message_type": "infer"} | many, "5.2")
    refused(plain_feedback(2, **many), "5.4")
    refused(plain_feedback(2, info=many), "5.4")
    refused(plain_infer(1000, env_indices=ids([1] * 1000)), "4.4")


def test_reuse_of_some_leaves_their_rows_out() -> None:
    wire = plain_infer(reuse=np.array([True, False]))
    refused(wire, "10.1", "leading dimension of 2, expected 1")
    wire["data"]["states"]["s"] = np.zeros((1, 3))
    wire["data"]["text"] = np.array(["x"])
    message = parse(wire)
    assert isinstance(message, Infer)
    assert len(message.observation.states["s"]) == 1
    assert sent(message) == b"".join(encode(wire))


@pytest.mark.parametrize(
    "reuse", [np.zeros(2, np.uint8), np.zeros(3, np.bool_), np.zeros((2, 1), np.bool_), [True, False], True, 0]
)
def test_reuse_is_a_bool_array_of_n(reuse: Any) -> None:
    refused(plain_infer(reuse=reuse), "10.1", "reuse must be a bool array of length 2")


def test_reuse_of_none_sends_all_rows() -> None:
    message = parse(plain_infer(reuse=np.zeros(2, np.bool_)))
    assert isinstance(message, Infer)
    assert parse(plain_infer(reuse=None)) is not None


@pytest.mark.parametrize("key", ["env_spec", "reset_info"])
def test_optional_maps_are_maps(key: str) -> None:
    refused(plain_infer() | {key: [1]}, "env-spec", key)
    message = parse(plain_infer() | {key: None})
    assert isinstance(message, Infer)
    assert getattr(message, key) is None


def test_reset_info_is_batched_as_an_info_is() -> None:
    refused(plain_infer(reset_info={"task": "pick"}), "env-spec", "infer: reset_info with keys")
    message = parse(plain_infer(reset_info={"task": "pick", "k": np.arange(2)}))
    assert isinstance(message, Infer)
    assert parse(plain_infer(reset_info={})) is not None
    many = {str(i): None for i in range(40_000)} | {"k": np.arange(1000)}
    refused(plain_infer(1000, reset_info=many), "env-spec", "entries for 1000 envs")


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", ">f4", "<i8", "|u1", "|b1"])
@pytest.mark.parametrize("shape", [(1, 2), (4, 2, 1), (1, 2, 2, 3), (1, 2, 0)])
def test_actions_keep_their_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    message = parse_bytes(sent(Action(ids([4, 2]), np.zeros(shape, dtype))))
    assert isinstance(message, Action)
    assert message.action.dtype == np.dtype(dtype)
    assert message.action.shape == shape
    assert message.env_ids is not None
    assert message.env_ids.tolist() == [4, 2]


def test_actions_without_env_ids_have_none() -> None:
    message = parse_bytes(sent(Action(None, np.zeros((1, 2, 2)))))
    assert isinstance(message, Action)
    assert message.env_ids is None


@pytest.mark.parametrize(
    "action",
    [
        np.zeros(2),
        np.zeros((0, 2, 1)),
        np.array([["a", "b"]]),
        [[1.0, 2.0]],
        1.0,
        np.zeros((1, 3, 1)),
        np.zeros((2, 1)),
    ],
)
def test_actions_of_the_wrong_form_are_refused(action: Any) -> None:
    refused({"message_type": "action", "data": {"env_ids": ids([0, 1]), "action": action}}, "5.3")


def test_reset_requests_round_trip() -> None:
    request = ResetRequest(ids([1, 0]), (2**64 - 1, None), ({"a": [1, {"b": 2.5}]}, None))
    found = parse_bytes(sent(Action(ids([0, 1]), np.zeros((1, 2, 1)), request)))
    assert isinstance(found, Action)
    assert found.reset is not None
    assert found.reset.env_ids.tolist() == [1, 0]
    assert (found.reset.seeds, found.reset.options) == (request.seeds, request.options)


def test_reset_requests_may_leave_seed_and_options_out() -> None:
    wire = Action(ids([0, 1]), np.zeros((1, 2, 1))).to_wire() | {"reset": {"env_ids": ids([1])}}
    found = parse(wire)
    assert isinstance(found, Action)
    assert found.reset is not None
    assert (found.reset.seeds, found.reset.options) == ((None,), (None,))
    wire["reset"]["seed"] = ids([9])
    found = parse(wire)
    assert isinstance(found, Action)
    assert found.reset is not None
    assert found.reset.seeds == (9,)


@pytest.mark.parametrize(
    "reset",
    [
        [],
        {"seed": [1]},
        {"env_ids": [1]},
        {"env_ids": ids([7])},
        {"env_ids": ids([1, 1])},
        {"env_ids": ids([1]), "seed": [1, 2]},
        {"env_ids": ids([1]), "seed": [-1]},
        {"env_ids": ids([1]), "seed": [True]},
        {"env_ids": ids([1]), "seed": [1.0]},
        {"env_ids": ids([1]), "seed": 1},
        {"env_ids": ids([1]), "seed": np.array([1.0])},
        {"env_ids": ids([1]), "options": [1]},
        {"env_ids": ids([1]), "options": {}},
    ],
)
def test_malformed_reset_requests_are_refused(reset: Any) -> None:
    wire = Action(ids([0, 1]), np.zeros((1, 2, 1))).to_wire() | {"reset": reset}
    with pytest.raises(RemoteProtocolError) as caught:
        parse_bytes(b"".join(encode(wire)))
    assert caught.value.clause in {"seeded-reset", "4.4"}


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
def test_rewards_of_any_float_width_are_accepted(dtype: str) -> None:
    message = parse_bytes(b"".join(encode(plain_feedback(2, rewards=np.array([0.5, 1.5], dtype)))))
    assert isinstance(message, Feedback)
    assert message.rewards.tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    "rewards", [np.zeros(2, np.int64), np.zeros((2, 1)), np.zeros(3), [0.0, 0.0], 0.0, np.float32(1), None]
)
def test_rewards_of_another_form_are_refused(rewards: Any) -> None:
    refused(plain_feedback(2, rewards=rewards), "5.4", "rewards must be a float array of length 2")


@pytest.mark.parametrize("key", ["terminated", "truncated"])
@pytest.mark.parametrize(
    "flags", [np.zeros(2), np.zeros(2, np.uint8), np.zeros(1, np.bool_), [False, False], False, None]
)
def test_flags_of_another_form_are_refused(key: str, flags: Any) -> None:
    refused(plain_feedback(2, **{key: flags}), "5.4", f"{key} must be a bool array of length 2")


def test_an_empty_feedback_is_a_message() -> None:
    message = parse_bytes(b"".join(encode(plain_feedback(0))))
    assert isinstance(message, Feedback)
    assert len(message.env_indices) == 0


def test_unknown_keys_beside_data_are_ignored() -> None:
    later: list[Callable[..., dict[str, Any]]] = [plain_infer, plain_feedback]
    for make in later:
        assert parse(make() | {"step_digest": 1, "later": {}}) is not None


def test_parse_takes_what_decode_gives() -> None:
    value = decode(b"".join(encode(plain_infer())))
    assert sent(parse(value)) == b"".join(encode(plain_infer()))


@pytest.mark.parametrize("value", [None, 1, "infer", b"infer", [], [1], np.zeros(2), np.float32(1)])
def test_what_is_no_map_is_no_message(value: Any) -> None:
    refused(value, "2", "a message is a map")


@pytest.mark.parametrize("kind", [None, 1, "", "Infer", b"infer", ["infer"], {"a": 1}, np.zeros(2)])
def test_message_types_are_the_four(kind: Any) -> None:
    refused({"message_type": kind}, "2", "must be one of metadata, infer, action, feedback")
