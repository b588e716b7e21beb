"""Own what holds for all tests: which are left out, and which signals the programs that they start listen to.

The tests that need RLinf are left out, and said to be: it has a virtual environment of its own.
"""

from __future__ import annotations

import dataclasses
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plugrl_bridges.server.options import BridgeOptions

if TYPE_CHECKING:
    from collections.abc import Callable

RLINF = Path(__file__).parent / "rlinf"
LEFT_OUT = find_spec("rlinf") is None
collect_ignore = [str(RLINF)] if LEFT_OUT else []


def pytest_configure() -> None:
    """Take back that signals are ignored: whoever started this in the background had them so, and it is inherited."""
    for name, usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Change how often servers look, or for how long they are patient."""

    def change(**seconds: float) -> None:
        monkeypatch.setattr(BridgeOptions, "timing", dataclasses.replace(BridgeOptions.timing, **seconds))

    return change


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    asked_for = [Path(str(arg).partition("::")[0]).resolve() for arg in config.args]
    if LEFT_OUT and any(RLINF.is_relative_to(path) for path in asked_for):
        terminalreporter.write_line("left out: tests/rlinf, for RLinf is not installed here; make test-rlinf runs them")
