"""Own the ``plugrl-env-client`` command: words on a command line in, `EnvClient` out, and what a person reads of it.

Nothing heavy is imported before the arguments are understood, so that ``--help`` answers at once. Exit codes: 0 when
the server says that the run is over, 1 after an error (with one line that says which), 2 for a wrong command line, 130
and 143 after SIGINT and SIGTERM, which close the connection with code 1000 [7.5].
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from plugrl_bridges import console

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plugrl_bridges.client.procs import ClientOptions, Outcome
    from plugrl_bridges.client.record import Progress

__all__ = ["main", "progress_text"]

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


@click.command(name=_NAME, context_settings=console.SETTINGS)
@click.option("--env-id", help="A Gymnasium id; module:Id-v0 imports the module first.")
@click.option("--env-factory", metavar="PKG.MOD:FUNC", help="A function that returns a gymnasium Env or VectorEnv.")
@click.option(
    "--env-kwargs",
    metavar="JSON",
    callback=_json_object,
    default="{}",
    help="Keyword arguments for either, as a JSON object.",
)
@click.option("--num-envs", type=click.IntRange(1), help="Envs in all processes together.  [default: one per process]")
@click.option("--num-procs", type=click.IntRange(1), default=1, help="Processes to spread the envs over.")
@click.option("--url", default="ws://127.0.0.1:8000", help="The training server: ws:// or wss://.")
@click.option("--seed", type=click.IntRange(0), help="Env i is first reset with seed + i, unless the trainer seeds it.")
@click.option("--rank", type=click.IntRange(0), help="Rank of the first process among all the clients of a run.")
@click.option("--api-key", envvar="PLUGRL_API_KEY", help="Sent to the server; or set PLUGRL_API_KEY.")
@click.option("--ca-file", type=click.Path(exists=True, dir_okay=False), help="Certificates to trust, for wss://.")
@click.option("--reuse/--no-reuse", default=True, help="Leave out observations that the server has.")
@click.option("--info/--no-info", default=True, help="Send the infos of the envs.")
@click.option("--verify", is_flag=True, help="Send digests, for a trainer that checks each step (verify=True there).")
@click.option(
    "--connect-timeout", type=click.FloatRange(0), default=300.0, help="Seconds without a server; 0: no limit."
)
@click.option("--ping-interval", type=click.FloatRange(0), default=20.0, help="Seconds between pings; 0: none.")
@click.option("--ping-timeout", type=click.FloatRange(0), default=60.0, help="Seconds of silence allowed; 0: no limit.")
@click.option("--summary", type=click.Path(dir_okay=False), help="Write the counts to this JSON file at the end.")
@console.talk_options
def main(
    *,
    env_id: str | None,
    env_factory: str | None,
    env_kwargs: dict[str, Any],
    num_envs: int | None,
    num_procs: int,
    info: bool,
    connect_timeout: float,
    ping_interval: float,
    ping_timeout: float,
    log_level: str,
    quiet: bool,
    summary: str | None,
    **plain: Any,
) -> None:
    """Step environments for a training server: the bridge of plugrl_bridges.sb3, or any other.

    Ends when the server says that the run is over.

    \b
    plugrl-env-client --env-id Pendulum-v1 --num-envs 16 --url ws://127.0.0.1:8000
    plugrl-env-client --env-factory mysim.envs:make --env-kwargs '{"task": "pick"}' --num-envs 8 --num-procs 4
    """  # noqa: D301 - the backspace is click's mark of lines that are not to be wrapped
    if (env_id is None) == (env_factory is None):
        raise click.UsageError("give either --env-id or --env-factory")
    if num_procs > 1 and num_envs is None:
        num_envs = num_procs
    if num_envs is not None and num_procs > num_envs:
        raise click.UsageError(
            f"--num-procs {num_procs} is more than --num-envs {num_envs}: a process has one env at least"
        )
    console.check_folder("--summary", summary)
    for name, seconds in (("connect", connect_timeout), ("ping", ping_timeout)):
        if not math.isfinite(seconds):
            raise click.UsageError(f"--{name}-timeout must be a number of seconds, not {seconds}")
    _check_destination(plain["url"], plain["api_key"])
    from plugrl_bridges.client.procs import ClientOptions  # noqa: PLC0415 - --help must not pay for it

    talk = console.Talk(log_level, quiet=quiet)
    options = ClientOptions(
        env_id=env_id,
        env_factory=env_factory,
        env_kwargs=env_kwargs,
        num_envs=num_envs,
        group_num_envs=num_envs,
        send_info=info,
        connect_timeout=connect_timeout or None,
        ping_interval=ping_interval or None,
        ping_timeout=ping_timeout or None,
        log_level=talk.log_level,
        terminal=talk.terminal,
        **plain,
    )
    raise SystemExit(_run(options, num_procs, talk, summary))


def _check_destination(url: str, api_key: str | None) -> None:
    from plugrl_bridges.transport import check_destination  # noqa: PLC0415 - --help must not pay for it

    try:
        check_destination(url, api_key=api_key)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc


def _run(options: ClientOptions, num_procs: int, talk: console.Talk, summary: str | None) -> int:
    """Run the client or clients; return the exit code."""
    from plugrl_bridges.client import procs  # noqa: PLC0415 - --help must not pay for it

    console.configure_logging(talk.log_level, terminal=talk.terminal, who=procs.who(options) if num_procs == 1 else "")
    signals = console.Signals()
    line = console.ProgressLine() if talk.terminal else None

    def show(reports: Sequence[Progress]) -> None:
        if line is not None and reports:
            line.show(progress_text(reports, num_procs))

    if num_procs == 1:
        outcomes = [_run_here(options, signals, None if line is None else lambda progress: show([progress]))]
    else:
        try:
            clients = _split(options, num_procs)
        except ValueError as exc:
            return console.fail(_NAME, exc, 2)
        try:
            outcomes = procs.run_processes(
                clients, stopping=lambda: signals.received is not None, progress=None if line is None else show
            )
        except OSError as exc:
            return console.fail(_NAME, f"cannot start {num_procs} processes: {exc}")
    if line is not None:
        line.clear()
    if summary is not None:
        console.write_json(summary, _counts(outcomes))
    failed = [(at, outcome.error) for at, outcome in enumerate(outcomes) if outcome.error is not None]
    if not talk.quiet:
        click.echo(_summary_line(outcomes))
    ended = signals.exit_code(_NAME)
    if ended is not None:
        return ended
    if failed:
        at, error = failed[0]
        where = "" if num_procs == 1 else f"{len(failed)} of {num_procs} clients failed; process {at}: "
        return console.fail(_NAME, f"{where}{error}")
    return 0


def _run_here(options: ClientOptions, signals: console.Signals, progress: Callable[[Progress], None] | None) -> Outcome:
    """Run the only client in this process."""
    import logging  # noqa: PLC0415

    from plugrl_bridges.client import procs  # noqa: PLC0415 - --help must not pay for it
    from plugrl_bridges.errors import PlugRLError  # noqa: PLC0415

    client = None
    try:
        with signals.interrupting():  # importing the envs may take minutes, and needs no clean end
            client = procs.make_client(options, progress)
        signals.call(client.stop)
        return procs.Outcome(client.run())
    except console.Interrupted:
        return procs.Outcome(replace(procs.NOTHING, reason="stopped"))
    except Exception as exc:
        if not isinstance(exc, (PlugRLError, ValueError, OSError)):
            logging.getLogger(__name__).exception("the client failed")
        summary = procs.NOTHING if client is None else client.summary
        return procs.Outcome(summary, procs.describe(exc))


def _split(options: ClientOptions, num_procs: int) -> list[ClientOptions]:
    """Spread the envs over the processes, the first ones having one more where it does not divide evenly.

    Raises:
        ValueError: The seeds of other commands could then not be told apart from this one's.
    """
    total = options.num_envs or num_procs
    each, more = divmod(total, num_procs)
    if more and options.rank:
        raise ValueError(f"with --rank, --num-envs {total} must divide evenly over --num-procs {num_procs}")
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


def _summary_line(outcomes: Sequence[Outcome]) -> str:
    """Sum up what all clients did."""
    summaries = [outcome.summary for outcome in outcomes]
    episodes = sum(summary.episodes for summary in summaries)
    steps = sum(summary.steps for summary in summaries)
    line = f"{episodes} episodes, {steps} env steps"
    if episodes:
        mean = sum(summary.mean_return * summary.episodes for summary in summaries if summary.episodes) / episodes
        recent = sorted(episode for summary in summaries for episode in summary.recent)[-_RECENT:]
        line += f", mean return {mean:.2f}"
        line += f" (last {len(recent)}: {sum(episode.ret for episode in recent) / len(recent):.2f})"
    reconnects = sum(summary.reconnects for summary in summaries)
    if reconnects:
        line += f", {reconnects} reconnects"
    return line


def _counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what all clients did, for programs: ``mean_return`` is null without an episode."""
    summaries = [outcome.summary for outcome in outcomes]
    episodes = sum(summary.episodes for summary in summaries)
    total = sum(summary.mean_return * summary.episodes for summary in summaries if summary.episodes)
    return {
        "episodes": episodes,
        "steps": sum(summary.steps for summary in summaries),
        "mean_return": total / episodes if episodes else None,
        "reconnects": sum(summary.reconnects for summary in summaries),
        "reasons": [outcome.error or outcome.summary.reason for outcome in outcomes],
    }


if __name__ == "__main__":
    main()
