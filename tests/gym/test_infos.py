"""Vector infos in both dialects: Gymnasium 1.x's held to Gymnasium itself, 0.29's to what it is known to give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_bridges.gym.infos import InfoDialect, InfoWriter
from plugrl_bridges.server.autoreset import AutoresetMode, AutoresetViews
from plugrl_bridges.server.result import Ended, InfoPart, StepResult
from plugrl_bridges.spaces import ObservationLayout
from plugrl_bridges.wire.codec import decode, encode
from plugrl_bridges.wire.info import Columns, batch_infos
from tests.adapters.equality import assert_same
from tests.support import OBSERVATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

Info = dict[str, Any]

# What Gymnasium makes of a column whose first value is of another kind than a later one (an error, or a cast) nobody
# wants; so every key has its own kind of value here, as in a real env.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(1 << 62), 1 << 62),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "word": st.text(max_size=5).filter(lambda text: "\x00" not in text),
    "vector": st.lists(st.floats(-9, 9), min_size=3, max_size=3).map(np.array),
    "matrix": st.integers(0, 9).map(lambda fill: np.full((2, 2), fill, np.uint8)),
}
LEAVES = st.fixed_dictionaries({}, optional=VALUES)
INFOS = st.fixed_dictionaries(
    {},
    optional={**VALUES, "nested": st.fixed_dictionaries({}, optional={**VALUES, "deep": LEAVES})},
)


def parts(infos: Sequence[Info], connections: Sequence[Sequence[int]]) -> list[InfoPart]:
    """Send infos over the wire: one message for the slots of each connection."""
    found = []
    for slots in connections:
        batched, refused = batch_infos([infos[slot] for slot in slots])
        assert not refused
        if batched:
            found.append(InfoPart.of(cast("Any", decode(b"".join(encode(batched)))), np.array(slots)))
    return found


def gymnasiums(infos: Sequence[Info], rows: Sequence[int] | None = None) -> Info:
    """Give what Gymnasium's own vector envs make of single infos."""
    env: Any = VectorEnv()
    env.num_envs = len(infos)
    vector: Info = {}
    for slot in range(len(infos)) if rows is None else rows:
        vector = env._add_info(vector, infos[slot], slot)
    return vector


def pruned(infos: Info) -> Info:
    """Leave out dicts that are empty in every env: they say nothing, and there is nothing of them on the wire."""
    left: Info = {}
    for key, value in infos.items():
        inner = pruned(value) if isinstance(value, dict) else value
        if not (isinstance(inner, dict) and not inner):
            left[key] = inner
    return {key: value for key, value in left.items() if not (key.startswith("_") and key[1:] not in left)}


@settings(deadline=None)
@given(st.lists(INFOS, min_size=4, max_size=4), st.permutations([[0, 1], [2], [3]]))
def test_columns_are_those_of_gymnasium(infos: list[Info], connections: list[list[int]]) -> None:
    columns = Columns(4)
    for part in parts(infos, connections):
        columns.add(part.info, part.slots, part.rows)
    assert_same(pruned(columns.infos), pruned(gymnasiums(infos)))


@settings(deadline=None)
@given(st.lists(INFOS, min_size=3, max_size=3), st.sets(st.sampled_from([0, 1, 2])))
def test_columns_of_some_rows_alone(infos: list[Info], rows: set[int]) -> None:
    columns = Columns(3)
    for part in parts(infos, [[0, 2], [1]]):
        some = part.only(np.isin(np.arange(3), list(rows)))
        columns.add(some.info, some.slots, some.rows)
    assert_same(pruned(columns.infos), pruned(gymnasiums(infos, sorted(rows))))


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, "one"), ("one", 1), (1.5, np.arange(2.0)), (np.arange(2.0), np.arange(3.0)), (np.arange(2), "two")],
    ids=repr,
)
def test_values_of_different_kinds_under_one_key_are_objects(first: Any, second: Any) -> None:
    """Gymnasium would raise, or cut the value; a run of remote envs must not end for an info."""
    columns = Columns(2)
    for part in parts([{"x": first}, {"x": second}], [[0], [1]]):
        columns.add(part.info, part.slots, part.rows)
    column = columns.infos["x"]
    assert column.dtype == object
    assert [str(each) for each in column] == [str(first), str(second)]
    assert columns.infos["_x"].tolist() == [True, True]


