"""The record of one connection: which of its envs fill which slots."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from plugrl_bridges.server.seats import Seat


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
