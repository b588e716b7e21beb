"""The ``plugrl-conformance`` command: words on a command line in, a report on stdout.

Exit codes: 0 without a violation, 1 with one, 2 for a wrong command line or a port that is taken, 129, 130 and 143
after SIGHUP, SIGINT and SIGTERM; the client that was started is ended in every case.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from plugrl_bridges import console
from plugrl_bridges.conformance.client_options import SCENARIOS, ClientCheckOptions

__all__ = ["main"]

_FEATURES = ("reuse-feedback-obs", "env-spec", "step-digest")


def _features(_context: click.Context, _option: click.Parameter, value: str | None) -> frozenset[str]:
    """Split the list of features."""
    names = frozenset(filter(None, (name.strip() for name in (value or "").split(","))))
    unknown = sorted(names.difference(_FEATURES))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: those that can be checked are {', '.join(_FEATURES)}")
    return names


@click.command(name="plugrl-conformance", context_settings=console.SETTINGS)
@click.option(
    "--client", metavar="COMMAND",
    help="Shell command that starts the client, once per scenario. {host}, {port} and {url} are replaced.",
)  # fmt: skip
@click.option("--scenario", type=click.Choice([*SCENARIOS, "all"]), default="basic", help="What to lead it through.")
@click.option("--probe", is_flag=True, help="The client runs the probe environment: check what it does with actions.")
@click.option("--steps", type=click.IntRange(1), default=20, help="Exchanges per scenario.")
@click.option("--horizon", type=click.IntRange(1), default=4, help="Steps per chunk.")
@click.option("--action-dim", type=click.IntRange(1), default=7, help="Width of an action.")
@click.option(
    "--action-dtype", type=click.Choice(["float32", "float64"]), default="float32", help="Dtype of the actions."
)
@click.option(
    "--features", metavar="NAMES", callback=_features,
    help=f"Optional features to offer, separated by commas: {', '.join(_FEATURES)}. step-digest needs env-spec; "
    "of announced spaces every digest is checked with a horizon of 1, with a longer one only those of resets.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0: a free one.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    help="Seconds to wait for what is due.",
)
@click.option("--report", type=click.Choice(["text", "json"]), default="text", help="Form of the report on stdout.")
def main(*, scenario: str, report: str, **options: Any) -> None:
    """Grade an env client, clause by clause.

    Be the training server that it connects to, and report what breaks the protocol (a violation, exit status 1) and
    what others may stumble over (a note).

    \b
    plugrl-conformance --steps 20 --client "./my_client 127.0.0.1 8000"
    plugrl-conformance --probe --scenario all --client "./my_client --probe 127.0.0.1 8000"
    """  # noqa: D301 - the backspace is click's mark of lines that are not to be wrapped
    from plugrl_bridges.conformance.client_checker import check_client  # noqa: PLC0415 - --help must not pay for it

    try:
        checked = ClientCheckOptions(scenarios=SCENARIOS if scenario == "all" else (scenario,), **options)
    except ValueError as exc:
        raise click.BadParameter(str(exc), param_hint="--features") from exc
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    try:
        # The client has a session of its own: a terminal that goes away does not end it.
        with console.ending_on_signals("SIGTERM", "SIGHUP"):
            found = check_client(checked)
    except OSError as exc:
        text = f"cannot listen on {checked.host}:{checked.port}: {exc}"
        raise SystemExit(console.fail("plugrl-conformance", text, 2)) from exc
    click.echo(found.to_json() if report == "json" else found.to_text(), nl=False)
    raise SystemExit(found.exit_code)


if __name__ == "__main__":
    main()