def test_numbers_of_different_kinds_under_one_key_are_those_of_the_first() -> None:
    columns = Columns(2)
    for part in parts([{"x": 1.5}, {"x": 2}], [[0], [1]]):
        columns.add(part.info, part.slots, part.rows)
    assert_same(columns.infos["x"], np.array([1.5, 2.0]))


# Steps and resets ---------------------------------------------------------------------------------------------------

LAYOUT = ObservationLayout(OBSERVATIONS)
INFOS_OF_STEP: list[Info] = [{"t": 3, "n": {"a": 1.5}}, {"t": 4, "word": "end"}, {"t": 5}]
INFOS_OF_RESET: list[Info] = [{}, {"began": 2, "t": 9}, {}]


def result(*, over: Sequence[int] = (1,), **changes: Any) -> StepResult:
    """Make the result of a step of three slots, in which the second ended its episode (return 15, length 5)."""
    ended = np.isin(np.arange(3), over)
    settings: dict[str, Any] = {
        "observations": [np.repeat(np.arange(10, 13, dtype=np.float32)[:, None], 3, axis=1)],
        "rewards": np.zeros(3),
        "terminated": ended,
        "truncated": np.zeros(3, np.bool_),
        "stepped": np.ones(3, np.bool_),
        "begun": ended,
        "first": [np.zeros((3, 3), np.float32)],
        "info_parts": parts(INFOS_OF_STEP, [[0, 1], [2]]),
        "reset_parts": parts(INFOS_OF_RESET, [[0], [1], [2]]) if over else [],
        "ended": {slot: Ended(15.0, 5, 0.25) for slot in over},
    }
    return StepResult(**{**settings, **changes})


class Written:
    """Write the infos of results, each as the first that its trainer sees.

    Args:
        mode: The trainer's.
        dialect: Of the infos.
        episodes: Whether to add records.
    """

    def __init__(
        self,
        mode: AutoresetMode = AutoresetMode.SAME_STEP,
        dialect: InfoDialect = InfoDialect.ARRAYS,
        *,
        episodes: bool = False,
    ) -> None:
        self._mode = mode
        self._writer = InfoWriter(LAYOUT, 3, dialect, episodes=episodes)

    def step(self, step: StepResult) -> Info:
        return self._writer.step(AutoresetViews(self._mode, 3).step(step))

    def reset(self, step: StepResult) -> Info:
        return self._writer.reset(AutoresetViews(self._mode, 3).reset(step))


def objects(*values: Any) -> Any:
    array = np.full(len(values), None)
    array[:] = values
    return array


def column(name: str, values: Any, mask: Sequence[int]) -> Info:
    return {name: np.array(values) if isinstance(values, list) else values, f"_{name}": np.array(mask, np.bool_)}


def final_vector() -> Any:
    array = np.full(3, None)
    array[1] = np.full(3, 11, np.float32)
    return array


RECORD = {
    **column("r", [0.0, 15.0, 0.0], [0, 1, 0]),
    **column("l", [0, 5, 0], [0, 1, 0]),
    **column("t", [0.0, 0.25, 0.0], [0, 1, 0]),
}


@pytest.mark.parametrize("episodes", [False, True])
def test_arrays_same_step(*, episodes: bool) -> None:
    infos = Written(episodes=episodes).step(result())
    final = {**column("t", [0, 4, 0], [0, 1, 0]), **column("word", objects(None, "end", None), [0, 1, 0])}
    if episodes:
        final |= {"episode": RECORD, "_episode": np.array([False, True, False])}
    expected = {
        **column("t", [3, 9, 5], [1, 1, 1]),
        "n": column("a", [1.5, 0.0, 0.0], [1, 0, 0]),
        "_n": np.array([True, False, False]),
        **column("began", [0, 2, 0], [0, 1, 0]),
        **column("final_obs", final_vector(), [0, 1, 0]),
        "final_info": final,
        "_final_info": np.array([False, True, False]),
    }
    assert_same(infos, expected)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
