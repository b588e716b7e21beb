"""Hold the tables of options to the commands."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click
import pytest

from plugrl_bridges.cli import plot, serve_policy
from plugrl_bridges.conformance.server_cli import main as server_checker
from plugrl_bridges.ledger.cli import main as ledger_command
from tests.docs.markdown import ROOT, table

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(
    ("command", "document"),
    [
        (serve_policy, DOCS / "serving-a-policy.md"),
        (plot, DOCS / "plotting.md"),
        (server_checker, DOCS / "checking-a-server.md"),
    ],
    ids=["serve-policy", "plot", "plugrl-conformance-server"],
)
def test_every_option_is_documented(command: click.Command, document: Path) -> None:
    shown = {tuple(code(row[0])): code(row[1]) for row in table(document, "Options")}
    context = click.Context(command, **command.context_settings)
    options = [parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option)]
    assert {name for names in shown for name in names} == {
        name for option in options for name in (*option.opts, *option.secondary_opts)
    }
    for option in options:
        [default] = [default for key, default in shown.items() if option.opts[0] in key]
        if option.secondary_opts:
            assert default == [option.opts[0][2:]]
        elif not option.is_flag and isinstance(option.default, (str, int, float)):
            assert default == [str(option.default)], option.opts


def test_commands_are_installed() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '\nplugrl-bridges = "plugrl_bridges.cli:main"\n' in project
    assert '\nplugrl-conformance-server = "plugrl_bridges.conformance.server_cli:main"\n' in project
    assert '\nstepledger = "plugrl_bridges.ledger.cli:main"\n' in project


@pytest.mark.parametrize("name", ["compare", "show"])
def test_every_option_of_stepledger_is_documented(name: str) -> None:
    command = ledger_command.commands[name]
    context = click.Context(command, **command.context_settings)
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    options = [option for option in options if "--help" not in option.opts]
    shown = {code(row[0])[0]: row for row in table(DOCS / "ledger.md", "The command") if f"`{name}`" in row[1]}
    assert shown.keys() == {option.opts[0] for option in options}
    for option in options:
        if not option.is_flag and isinstance(option.default, (str, int)):
            assert f"`{option.default}`" in shown[option.opts[0]][2]
