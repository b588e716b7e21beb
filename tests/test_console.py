"""What the commands share. How each of them ends is tested with the command."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from plugrl_bridges import console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put back what a test sets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_a_signal_between_two_phases_is_not_lost() -> None:
    called: list[str] = []
    signals = console.Signals()
    assert signals.exit_code("command") is None
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(console.Interrupted), signals.interrupting():
        called.append("inside")
    signals.call(lambda: called.append("then"))
    assert called == ["then"]
    assert signals.received is signal.SIGTERM


@pytest.mark.usefixtures("handlers")
def test_a_signal_asks_for_the_end_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []
    signals = console.Signals(lambda: called.append("stop"))
    signal.raise_signal(signal.SIGINT)
    assert called == ["stop"]
    assert signals.exit_code("command") == 130
    assert capsys.readouterr().err == "command: ended by SIGINT\n"


def test_the_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import signal; from plugrl_bridges import console; signals = console.Signals(lambda: None)\n"
        "signal.raise_signal(signal.SIGINT)\nsignal.raise_signal(signal.SIGTERM)\nprint('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


@pytest.mark.usefixtures("handlers")
def test_signals_end_a_command_with_the_code_that_a_shell_expects() -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with pytest.raises(SystemExit) as caught, console.ending_on_signals("SIGTERM", "SIGNOSUCH"):
            signal.raise_signal(number)
        assert caught.value.code == code
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with console.ending_on_signals("SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


def test_the_progress_line_is_written_over_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    line = console.ProgressLine()
    for text in ("waiting", "stepping", "stepping"):
        line.show(text)
    line.clear()
    # click keeps the escape that clears the line from what is no terminal.
    assert capsys.readouterr().err.split("\r") == ["", "waiting", "stepping", ""]


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.fail("command", ValueError("a\n  b")) == 1
    assert console.fail("command", KeyError(), 2) == 2
    assert capsys.readouterr().err == "command: a b\ncommand: KeyError\n"


def test_a_missing_folder_is_a_wrong_command_line(tmp_path: Path) -> None:
    console.check_folder("--out", None)
    console.check_folder("--out", str(tmp_path / "a.png"))
    with pytest.raises(click.UsageError, match=r"--out .*the folder does not exist"):
        console.check_folder("--out", str(tmp_path / "no" / "a.png"))


@pytest.mark.parametrize(
    ("given", "quiet", "level"),
    [("info", False, "info"), ("debug", True, "warning"), ("error", True, "error"), ("debug", False, "debug")],
)
def test_quiet_leaves_warnings(given: str, *, quiet: bool, level: str) -> None:
    assert console.Talk(given, quiet=quiet).log_level == level