@pytest.mark.parametrize("episodes", [False, True])
def test_arrays_of_the_other_modes(mode: AutoresetMode, *, episodes: bool) -> None:
    infos = Written(mode, episodes=episodes).step(result())
    expected = {
        **column("t", [3, 4, 5], [1, 1, 1]),
        "n": column("a", [1.5, 0.0, 0.0], [1, 0, 0]),
        "_n": np.array([True, False, False]),
        **column("word", objects(None, "end", None), [0, 1, 0]),
    }
    if episodes:
        expected |= {"episode": RECORD, "_episode": np.array([False, True, False])}
    assert_same(infos, expected)


def test_arrays_of_a_step_in_which_nothing_ended() -> None:
    infos = Written(episodes=True).step(result(over=(), info_parts=parts([{}, {"x": 1}, {}], [[0, 1, 2]])))
    assert_same(infos, column("x", [0, 1, 0], [0, 1, 0]))


def test_arrays_of_the_step_that_begins_an_episode() -> None:
    began = result(over=(), info_parts=parts([{"t": 1}, {}, {"t": 2}], [[0], [1], [2]]),
                   reset_parts=parts([{"began": 1}], [[0]]), stepped=np.array([True, False, True]))  # fmt: skip
    began.reset_parts = [InfoPart(np.array([1]), part.info, part.rows) for part in began.reset_parts]
    infos = Written(AutoresetMode.NEXT_STEP, episodes=True).step(began)
    assert_same(infos, {**column("t", [1, 0, 2], [1, 0, 1]), **column("began", [0, 1, 0], [0, 1, 0])})


def test_a_record_that_the_client_brought_stays() -> None:
    brought = {"episode": {"r": 99.0, "l": 5, "t": 1.0}}
    for mode in AutoresetMode:
        infos = Written(mode, episodes=True).step(result(info_parts=parts([{}, brought, {}], [[0], [1], [2]])))
        where = infos["final_info"] if mode is AutoresetMode.SAME_STEP else infos
        assert where["episode"]["r"].tolist() == [0, 99, 0]
        assert where["_episode"].tolist() == [False, True, False]
    lists = Written(dialect=InfoDialect.LISTS, episodes=True).step(
        result(info_parts=parts([{}, brought, {}], [[0], [1], [2]]))
    )
    assert lists["final_info"][1]["episode"] == {"r": [99.0], "l": [5], "t": [1.0]}


OF_0_29 = {"r": np.array([99.0], np.float32), "l": np.array([5], np.int32), "t": np.array([1.0], np.float32)}
OF_1_X = {"r": 99.0, "l": 5, "t": 1.0}


@pytest.mark.parametrize("brought", [OF_0_29, OF_1_X], ids=["0.29", "1.x"])
def test_a_record_of_a_client_with_another_release_has_the_form_of_ours(brought: Info) -> None:
    step = result(over=(0, 1), info_parts=parts([{}, {"episode": brought}, {}], [[0, 1], [2]]))
    record = Written(episodes=True).step(step)["final_info"]["episode"]
    assert {key: column.tolist() for key, column in record.items() if not key.startswith("_")} == {
        "r": [15, 99, 0],
        "l": [5, 5, 0],
        "t": [0.25, 1, 0],
    }
    lists = Written(dialect=InfoDialect.LISTS, episodes=True).step(step)
    assert_same(lists["final_info"][1]["episode"], OF_0_29)
    assert lists["final_info"][0]["episode"]["r"].tolist() == [15]


@pytest.mark.parametrize("brought", ["the first", {"r": "high"}, {"l": np.arange(3)}], ids=str)
def test_what_a_client_calls_an_episode_may_be_something_else(brought: Any) -> None:
    step = result(info_parts=parts([{}, {"episode": brought}, {}], [[0], [1], [2]]))
    without = Written(dialect=InfoDialect.LISTS).step(step)
    assert_same(without["final_info"][1], {"episode": brought})
    lists = Written(dialect=InfoDialect.LISTS, episodes=True).step(step)
    arrays = Written(episodes=True).step(step)["final_info"]["episode"]
    for slot, ended in step.ended.items():  # who asks for records gets them
        assert lists["final_info"][slot]["episode"]["r"].item() == arrays["r"][slot] == ended.ret
        assert lists["final_info"][slot]["episode"]["l"].item() == arrays["l"][slot] == ended.length


