"""The ``plugrl-bridges`` command: ``serve-policy`` lets a trained policy act, ``plot`` draws what runs logged.

Nothing heavy is imported before the arguments are understood, so that ``--help`` answers at once. Exit codes: 0 when
enough was done, 1 after an error (with one line that says which), 2 for a wrong command line or files that cannot be
drawn, 130 and 143 after SIGINT and SIGTERM. In each case the clients of a served policy hear that the run is over.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plugrl_bridges import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.server.policy_server import PolicyServer, PolicySummary
    from plugrl_bridges.server.tally import ServedEpisode

__all__ = ["main"]

_NAME = "plugrl-bridges"


@click.group(name=_NAME, context_settings=console.SETTINGS)
def main() -> None:
    """Use trained policies on environments that live elsewhere, and see what runs came to."""


@main.command(name="serve-policy", context_settings=console.SETTINGS)
@click.argument("model", type=click.Path(exists=True, dir_okay=False))
@click.option("--algo", help="Algorithm of Stable-Baselines3 that saved it.  [default: told by the file]")
@click.option("--episodes", type=click.IntRange(1), help="End when so many are finished, spread evenly over the envs.")
@click.option("--steps", type=click.IntRange(1), help="End after so many env steps.")
@click.option("--num-envs", type=click.IntRange(1), help="Begin only when so many envs are there.")
@click.option("--deterministic/--stochastic", default=True, help="Take the likeliest action, or a random one.")
@click.option("--seed", type=click.IntRange(0), help="Seeds the random actions; the envs are seeded at their client.")
@click.option("--horizon", type=click.IntRange(1), default=1, help="Actions in one exchange, as in training.")
@click.option("--device", default="auto", help="Where torch computes.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port to listen on; 0 takes a free one.")
@click.option("--image-key", help="Give the policy only this image entry of the observations.")
@click.option("--state-key", help="Give the policy only this state entry of the observations.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=60.0, help="Seconds for a chunk.")
@click.option(
    "--connect-timeout", type=click.FloatRange(0), default=300.0, help="Seconds without a client; 0: no limit."
)
@click.option("--episode-log", type=click.Path(dir_okay=False), help="CSV file with one row per finished episode.")
@click.option("--api-key", envvar="PLUGRL_API_KEY", help="Clients must send it; or set PLUGRL_API_KEY.")
@click.option("--summary", type=click.Path(dir_okay=False), help="Write what came of it to this JSON file.")
@console.talk_options
def serve_policy(
    *,
    model: str,
    algo: str | None,
    deterministic: bool,
    seed: int | None,
    horizon: int,
    device: str,
    connect_timeout: float,
    summary: str | None,
    log_level: str,
    quiet: bool,
    **plain: Any,
) -> None:
    """Let a policy that Stable-Baselines3 saved act in the environments of whoever connects.

    Only serve files that you trust: loading a model runs what its author put into it.

    \b
    plugrl-bridges serve-policy model.zip --port 8000 --episodes 20
    plugrl-env-client --env-id Pendulum-v1 --num-envs 4 --seed 0
    """  # noqa: D301 - the backspace is click's mark of lines that are not to be wrapped
    console.check_folder("--summary", summary)
    talk = console.Talk(log_level, quiet=quiet)
    console.configure_logging(talk.log_level, terminal=talk.terminal)
    try:
        from plugrl_bridges.sb3.policy import ModelPolicy, load_model  # noqa: PLC0415 - --help must not pay for it
    except ImportError as exc:
        raise SystemExit(_fail(exc)) from exc
    from plugrl_bridges.server.policy_server import PolicyServer  # noqa: PLC0415

    progress = _Progress() if talk.terminal else None
    try:
        loaded = load_model(model, algorithm=algo, device=device)
        policy = ModelPolicy(loaded, deterministic=deterministic, action_horizon=horizon)
    except (OSError, ValueError) as exc:
        raise click.UsageError(str(exc)) from exc
    if seed is not None:
        loaded.set_random_seed(seed)
    try:
        server = PolicyServer(
            policy, accepts=policy.accepts, action_space=policy.action_space, action_horizon=horizon,
            connect_timeout=connect_timeout or None, on_progress=progress, **plain,
        )  # fmt: skip
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    except OSError as exc:
        raise SystemExit(_fail(exc)) from exc
    if not quiet:
        click.echo(f"serving {Path(model).name} at {server.url}", err=True)
    raise SystemExit(_serve(server, progress, quiet=quiet, summary=summary))


@main.command(name="plot", context_settings=console.SETTINGS)
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@click.option(
    "--out", "-o", type=click.Path(dir_okay=False), default="learning_curves.png", help="Picture to write: .png, .svg."
)
@click.option("--title", "titles", multiple=True, help="Title of a run; repeat it, once per run.")
def plot(*, runs: tuple[str, ...], out: str, titles: tuple[str, ...]) -> None:
    """Draw return against env steps from the episode logs of RUNS, which are files and folders.

    Every slot is faint, their mean bold, and the runs stand side by side.

    \b
    plugrl-bridges plot runs/demo
    plugrl-bridges plot runs/a/episodes.csv runs/b/episodes.csv --out both.svg
    """  # noqa: D301 - the backspace is click's mark of lines that are not to be wrapped
    from plugrl_bridges.plot import find_episode_logs, plot_learning_curves  # noqa: PLC0415 - --help must not pay

    if not Path(out).absolute().parent.is_dir():
        raise SystemExit(_fail(ValueError(f"--out {out}: the folder does not exist"), 2))
    try:
        logs = find_episode_logs(runs)
        plot_learning_curves(logs, out, titles=titles or None)
    except ImportError as exc:
        raise SystemExit(_fail(exc)) from exc
    except (OSError, ValueError) as exc:
        raise SystemExit(_fail(exc, 2)) from exc
    click.echo(f"{out}: {', '.join(map(str, logs))}")


def _serve(server: PolicyServer, progress: _Progress | None, *, quiet: bool, summary: str | None) -> int:
    """Run the server; return the exit code."""
    signals = console.Signals(server.stop)
    error: Exception | None = None
    try:
        server.run()
    except Exception as exc:
        logging.getLogger(__name__).debug("the server failed", exc_info=True)
        error = exc
    if progress is not None:
        progress.line.clear()
    done = server.summary
    if not quiet:
        for text in _summary_lines(done):
            click.echo(text)
    if summary is not None:
        try:
            console.write_json(summary, _as_json(done))
        except OSError as exc:
            error = error or exc
    if error is not None:
        return _fail(error)
    return signals.exit_code(_NAME) or 0


def _fail(error: Exception, code: int = 1) -> int:
    return console.fail(_NAME, error, code)


class _Progress:
    """A progress line of how far the server is."""

    def __init__(self) -> None:
        self.line = console.ProgressLine()
        self._steps, self._at = 0, time.monotonic()

    def __call__(self, summary: PolicySummary) -> None:
        now = time.monotonic()
        speed = (summary.steps - self._steps) / max(now - self._at, 1e-9)
        self._steps, self._at = summary.steps, now
        here = [client for client in summary.clients if client.connected]
        self.line.show(
            f"{len(here)} clients, {sum(client.num_envs for client in here)} envs | {len(summary.returns)} episodes | "
            f"{speed:.0f} steps/s | mean return {_mean(summary.returns)}"
        )


def _mean(returns: Sequence[float]) -> str:
    return f"{statistics.fmean(returns):.2f}" if returns else "-"


def _summary_lines(summary: PolicySummary) -> list[str]:
    """Return what each client did, and all of them together."""
    lines = []
    for client in summary.clients:
        own = [episode.ret for episode in summary.episodes if episode.client == client.number]
        lines.append(
            f"{client.address} ({client.name}): {client.num_envs} envs, {client.steps} env steps, "
            f"{len(own)} episodes, mean return {_mean(own)}"
        )
    returns = summary.returns
    total = f"{len(returns)} episodes, {summary.steps} env steps, mean return {_mean(returns)}"
    if returns:
        total += f" (std {statistics.pstdev(returns):.2f}, min {min(returns):.2f}, max {max(returns):.2f})"
    return [*lines, total]


def _as_json(summary: PolicySummary) -> dict[str, Any]:
    """Return what came of it, for programs; a return that is no finite number is null."""

    def finite(episodes: Sequence[ServedEpisode]) -> list[float | None]:
        return [episode.ret if math.isfinite(episode.ret) else None for episode in episodes]

    returns = finite(summary.episodes)
    return {
        "ending": None if summary.ending is None else summary.ending.value,
        "steps": summary.steps,
        "mean_return": statistics.fmean(summary.returns) if returns and None not in returns else None,
        "returns": returns,
        "lengths": [episode.length for episode in summary.episodes],
        "clients": [
            {
                "address": client.address, "name": client.name, "num_envs": client.num_envs, "steps": client.steps,
                "returns": finite([each for each in summary.episodes if each.client == client.number]),
            }
            for client in summary.clients
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
