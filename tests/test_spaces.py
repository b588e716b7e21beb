from __future__ import annotations

import tracemalloc
import warnings
from collections import OrderedDict
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.spaces import (
    ActionLayout,
    Channel,
    ObservationLayout,
    infer_observation_space,
    space_from_wire,
    space_to_wire,
)
from plugrl_bridges.wire.codec import decode, encode
from plugrl_bridges.wire.messages import Infer, Observation, parse_bytes, to_bytes

Space: TypeAlias = "spaces.Space[Any]"

NEWER = tuple(map(int, gymnasium.__version__.split(".")[:2])) >= (1, 0)

LEAVES: dict[str, Space] = {
    "box": spaces.Box(-1, 1, (3,)),
    "box of f8": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "box of f2": spaces.Box(0, 1, (2,), np.float16),
    "box without a shape": spaces.Box(-5, 5, (), np.float32),
    "box of one": spaces.Box(np.array([-1.0], np.float32), np.array([2.0], np.float32)),
    "box of i4": spaces.Box(-7, 7, (2,), np.int32),
    "box of i8": spaces.Box(-(2**40), 2**40, (2,), np.int64),
    "box of bools": spaces.Box(0, 1, (4,), np.bool_),
    "box of uneven bounds": spaces.Box(np.array([-1, -2], np.float32), np.array([1, np.inf], np.float32)),
    "image HWC": spaces.Box(0, 255, (5, 6, 3), np.uint8),
    "image of four stacked frames": spaces.Box(0, 255, (5, 6, 4), np.uint8),
    "image CHW": spaces.Box(0, 255, (3, 5, 6), np.uint8),
    "bytes": spaces.Box(0, 255, (128,), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete with start": spaces.Discrete(5, start=-2),
    "multi-discrete": spaces.MultiDiscrete([3, 2, 5]),
    "multi-discrete of two dimensions": spaces.MultiDiscrete(np.array([[3, 2], [4, 5]])),
    "multi-discrete of i4": spaces.MultiDiscrete([3, 2], dtype=np.int32),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary of two dimensions": spaces.MultiBinary([2, 3]),
    "multi-binary of one in a list": spaces.MultiBinary([3]),
    "text": spaces.Text(9),
    "text that may be empty": spaces.Text(4, min_length=0, charset="aß✓"),
}
if NEWER:
    LEAVES["discrete of i4"] = spaces.Discrete(4, dtype=np.int32)
    LEAVES["multi-discrete with start"] = spaces.MultiDiscrete([3, 2], start=[-1, 4])
NESTED: dict[str, Space] = {
    "dict": spaces.Dict({"b": spaces.Box(0, 1, (2,)), "a": spaces.Discrete(3)}),
    "dict in its own order": spaces.Dict(OrderedDict(z=spaces.Discrete(3), a=spaces.Discrete(4))),
    "tuple": spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Discrete(3)]),
    "nested": spaces.Dict(
        {
            "camera": spaces.Dict({"left": LEAVES["image HWC"], "right": LEAVES["image CHW"]}),
            "pair": spaces.Tuple([spaces.Text(5), spaces.Dict({"x": LEAVES["box without a shape"]})]),
            "said": spaces.Text(7),
            "flag": spaces.MultiBinary(2),
        }
    ),
    "empty dict": spaces.Dict({}),
}
EVERY = {**LEAVES, **NESTED}

each_space = pytest.mark.parametrize("space", EVERY.values(), ids=EVERY)


def over_the_wire(observation: Observation, n: int) -> Observation:
    names = np.arange(n)
    found = parse_bytes(b"".join(to_bytes(Infer(observation, names, names))))
    assert isinstance(found, Infer)
    return found.observation


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return isinstance(right, tuple) and len(left) == len(right) and all(map(same, left, right))
    return bool(np.array_equal(left, right))


def rows_of(layout: ObservationLayout, arrays: list[Any], n: int) -> list[Any]:
    return [layout.nest([array[row] for array in arrays]) for row in range(n)]


def sample(space: Space, n: int, seed: int = 0) -> list[Any]:
    space.seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a float16 box warns of its own sampling
        return [space.sample() for _ in range(n)]


def layout_and_arrays(space: Space, observations: list[Any]) -> tuple[ObservationLayout, list[Any]]:
    layout = ObservationLayout(space)
    arrays = layout.allocate(len(observations))
    for row, each in enumerate(observations):
        layout.store(arrays, row, each)
    return layout, arrays


