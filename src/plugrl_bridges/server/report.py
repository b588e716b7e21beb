"""The texts that say who is missing, for warnings and errors: address, k of N envs, slots, time, last words.

Pure: it formats what it is given. ``server.exchange`` and ``server.roster`` ask for the texts.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from plugrl_bridges.server.seats import Loss, Seat

__all__ = [
    "client_command",
    "lost_clients",
    "slots_text",
    "still_acting",
    "vacant_slots",
    "waiting_for_clients",
]


def client_command(url: str, num_envs: int | None, *, verify: bool = False) -> str:
    """Return the command that starts a client for this bridge.

    Args:
        url: Where the bridge listens.
        num_envs: Envs that are missing; None if nobody knows.
        verify: Whether the client is to send digests of its steps.
    """
    command = f"plugrl-env-client --env-id <id> --num-envs {num_envs or '<n>'} --url {url}"
    return f"{command} --verify" if verify else command


def slots_text(slots: Iterable[int]) -> str:
    """Write slots as ranges: ``0-7, 12``."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def waiting_for_clients(
    url: str,
    num_envs: int | None,
    waiting: Sequence[Seat],
    elapsed_s: float,
    notes: Sequence[str] = (),
    *,
    verify: bool = False,
) -> str:
    """Return how many envs are here before the first step, from where, and how to start more."""
    have = sum(len(seat.envs) for seat in waiting)
    text = f"waiting for env clients at {url} for {elapsed_s:.0f} s: {have} of {num_envs or '?'} envs are here"
    if waiting:
        text += " (" + "; ".join(f"{seat.peer.address}: {len(seat.envs)}" for seat in waiting) + ")"
    for note in notes:
        text += f"; {note}"
    missing = None if num_envs is None else num_envs - have
    command = client_command(url, missing if missing and missing > 0 else num_envs, verify=verify)
    return f"{text}. Start a client with: {command}"


def still_acting(url: str, seats: Sequence[Seat], num_envs: int, elapsed_s: float) -> str:
    """Return which slots have no result for the step."""
    missing = [slot for seat in seats for slot in seat.slots]
    who = "; ".join(
        f"slots {slots_text(s.slots)} at {s.peer.address}, last message: {s.peer.last_words()}" for s in seats
    )
    return (
        f"the environment at {url} took longer than {elapsed_s:.1f} s: {num_envs - len(missing)} of {num_envs} envs "
        f"answered; missing: {who}"
    )


def vacant_slots(
    url: str,
    losses: Sequence[Loss],
    num_envs: int,
    elapsed_s: float,
    notes: Sequence[str] = (),
    *,
    verify: bool = False,
) -> str:
    """Return which slots lost their client, to whom they belonged, and how to start another."""
    vacant = {slot for loss in losses for slot in loss.vacant}
    told = "; ".join((*(_who_left(loss, loss.vacant) for loss in losses), *notes))
    return (
        f"{num_envs - len(vacant)} of {num_envs} envs are connected to {url} and no client took the vacant slots "
        f"within {elapsed_s:.1f} s: {told}. Start a client with: {client_command(url, len(vacant), verify=verify)}"
    )


def lost_clients(url: str, losses: Sequence[Loss], num_envs: int) -> str:
    """Return which slots lost their client, and to whom they belonged, where that alone is an error."""
    lost = {slot for loss in losses for slot in loss.slots}
    who = "; ".join(_who_left(loss, loss.slots) for loss in losses)
    return (
        f"lost the clients of {len(lost)} of {num_envs} envs at {url}: {who}; "
        "on_client_loss='truncate' would wait for others to take their place"
    )


def _who_left(loss: Loss, slots: Iterable[int]) -> str:
    return (
        f"slots {slots_text(slots)} were at {loss.address}, lost {time.monotonic() - loss.at:.1f} s ago: {loss.why}; "
        f"last message: {loss.last_words}"
    )
