"""The ``stepledger`` command: compare ledgers, show one.

Exit codes: 0 if both sides are equal, 1 if they differ, 2 for a wrong command line or a file that cannot be read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plugrl_bridges import console
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.reader import escaped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_bridges.ledger.columns import Column, Columns
    from plugrl_bridges.ledger.outcome import Comparison
    from plugrl_bridges.ledger.reader import LedgerReader, Record
    from plugrl_bridges.ledger.schema import Header

__all__ = ["main"]

_NAME = "stepledger"
_SHOWN_FILES = 16
_SHOWN_CELLS = 8

_float32 = click.option(
    "--float32", is_flag=True, help="Compare 64-bit floats as float32, for a client that sends them so."
)


@click.group(name=_NAME, context_settings=console.SETTINGS)
def main() -> None:
    """See every silent fault at the boundary between a trainer and its environments."""


@main.command(context_settings=console.SETTINGS)
@click.argument("trainer", type=click.Path())
@click.argument("envs", type=click.Path(), nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
@_float32
def compare(*, trainer: str, envs: tuple[str, ...], as_json: bool, float32: bool) -> None:
    """Compare the trainer's ledger TRAINER with those of its ENVS (files, or folders of them).

    Exit status 0: equal. 1: different; the first difference is named. 2: a file cannot be read.

    \b
    stepledger compare trainer.ledger ledgers/
    """  # noqa: D301 - the backspace is click's mark of lines that are not to be wrapped
    found = _compared(trainer, envs, float32=float32)
    _say(json.dumps(found.as_json(), indent=2) if as_json else str(found))
    raise SystemExit(0 if found.equal else 1)


@main.command(context_settings=console.SETTINGS)
@click.argument("file", type=click.Path())
@click.option("--env", "number", type=click.IntRange(0), help="Only this env's events.")
@click.option("--episode", type=click.IntRange(0), help="Only events of this episode of each env, from 0.")
@click.option("--step", type=click.IntRange(0), help="Only this step of each episode, from 1; 0 is the reset.")
@click.option("--skip", type=click.IntRange(0), default=0, help="Leave out so many events first.")
@click.option("--events", type=click.IntRange(0), default=10, help="Show so many events.")
def show(*, file: str, number: int | None, episode: int | None, step: int | None, skip: int, events: int) -> None:
    """Show what a ledger is of, how it ends, and its first events.

    Episodes and steps are counted as compare counts them. Exit status 2: the file cannot be read, or has no such env.
    """
    from plugrl_bridges.ledger.reader import LedgerReader  # noqa: PLC0415 - --help must not pay for it

    try:
        if os.path.isdir(file):  # noqa: PTH112 - pathlib's raises for a name that is too long
            raise LedgerError(_of_folder(Path(file)))
        reader = LedgerReader(file)
        wanted = {"env": number, "episode": episode, "step": step}
        lines = [*_about(reader), *_chosen(reader, {k: v for k, v in wanted.items() if v is not None}, skip, events)]
    except LedgerError as exc:
        raise SystemExit(_fail(exc)) from exc
    _say("\n".join(lines))


def _about(reader: LedgerReader) -> Iterator[str]:
    """Say in lines what a ledger is of, and how it ends."""
    header = reader.header
    told = ", ".join(f"{key} {value}" for key, value in header.about.items())
    yield f"side      {header.side.value} ({header.dialect.value})"
    yield f"run       {escaped(header.run) or '-'}"
    yield f"about     {escaped(told)}"
    for name, columns in (("action", header.action), ("obs", header.observation)):
        for column in columns.all:
            by = " by digest; full=True records it whole" if column.digested else ""
            yield f"{name:<9} {escaped(column.name)} {list(column.shape)} {column.dtype.str}{by}"
    yield f"envs      {_envs(reader)}"
    yield f"end       {reader.tail}"


def _envs(reader: LedgerReader) -> str:
    numbers = [str(number) for _, number in reader.envs]
    return (", ".join(numbers[:_SHOWN_FILES]) or "-") + (", …" if len(numbers) > _SHOWN_FILES else "")


def _chosen(reader: LedgerReader, wanted: dict[str, int], skip: int, events: int) -> Iterator[str]:
    """Return the rows that are wanted, one line each; a line that says why, if there are none."""
    if "env" in wanted and wanted["env"] not in {number for _, number in reader.envs}:
        raise LedgerError(f"{reader.path} has no env {wanted['env']}: its envs are {_envs(reader)}")
    given = tuple(wanted.values())
    where = " AND ".join(["1", *(f"{name} = ?" for name in wanted)])
    shown = False
    for record in reader.select(where, given, limit=events, skip=skip):
        shown = True
        yield _line(reader.header, record)
    if not shown and events:
        count = reader.count(where, given)
        whose = "".join(f"{', ' if at else ' of '}{name} {value}" for at, (name, value) in enumerate(wanted.items()))
        skipped = f"; --skip {skip} leaves out all of them" if count else ""
        yield f"nothing to show: the ledger has {count} events{whose}{skipped}"


def _line(header: Header, record: Record) -> str:
    from plugrl_bridges.ledger.schema import Flag  # noqa: PLC0415 - --help must not pay for it

    at = f" (vector step {record.vector_step})" if header.side.value == "trainer" else ""
    place = f"env {record.env}, episode {record.episode}, step {record.step}{at}"
    observation = _values(header.observation, record.observation)
    if record.flags & Flag.AGAIN:
        return f"{place}: handed over again, otherwise than before -> {observation}"
    if record.is_reset:
        return f"{place}: reset -> {observation}"
    action = _values(header.action, record.action)
    if record.flags & Flag.FAILED:
        return f"{place}: {action} -> no outcome"
    flags = "".join(f"{flag.name} ".lower() for flag in Flag if record.flags & flag)
    return f"{place}: {action} -> reward {record.reward!r} {flags}{observation}"


def _values(columns: Columns, data: bytes) -> str:
    if not data:
        return "[none]" if columns.width else "[]"
    return " ".join(_short(column, value) for column, value in zip(columns.all, columns.split(data), strict=True))


def _short(column: Column, value: Any) -> str:  # noqa: ANN401 - an array of any dtype
    if column.digested:
        return f"[digest {int(value):016x}]"
    cells = value.reshape(-1).tolist()
    text = " ".join(f"{cell:.6g}" if isinstance(cell, float) else escaped(str(cell)) for cell in cells[:_SHOWN_CELLS])
    return f"[{text}{' …' if len(cells) > _SHOWN_CELLS else ''}]"


def _of_folder(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.ledger"))
    if not names:
        return f"{folder} is a folder, and no ledger (*.ledger) is in it: show takes a ledger"
    more = len(names) - _SHOWN_FILES
    shown = ", ".join(names[:_SHOWN_FILES]) + (f" and {more} more" if more > 0 else "")
    return f"{folder} is a folder: show takes one of the ledgers in it: {shown}"


def _compared(trainer: str, envs: tuple[str, ...], *, float32: bool) -> Comparison:
    from plugrl_bridges.ledger.comparing import compare as compare_files  # noqa: PLC0415 - --help must not pay for it

    try:
        return compare_files(trainer, [Path(env) for env in envs], float32=float32)
    except LedgerError as exc:
        raise SystemExit(_fail(exc)) from exc


def _say(text: str) -> None:
    """Print it, with escapes for what the terminal cannot show."""
    known = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.encode(known, "backslashreplace").decode(known))


def _fail(error: object) -> int:
    return console.fail(_NAME, escaped(" ".join(str(error).split())), 2)


if __name__ == "__main__":
    main()
