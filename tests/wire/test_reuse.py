from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.reuse import ReuseRule
from tests.wire.strategies import ids


def flags(*values: bool) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array(values, dtype=np.bool_)


def rule_after(*, terminated: bool = False, truncated: bool = False) -> ReuseRule:
    rule = ReuseRule()
    rule.note_feedback(ids([3]), flags(terminated), flags(truncated))
    return rule


def test_nothing_may_be_reused_on_a_new_connection() -> None:
    rule = ReuseRule()
    assert rule.marks(ids([0, 1])).tolist() == [False, False]
    with pytest.raises(RemoteProtocolError, match="env 1 is marked reuse, but it has no feedback on this") as caught:
        rule.check(ids([0, 1]), flags(False, True))
    assert caught.value.clause == "10.1"


def test_the_last_feedback_may_be_reused_again_and_again() -> None:
    rule = rule_after()
    for _ in range(2):
        assert rule.marks(ids([1, 3])).tolist() == [False, True]
        rule.check(ids([1, 3]), flags(False, True))


@pytest.mark.parametrize(("terminated", "truncated"), [(True, False), (False, True), (True, True)])
def test_not_after_the_end_of_an_episode(terminated: bool, truncated: bool) -> None:
    rule = rule_after(terminated=terminated, truncated=truncated)
    assert rule.marks(ids([3])).tolist() == [False]
    with pytest.raises(RemoteProtocolError, match="its episode ended or it was reset"):
        rule.check(ids([3]), flags(True))


def test_not_after_a_reset() -> None:
    rule = rule_after()
    rule.forget(iter([3, 9]))
    assert rule.marks(ids([3])).tolist() == [False]
    assert rule.fault(ids([3]), flags(True)) == "infer: env 3 is marked reuse, but its episode ended or it was reset"


def test_again_after_the_next_feedback() -> None:
    rule = rule_after(terminated=True)
    rule.note_feedback(ids([3]), flags(False), flags(False))
    rule.check(ids([3]), flags(True))


def test_unmarked_rows_are_never_at_fault() -> None:
    ReuseRule().check(ids([0, 1]), flags(False, False))
    assert ReuseRule().fault(ids([]), flags()) is None


def test_marks_are_bools_even_of_no_envs() -> None:
    assert ReuseRule().marks(ids([])).dtype == np.bool_


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["goes on", "ends", "reset"])), max_size=12))
def test_the_marks_are_exactly_what_the_check_admits(story: list[tuple[int, str]]) -> None:
    rule, last = ReuseRule(), dict.fromkeys(range(4), "nothing")
    for env, what in story:
        last[env] = what
        if what == "reset":
            rule.forget([env])
        else:
            rule.note_feedback(ids([env]), flags(what == "ends"), flags(False))
    assert rule.marks(ids([0, 1, 2, 3])).tolist() == [last[env] == "goes on" for env in range(4)]
    for env in range(4):
        assert (rule.fault(ids([env]), flags(True)) is None) == (last[env] == "goes on")