@pytest.mark.parametrize("episodes", [False, True])
def test_lists_same_step(*, episodes: bool) -> None:
    infos = Written(dialect=InfoDialect.LISTS, episodes=episodes).step(result())
    final: Info = {"t": 4, "word": "end"}
    if episodes:
        final["episode"] = {
            "r": np.array([15.0], np.float32),
            "l": np.array([5], np.int32),
            "t": np.array([0.25], np.float32),
        }
    assert_same(
        infos,
        {
            **column("t", [3, 9, 5], [1, 1, 1]),
            **column("n", objects({"a": 1.5}, None, None), [1, 0, 0]),
            **column("began", [0, 2, 0], [0, 1, 0]),
            **column("final_observation", final_vector(), [0, 1, 0]),
            **column("final_info", objects(None, final, None), [0, 1, 0]),
        },
    )


def test_lists_of_a_step_in_which_nothing_ended() -> None:
    infos = Written(dialect=InfoDialect.LISTS, episodes=True).step(
        result(over=(), info_parts=parts([{"ok": True, "v": np.arange(2)}, {}, {"word": "go"}], [[0], [1], [2]]))
    )
    assert_same(
        infos,
        {
            **column("ok", [True, False, False], [1, 0, 0]),
            **column("v", objects(np.arange(2), None, None), [1, 0, 0]),
            **column("word", objects(None, None, "go"), [0, 0, 1]),
        },
    )


def test_lists_of_the_other_modes() -> None:
    infos = Written(AutoresetMode.DISABLED, InfoDialect.LISTS, episodes=True).step(result())
    assert infos["t"].tolist() == [3, 4, 5]
    assert infos["episode"][1]["r"].tolist() == [15.0]
    assert infos["_episode"].tolist() == [False, True, False]
    assert not {"final_info", "final_observation"} & set(infos)


@pytest.mark.parametrize("dialect", InfoDialect, ids=lambda dialect: dialect.name)
def test_infos_of_a_reset(dialect: InfoDialect) -> None:
    infos = Written(dialect=dialect, episodes=True).reset(
        result(over=(), reset_parts=parts(INFOS_OF_RESET, [[0, 1, 2]]))
    )
    assert_same(infos, {**column("began", [0, 2, 0], [0, 1, 0]), **column("t", [0, 9, 0], [0, 1, 0])})


@pytest.mark.parametrize("dialect", InfoDialect, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_losses_are_told_and_nothing_else_passes_for_one(mode: AutoresetMode, dialect: InfoDialect) -> None:
    lie = parts([{"client_lost": True}, {}, {}], [[0], [1], [2]])
    infos = Written(mode, dialect).step(result(over=(), info_parts=lie))
    assert infos == {}
    for write in (Written(mode, dialect).step, Written(mode, dialect).reset):
        infos = write(result(over=(), info_parts=lie, reset_parts=[], lost=(2,)))
        assert_same(infos, column("client_lost", [False, False, True], [0, 0, 1]))


@pytest.mark.parametrize("dialect", InfoDialect, ids=lambda dialect: dialect.name)
def test_a_step_of_which_there_is_nothing_to_say(dialect: InfoDialect) -> None:
    assert Written(dialect=dialect, episodes=True).step(result(over=(), info_parts=[])) == {}


@pytest.mark.parametrize(
    ("version", "dialect"),
    [("0.29.1", InfoDialect.LISTS), ("1.0.0", InfoDialect.ARRAYS), ("1.4.0a1", InfoDialect.ARRAYS)],
)
def test_the_dialect_of_the_installed_release(
    monkeypatch: pytest.MonkeyPatch, version: str, dialect: InfoDialect
) -> None:
    monkeypatch.setattr("plugrl_bridges.gym.infos.gymnasium", SimpleNamespace(__version__=version))
    assert InfoDialect.installed() is dialect


def test_the_dialect_here() -> None:
    assert InfoDialect.installed() is InfoDialect(gymnasium.__version__[:1] + ".x")
