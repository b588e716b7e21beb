"""The ``plugrl-env-client`` command: words on a command line in, `EnvClient` out, and what a person reads of it.

Nothing heavy is imported before the arguments are understood, so that ``--help`` answers at once. Exit codes: 0 when
the server says that the run is over, 1 after an error (with one line that says which), 2 for a wrong command line, 130
and 143 after SIGINT and SIGTERM, which close the connection with code 1000 [7.5].
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from plugrl_bridges import console

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plugrl_bridges.client.procs import ClientOptions
    from plugrl_bridges.client.record import ClientSummary, Progress

__all__ = ["main", "progress_text"]

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_NAME = "plugrl-env-client"
_RECENT = 10


def _json_object(_context: click.Context, _option: click.Parameter, value: str) -> dict[str, Any]:
    """Parse a JSON object given on the command line."""
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as exc:
        raise click.BadParameter(f"{value!r} is no JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise click.BadParameter(f'expected a JSON object such as {{"render_mode": "rgb_array"}}, got {value!r}')
    return parsed


def _seconds(_context: click.Context, _option: click.Parameter, value: float) -> float | None:
    """Return a number of seconds; 0 stands for None."""
    if not math.isfinite(value):
        raise click.BadParameter(f"expected a number of seconds, got {value}")
    return value or None


def _seconds_option(name: str, default: float, text: str) -> Callable[[_Command], _Command]:
    return click.option(name, type=click.FloatRange(0), default=default, callback=_seconds, help=text)


@click.command(name=_NAME, context_settings=console.SETTINGS)
@click.option("--env-id", help="A Gymnasium id; module:Id-v0 imports the module first.")
@click.option("--env-factory", metavar="PKG.MOD:FUNC", help="A function that returns a gymnasium Env or VectorEnv.")
@click.option("--env-kwargs", metavar="JSON", callback=_json_object, default="{}", help="Keywords for either, as JSON.")
@click.option("--num-envs", type=click.IntRange(1), help="Envs in all processes together.  [default: one per process]")
@click.option("--num-procs", type=click.IntRange(1), default=1, help="Processes to spread the envs over.")
@click.option("--url", default="ws://127.0.0.1:8000", help="The training server: ws:// or wss://.")
@click.option("--seed", type=click.IntRange(0), help="Env i is first reset with seed + i, unless the trainer seeds it.")
@click.option("--rank", type=click.IntRange(0), help="Rank of the first process among all the clients of a run.")
@click.option("--api-key", envvar="PLUGRL_API_KEY", help="Sent to the server; or set PLUGRL_API_KEY.")
@click.option("--ca-file", type=click.Path(exists=True, dir_okay=False), help="Certificates to trust, for wss://.")
@click.option("--reuse/--no-reuse", default=True, help="Leave out observations that the server has.")
@click.option("--info/--no-info", "send_info", default=True, help="Send the infos of the envs.")
@click.option("--verify", is_flag=True, help="Send digests, for a trainer that checks each step (verify=True there).")
@_seconds_option("--connect-timeout", 300.0, "Seconds without a server; 0: no limit.")
@_seconds_option("--ping-interval", 20.0, "Seconds between pings; 0: none.")
@_seconds_option("--ping-timeout", 60.0, "Seconds of silence allowed; 0: no limit.")
@click.option("--summary", type=click.Path(dir_okay=False), help="Write the counts to this JSON file at the end.")
@console.talk_options
def main(
    *,
    env_id: str | None,
    env_factory: str | None,
    env_kwargs: dict[str, Any],
    num_envs: int | None,
    num_procs: int,
    rank: int | None,
    ca_file: str | None,
    log_level: str,
    quiet: bool,
    summary: str | None,
    **keywords: Any,
) -> None:
    """Step environments for a training server: the bridge of plugrl_bridges.sb3, or any other.

    Ends when the server says that the run is over.

    \b
    plugrl-env-client --env-id Pendulum-v1 --num-envs 16 --url ws://127.0.0.1:8000
    plugrl-env-client --env-factory mysim.envs:make --env-kwargs '{"task": "pick"}' --num-envs 8 --num-procs 4
    """  # noqa: D301 - the backspace is click's mark of lines that are not to be wrapped
    if (env_id is None) == (env_factory is None):
        raise click.UsageError("give either --env-id or --env-factory")
    console.check_folder("--summary", summary)
    from plugrl_bridges.client.procs import ClientOptions  # noqa: PLC0415 - --help must not pay for it
    from plugrl_bridges.transport import check_destination  # noqa: PLC0415

    try:
        check_destination(keywords["url"], api_key=keywords["api_key"])
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    talk = console.Talk(log_level, quiet=quiet)
    options = ClientOptions(
        env_id=env_id,
        env_factory=env_factory,
        env_kwargs=env_kwargs,
        ca_file=ca_file,
        num_envs=num_envs,
        rank=rank,
        keywords=keywords,
        talk=talk,
    )
    raise SystemExit(_run(_split(options, num_procs), talk, summary))


def _run(clients: Sequence[ClientOptions], talk: console.Talk, summary: str | None) -> int:
    """Run the client or clients; return the exit code."""
    from plugrl_bridges.client import procs  # noqa: PLC0415 - --help must not pay for it
    from plugrl_bridges.client.record import together  # noqa: PLC0415

    num_procs = len(clients)
    console.configure_logging(talk.log_level, terminal=talk.terminal, who=clients[0].who if num_procs == 1 else "")
    signals = console.Signals()
    line = console.ProgressLine()

    def show(reports: Sequence[Progress]) -> None:
        if reports:
            line.show(progress_text(reports, num_procs))

    progress = show if talk.terminal else None
    if num_procs == 1:
        outcomes = [procs.run_here(clients[0], signals, progress)]
    else:
        try:
            outcomes = procs.run_processes(clients, lambda: signals.received is not None, progress)
        except OSError as exc:
            return console.fail(_NAME, f"cannot start {num_procs} processes: {exc}")
    if talk.terminal:
        line.clear()
    done = together([outcome.summary for outcome in outcomes])
    if summary is not None:
        counts = {
            "episodes": done.episodes,
            "steps": done.steps,
            "mean_return": done.mean_return if done.episodes else None,
            "reconnects": done.reconnects,
            "reasons": [outcome.error or outcome.summary.reason for outcome in outcomes],
        }
        console.write_json(summary, counts)
    if not talk.quiet:
        click.echo(_summary_line(done))
    ended = signals.exit_code(_NAME)
    if ended is not None:
        return ended
    failed = [(at, outcome.error) for at, outcome in enumerate(outcomes) if outcome.error is not None]
    if failed:
        at, error = failed[0]
        where = "" if num_procs == 1 else f"{len(failed)} of {num_procs} clients failed; process {at}: "
        return console.fail(_NAME, f"{where}{error}")
    return 0


def _split(options: ClientOptions, num_procs: int) -> list[ClientOptions]:
    """Return the options of each process; the first ones have one env more where it does not divide evenly."""
    if num_procs == 1:
        return [options]
    total = options.num_envs or num_procs
    each, more = divmod(total, num_procs)
    if not each:
        raise click.UsageError(
            f"--num-procs {num_procs} is more than --num-envs {total}: a process has one env at least"
        )
    if more and options.rank:  # the seeds of other commands could then not be told apart from this one's
        raise click.UsageError(f"with --rank, --num-envs {total} must divide evenly over --num-procs {num_procs}")
    options = replace(options, keywords={**options.keywords, "group_num_envs": total})
    rank = options.rank or 0
    clients = []
    first_env = rank * each
    for at in range(num_procs):
        num_envs = each + (at < more)
        clients.append(replace(options, rank=rank + at, num_envs=num_envs, first_env=first_env))
        first_env += num_envs
    return clients


def progress_text(reports: Sequence[Progress], num_procs: int) -> str:
    """Return the reports of all clients as one line."""
    if num_procs == 1:
        state = {"connecting": "waiting for a server"}.get(reports[0].state, reports[0].state)
    else:
        state = f"{sum(report.state != 'connecting' for report in reports)} of {num_procs} connected"
    means = [report.mean_return for report in reports if not math.isnan(report.mean_return)]
    mean = f"{sum(means) / len(means):.2f}" if means else "-"
    return (
        f"{state} | {sum(report.episodes for report in reports)} episodes | "
        f"{sum(report.steps_per_s for report in reports):.0f} steps/s | mean return {mean}"
    )


def _summary_line(done: ClientSummary) -> str:
    """Return on one line what all clients did."""
    line = f"{done.episodes} episodes, {done.steps} env steps"
    if done.episodes:
        last = done.returns[-_RECENT:]
        line += f", mean return {done.mean_return:.2f} (last {len(last)}: {sum(last) / len(last):.2f})"
    if done.reconnects:
        line += f", {done.reconnects} reconnects"
    return line


if __name__ == "__main__":
    main()
