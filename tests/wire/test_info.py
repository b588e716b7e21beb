from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import decode, encode
from plugrl_bridges.wire.info import EpisodeRecord, batch_infos, check_splittable, episode_records, split_info


def over_the_wire(value: Any) -> Any:
    return decode(b"".join(encode(value)))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return (
            isinstance(right, dict) and left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and bool(left == right)


class TestSplittable:
    """The first array of length m, at the top level or one map down [5.4]."""

    @pytest.mark.parametrize(
        "info",
        [
            {"k": np.arange(2)},
            {"task": "pick", "k": np.zeros((2, 3))},
            {"episode": {"r": np.zeros(2)}},
            {"long": np.zeros(3), "k": {"task": "pick", "x": np.zeros(2)}},
            {"text": np.array(["a", "b"])},
        ],
    )
    def test_an_array_of_length_m_is_enough(self, info: dict[str, Any]) -> None:
        check_splittable(info, 2)

    @pytest.mark.parametrize(
        "info",
        [
            {"task": "pick"},
            {"k": [1, 2]},
            {"k": np.arange(3)},
            {"k": np.array(2)},
            {"k": np.zeros((3, 2))},
            {"a": {"b": {"c": np.arange(2)}}},
            {"k": {}},
            {b"k": 1},
        ],
    )
    def test_nothing_else_is(self, info: dict[str, Any]) -> None:
        with pytest.raises(RemoteProtocolError, match="no array of length 2") as caught:
            check_splittable(info, 2)
        assert caught.value.clause == "5.4"

    @pytest.mark.parametrize("m", [0, 1])
    def test_of_one_env_everything_can_be_split(self, m: int) -> None:
        check_splittable({"task": "pick"}, m)

    def test_what_it_would_come_to_is_bounded(self) -> None:
        """Forty thousand short keys, for a thousand envs each, are forty million entries."""
        flat: dict[str, Any] = {str(i): None for i in range(40_000)}
        for info in (flat, {"inner": flat}):
            with pytest.raises(RemoteProtocolError, match="entries for 1000 envs") as caught:
                check_splittable(info | {"k": np.arange(1000)}, 1000)
            assert caught.value.clause == "5.4"


class TestSplit:
    def test_arrays_give_python_scalars_and_rows(self) -> None:
        x = np.arange(6.0).reshape(2, 3)
        rows = split_info(
            {"lives": np.array([3, 2]), "won": np.array([True, False]), "x": x, "t": np.array(["a", "b"])}, 2
        )
        assert [type(rows[0][key]) for key in ("lives", "won", "t")] == [int, bool, str]
        assert (rows[1]["lives"], rows[1]["won"], rows[1]["t"]) == (2, False, "b")
        assert rows[1]["x"].tolist() == [3.0, 4.0, 5.0]
        assert not np.shares_memory(rows[1]["x"], x)

    def test_a_mask_says_which_envs_have_a_key(self) -> None:
        rows = split_info({"k": np.array([1, 2]), "_k": np.array([False, True])}, 2)
        assert rows == [{}, {"k": 2}]

    def test_masks_hold_one_map_down_too(self) -> None:
        rows = split_info(
            {"a": {"k": np.array([1, 2]), "_k": np.array([False, True])}, "_a": np.array([True, True])}, 2
        )
        assert rows == [{"a": {}}, {"a": {"k": 2}}]

    def test_what_looks_like_a_mask_but_is_none_is_an_entry(self) -> None:
        rows = split_info({"k": np.array([1, 2]), "_k": np.array([1, 0]), "_alone": np.array([True, False])}, 2)
        assert rows == [{"k": 1, "_k": 1, "_alone": True}, {"k": 2, "_k": 0, "_alone": False}]

    def test_what_is_not_batched_goes_to_every_env(self) -> None:
        rows = split_info({"task": "pick", "k": np.array([1, 2]), "map": {"x": None}, "other": np.arange(3)}, 2)
        for row in rows:
            assert (row["task"], row["map"], row["other"].tolist()) == ("pick", {"x": None}, [0, 1, 2])

    def test_lists_of_length_m_are_split(self) -> None:
        assert split_info({"names": ["a", {"b": 1}], "k": np.arange(2)}, 2)[1] == {"names": {"b": 1}, "k": 1}

    def test_the_record_stays_out_and_an_info_of_that_name_comes_back(self) -> None:
        info = {"episode": {"r": np.zeros(2)}, "env_episode": np.array([7, 8]), "_env_episode": np.array([True, False])}
        assert split_info(info, 2) == [{"episode": 7}, {}]

    def test_bin_keys_become_str(self) -> None:
        assert split_info({b"k\xff": np.array([1, 2])}, 2) == [{"k\ufffd": 1}, {"k\ufffd": 2}]

    def test_no_env_gives_no_row(self) -> None:
        assert split_info({"k": np.arange(0)}, 0) == []


class TestRecords:
    def records(self, m: int = 2, **episode: Any) -> list[EpisodeRecord | None]:
        return episode_records({"episode": episode}, m)

    def test_are_read_where_the_mask_is_true(self) -> None:
        nothing, one = self.records(
            r=np.array([0.0, 2.5]), l=np.array([0, 40]), s=np.array([False, True]), mask=np.array([False, True])
        )
        assert nothing is None
        assert one is not None
        assert (one.ret, one.length, one.success) == (2.5, 40, True)

    def test_an_absent_mask_means_true_and_absent_success_not_known(self) -> None:
        found = self.records(r=np.array([1, 2], ">i4"), l=np.array([3.0, 4.0]))
        assert [(each.ret, each.length, each.success) for each in found if each is not None] == [
            (1.0, 3, None),
            (2.0, 4, None),
        ]

    @pytest.mark.parametrize("one", [2.0, np.float32(2), np.array(2.0), np.array([2.0]), [2.0]])
    def test_a_single_env_may_send_single_numbers(self, one: Any) -> None:
        (found,) = self.records(1, r=one, l=one, s=True, mask=True)
        assert found is not None
        assert (found.ret, found.length, found.success) == (2.0, 2, True)

    @pytest.mark.parametrize(
        "value",
        [
            None,
            "text",
            b"raw",
            [],
            [[1], [1, 2]],
            ["a", "b"],
            [10**30, 1],
            {"a": 1},
            1.0,
            np.zeros(3),
            np.zeros((2, 1)),
            np.zeros((1, 2)),
            np.array(["a", "b"]),
            np.array([np.nan, np.inf]),
        ],
        ids=repr,
    )
    def test_anything_else_is_no_record_and_no_error(self, value: Any) -> None:
        good = np.array([1.0, 2.0])
        assert self.records(r=good, l=value) == [None, None]
        assert self.records(r=good, l=good, s=value, mask=np.array([False, False])) == [None, None]
        assert len(self.records(r=good, l=good, s=good, mask=value)) == 2
        assert len(self.records(r=value, l=good)) == 2

    @pytest.mark.parametrize("info", [{}, {"episode": None}, {"episode": np.zeros(2)}, {"episode": {}}])
    def test_an_info_without_one_has_none(self, info: dict[str, Any]) -> None:
        assert episode_records(info, 2) == [None, None]


class TestBatch:
    def test_nothing_gives_nothing(self) -> None:
        assert batch_infos([]) == ({}, set())
        assert batch_infos([{}, {}]) == ({}, set())

    def test_a_key_of_some_envs_has_a_mask(self) -> None:
        batched, refused = batch_infos([{"k": 1.5}, {}])
        assert refused == set()
        assert batched["k"].tolist() == [1.5, 0.0]
        assert batched["_k"].tolist() == [True, False]

    def test_what_the_wire_cannot_carry_is_left_out_and_named(self) -> None:
        odd: list[dict[Any, Any]] = [
            {"object": object(), "ragged": [1, 2], 5: 1, "deep": {"o": object(), "k": 1}, "kind": 1},
            {"object": object(), "ragged": [1], 5: 1, "deep": {"o": object(), "k": 2}, "kind": object()},
        ]
        batched, refused = batch_infos(odd)
        assert refused == {"object", "ragged", "5", "deep.o", "kind"}
        assert list(batched) == ["deep"]
        assert batched["deep"]["k"].tolist() == [1, 2]

    @pytest.mark.parametrize("value", ["\ud800", 1j, b"raw", np.datetime64("2020-01-01"), [[1], [1, 2]], 2**70])
    def test_values_that_cannot_be_encoded_are_refused_here(self, value: Any) -> None:
        assert batch_infos([{"k": value}, {"k": value}]) == ({}, {"k"})

    @pytest.mark.parametrize(
        "values", [(0, 0.5), (True, 3), (None, 1.5), (None, None), ("text", 1), (np.float32(0.5), True)], ids=repr
    )
    def test_scalars_of_several_kinds_keep_their_own(self, values: tuple[Any, Any]) -> None:
        batched, refused = batch_infos([{"x": value} for value in values])
        check_splittable(batched, 2)
        found = [row["x"] for row in split_info(decode(b"".join(encode(batched))), 2)]
        assert not refused
        assert found == list(values)
        plain = [value.item() if isinstance(value, np.generic) else value for value in values]
        assert [type(value) for value in found] == [type(value) for value in plain]

    def test_scalars_of_several_kinds_may_be_absent_in_some_envs(self) -> None:
        infos: list[dict[str, Any]] = [{"x": 0}, {}, {"x": None}, {"x": "text"}]
        batched, _ = batch_infos(infos)
        assert split_info(batched, 4) == infos

    def test_arrays_of_several_kinds_take_the_wider_one(self) -> None:
        batched, refused = batch_infos([{"x": np.array([1, 2])}, {"x": np.array([0.5, 1])}])
        assert (batched["x"].tolist(), refused) == ([[1.0, 2.0], [0.5, 1.0]], set())

    def test_what_is_split_shares_nothing_with_the_message_nor_between_envs(self) -> None:
        buffer = bytearray(b"".join(encode({"m": np.zeros(2), "frames": [np.ones(2), np.ones(2)], "all": [[1], {}]})))
        rows = split_info(decode(memoryview(buffer)), 2)
        buffer[:] = b"\xff" * len(buffer)
        assert rows[0]["frames"].tolist() == [1.0, 1.0]
        lone = split_info({"goal": [np.ones(1)], "d": {"a": [1, 2, 3]}}, 2)
        assert lone[0]["goal"] is not lone[1]["goal"]
        assert lone[0]["d"]["a"] is not lone[1]["d"]["a"]

    def test_widths_are_joined(self) -> None:
        batched, _ = batch_infos([{"t": "a", "f": np.float32(1)}, {"t": "long", "f": 2.0}])
        assert (batched["t"].tolist(), batched["f"].dtype) == (["a", "long"], np.float64)

    def test_an_info_called_episode_is_not_taken_for_the_record(self) -> None:
        batched, _ = batch_infos([{"episode": {"r": 1.0}}, {}])
        assert list(batched) == ["env_episode", "_env_episode"]
        assert episode_records(batched, 2) == [None, None]
        assert split_info(batched, 2) == [{"episode": {"r": 1.0}}, {}]

    @pytest.mark.parametrize("infos", [[{"a": {}}] * 2, [{"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}]])
    def test_maps_of_maps_can_be_split_all_the_same(self, infos: list[dict[str, Any]]) -> None:
        batched, _ = batch_infos(infos)
        check_splittable(batched, 2)
        assert split_info(over_the_wire(batched), 2) == infos

    def test_costs_no_more_than_the_values(self) -> None:
        infos = [{"x": np.zeros(1000)} for _ in range(100)]
        tracemalloc.start()
        try:
            batch_infos(infos)
            assert tracemalloc.get_traced_memory()[1] < 4 * 100 * 8000
        finally:
            tracemalloc.stop()


# Names may begin with an underscore, but not be one with another name: that is how a mask looks.
names = st.sampled_from(["a", "b", "episode", "final", "_own"])
columns = st.sampled_from(
    [
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3),
        st.lists(st.floats(allow_nan=False, width=32), min_size=3, max_size=3).map(
            lambda row: np.array(row, np.float32)
        ),
    ]
)


@st.composite
def info_lists(draw: st.DrawFn, depth: int = 2) -> list[dict[str, Any]]:
    n = draw(st.integers(1, 4))
    infos: list[dict[str, Any]] = [{} for _ in range(n)]
    for name in draw(st.sets(names, max_size=3)):
        inner = draw(info_lists(depth - 1)) if depth and draw(st.booleans()) else None
        column = draw(columns)
        for i, info in enumerate(infos):
            if draw(st.integers(0, 3)):
                info[name] = draw(column) if inner is None else inner[i % len(inner)]
    return infos


@settings(deadline=None, max_examples=200)
@given(info_lists())
def test_infos_round_trip_over_the_wire(infos: list[dict[str, Any]]) -> None:
    batched, refused = batch_infos(infos)
    assert refused == set()
    wire = over_the_wire(batched)
    if wire:
        check_splittable(wire, len(infos))
    found = split_info(wire, len(infos))
    assert len(found) == len(infos)
    assert all(map(same, infos, found)), (infos, found)
