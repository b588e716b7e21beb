"""The texts that say who is missing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import pytest

from plugrl_bridges.server.report import (
    client_command,
    lost_clients,
    slots_text,
    still_acting,
    vacant_slots,
    waiting_for_clients,
)
from plugrl_bridges.server.seats import Loss, Seat

URL = "ws://127.0.0.1:8000"


@dataclass
class StubPeer:
    address: str

    def last_words(self) -> str:
        return "feedback 3.0 s ago"


def seat(address: str, slots: tuple[int, ...]) -> Seat:
    made = Seat(cast("Any", StubPeer(address)), tuple(range(len(slots))), frozenset())
    made.sit(slots)
    return made


def loss(address: str, *slots: int) -> Loss:
    why = "its connection ended with 1006"
    return Loss(slots, address, why, "feedback 3.0 s ago", time.monotonic())


@pytest.mark.parametrize(
    ("slots", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([12, 0, 1, 2, 7], "0-2, 7, 12"), ([5, 4], "4-5")],
)
def test_slots_are_written_as_ranges(slots: list[int], text: str) -> None:
    assert slots_text(slots) == text


def test_the_command_has_the_url_and_the_number_of_envs() -> None:
    assert client_command(URL, 4) == f"plugrl-env-client --env-id <id> --num-envs 4 --url {URL}"
    assert "--num-envs <n>" in client_command(URL, None)
    assert client_command(URL, 4, verify=True) == f"plugrl-env-client --env-id <id> --num-envs 4 --url {URL} --verify"


def test_waiting_says_who_is_here_and_how_to_start_a_client() -> None:
    text = waiting_for_clients(URL, 4, [seat("127.0.0.1:5", (0,)), seat("127.0.0.1:6", (1, 2))], 7.2, ["a note"])
    assert text == (
        f"waiting for env clients at {URL} for 7 s: 3 of 4 envs are here (127.0.0.1:5: 1; 127.0.0.1:6: 2); a note. "
        f"Start a client with: plugrl-env-client --env-id <id> --num-envs 1 --url {URL}"
    )
    assert "0 of ? envs are here." in waiting_for_clients(URL, None, [], 7.2)
    assert waiting_for_clients(URL, 4, [], 7.2, verify=True).endswith(" --verify")


def test_still_acting_names_slots_addresses_and_last_words() -> None:
    text = still_acting(URL, [seat("127.0.0.1:5", (0, 1)), seat("127.0.0.1:6", (3,))], 5, 60.0)
    assert "took longer than 60.0 s: 2 of 5 envs answered" in text
    assert "slots 0-1 at 127.0.0.1:5, last message: feedback 3.0 s ago" in text
    assert "slots 3 at 127.0.0.1:6" in text


def test_vacant_slots_are_told_by_the_client_that_left_them() -> None:
    first = loss("127.0.0.1:5", 0, 1)
    text = vacant_slots(URL, [first, loss("127.0.0.1:6", 3)], 5, 60.0)
    assert "2 of 5 envs are connected" in text
    assert "within 60.0 s" in text
    assert "slots 0-1 were at 127.0.0.1:5, lost 0.0 s ago: its connection ended with 1006" in text
    assert "slots 3 were at 127.0.0.1:6" in text
    assert "--num-envs 3" in text
    first.vacant.remove(0)
    text = vacant_slots(URL, [first], 5, 60.0, ["a note"], verify=True)
    assert "slots 1 were at" in text
    assert f"feedback 3.0 s ago; a note. Start a client with: {client_command(URL, 1, verify=True)}" in text


def test_lost_clients_say_which_option_would_have_gone_on() -> None:
    text = lost_clients(URL, [loss("127.0.0.1:5", 1)], 5)
    assert "lost the clients of 1 of 5 envs" in text
    assert "slots 1 were at 127.0.0.1:5" in text
    assert "on_client_loss='truncate'" in text
