"""The short way of vector infos to the wire says what the long way, env by env, says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plugrl_bridges.wire.info import batch_infos, columns_for_wire, merged, row_info, scattered, split_info

N = 4


def infos(**more: Any) -> dict[str, Any]:
    return {"x": np.arange(N) * 1.5, "t": np.arange(N), "_t": np.array([True, False, True, True]), **more}


def test_plain_arrays_go_as_they_are_and_the_name_of_the_record_is_kept_free() -> None:
    nested = {"r": np.ones(N), "_r": np.ones(N, bool)}
    given = infos(episode=nested, _episode=np.ones(N, bool), inner={"episode": np.zeros(N)})
    columns = columns_for_wire(given, N)
    assert columns is not None
    assert set(columns) == {"x", "t", "_t", "env_episode", "_env_episode", "inner"}
    assert columns["inner"] == {"episode": given["inner"]["episode"]}
    assert columns["x"] is given["x"]


@pytest.mark.parametrize(
    "value",
    [np.zeros(N, object), np.zeros(N + 1), np.array(1.0), np.zeros(N, np.longdouble), [1] * N, "x", {"y": "z"}],
    ids=["objects", "too long", "no rows", "too wide", "a list", "text", "a dict with text"],
)
def test_anything_else_takes_the_long_way(value: Any) -> None:
    assert columns_for_wire(infos(odd=value), N) is None


def test_a_key_that_is_no_text_takes_the_long_way() -> None:
    assert columns_for_wire({1: np.zeros(N)}, N) is None


def test_ended_rows_say_what_the_last_step_said_and_the_others_what_this_one_says() -> None:
    own = infos(only_own=np.arange(N), deep={"a": np.arange(N)})
    final = {"x": -np.ones(N), "t": np.full(N, 9), "only_final": np.full(N, 7.0), "deep": {"b": np.full(N, 2)}}
    ended = np.array([False, True, False, True])
    merged = merged_columns(own, final, ended)
    assert merged is not None
    expected = [row_info(final if ended[row] else own, row) for row in range(N)]
    assert split_info(merged, N) == expected
    assert own["x"].tolist() == [0, 1.5, 3, 4.5]  # what the simulator gave is left alone


def merged_columns(own: dict[str, Any], final: dict[str, Any], ended: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    over, going_on = np.flatnonzero(ended), np.flatnonzero(~ended)
    return merged([(own, going_on, going_on), (final, over, over)], N)


@pytest.mark.parametrize("value", [np.zeros((N, 2)), np.zeros(N, np.int8), {"a": np.zeros(N)}], ids=str)
def test_two_kinds_of_value_under_one_key_take_the_long_way(value: Any) -> None:
    assert merged_columns(infos(), {"x": value}, np.ones(N, bool)) is None
    assert merged_columns({"d": {"x": np.zeros(N)}}, {"d": {"x": value}}, np.ones(N, bool)) is None


def test_infos_of_a_few_are_spread_over_all() -> None:
    few = [{"a": 1, "s": "x", "d": {"v": np.ones(2)}, "mixed": 1}, {"a": 2, "b": 0.5, "s": "yy", "mixed": "z"}]
    wide = scattered(batch_infos(few)[0], [3, 1], N)
    found = split_info(wide, N)
    assert found[0] == found[2] == {}
    assert found[1] == few[1]
    assert {**found[3], "d": None} == {**few[0], "d": None}
    assert found[3]["d"]["v"].tolist() == [1, 1]


def test_infos_of_all_stay_as_they_are() -> None:
    batched = batch_infos([{"a": row} for row in range(N)])[0]
    assert scattered(batched, list(range(N)), N) == batched
