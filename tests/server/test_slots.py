"""The slot table: who sits where, by rank and arrival, and who moves up."""

from __future__ import annotations

import random

import pytest

from plugrl_bridges.server.slots import Candidate, SlotTable


def seats(table: SlotTable, *connections: int) -> dict[int, tuple[int, ...]]:
    return {number: table.slots_of(number) for number in connections}


def filled(*sizes: int) -> SlotTable:
    """Give a table that is exactly filled by connections 0, 1, … of these sizes, ranked in order."""
    table = SlotTable(sum(sizes))
    for number, size in enumerate(sizes):
        table.arrive(Candidate(number, size, rank=number))
    return table


def test_ranked_clients_sit_in_rank_order_whoever_came_first() -> None:
    arrivals = [0, 1, 2, 3]
    for seed in range(5):
        random.Random(seed).shuffle(arrivals)
        table = SlotTable(8)
        for connection, rank in enumerate(arrivals):
            table.arrive(Candidate(connection, 2, rank=rank))
        assert seats(table, *range(4)) == {c: (2 * r, 2 * r + 1) for c, r in enumerate(arrivals)}


def test_unranked_clients_sit_behind_ranked_ones_in_order_of_arrival() -> None:
    table = SlotTable(3)
    table.arrive(Candidate(1, 1))
    table.arrive(Candidate(2, 1))
    table.arrive(Candidate(3, 1, rank=0))
    assert seats(table, 3, 1, 2) == {3: (0,), 1: (1,), 2: (2,)}


def test_nobody_is_seated_before_all_slots_can_be_filled() -> None:
    table = SlotTable(4)
    assert table.arrive(Candidate(1, 3)) == {}
    assert table.why_spare(Candidate(1, 3)) == "waiting until all slots can be filled"
    assert not table.filled
    assert table.slots_of(1) == ()


def test_a_client_larger_than_the_table_is_parked_and_told_why() -> None:
    table = SlotTable(2)
    assert table.arrive(Candidate(1, 3)) == {}
    assert table.why_spare(Candidate(1, 3)) == "it offers 3 envs, but there are 2 slots"


def test_a_smaller_client_behind_one_that_does_not_fit_is_seated() -> None:
    table = SlotTable(3)
    table.arrive(Candidate(1, 2))
    table.arrive(Candidate(2, 2))
    assert table.arrive(Candidate(3, 1)) == {1: (0, 1), 3: (2,)}
    assert table.slots_of(2) == ()


def test_a_surplus_client_is_parked() -> None:
    table = filled(1, 1)
    assert table.arrive(Candidate(9, 1)) == {}
    assert table.why_spare(Candidate(9, 1)) == "all 2 slots are taken"


def test_a_spare_moves_up_when_a_client_leaves() -> None:
    table = filled(1, 1)
    table.arrive(Candidate(9, 1))
    assert table.leave(1) == {9: (1,)}
    assert table.vacant == ()


def test_slots_stay_vacant_without_a_spare_and_go_to_the_next_that_comes() -> None:
    table = filled(1, 2)
    assert table.leave(1) == {}
    assert table.vacant == (1, 2)
    assert table.arrive(Candidate(9, 2)) == {9: (1, 2)}


def test_a_spare_that_is_too_large_stays_a_spare_and_is_told_why() -> None:
    table = filled(1, 2)
    table.leave(0)
    assert table.arrive(Candidate(9, 2)) == {}
    assert table.why_spare(Candidate(9, 2)) == "it offers 2 envs, but 1 slots are vacant"


def test_the_same_rank_gets_its_old_slots_back() -> None:
    table = filled(2, 2, 2)
    table.leave(2)
    table.leave(0)
    assert table.arrive(Candidate(10, 2, rank=0)) == {10: (0, 1)}
    assert table.arrive(Candidate(11, 2, rank=2)) == {11: (4, 5)}


def test_another_rank_of_the_same_size_takes_the_place_vacated_first() -> None:
    table = filled(1, 1, 1)
    table.leave(2)
    table.leave(0)
    assert table.arrive(Candidate(10, 1, rank=7)) == {10: (2,)}


def test_small_clients_share_the_place_of_a_large_one() -> None:
    table = filled(3, 1)
    table.leave(0)
    assert table.arrive(Candidate(5, 1)) == {5: (0,)}
    assert table.arrive(Candidate(6, 2)) == {6: (1, 2)}
    assert table.vacant == ()


def test_a_large_client_takes_the_places_of_several_small_ones() -> None:
    table = filled(1, 1, 1, 1)
    table.leave(3)
    table.leave(1)
    assert table.arrive(Candidate(5, 2)) == {5: (1, 3)}
    assert table.leave(5) == {}
    assert table.vacant == (1, 3)


def test_one_loss_may_seat_several_spares() -> None:
    table = filled(2)
    table.arrive(Candidate(5, 1))
    table.arrive(Candidate(6, 1))
    assert table.leave(0) == {5: (0,), 6: (1,)}


def test_a_spare_leaves_without_a_trace() -> None:
    table = filled(1)
    table.arrive(Candidate(5, 1))
    assert table.leave(5) == {}
    assert table.leave(0) == {}


def test_a_stranger_leaves_without_a_trace() -> None:
    assert filled(1).leave(99) == {}


def test_the_repr_shows_the_counts() -> None:
    table = filled(2, 1)
    table.arrive(Candidate(5, 1))
    assert repr(table) == "<SlotTable 3 of 3 slots seated, 1 spare connections>"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_slot_has_one_holder_or_is_vacant(seed: int) -> None:
    rng = random.Random(seed)
    table = SlotTable(6)
    here: dict[int, int] = {}
    for number in range(120):
        if here and rng.random() < 0.4:
            gone = rng.choice(list(here))
            del here[gone]
            table.leave(gone)
        else:
            here[number] = rng.randint(1, 3)
            table.arrive(Candidate(number, here[number], rank=rng.choice([None, 0, 1, 2])))
        taken = [slot for connection in here for slot in table.slots_of(connection)]
        assert len(taken) == len(set(taken))
        assert all(len(table.slots_of(c)) in {0, size} for c, size in here.items())
        if table.filled:
            assert sorted([*taken, *table.vacant]) == list(range(6))
