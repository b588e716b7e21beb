"""Own what is said when the trainer's rows as a whole are not those of the envs: in another order, or all changed.

``comparing`` asks once it is done. The first observation of each row tells: the files are begun anew for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from plugrl_bridges.ledger.common import Common
    from plugrl_bridges.ledger.outcome import Comparison
    from plugrl_bridges.ledger.reader import Event, LedgerReader
    from plugrl_bridges.ledger.streams import EnvEvents

__all__ = ["of_rows"]

_SHOWN_ROWS = 8
_NEARLY_ALL = 0.9
_CHANGED = (
    "nearly every observation of every env differs: either a wrapper between both ledgers changes values, then put "
    "LedgerVecEnv or LedgerVectorEnv below it, around what hands out the envs; or the files are of two runs"
)


def of_rows(trainer: LedgerReader, streams: Sequence[EnvEvents], observation: Common, found: Comparison) -> list[str]:
    """Say why whole rows differ, if their first observations tell.

    Args:
        trainer: The trainer's ledger.
        streams: The envs, in the order of its rows.
        observation: Form in which both sides' observations are compared.
        found: The finished comparison.

    Returns:
        No note, or one.
    """
    if found.first is None or not found.cells["reset_obs"] or not found.cells["obs"]:
        return []
    given = _first_of_rows(trainer, observation)
    made = [_first_of_env(stream, observation) for stream in streams]
    wrong = [row for row in range(len(made)) if given.get(row) != made[row]]
    if not wrong or found.cells["obs"] < _NEARLY_ALL * found.env_steps * len(wrong) / len(made):
        return []
    moved = []
    for row in wrong:
        slots = [stream.slot for stream, first in zip(streams, made, strict=True) if first == given.get(row)]
        if len(slots) == 1:
            [slot] = slots
            named = f"env {slot.number} (rank {slot.rank}, index {slot.env_index})"
            moved.append(f"row {row} of the trainer began with the first observation of {named}")
    if moved:
        more = len(moved) - _SHOWN_ROWS
        shown = ", ".join(moved[:_SHOWN_ROWS]) + (f", and so on for {more} more rows" if more > 0 else "")
        return [f"the rows seem to be in another order: {shown}; give clients their --rank, and envs their env_index"]
    if len(wrong) == len(made):
        return [_CHANGED]
    return []


def _first_of_rows(trainer: LedgerReader, observation: Common) -> dict[int, bytes]:
    """Give the observation with which each row began: that of the last reset before its first step."""
    found: dict[int, bytes] = {}
    for env, event in _events(trainer):
        if not event.is_reset:
            break
        found[env] = observation.from_trainer(event.observation)
    return found


def _first_of_env(stream: EnvEvents, observation: Common) -> bytes | None:
    found = None
    for env, event in _events(stream.readers[0]):
        if env == stream.slot.env_index:
            if not event.is_reset:
                break
            found = observation.from_env(event.observation)
    return found


def _events(reader: LedgerReader) -> Iterator[tuple[int, Event]]:
    for record in reader.records():
        yield from zip(record.envs, record.events, strict=False)  # a join has no event
