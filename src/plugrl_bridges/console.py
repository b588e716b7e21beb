"""What all commands share: settings, the options of talkativeness, signals, a progress line, logging, and their ends.

Only commands import this; it imports nothing heavy, so that ``--help`` answers soon.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = [
    "SETTINGS",
    "Interrupted",
    "ProgressLine",
    "Signals",
    "Talk",
    "check_folder",
    "configure_logging",
    "ending_on_signals",
    "fail",
    "talk_options",
    "write_json",
]

SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}
"""Settings of every command, for click."""

_CLEAR = "\r\x1b[K"
_INTERRUPTED = 130

_Command = TypeVar("_Command", bound="Callable[..., Any]")


# Ends ---------------------------------------------------------------------------------------------------------------


def fail(command: str, error: object, code: int = 1) -> int:
    """Write an error of the command so named on one line to stderr; return ``code``."""
    text = " ".join(str(error).split()) or type(error).__name__
    click.echo(f"{command}: {text}", err=True)
    return code


def check_folder(option: str, path: str | None) -> None:
    """Raise `click.UsageError`, naming the option, if the folder of a file to write does not exist; None is no file."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise click.UsageError(f"{option} {path}: the folder does not exist")


def write_json(path: str, value: object) -> None:
    """Write a value to a file as JSON, for people too."""
    Path(path).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# Signals ------------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """The end of what a signal came into; no `Exception`, so that no module takes it for an error of its own."""


class Signals:
    """Handler of SIGINT and SIGTERM: the first calls ``then``, the second ends the process at once."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.received: signal.Signals | None = None
        """The signal that came, or None."""
        self._then = then
        for name in ("SIGINT", "SIGTERM", "SIGBREAK"):  # the last is Windows' own
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self._handle)

    def call(self, then: Callable[[], None]) -> None:
        """Call this when a signal comes; at once if one has come already."""
        self._then = then
        if self.received is not None:
            then()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal raise `Interrupted` in here; one that came before does so at once."""
        try:
            self.call(_interrupt)
            yield
        finally:
            self._then = None

    def exit_code(self, command: str) -> int | None:
        """Return the exit code after a signal, which is written to stderr; None if none came."""
        if self.received is None:
            return None
        return fail(command, f"ended by {self.received.name}", 128 + int(self.received))

    def _handle(self, number: int, _frame: object) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._then is not None:
            self._then()


def _interrupt() -> None:
    raise Interrupted


@contextmanager
def ending_on_signals(*names: str) -> Iterator[None]:
    """Let signals raise `SystemExit` in here, with the code that a shell expects of each; SIGINT always does.

    Args:
        names: Of other signals; one that this platform lacks or that is ignored, as under nohup, is left alone.
    """
    before = {}
    for name in names:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, _end)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


# What is written meanwhile ------------------------------------------------------------------------------------------


def talk_options(command: _Command) -> _Command:
    """Add the options ``--log-level`` and ``--quiet`` to a command, which makes a `Talk` of them."""
    quiet = click.option("--quiet", is_flag=True, help="Neither progress nor summary, and warnings only.")
    level = click.option(
        "--log-level", type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False), default="info",
        help="Log to stderr from this level on.",
    )  # fmt: skip
    return level(quiet(command))


class Talk:
    """How much a command says, by the values of ``--log-level`` and ``--quiet``."""

    def __init__(self, log_level: str, *, quiet: bool) -> None:
        self.quiet = quiet
        """Whether to write neither progress nor summary."""
        self.log_level = "warning" if quiet and log_level in {"debug", "info"} else log_level
        self.terminal = sys.stderr.isatty() and not quiet
        """Whether a progress line is to be written."""


def configure_logging(level: str, *, terminal: bool, who: str = "") -> None:
    """Let log records from a level on go to stderr, with ``who`` behind their level.

    With ``terminal`` they go in place of the progress line that is being written there.
    """
    logging.basicConfig(
        level=level.upper(),
        format=f"{_CLEAR if terminal else ''}%(asctime)s %(levelname)s{who}: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


class ProgressLine:
    """One line that is written over and over on a terminal's stderr."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""
        if text != self._last:
            self._last = text
            click.echo(f"{_CLEAR}{text}", nl=False, err=True)

    def clear(self) -> None:
        """Remove the line."""
        click.echo(_CLEAR, nl=False, err=True)
