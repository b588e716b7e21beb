"""Own what ``stepledger show`` says of one ledger: what it is of, and its events, each with its place.

``cli`` is the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.files import escaped
from plugrl_bridges.ledger.format import Flag, Kind, Side

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_bridges.ledger.columns import Column, Columns
    from plugrl_bridges.ledger.reader import Event, LedgerReader

__all__ = ["Choice", "about", "chosen"]

_SHOWN_CELLS = 8


@dataclass(frozen=True)
class Choice:
    """Say which events are wanted.

    Attributes:
        env: Number of the env, or the trainer's row; None: all.
        episode: From 0; None: all.
        step: Within the episode, from 1, 0 is the reset; None: all.
        skip: Leave out so many of these first.
        events: How many.
    """

    env: int | None = None
    episode: int | None = None
    step: int | None = None
    skip: int = 0
    events: int = 10

    def fits(self, placed: _Placed) -> bool:
        """Tell whether an event is wanted, but for how many."""
        return all(
            wanted is None or wanted == has
            for wanted, has in ((self.env, placed.env), (self.episode, placed.episode), (self.step, placed.step))
        )

    def __str__(self) -> str:
        """Name what is asked for."""
        asked = (("env", self.env), ("episode", self.episode), ("step", self.step))
        return ", ".join(f"{name} {value}" for name, value in asked if value is not None)


class _Placed(NamedTuple):
    """Hold an event, and where it is, counted as `compare` counts."""

    env: int
    episode: int
    step: int
    event: Event
    kept: bool


def about(reader: LedgerReader) -> Iterator[str]:
    """Say in lines what a ledger is of, and how it ends."""
    header = reader.header
    told = ", ".join(f"{key} {value}" for key, value in header.about.items())
    yield f"side      {header.side.value} ({header.dialect.value})"
    yield f"run       {escaped(header.run) or '-'}"
    yield f"about     {escaped(told)}"
    for name, columns in (("action", header.action), ("obs", header.observation)):
        for entry in columns.entries:
            by = " by digest; full=True records it whole" if entry.digested else ""
            yield f"{name:<9} {escaped(entry.name)} {list(entry.shape)} {entry.dtype.str}{by}"
    yield f"envs      {_envs(reader)}"
    yield f"end       {reader.tail}"


def chosen(reader: LedgerReader, choice: Choice) -> Iterator[str]:
    """Give the events that are wanted, one line each; a line that says why, if there are none.

    Raises:
        LedgerError: for an env that the ledger has not.
    """
    header = reader.header
    numbers = range(header.num_envs) or {number for _, number in reader.joined()}
    if choice.env is not None and choice.env not in numbers:
        raise LedgerError(f"{reader.path} has no env {choice.env}: its envs are {_envs(reader)}")
    fitting = 0
    for placed in _placed(reader):
        if fitting >= choice.skip + choice.events:
            return
        if choice.fits(placed):
            fitting += 1
            if fitting > choice.skip:
                yield _line(reader, placed)
    if fitting <= choice.skip and choice.events:
        whose = f" of {choice}" if str(choice) else ""
        skipped = f"; --skip {choice.skip} leaves out all of them" if fitting else ""
        yield f"nothing to show: the ledger has {fitting} events{whose}{skipped}"


def _envs(reader: LedgerReader) -> str:
    count = reader.header.num_envs
    if count:
        return f"0..{count - 1}"
    return ", ".join(str(number) for _, number in reader.joined()) or "-"


def _placed(reader: LedgerReader) -> Iterator[_Placed]:
    """Count episodes from 0 and steps from 1; a reset behind a reset begins no other episode."""
    places: dict[int, tuple[int, int]] = {}
    for record in reader.records():
        for env, event in zip(record.envs, record.events, strict=False):  # a join has no event
            episode, step = places.get(env, (-1, 1))
            kept = record.kind is Kind.KEPT
            if kept:
                pass
            elif not event.is_reset:
                episode, step = max(episode, 0), step + 1
            elif step:
                episode, step = episode + 1, 0
            places[env] = episode, step
            yield _Placed(env, episode, step, event, kept)


def _line(reader: LedgerReader, placed: _Placed) -> str:
    event, header = placed.event, reader.header
    at = f" (vector step {event.at})" if header.side is Side.TRAINER else ""
    place = f"env {placed.env}, episode {placed.episode}, step {placed.step}{at}"
    observation = _values(header.observation, event.observation)
    if placed.kept:
        return f"{place}: handed over again, otherwise than before -> {observation}"
    if event.is_reset:
        return f"{place}: reset -> {observation}"
    flags = "".join(f"{flag.name} ".lower() for flag in Flag if event.flags & flag)
    return f"{place}: {_values(header.action, event.action)} -> reward {event.reward!r} {flags}{observation}"


def _values(columns: Columns, data: bytes) -> str:
    return " ".join(_short(entry, value) for entry, value in zip(columns.entries, columns.split(data), strict=True))


def _short(entry: Column, value: Any) -> str:  # noqa: ANN401 - an array of any dtype
    if entry.digested:
        return f"[digest {int(value):016x}]"
    cells = value.reshape(-1).tolist()
    text = " ".join(f"{cell:.6g}" if isinstance(cell, float) else escaped(str(cell)) for cell in cells[:_SHOWN_CELLS])
    return f"[{text}{' …' if len(cells) > _SHOWN_CELLS else ''}]"