class TestObservations:
    @each_space
    def test_every_space_round_trips(self, space: Space) -> None:
        observations = sample(space, 3)
        layout, arrays = layout_and_arrays(space, observations)
        received = over_the_wire(layout.write(arrays), 3)
        theirs = ObservationLayout(space_from_wire(decode(b"".join(encode(space_to_wire(space))))))
        copies = theirs.allocate(5)
        theirs.read(received, copies, np.array([4, 0, 2]))
        found = rows_of(theirs, copies, 5)
        assert all(same(each, found[at]) for each, at in zip(observations, (4, 0, 2), strict=True))
        for leaf, copy in zip(theirs.leaves, copies, strict=True):
            assert copy.dtype == leaf.dtype
            assert copy.dtype.isnative
            assert copy.shape == (5, *leaf.shape)

    @each_space
    def test_picked_rows_travel_alone(self, space: Space) -> None:
        observations = sample(space, 3)
        layout, arrays = layout_and_arrays(space, observations)
        for rows, count in ((np.array([True, False, True]), 2), (np.array([2]), 1), (np.zeros(3, np.bool_), 0)):
            written = layout.write(arrays, rows)
            data = b"".join(encode(written.to_wire(count)))
            copies = layout.allocate(count)
            layout.read(Observation(**decode(data)), copies, slice(0, count))
            kept = np.arange(3)[rows].tolist()
            found = rows_of(layout, copies, count)
            assert all(same(observations[at], each) for at, each in zip(kept, found, strict=True))

    @pytest.mark.parametrize(
        ("shape", "channel"),
        [
            ((84, 84, 3), Channel.IMAGES),
            ((84, 84, 1), Channel.IMAGES),
            ((4, 4, 4), Channel.IMAGES),
            ((84, 84, 5), Channel.STATES),
            ((3, 84, 84), Channel.STATES),
            ((84, 84), Channel.STATES),
            ((2, 84, 84, 3), Channel.STATES),
        ],
    )
    def test_channels_last_uint8_is_an_image(self, shape: tuple[int, ...], channel: Channel) -> None:
        (leaf,) = ObservationLayout(spaces.Box(0, 255, shape, np.uint8)).leaves
        assert (leaf.channel, leaf.name, leaf.shape) == (channel, "obs", shape)
        assert ObservationLayout(spaces.Box(0, 255, shape, np.int16)).leaves[0].channel is Channel.STATES

    def test_channel_order_is_never_changed(self) -> None:
        for shape in ((3, 4, 5), (4, 5, 3)):
            frame = np.arange(60, dtype=np.uint8).reshape(shape)
            layout, arrays = layout_and_arrays(spaces.Box(0, 255, shape, np.uint8), [frame])
            written = layout.write(arrays)
            (sent,) = (*written.images.values(), *written.states.values())
            assert sent.tolist() == [frame.tolist()]

    def test_channel_order_is_never_guessed(self) -> None:
        layout = ObservationLayout(spaces.Box(0, 255, (3, 4, 5), np.uint8))
        channels_last = Observation({"obs": np.zeros((1, 4, 5, 3), np.uint8)})
        with pytest.raises(RemoteProtocolError, match=r"shape \[4, 5, 3\], expected \[3, 4, 5\]") as caught:
            layout.read(channels_last, layout.allocate(1), slice(0, 1))
        assert caught.value.clause == "5.2"

    def test_names_are_paths_and_the_first_text_is_the_text(self) -> None:
        layout = ObservationLayout(NESTED["nested"])
        assert {leaf.name: leaf.channel.value for leaf in layout.leaves} == {
            "camera/left": "images",
            "camera/right": "states",
            "flag": "states",
            "pair/0": "text",
            "pair/1/x": "states",
            "said": "states",
        }

    def test_a_space_without_leaves_has_an_observation_without_entries(self) -> None:
        layout = ObservationLayout(spaces.Dict({}))
        assert (layout.leaves, layout.allocate(2), layout.nest([])) == ((), [], {})
        assert layout.write([]) == Observation({}, {}, None)

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Sequence(spaces.Discrete(2)),
            spaces.Graph(spaces.Discrete(2), None),
            spaces.Dict({"deep": spaces.Tuple([spaces.Sequence(spaces.Discrete(2))])}),
            spaces.Dict({"deep": spaces.Tuple([spaces.Text(10**7)])}),
        ],
    )
    def test_spaces_that_cannot_travel_are_named(self, space: Space) -> None:
        with pytest.raises(SpaceError, match=r"'obs'|'deep/0'"):
            ObservationLayout(space)

    def test_two_leaves_of_one_name_are_refused(self) -> None:
        with pytest.raises(SpaceError, match="same name"):
            ObservationLayout(spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}))

    @pytest.mark.parametrize(
        ("name", "observation"),
        [
            ("box", np.zeros(2)),
            ("box", np.zeros((1, 3))),
            ("box", 1.0),
            ("box", "text"),
            ("box", None),
            ("box", [0.0, "x", 1.0]),
            ("box", [[0.0], [1.0, 2.0], [3.0]]),
            ("box of i4", [10**30, 1]),
            ("image HWC", np.zeros((6, 5, 3))),
            ("discrete", np.array([1])),
            ("discrete", 2**70),
            ("text", "ten letters"),
            ("text", b"raw"),
            ("text", 5),
            ("text", None),
            ("text", np.array(["a"])),
            ("dict", {"a": 1}),
            ("dict", [1, 2]),
            ("dict", None),
            ("tuple", (np.zeros(2),)),
            ("tuple", {}),
        ],
    )
    def test_observations_that_do_not_fit_are_named(self, name: str, observation: Any) -> None:
        layout = ObservationLayout(EVERY[name])
        with pytest.raises(SpaceError, match=r"observation entry '.*' does not fit its space"):
            layout.store(layout.allocate(1), 0, observation)

    @pytest.mark.parametrize("value", ["abc", np.str_("abc"), np.array("abc")])
    def test_text_may_be_any_kind_of_str(self, value: Any) -> None:
        _, (array,) = layout_and_arrays(LEAVES["text"], [value])
        assert array.tolist() == ["abc"]

    def test_stored_values_are_copies(self) -> None:
        value = np.zeros(3, np.float32)
        _, (array,) = layout_and_arrays(LEAVES["box"], [value])
        value[:] = 7
        assert array.tolist() == [[0.0, 0.0, 0.0]]

    def test_writing_all_rows_copies_nothing(self) -> None:
        layout, arrays = layout_and_arrays(LEAVES["image HWC"], sample(LEAVES["image HWC"], 2))
        assert np.shares_memory(layout.write(arrays).images["obs"], arrays[0])

    def test_text_is_sent_no_wider_than_it_is(self) -> None:
        layout, arrays = layout_and_arrays(spaces.Text(1000), ["ab", "abc"])
        written = layout.write(arrays)
        assert written.text is not None
        assert written.text.dtype == "<U3"

    @pytest.mark.parametrize(
        ("have", "want"),
        [
            ((), (1,)),
            ((1,), ()),
            ((1, 3), (3,)),
            ((6,), (2, 3)),
            ((2, 3), (6,)),
            ((1, 4, 4, 1), (4, 4)),
            ((0,), (0, 3)),
        ],
    )
    def test_shapes_without_a_doubt_are_reshaped(self, have: tuple[int, ...], want: tuple[int, ...]) -> None:
        layout = ObservationLayout(spaces.Box(0, 99, want))
        arrays = layout.allocate(2)
        sent = np.arange(2 * int(np.prod(have))).reshape(2, *have).astype(np.float32)
        layout.read(Observation({}, {"obs": sent}), arrays, slice(0, 2))
        assert arrays[0].reshape(-1).tolist() == sent.reshape(-1).tolist()

    @pytest.mark.parametrize(("have", "want"), [((2,), (3,)), ((2, 3), (3, 2)), ((2, 3, 1), (3, 2)), ((4,), ())])
    def test_other_shapes_are_refused(self, have: tuple[int, ...], want: tuple[int, ...]) -> None:
        layout = ObservationLayout(spaces.Box(0, 9, want))
        with pytest.raises(RemoteProtocolError, match="'obs' has shape"):
            layout.read(Observation({}, {"obs": np.zeros((2, *have))}), layout.allocate(2), slice(0, 2))

    @pytest.mark.parametrize(
        ("have", "want"),
        [
            (">f4", "f4"),
            ("f8", "f4"),
            ("f4", "f8"),
            ("i8", "f4"),
            ("i8", "u1"),
            ("u1", "i4"),
            ("b1", "u1"),
            ("b1", "f4"),
        ],
    )
    def test_dtypes_that_numpy_assigns_are_accepted(self, have: str, want: str) -> None:
        layout = ObservationLayout(spaces.Box(0, 1, (2,), np.dtype(want).type))
        (array,) = layout.allocate(1)
        layout.read(Observation({}, {"obs": np.array([[0, 1]], have)}), [array], slice(0, 1))
        assert array.tolist() == [[0, 1]]

    @pytest.mark.parametrize(("have", "want"), [("f4", "i4"), ("f8", "u1"), ("f4", "b1"), ("U1", "f4")])
    def test_other_dtypes_are_refused(self, have: str, want: str) -> None:
        layout = ObservationLayout(spaces.Box(0, 1, (2,), np.dtype(want).type))
        with pytest.raises(RemoteProtocolError, match="'obs' has dtype") as caught:
            layout.read(Observation({}, {"obs": np.zeros((1, 2), have)}), layout.allocate(1), slice(0, 1))
        assert caught.value.clause == "5.2"

    def test_numbers_are_no_text(self) -> None:
        layout = ObservationLayout(spaces.Dict({"a": spaces.Text(3), "b": spaces.Text(3)}))
        sent = Observation({}, {"b": np.zeros(1)}, np.array(["x"]))
        with pytest.raises(RemoteProtocolError, match="'b' has dtype <f8"):
            layout.read(sent, layout.allocate(1), slice(0, 1))

    def test_text_is_never_cut(self) -> None:
        layout = ObservationLayout(spaces.Text(3))
        arrays = layout.allocate(2)
        layout.read(Observation({}, {}, np.array(["abc", ""], "<U99")), arrays, slice(0, 2))
        assert arrays[0].tolist() == ["abc", ""]
        with pytest.raises(RemoteProtocolError, match="'obs' has 4 characters, at most 3"):
            layout.read(Observation({}, {}, np.array(["abcd", ""])), arrays, slice(0, 2))

    @pytest.mark.parametrize(
        "form", [np.array(["push", "push"]), ["push", "push"], "push"], ids=["array", "list", "bare"]
    )
    def test_text_arrives_in_the_three_forms_of_the_wire(self, form: Any) -> None:
        wire = Infer(Observation(), np.arange(2), np.arange(2)).to_wire()
        wire["data"]["text"] = form
        message = parse_bytes(b"".join(encode(wire)))
        assert isinstance(message, Infer)
        layout = ObservationLayout(spaces.Text(9))
        arrays = layout.allocate(2)
        layout.read(message.observation, arrays, slice(0, 2))
        assert arrays[0].tolist() == ["push", "push"]

    def test_a_single_entry_may_go_by_any_name(self) -> None:
        layout = ObservationLayout(spaces.Box(0, 9, (2,)))
        arrays = layout.allocate(1)
        layout.read(Observation({}, {"proprio": np.ones((1, 2))}), arrays, slice(0, 1))
        assert arrays[0].tolist() == [[1.0, 1.0]]

    def test_an_image_may_travel_as_a_state_and_the_other_way(self) -> None:
        for shape, sent in (
            ((4, 4, 3), Observation({}, {"obs": np.ones((1, 4, 4, 3), np.uint8)})),
            ((3, 4, 4), Observation({"obs": np.ones((1, 3, 4, 4), np.uint8)})),
        ):
            layout = ObservationLayout(spaces.Box(0, 255, shape, np.uint8))
            arrays = layout.allocate(1)
            layout.read(sent, arrays, slice(0, 1))
            assert arrays[0].all()

    @pytest.mark.parametrize(
        "sent",
        [
            Observation(),
            Observation({}, {"x": np.zeros((1, 2)), "y": np.zeros((1, 2))}),
            Observation({}, {}, np.array([""])),
        ],
    )
    def test_missing_entries_are_named(self, sent: Observation) -> None:
        layout = ObservationLayout(spaces.Box(0, 9, (2,)))
        with pytest.raises(RemoteProtocolError, match="lacks the entry 'obs'; it has"):
            layout.read(sent, layout.allocate(1), slice(0, 1))

    def test_missing_text_is_named(self) -> None:
        layout = ObservationLayout(spaces.Text(3))
        with pytest.raises(RemoteProtocolError, match="lacks the entry 'obs'"):
            layout.read(Observation(), layout.allocate(1), slice(0, 1))


