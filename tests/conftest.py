"""Leave out the tests that need RLinf, which has a virtual environment of its own, and say so."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

RLINF = Path(__file__).parent / "rlinf"
LEFT_OUT = find_spec("rlinf") is None
collect_ignore = [str(RLINF)] if LEFT_OUT else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    asked_for = [Path(str(arg).partition("::")[0]).resolve() for arg in config.args]
    if LEFT_OUT and any(RLINF.is_relative_to(path) for path in asked_for):
        terminalreporter.write_line("left out: tests/rlinf, for RLinf is not installed here; make test-rlinf runs them")
