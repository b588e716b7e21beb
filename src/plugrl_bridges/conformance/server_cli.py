"""The ``plugrl-conformance-server`` command: it grades a training server, clause by clause.

Exit codes: 0 if nothing is violated, 1 after a violation, 2 for a wrong command line, 130 and 143 after SIGINT and
SIGTERM.
"""

from __future__ import annotations

from typing import Any

import click

from plugrl_bridges import console

__all__ = ["main"]


@click.command(name="plugrl-conformance-server", context_settings=console.SETTINGS)
@click.option("--host", default="127.0.0.1", help="Where the server listens.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Where the server listens.")
@click.option("--state-key", default="obs", help="Name of the state that is sent.")
@click.option("--state-dim", type=click.IntRange(1), default=3, help="Its width.")
@click.option("--image-key", help="Name of an image that is sent too.")
@click.option("--image-size", type=click.IntRange(1), default=64, help="Its height and width.")
@click.option("--exchanges", type=click.IntRange(1), default=5, help="Exchanges of the first phase.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=10.0,
    help="Seconds to wait for the port, and for each message.",
)  # fmt: skip
@click.option("--until-stop", is_flag=True, help="Go on until the server ends the run, and check how it says so.")
@click.option("--max-exchanges", type=click.IntRange(1), default=10_000, help="How many exchanges that may take.")
@click.option("--report", type=click.Choice(["text", "json"]), default="text", help="For people, or for programs.")
def main(*, host: str, report: str, **options: Any) -> None:
    """Grade a training server: drive it as the protocol lets clients behave, and check what comes back.

    Each connection brings three envs. A server that steps all envs together needs that many slots.

    \b
    plugrl-conformance-server --port 8000 --state-dim 3 --until-stop
    """  # noqa: D301 - the backspace is click's mark of lines that are not to be wrapped
    try:
        host.encode("idna")  # as the look-up of the address will do
    except UnicodeError as exc:
        text = f"{host!r} is no name of a host: {exc}"
        raise SystemExit(console.fail("plugrl-conformance-server", text, 2)) from exc
    from plugrl_bridges.conformance.server_checker import (  # noqa: PLC0415 - --help must not pay for it
        ServerChecker,
        ServerCheckOptions,
    )

    with console.ending_on_signals("SIGTERM"):
        found = ServerChecker(ServerCheckOptions(host=host, **options)).run()
    click.echo(found.to_json() if report == "json" else found.to_text(), nl=False)
    raise SystemExit(found.exit_code)


if __name__ == "__main__":
    main()