class TestInferring:
    def test_one_entry_is_a_box_and_several_are_a_dict(self) -> None:
        one = Observation({}, {"obs": np.zeros((2, 3), np.float32)}, np.array(["", ""]))
        assert infer_observation_space(one) == spaces.Box(-np.inf, np.inf, (3,), np.float32)
        several = Observation({"cam": np.zeros((2, 4, 5, 3), np.uint8)}, {"s": np.zeros((2,), np.float64)})
        assert infer_observation_space(several) == spaces.Dict(
            {"cam": spaces.Box(0, 255, (4, 5, 3), np.uint8), "s": spaces.Box(-np.inf, np.inf, (), np.float64)}
        )

    @pytest.mark.parametrize("dtype", ["f2", "f4", ">f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"])
    def test_states_of_every_numeric_dtype_have_a_space_that_holds_them(self, dtype: str) -> None:
        state = np.ones((1, 2), dtype)
        space = infer_observation_space(Observation({}, {"s": state}))
        assert space.dtype == np.dtype(dtype).newbyteorder("=")
        assert space.contains(state[0].astype(space.dtype))
        assert space_from_wire(decode(b"".join(encode(space_to_wire(space))))) == space

    def test_uint8_states_are_bytes(self) -> None:
        space = infer_observation_space(Observation({}, {"s": np.zeros((1, 3, 84, 84), np.uint8)}))
        assert space == spaces.Box(0, 255, (3, 84, 84), np.uint8)

    def test_keys_surface_one_entry(self) -> None:
        mixed = Observation(
            {"cam": np.zeros((1, 4, 4, 3), np.uint8), "x": np.zeros((1, 2, 2, 3), np.uint8)},
            {"chw": np.zeros((1, 3, 4, 4), np.uint8), "s": np.zeros((1, 2)), "x": np.zeros((1, 5))},
        )
        assert infer_observation_space(mixed, image_key="cam").shape == (4, 4, 3)
        assert infer_observation_space(mixed, image_key="chw").shape == (3, 4, 4)
        assert infer_observation_space(mixed, state_key="s").shape == (2,)
        assert infer_observation_space(mixed, image_key="x").shape == (2, 2, 3)
        assert infer_observation_space(mixed, state_key="x").shape == (5,)
        both = infer_observation_space(mixed, image_key="cam", state_key="s")
        assert isinstance(both, spaces.Dict)
        assert list(both.spaces) == ["cam", "s"]
        with pytest.raises(SpaceError, match=r"sends no entry 'nope': it sends \['cam', 'chw'"):
            infer_observation_space(mixed, image_key="nope")
        with pytest.raises(SpaceError, match="both an image and a state 'x'"):
            infer_observation_space(mixed)

    def test_text_surfaces_only_when_asked_for_and_there(self) -> None:
        said = Observation({}, {"s": np.zeros((2, 1))}, np.array(["", "push"]))
        assert isinstance(infer_observation_space(said), spaces.Box)
        space = infer_observation_space(said, text=True)
        assert isinstance(space, spaces.Dict)
        assert space["text"].contains("push the T!")
        assert space["text"].contains("")
        silent = Observation({}, {"s": np.zeros((2, 1))}, np.array(["", ""]))
        assert isinstance(infer_observation_space(silent, text=True), spaces.Box)

    def test_nothing_and_text_states_have_no_safe_space(self) -> None:
        with pytest.raises(SpaceError, match="empty: pass observation_space"):
            infer_observation_space(Observation())
        with pytest.raises(SpaceError, match="pass observation_space"):
            infer_observation_space(Observation({}, {"s": np.array([["a"]])}))

    def test_an_observation_reads_into_the_space_inferred_from_it(self) -> None:
        sent = Observation({"cam": np.ones((2, 4, 5, 3), np.uint8)}, {"s": np.ones((2, 3))})
        layout = ObservationLayout(infer_observation_space(sent))
        arrays = layout.allocate(2)
        layout.read(sent, arrays, slice(0, 2))
        assert all(array.all() for array in arrays)


