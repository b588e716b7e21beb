"""Inject every kind of fault at the boundary, one at a time, and tabulate what catches it.

Each case trains Stable-Baselines3's PPO through a client that makes one fault (``benchmarks.faulty_env``), twice: with
ledgers on both sides, to the end; and with ``verify=True``, until it is stopped. Then:

    ledger    whether `compare` sees a difference, and whether its first one is the first change that was made
    live      whether the run was stopped, and whether that was in the step in which the first change crossed
    log       whether the bridge's episode log differs from the envs' own record (of their ledgers)
    curve     what a person sees: whether the returns of the last fifth of the episodes are above those of the first
    weights   whether the final weights differ from those of the run without a fault

Two faults in the trainer's own log (the first reward of each episode left out of its return; each length one short) are
held to the same record.

    python -m benchmarks.boundary_faults --env Pendulum-v1 --steps 20480 --seeds 3
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnvWrapper
from tqdm import tqdm

from benchmarks.faults_report import LOG_FAULTS, Row, summary, verdict, write
from benchmarks.faulty_env import CONTROLS, DOSES, FAULTS
from plugrl_bridges.errors import LedgerMismatch
from plugrl_bridges.ledger import LedgerReader, LedgerVecEnv, compare
from plugrl_bridges.sb3 import PlugRemoteVecEnv

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stable_baselines3.common.vec_env import VecEnv

NUM_ENVS = 16
THE_ENV = 5  # in which the one cell is changed

_BUDGET = f"""
The budget: each of the {NUM_ENVS} envs makes --steps / {NUM_ENVS} steps. The end of an episode must lie within them,
behind --at, so --steps / {NUM_ENVS} must be above the length of an episode. Otherwise final_obs, reset_obs
and the faults of ends find nothing to change; such cases are reported, and the summary leaves them
out. A learning curve takes 15 episodes.
"""

Episode = tuple[int, float, int]
"""Row, return, length."""


@dataclass(frozen=True)
class Setting:
    """Say how all cases are trained."""

    env: str
    steps: int
    at: int
    n_steps: int


class ReturnLog(VecEnvWrapper):
    """Keep the trainer's own log of episodes: row, return, length, and the first reward."""

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        self.episodes: list[tuple[Episode, float]] = []
        self._rewards: list[list[float]] = [[] for _ in range(venv.num_envs)]

    def reset(self) -> Any:
        """Reset the envs, and forget what was running."""
        self._rewards = [[] for _ in self._rewards]
        return self.venv.reset()

    def step_wait(self) -> Any:
        """Take in a step."""
        returned = self.venv.step_wait()
        for row, (reward, done) in enumerate(zip(returned[1].tolist(), returned[2].tolist(), strict=True)):
            self._rewards[row].append(reward)
            if done:
                rewards, self._rewards[row] = self._rewards[row], []
                self.episodes.append(((row, sum(rewards), len(rewards)), rewards[0]))
        return returned


@dataclass
class Trained:
    """Hold what a run left behind."""

    log: list[tuple[Episode, float]]
    weights: str = ""
    stopped: LedgerMismatch | None = None
    report: dict[str, Any] = field(default_factory=dict)


def train(setting: Setting, seed: int, folder: Path, *, verify: bool, plan: dict[str, Any]) -> Trained:
    """Train PPO through one client.

    Args:
        setting: Env, budget.
        seed: Of PPO, and of its first reset.
        folder: For ledgers, the episode log and the report of the client.
        verify: With the live check, and without ledgers.
        plan: Arguments of `benchmarks.faulty_env.Plan`.
    """
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS, verify=verify, episode_log=folder / "episodes.csv")
    kwargs: dict[str, Any] = {"env_id": setting.env, "report": str(folder / "report.json"), **plan}
    if not verify:
        kwargs["ledger"] = f"{folder}/envs/"
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-factory", "benchmarks.faulty_env:make"]
    command += ["--env-kwargs", json.dumps(kwargs), "--num-envs", str(NUM_ENVS), "--url", env.url, "--quiet"]
    client = subprocess.Popen([*command, *(["--verify"] if verify else [])])
    log = ReturnLog(env if verify else LedgerVecEnv(env, folder / "trainer.ledger"))
    trained = Trained(log.episodes)
    try:
        model = PPO("MlpPolicy", log, seed=seed, device="cpu", n_steps=setting.n_steps, gamma=0.9, learning_rate=1e-3)
        trained.weights = _weights(model.learn(setting.steps))
    except LedgerMismatch as exc:
        trained.stopped = exc
    finally:
        log.close()
        client.wait(60)
    trained.report = json.loads((folder / "report.json").read_text())
    return trained


