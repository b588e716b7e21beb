"""Own the ``stepledger`` command: compare ledgers, show one, draw where they differ.

Exit codes: 0 if both sides are equal, 1 if they differ, 2 for a wrong command line or a file that cannot be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plugrl_bridges import console
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.files import escaped, is_folder

if TYPE_CHECKING:
    from plugrl_bridges.ledger.outcome import Comparison

__all__ = ["main"]

_NAME = "stepledger"
_SHOWN_FILES = 16

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
@click.argument("trainer", type=click.Path())
@click.argument("envs", type=click.Path(), nargs=-1, required=True)
@click.option("--out", type=click.Path(dir_okay=False), default="differences.png", help="Picture to write.")
@_float32
def plot(*, trainer: str, envs: tuple[str, ...], out: str, float32: bool) -> None:
    """Draw where TRAINER and ENVS differ: a heat map of env and vector step.

    Needs matplotlib: pip install 'plugrl-bridges[plot]'. Exit status as of compare.
    """
    found = _compared(trainer, envs, float32=float32)
    try:
        from plugrl_bridges.ledger.plot import plot_differences  # noqa: PLC0415 - matplotlib is an extra

        written = plot_differences(found, out)
    except ImportError as exc:
        raise SystemExit(_fail(f"plot needs matplotlib ({exc}): pip install 'plugrl-bridges[plot]'")) from exc
    except (OSError, ValueError) as exc:
        raise SystemExit(_fail(f"--out {out}: {exc}")) from exc
    _say(f"{found}\nwritten: {escaped(str(written))}")
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
    # --help must not pay for these.
    from plugrl_bridges.ledger.reader import LedgerReader  # noqa: PLC0415
    from plugrl_bridges.ledger.showing import Choice, about, chosen  # noqa: PLC0415

    try:
        if is_folder(file):
            raise LedgerError(_of_folder(Path(file)))
        reader = LedgerReader(file)
        lines = [*about(reader), *chosen(reader, Choice(number, episode, step, skip, events))]
    except LedgerError as exc:
        raise SystemExit(_fail(exc)) from exc
    _say("\n".join(lines))


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