ACTIONS = {name: space for name, space in LEAVES.items() if not isinstance(space, spaces.Text)}


class TestActions:
    @pytest.mark.parametrize("space", ACTIONS.values(), ids=ACTIONS)
    @pytest.mark.parametrize("horizon", [1, 3])
    def test_every_space_round_trips_time_major(self, space: Space, horizon: int) -> None:
        layout = ActionLayout(space)
        given_ = np.array([sample(space, horizon, seed) for seed in range(4)])
        wire = layout.to_wire(given_[:, 0] if horizon == 1 else given_, 4, horizon)
        assert wire.shape[:2] == (horizon, 4)
        assert wire.ndim >= 3
        received = layout.from_wire(decode(b"".join(encode(wire))))
        assert received.dtype == layout.dtype
        assert received.shape == (horizon, 4, *layout.shape)
        for slot in range(4):
            for step in range(horizon):
                assert np.array_equal(received[step, slot], given_[slot, step])

    def test_a_discrete_action_travels_as_an_integer_in_a_list(self) -> None:
        layout = ActionLayout(spaces.Discrete(5))
        wire = layout.to_wire(np.array([3, 1]), 2)
        assert (wire.shape, wire.dtype.str, layout.width) == ((1, 2, 1), "<i8", 1)

    @pytest.mark.parametrize(
        ("space", "width"), [(spaces.Box(0, 1, (2, 3)), 3), (spaces.Box(0, 1, ()), 1), (spaces.MultiBinary(4), 4)]
    )
    def test_width_is_that_of_one_action(self, space: Space, width: int) -> None:
        assert ActionLayout(space).width == width

    @pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i8"])
    def test_a_box_keeps_what_the_trainer_sent(self, dtype: str) -> None:
        layout = ActionLayout(spaces.Box(-1, 1, (2,), np.float32))
        given_ = np.array([[100, -100], [0, 1]], dtype)
        wire = layout.to_wire(given_, 2)
        assert wire.dtype == np.dtype(dtype)
        assert wire.tolist() == [given_.tolist()]
        assert layout.from_wire(wire.astype(wire.dtype.newbyteorder(">"))).dtype == np.dtype(dtype)

    def test_what_is_out_of_range_passes_unchanged(self) -> None:
        assert ActionLayout(spaces.Box(-1, 1, (1,))).to_wire([[np.inf]], 1).tolist() == [[[np.inf]]]
        assert ActionLayout(spaces.Discrete(2)).to_wire([77], 1).tolist() == [[[77]]]
        assert ActionLayout(spaces.MultiBinary(2)).to_wire([[5, -1]], 1).tolist() == [[[5, -1]]]

    @pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 2])])
    def test_nan_is_not_sent_and_its_slot_named(self, space: Space) -> None:
        actions = np.zeros((3, 2))
        actions[1, 1] = np.nan
        with pytest.raises(ValueError, match="slot 1 holds NaN"):
            ActionLayout(space).to_wire(actions, 3)
        with pytest.raises(ValueError, match="slot 1 holds NaN"):
            ActionLayout(space).to_wire(np.stack([actions, actions], axis=1), 3, 2)
        with pytest.raises(ValueError, match="slot 0 holds NaN"):
            ActionLayout(spaces.Discrete(2)).to_wire([np.nan], 1)

    @pytest.mark.parametrize(
        ("space", "actions", "slots", "horizon"),
        [
            (spaces.Box(-1, 1, (2,)), np.zeros((3, 2)), 2, 1),
            (spaces.Box(-1, 1, (2,)), np.zeros((2, 1)), 2, 1),
            (spaces.Box(-1, 1, (2,)), np.zeros(2), 2, 1),
            (spaces.Box(-1, 1, (2,)), np.zeros((3, 2, 2)), 2, 3),
            (spaces.Box(-1, 1, (2,)), np.zeros((2, 1, 2)), 2, 1),
            (spaces.Discrete(3), np.zeros((2, 1), int), 2, 1),
            (spaces.Discrete(3), 1, 1, 1),
        ],
    )
    def test_wrong_shapes_are_named(self, space: Space, actions: Any, slots: int, horizon: int) -> None:
        with pytest.raises(ValueError, match=r"actions have shape \(.*\), expected \("):
            ActionLayout(space).to_wire(actions, slots, horizon)

    @pytest.mark.parametrize("actions", [[1.5], [1e300], [np.inf]])
    def test_a_discrete_action_is_whole(self, actions: Any) -> None:
        with pytest.raises(ValueError, match="must be whole numbers"):
            ActionLayout(spaces.Discrete(3)).to_wire(actions, 1)

    @pytest.mark.parametrize(
        "actions", [[2.0], np.array([2], np.int8), np.array([2], np.uint64), np.array([2.0], np.float16)]
    )
    def test_a_whole_number_is_cast(self, actions: Any) -> None:
        wire = ActionLayout(spaces.Discrete(3)).to_wire(actions, 1)
        assert wire.dtype == np.int64
        assert wire.tolist() == [[[2]]]

    def test_a_number_beyond_the_dtype_is_not_wrapped(self) -> None:
        with pytest.raises(ValueError, match="must be whole numbers of int8"):
            ActionLayout(spaces.MultiBinary(2)).to_wire([[300, 0]], 1)

    @pytest.mark.parametrize("actions", [[["a", "b"]], [[None, None]], [[1j, 0]]])
    @pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)])
    def test_what_is_no_number_is_named(self, space: Space, actions: Any) -> None:
        with pytest.raises(ValueError, match="actions have dtype"):
            ActionLayout(space).to_wire(actions, 1)

    def test_the_trainers_array_is_not_written_to(self) -> None:
        actions = np.zeros((2, 3, 2))
        actions.flags.writeable = False
        before = actions.tobytes()
        ActionLayout(spaces.Box(-1, 1, (2,))).to_wire(actions, 2, 3)
        assert actions.tobytes() == before

    @pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u1", ">f4"])
    def test_a_received_discrete_action_is_rounded_whatever_its_dtype(self, dtype: str) -> None:
        layout = ActionLayout(spaces.Discrete(3))
        assert layout.from_wire(np.array([[[2], [1]]], dtype)).tolist() == [[2, 1]]
        if np.dtype(dtype).kind == "f":
            assert layout.from_wire(np.array([[[1.999], [0.6]]], dtype)).tolist() == [[2, 1]]

    @pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
    def test_a_received_action_that_is_no_integer_is_refused(self, value: float) -> None:
        with pytest.raises(RemoteProtocolError, match="cannot be the integers") as caught:
            ActionLayout(spaces.Discrete(3)).from_wire(np.array([[[value]]]))
        assert caught.value.clause == "5.3"

    def test_a_received_action_of_another_size_is_refused(self) -> None:
        with pytest.raises(RemoteProtocolError, match=r"shape \[1, 2, 3\] does not fit") as caught:
            ActionLayout(spaces.Box(-1, 1, (2,))).from_wire(np.zeros((1, 2, 3)))
        assert caught.value.clause == "5.3"

    def test_a_flat_action_is_reshaped(self) -> None:
        found = ActionLayout(spaces.Box(-1, 1, (2, 2))).from_wire(np.arange(8.0).reshape(1, 2, 4))
        assert found.tolist() == [[[[0, 1], [2, 3]], [[4, 5], [6, 7]]]]

    @pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict({}), spaces.Tuple([])])
    def test_spaces_that_cannot_travel_are_named(self, space: Space) -> None:
        with pytest.raises(SpaceError, match="expected Box, Discrete, MultiDiscrete or MultiBinary"):
            ActionLayout(space)

    def test_the_space_of_a_chunk_has_the_bounds_of_a_step(self) -> None:
        low, high = np.array([-1, -2], np.float32), np.array([1, 2], np.float32)
        layout = ActionLayout(spaces.Box(low, high))
        assert layout.stacked(1) is layout.space
        assert layout.stacked(3) == spaces.Box(np.stack([low] * 3), np.stack([high] * 3))
        with pytest.raises(SpaceError, match="action_horizon 2 needs a Box"):
            ActionLayout(spaces.Discrete(2)).stacked(2)