def _weights(model: PPO) -> str:
    sha = hashlib.sha256()
    for key, value in model.policy.state_dict().items():
        sha.update(key.encode())
        sha.update(value.numpy().tobytes())
    return sha.hexdigest()


def _recorded(folder: Path) -> tuple[list[Episode], list[str]]:
    """Give the episodes of the envs' own ledger, and how each ended, row by row."""
    [path] = (folder / "envs").iterdir()
    episodes = sorted(LedgerReader(path).episodes(), key=lambda each: each.env)
    ends = ["terminated" if each.terminated else "truncated" for each in episodes]
    return [(each.env, each.ret, each.length) for each in episodes], ends


def _logged(folder: Path) -> tuple[list[Episode], list[str]]:
    """Give the same of the bridge's episode log."""
    with (folder / "episodes.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["slot"]))
    return [(int(row["slot"]), float(row["return"]), int(row["length"])) for row in rows], [row["end"] for row in rows]


def agree(log: Iterable[Episode], record: Iterable[Episode], tolerance: float = 1e-12) -> bool:
    """Tell whether two logs have the same episodes; a trainer's own has rewards rounded to float32."""
    ours, theirs = sorted(log, key=lambda each: each[0]), sorted(record, key=lambda each: each[0])
    return [(row, length) for row, _, length in ours] == [(row, length) for row, _, length in theirs] and np.allclose(
        [ret for _, ret, _ in ours], [ret for _, ret, _ in theirs], rtol=tolerance, atol=tolerance
    )


def _curve(log: Sequence[tuple[Episode, float]]) -> str:
    returns = [ret for (_, ret, _), _ in log]
    fifth = len(returns) // 5
    if fifth < 3:
        return "too short"
    before, after = float(np.mean(returns[:fifth])), float(np.mean(returns[-fifth:]))
    return f"{'rises' if after > before else 'does not rise'}, {before:.0f} to {after:.0f}"


def _place(env: int, episode: int, step: int, vector_step: int) -> str:
    return f"env {env}, episode {episode}, step {step} (vector step {vector_step})"


def run_case(
    setting: Setting, fault: str, dose: str, seed: int, clean: str | None
) -> tuple[Row, Trained, list[Episode]]:
    """Train through one fault, and see what catches it.

    Args:
        setting: Env, budget.
        fault: One of `FAULTS` or `CONTROLS`.
        dose: One of `DOSES`.
        seed: Of everything.
        clean: Final weights without a fault; None in that run itself.

    Returns:
        The row of the table, the whole run, and the envs' own record of it.
    """
    plan = {"fault": fault, "dose": dose, "at": setting.at, "env": THE_ENV, "seed": seed}
    row = Row(fault, dose, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = train(setting, seed, folder, verify=False, plan=plan)
        found = compare(folder / "trainer.ledger", [folder / "envs"])
        record, ends = _recorded(folder)
        logged, logged_ends = _logged(folder)
        row.log = "agrees" if agree(logged, record) and logged_ends == ends else "DIFFERS"
        if not (record or logged):
            row.log = "no episode"
    first, row.changed = whole.report["first"], whole.report["changed"]
    place = None
    if first is not None:
        place = _place(first["env"], first["episode"], first["step"], first["vector_step"])
        row.first = f"{place}, {first['field']}"
    if found.first is not None:
        at = found.first
        where = f"{_place(at.slot.number, at.episode, at.step, at.vector_step)}, {at.field}"
        row.ledger = "located" if where == row.first else f"ELSEWHERE: {where}"
    else:
        row.ledger = "silent"
    row.curve = _curve(whole.log)
    row.weights = "clean" if clean is None else "equal" if whole.weights == clean else "differ"
    with tempfile.TemporaryDirectory() as name:
        live = train(setting, seed, Path(name), verify=True, plan=plan)
    if live.stopped is None:
        row.live = "silent" if live.weights == whole.weights else "silent, but OTHER WEIGHTS"
    else:
        stop = live.stopped
        where = _place(stop.slot, stop.episode, stop.step, stop.vector_step)
        row.live = f"in the step{', named' if stop.field else ''}" if where == place else f"ELSEWHERE: {where}"
    return row, whole, record


def log_rows(clean: Row, whole: Trained, record: list[Episode]) -> list[Row]:
    """Hold the two faults of a trainer's own log to the envs' record, of a run without another fault.

    Args:
        clean: The row of that run: what ledgers, live check and weights say of it.
        whole: That run.
        record: The envs' own record of it.
    """
    logs = (
        [(row, ret - reward, length) for (row, ret, length), reward in whole.log],
        [(row, ret, length - 1) for (row, ret, length), _ in whole.log],
    )
    assert agree([episode for episode, _ in whole.log], record, 1e-6)
    return [
        replace(
            clean,
            fault=name,
            dose="every",
            changed=len(log),
            log="agrees" if agree(log, record, 1e-6) else "DIFFERS",
        )
        for name, log in zip(LOG_FAULTS, logs, strict=True)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_BUDGET,
    )
    doses = "one cell, 1 %% of the cells, every cell"
    parser.add_argument("--env", default="Pendulum-v1", help="Gymnasium id (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20_480, help="env steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds: 0, 1, … (default: %(default)s)")
    parser.add_argument(
        "--at",
        type=int,
        default=100,
        help="vector step from which on the one cell may be changed (default: %(default)s)",
    )
    parser.add_argument("--n-steps", type=int, default=64, help="vector steps of a rollout (default: %(default)s)")
    parser.add_argument(
        "--faults", nargs="*", choices=FAULTS, default=list(FAULTS), metavar="FAULT",
        help=f"which, each in quotes: {', '.join(FAULTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--doses", nargs="*", choices=DOSES, default=list(DOSES), metavar="DOSE",
        help=f"how much of it: {', '.join(DOSES)}, that is {doses} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/boundary_faults"),
        help="writes .md, .csv and .png (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix; print and write the table. Exit code 1 if anything was missed, or an alarm was false."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    setting = Setting(args.env, args.steps, args.at, args.n_steps)
    cases = [(name, "one") for name in CONTROLS] + [(fault, dose) for fault in args.faults for dose in args.doses]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tqdm(total=len(cases) * args.seeds, unit="case", file=sys.stderr, disable=None) as progress:
        for seed in range(args.seeds):
            clean: str | None = None
            for fault, dose in cases:
                progress.set_postfix_str(f"{fault}, {dose}, seed {seed}")
                row, whole, record = run_case(setting, fault, dose, seed, clean)
                rows.append(row)
                if clean is None:
                    clean = whole.weights
                    rows += log_rows(row, whole, record)
                write(rows, args.out, picture=False)  # after each case: a run of hours may be interrupted
                progress.update()
    print(summary(rows))
    wrong = verdict(rows)
    print(f"\n{len(rows)} cases; " + (f"{len(wrong)} not as they should be:" if wrong else "all as they should be"))
    for line in wrong:
        print(f"- {line}")
    print("written: " + ", ".join(str(path) for path in write(rows, args.out, title=f"{args.env}, {len(rows)} cases")))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
