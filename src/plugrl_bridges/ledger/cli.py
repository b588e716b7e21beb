"""Own the ``stepledger`` command: compare ledgers, show one, draw where they differ.

Exit codes: 0 if both sides are equal, 1 if they differ, 2 for a wrong command line or a file that cannot be read.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plugrl_bridges.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_bridges.ledger.outcome import Comparison
    from plugrl_bridges.ledger.reader import Event, LedgerReader

__all__ = ["main"]

_NAME = "stepledger"
_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
_SHOWN_CELLS = 8
_SHOWN_FILES = 16

_float32 = click.option(
    "--float32", is_flag=True, help="Compare 64-bit floats as float32, for a client that sends them so."
)


@click.group(name=_NAME, context_settings=_SETTINGS)
def main() -> None:
    """See every silent fault at the boundary between a trainer and its environments."""


@main.command(context_settings=_SETTINGS)
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
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else str(found))
    raise SystemExit(0 if found.equal else 1)


@main.command(context_settings=_SETTINGS)
@click.argument("trainer", type=click.Path())
@click.argument("envs", type=click.Path(), nargs=-1, required=True)
@click.option("--out", type=click.Path(dir_okay=False), default="differences.png", help="Picture to write.")
@_float32
def plot(*, trainer: str, envs: tuple[str, ...], out: str, float32: bool) -> None:
    """Draw where TRAINER and ENVS differ: a heat map of env and vector step.

    Needs matplotlib. Exit status as of compare.
    """
    found = _compared(trainer, envs, float32=float32)
    try:
        from plugrl_bridges.ledger.plot import plot_differences  # noqa: PLC0415 - matplotlib is an extra

        plot_differences(found, out)
    except ImportError as exc:
        raise SystemExit(_fail(f"plot needs matplotlib: {exc}")) from exc
    except (OSError, ValueError) as exc:
        raise SystemExit(_fail(f"--out {out}: {exc}")) from exc
    click.echo(f"{found}\nwritten: {out}")
    raise SystemExit(0 if found.equal else 1)


@main.command(context_settings=_SETTINGS)
@click.argument("file", type=click.Path())
@click.option("--env", "number", type=click.IntRange(0), help="Only this env's events.")
@click.option("--skip", type=click.IntRange(0), default=0, help="Leave out so many events first.")
@click.option("--events", type=click.IntRange(0), default=10, help="Show so many events.")
def show(*, file: str, number: int | None, skip: int, events: int) -> None:
    """Show what a ledger is of, how it ends, and its first events."""
    from plugrl_bridges.ledger.reader import LedgerReader  # noqa: PLC0415 - --help must not pay for it

    try:
        if Path(file).is_dir():
            raise LedgerError(_of_folder(Path(file)))
        reader = LedgerReader(file)
        lines = [*_about(reader), *islice(_events(reader, number), skip, skip + events)]
    except LedgerError as exc:
        raise SystemExit(_fail(exc)) from exc
    click.echo("\n".join(lines))


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


def _fail(error: object) -> int:
    click.echo(f"{_NAME}: {' '.join(str(error).split())}", err=True)
    return 2


def _about(reader: LedgerReader) -> Iterator[str]:
    header = reader.header
    about = ", ".join(f"{key} {value}" for key, value in header.about.items())
    yield f"side      {header.side.value} ({header.dialect.value})"
    yield f"run       {header.run or '-'}"
    yield f"about     {about}"
    for name, columns in (("action", header.action), ("obs", header.observation)):
        for entry in columns.entries:
            by = " by digest" if entry.digested else ""
            yield f"{name:<9} {entry.name} {list(entry.shape)} {entry.dtype.str}{by}"
    envs = [str(number) for _, number in reader.joined()] if not header.num_envs else [f"0..{header.num_envs - 1}"]
    yield f"envs      {', '.join(envs) or '-'}"
    yield f"end       {reader.tail}"


def _events(reader: LedgerReader, number: int | None) -> Iterator[str]:
    from plugrl_bridges.ledger.format import Kind  # noqa: PLC0415 - --help must not pay for it

    for record in reader.records():
        for env, event in zip(record.envs, record.events, strict=False):  # a join has no event
            if number is None or env == number:
                yield f"{event.at:>8} env {env}: {_described(reader, event, kept=record.kind is Kind.KEPT)}"


def _described(reader: LedgerReader, event: Event, *, kept: bool) -> str:
    from plugrl_bridges.ledger.format import Flag  # noqa: PLC0415 - --help must not pay for it

    header = reader.header
    observation = " ".join(_short(value) for value in header.observation.split(event.observation))
    if kept:
        return f"handed over again, otherwise than before -> {observation}"
    if event.is_reset:
        return f"reset -> {observation}"
    action = " ".join(_short(value) for value in header.action.split(event.action))
    flags = " ".join(str(flag.name).lower() for flag in Flag if event.flags & flag)
    return f"step {action} -> reward {event.reward!r} {flags + ' ' if flags else ''}{observation}"


def _short(value: Any) -> str:  # noqa: ANN401 - an array of any dtype
    cells = value.reshape(-1).tolist()
    text = " ".join(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells[:_SHOWN_CELLS])
    return f"[{text}{' …' if len(cells) > _SHOWN_CELLS else ''}]"


if __name__ == "__main__":
    main()
