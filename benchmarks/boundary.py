"""Measure what the boundary costs: the time of a vector step of 16 envs, remote against in-process.

All arms of one environment are alive at once and are stepped in turns, a short block each, so that whatever else the
machine does hits them alike. Medians over steps are reported, and ratios, which are what counts:

    overhead   (arm - DummyVecEnv) / (baseline - DummyVecEnv)
    total      arm / SubprocVecEnv

    python -m benchmarks.boundary --steps 2000 --json runs/boundary.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from tqdm import tqdm

from benchmarks.baseline import BaselineVecEnv, run_client
from benchmarks.frames_env import FramesEnv
from plugrl_bridges.sb3 import PlugRemoteVecEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

NUM_ENVS = 16
BLOCK = 200
WARM_UP = 20  # steps of a block that are not recorded: caches and sleepers wake after the turns of the others
STALL_S = 0.04


def _pendulum() -> gym.Env[Any, Any]:
    return gym.make("Pendulum-v1")


def _halfcheetah() -> gym.Env[Any, Any]:
    return gym.make("HalfCheetah-v5")


def _frames() -> gym.Env[Any, Any]:
    return FramesEnv()


@dataclass(frozen=True)
class Job:
    """Say how an environment is made, here and at a client."""

    make: Callable[[], gym.Env[Any, Any]]
    client_args: tuple[str, ...]


JOBS = {
    "pendulum": Job(_pendulum, ("--env-id", "Pendulum-v1")),
    "halfcheetah": Job(_halfcheetah, ("--env-id", "HalfCheetah-v5")),
    "frames": Job(_frames, ("--env-factory", "benchmarks.frames_env:make")),
}


class Arm:
    """Step one kind of vector env, and keep the time of every step."""

    def __init__(self, env: Any, close: Callable[[], None]) -> None:
        self.env = env
        self.close = close
        self.times: list[float] = []

    def run(self, actions: NDArray[Any], *, record: bool) -> None:
        """Step once per row of actions."""
        for action in actions:
            started = time.perf_counter()
            self.env.step(action)
            if record:
                self.times.append(time.perf_counter() - started)


def _start_remote(job: Job, clients: int) -> Arm:
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS)
    share = NUM_ENVS // clients
    command = [sys.executable, "-m", "plugrl_bridges.client", *job.client_args, "--url", env.url, "--quiet"]
    command += ["--num-envs", str(share)]
    processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(clients)]

    def close() -> None:
        env.close()
        for process in processes:
            process.wait(20)

    env.reset()
    return Arm(env, close)


def _start_baseline(job: Job) -> Arm:
    env = BaselineVecEnv()
    process = multiprocessing.get_context("spawn").Process(target=run_client, args=(env.port, job.make, NUM_ENVS))
    process.start()

    def close() -> None:
        env.close()
        process.join(20)

    env.reset()
    return Arm(env, close)


def _start_local(env: Any) -> Arm:
    env.reset()
    return Arm(env, env.close)


def _start_arms(job: Job) -> dict[str, Arm]:
    makers = [job.make] * NUM_ENVS
    starters: dict[str, Callable[[], Arm]] = {
        "DummyVecEnv": lambda: _start_local(DummyVecEnv(makers)),
        "SubprocVecEnv": lambda: _start_local(SubprocVecEnv(makers)),
        "AsyncVectorEnv": lambda: _start_local(gym.vector.AsyncVectorEnv(makers)),
        "baseline": lambda: _start_baseline(job),
        "ours 1x16": lambda: _start_remote(job, 1),
        "ours 2x8": lambda: _start_remote(job, 2),
        "ours 16x1": lambda: _start_remote(job, 16),
    }
    return {name: start() for name, start in starters.items()}


def measure(name: str, steps: int) -> dict[str, dict[str, float]]:
    """Measure all arms of one environment.

    Args:
        name: A key of `JOBS`.
        steps: Recorded vector steps per arm.

    Returns:
        Per arm: median, p99 and max of a vector step in microseconds, stalls of 40 ms and more, and the ratios.
    """
    job = JOBS[name]
    space = job.make().action_space
    space.seed(0)
    arms = _start_arms(job)
    try:
        actions = np.array([[space.sample() for _ in range(NUM_ENVS)] for _ in range(BLOCK)])
        for arm in arms.values():
            for _ in range(2):
                arm.run(actions, record=False)
        for _ in tqdm(range(-(-steps // BLOCK)), desc=name, unit="block", file=sys.stderr, disable=None):
            for arm in arms.values():
                arm.run(actions[:WARM_UP], record=False)
                arm.run(actions, record=True)
    finally:
        for arm in arms.values():
            arm.close()
    return _summary({arm_name: np.array(arm.times) for arm_name, arm in arms.items()})


def _summary(times: dict[str, NDArray[np.float64]]) -> dict[str, dict[str, float]]:
    medians = {name: float(np.median(values)) for name, values in times.items()}
    local, baseline, subproc = medians["DummyVecEnv"], medians["baseline"], medians["SubprocVecEnv"]
    return {
        name: {
            "median_us": medians[name] * 1e6,
            "p99_us": float(np.percentile(values, 99)) * 1e6,
            "max_us": float(values.max()) * 1e6,
            "stalls": int((values >= STALL_S).sum()),
            "overhead": (medians[name] - local) / (baseline - local),
            "total": medians[name] / subproc,
        }
        for name, values in times.items()
    }


def table(name: str, arms: dict[str, dict[str, float]]) -> str:
    """Write one environment's figures as a Markdown table."""
    lines = [
        f"| {name} | median µs | p99 µs | steps ≥ 40 ms | overhead / baseline's | total / SubprocVecEnv's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {arm} | {row['median_us']:.0f} | {row['p99_us']:.0f} | {row['stalls']} | {row['overhead']:.2f} | "
        f"{row['total']:.2f} |"
        for arm, row in arms.items()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=[*JOBS, "all"], default="all")
    parser.add_argument("--steps", type=int, default=2000, help="recorded vector steps per arm")
    parser.add_argument("--json", type=Path, default=Path("runs/boundary.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    names = list(JOBS) if args.env == "all" else [args.env]
    results = {}
    for name in names:
        results[name] = measure(name, args.steps)
        print(f"\n{table(name, results[name])}", flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"python": platform.python_version(), "machine": platform.machine(), "steps": args.steps}
    args.json.write_text(json.dumps({"about": about, "results": results}, indent=2))
    print(f"\nwritten: {args.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
