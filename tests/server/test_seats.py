"""The record of one connection: which of its envs fill which slots, and the stages of its life."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from plugrl_bridges.server.seats import TRANSITIONS, Event, Seat, Stage


def seat(envs: tuple[int, ...], slots: tuple[int, ...]) -> Seat:
    made = Seat(cast("Any", None), envs, frozenset())
    made.sit(slots)
    return made


@pytest.mark.parametrize(
    ("envs", "slots", "asked", "rows"),
    [
        ((0, 1, 2), (4, 5, 6), [0, 1, 2], [4, 5, 6]),
        ((0, 1, 2), (4, 5, 6), [2, 0, 1], [6, 4, 5]),
        ((0, 1, 2), (4, 5, 6), [1], [5]),
        ((7, 3), (1, 9), [7, 3], [1, 9]),
        ((7, 3), (1, 9), [3, 7], [9, 1]),
        ((5,), (0,), [5], [0]),
    ],
)
def test_rows_are_the_slots_of_the_envs_in_the_order_asked(
    envs: tuple[int, ...], slots: tuple[int, ...], asked: list[int], rows: list[int]
) -> None:
    found = np.arange(10)[seat(envs, slots).rows(np.array(asked))]
    assert found.tolist() == rows


def test_neighbouring_slots_in_order_are_a_slice() -> None:
    assert seat((0, 1), (2, 3)).rows(np.array([0, 1])) == slice(2, 4)


def test_a_seat_knows_exactly_its_envs_in_any_order() -> None:
    own = seat((0, 4), (0, 1))
    assert own.knows(np.array([0, 4]))
    assert own.knows(np.array([4, 0]))
    assert not own.knows(np.array([0]))
    assert not own.knows(np.array([0, 1]))
    assert not own.knows(np.array([0, 4, 5]))


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("stage", Stage)
def test_an_event_leads_where_the_table_says_or_is_refused_by_name(stage: Stage, event: Event) -> None:
    one = Seat(cast("Any", None), (0,), frozenset(), stage)
    after = TRANSITIONS[event].get(stage)
    if after is None:
        with pytest.raises(RuntimeError, match=rf"{event.name} .* in stage {stage.name} "):
            one.note(event)
        assert one.stage is stage
    else:
        one.note(event)
        assert one.stage is after


def test_every_stage_can_be_reached_and_left_but_the_last() -> None:
    reached = {Stage.UNRESET, Stage.SPARE}
    while more := {moves[stage] for stage in reached for moves in TRANSITIONS.values() if stage in moves} - reached:
        reached |= more
    assert reached == set(Stage)
    assert not any(Stage.GONE in moves for moves in TRANSITIONS.values())


def follow(*events: Event, stage: Stage = Stage.SPARE, returned: bool = False) -> Seat:
    one = Seat(cast("Any", None), (0,), frozenset(), stage, returned)
    for event in events:
        one.note(event)
    return one


STEPPED = (Event.SIT, Event.HAND_OVER, Event.STEP, Event.FEEDBACK, Event.INFER)


@pytest.mark.parametrize("number", range(len(STEPPED) + 1))
def test_a_result_is_owed_from_the_action_to_the_next_infer(number: int) -> None:
    assert follow(*STEPPED[:number]).owes == (number in {3, 4})


def test_a_reset_is_owed_by_envs_that_never_had_one_too() -> None:
    one = follow(Event.SIT, Event.RESET, stage=Stage.UNRESET)
    assert one.owes
    one.note(Event.INFER)
    assert (one.owes, one.stage) == (False, Stage.RESTING)


def test_a_client_that_came_back_is_amid_episodes_until_it_steps_or_is_reset() -> None:
    for events in ((Event.SIT,), (Event.SIT, Event.HAND_OVER)):
        assert follow(*events, returned=True).amid_episodes
        assert not follow(*events).amid_episodes
    assert not follow(*STEPPED, returned=True).amid_episodes
    assert not follow(Event.SIT, Event.RESET, Event.INFER, returned=True).amid_episodes