def announced(wire: Any) -> Space:
    return space_from_wire(decode(b"".join(encode(wire))))


box_spaces = st.builds(
    lambda shape, dtype: spaces.Box(0, 1, shape, dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([np.float32, np.float64, np.int8, np.uint8, np.bool_]),
)
some_spaces = st.recursive(
    box_spaces | st.sampled_from(list(LEAVES.values())),
    lambda inner: (
        st.lists(inner, max_size=3).map(spaces.Tuple)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3).map(OrderedDict).map(spaces.Dict)
    ),
    max_leaves=6,
)


def keys_of(space: Space) -> Any:
    if isinstance(space, spaces.Dict):
        return [(key, keys_of(inner)) for key, inner in space.spaces.items()]
    return [keys_of(inner) for inner in space.spaces] if isinstance(space, spaces.Tuple) else None


BOX = space_to_wire(LEAVES["box"])
MULTI = space_to_wire(LEAVES["multi-discrete"])
TEXT = space_to_wire(LEAVES["text"])
ONE = np.array([1.0], np.float32)


class TestAnnouncing:
    @each_space
    def test_every_space_comes_back_equal(self, space: Space) -> None:
        found = announced(space_to_wire(space))
        assert found == space
        assert (type(found), found.shape, found.dtype) == (type(space), space.shape, space.dtype)

    @settings(deadline=None, max_examples=60)
    @given(some_spaces)
    def test_nested_spaces_come_back_equal_and_in_order(self, space: Space) -> None:
        found = announced(space_to_wire(space))
        assert found == space
        assert keys_of(found) == keys_of(space)

    def test_the_order_of_a_dict_is_kept(self) -> None:
        """Trainers flatten in this order, so a sorted copy would give them other inputs."""
        found = announced(space_to_wire(NESTED["dict in its own order"]))
        assert [leaf.name for leaf in ObservationLayout(found).leaves] == ["z", "a"]

    def test_bounds_that_are_all_alike_travel_as_one_number(self) -> None:
        wire = space_to_wire(spaces.Box(0, 255, (480, 640, 3), np.uint8))
        assert sum(map(len, encode(wire))) < 300

    def test_what_older_clients_leave_out_has_a_default(self) -> None:
        assert announced({"type": "Discrete", "n": 3}) == spaces.Discrete(3)
        assert announced({"type": "MultiDiscrete", "nvec": np.array([3, 2])}) == spaces.MultiDiscrete([3, 2])
        assert announced({"type": "MultiBinary", "shape": 3}) == spaces.MultiBinary(3)

    def test_bounds_of_another_width_are_cast(self) -> None:
        found = announced(BOX | {"low": np.array([-1.0]), "high": np.array([1])})
        assert found == LEAVES["box"]

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Sequence(spaces.Discrete(2)),
            spaces.Dict({"a": spaces.Graph(spaces.Discrete(2), None)}),
            spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]),
        ],
    )
    def test_spaces_that_cannot_travel_are_named(self, space: Space) -> None:
        with pytest.raises(SpaceError, match="cannot travel"):
            space_to_wire(space)

    @pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="there is no wider float here")
    def test_a_box_of_long_doubles_cannot_travel(self) -> None:
        space = spaces.Box(np.zeros(1, np.longdouble), np.ones(1, np.longdouble), dtype=np.longdouble)
        with pytest.raises(SpaceError, match="cannot travel"):
            space_to_wire(space)

    @pytest.mark.parametrize(
        "wire",
        [
            None,
            1,
            "Box",
            [],
            ["Box"],
            np.zeros(3),
            {},
            {"type": None},
            {"type": ["Box"]},
            {"type": "Sequence"},
            {"type": "x" * 10_000},
            {"type": "Box"},
            *({key: value for key, value in BOX.items() if key != gone} for gone in BOX),
            BOX | {"shape": [10**12]},
            BOX | {"shape": [2**40, 2**40]},
            BOX | {"shape": [2**63] * 30},
            BOX | {"shape": [2**30]},
            BOX | {"shape": [0, 2**62], "low": np.empty((0,), np.float32)},
            BOX | {"shape": [-3]},
            BOX | {"shape": [3.0]},
            BOX | {"shape": [True, 3]},
            BOX | {"shape": 3},
            BOX | {"shape": "3"},
            BOX | {"shape": [1] * 100},
            BOX | {"shape": np.array([3])},
            BOX | {"dtype": "O"},
            BOX | {"dtype": "<c8"},
            BOX | {"dtype": "<U3"},
            BOX | {"dtype": "float32"},
            BOX | {"dtype": ["<f4"]},
            BOX | {"dtype": {"names": ["a"], "formats": ["<f4"]}},
            BOX | {"dtype": b"<f4"},
            BOX | {"dtype": "<i4"},
            BOX | {"low": -1.0},
            BOX | {"low": None},
            BOX | {"low": np.array(["a"])},
            BOX | {"low": np.zeros(2, np.float32)},
            BOX | {"low": np.array([np.nan], np.float32)},
            BOX | {"low": ONE, "high": -ONE},
            {"type": "Discrete"},
            {"type": "Discrete", "n": 0},
            {"type": "Discrete", "n": -1},
            {"type": "Discrete", "n": 2**64 - 1},
            {"type": "Discrete", "n": 2**63 - 1, "start": 2},
            {"type": "Discrete", "n": 2.0},
            {"type": "Discrete", "n": True},
            {"type": "Discrete", "n": np.array([3])},
            {"type": "Discrete", "n": 3, "start": "0"},
            {"type": "Discrete", "n": 3, "start": None},
            {"type": "Discrete", "n": 3, "dtype": "<f4"},
            {"type": "Discrete", "n": 300, "dtype": "|i1"},
            {"type": "MultiDiscrete"},
            MULTI | {"nvec": [3, 2, 5]},
            MULTI | {"nvec": np.array([3, 0, 5])},
            MULTI | {"nvec": np.array([3, -2, 5])},
            MULTI | {"nvec": np.array([3.0, 2.0, 5.0])},
            MULTI | {"nvec": np.array([3, 2, 300]), "dtype": "|i1"},
            MULTI | {"nvec": np.array([2**64 - 1] * 3, np.uint64)},
            MULTI | {"start": np.array([1, 2])},
            MULTI | {"start": [0, 0, 0]},
            MULTI | {"dtype": "<f4"},
            {"type": "MultiBinary"},
            {"type": "MultiBinary", "shape": 0},
            {"type": "MultiBinary", "shape": -1},
            {"type": "MultiBinary", "shape": 10**12},
            {"type": "MultiBinary", "shape": [10**6, 10**6]},
            {"type": "MultiBinary", "shape": [2, 0]},
            {"type": "MultiBinary", "shape": [2.0]},
            {"type": "MultiBinary", "shape": "3"},
            {"type": "MultiBinary", "shape": None},
            {"type": "Text"},
            TEXT | {"max_length": 10**12},
            TEXT | {"max_length": 0, "min_length": 0},
            TEXT | {"max_length": 5, "min_length": 6},
            TEXT | {"max_length": 5.0},
            TEXT | {"min_length": -1},
            TEXT | {"charset": ["a"]},
            TEXT | {"charset": None},
            TEXT | {"charset": "ab" * (1 << 21)},
            {"type": "Dict"},
            {"type": "Dict", "spaces": None},
            {"type": "Dict", "spaces": [BOX]},
            {"type": "Dict", "spaces": "ab"},
            {"type": "Dict", "spaces": {b"a": BOX}},
            {"type": "Dict", "spaces": {"a": None}},
            {"type": "Dict", "spaces": {str(i): BOX for i in range(5000)}},
            {"type": "Tuple"},
            {"type": "Tuple", "spaces": {"a": BOX}},
            {"type": "Tuple", "spaces": "ab"},
            {"type": "Tuple", "spaces": [1]},
            {"type": "Tuple", "spaces": [BOX] * 5000},
            {"type": "Tuple", "spaces": [{"type": "Tuple", "spaces": []}] * 5000},
        ],
        ids=lambda wire: str(wire)[:60],
    )
    def test_what_describes_no_space_is_refused_in_bounded_memory(self, wire: Any) -> None:
        value = decode(b"".join(encode(wire)))
        tracemalloc.start()
        try:
            with pytest.raises(RemoteProtocolError, match=r"^\[env-spec\] env_spec: ") as caught:
                space_from_wire(value)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert caught.value.clause == "env-spec"
        assert len(str(caught.value)) < 400
        assert peak < 1 << 21

    def test_the_bound_is_one_on_the_sum(self) -> None:
        half = BOX | {"shape": [1 << 27], "dtype": "|b1", "low": np.array([False]), "high": np.array([True])}
        wire = {"type": "Tuple", "spaces": [{"type": "MultiBinary", "shape": 1 << 27}, BOX, half]}
        with pytest.raises(RemoteProtocolError, match="more than 256 MiB"):
            announced(wire)

    def test_a_deep_space_is_refused(self) -> None:
        wire: Any = BOX
        for level in range(10_000):
            wire = {"type": "Tuple", "spaces": [wire]} if level % 2 else {"type": "Dict", "spaces": {"a": wire}}
        with pytest.raises(RemoteProtocolError, match="nested deeper"):
            space_from_wire(wire)

    def test_the_largest_frames_are_within_the_bound(self) -> None:
        frame = spaces.Box(0, 255, (1080, 1920, 3), np.uint8)
        assert announced({"type": "Dict", "spaces": {"left": space_to_wire(frame)}})["left"] == frame  # type: ignore[index]
