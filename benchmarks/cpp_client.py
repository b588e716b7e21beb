"""Measure a vector step of 16 Pendulums in one C++ client against one Python client of 16, and against none.

All arms are alive at once and are stepped in turns, a short block each, as in `benchmarks.boundary`. Medians over steps
are reported, and what counts is the ratio of the two clients. Needs make and a C++ compiler.

    python -m benchmarks.cpp_client --steps 2000
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv
from tqdm import tqdm

from benchmarks.boundary import BLOCK, NUM_ENVS, WARM_UP, Arm
from plugrl_bridges.sb3 import PlugRemoteVecEnv

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "cpp"
CPP, PYTHON, LOCAL = "C++ client", "Python client", "DummyVecEnv"


def _start(command: Sequence[str]) -> Arm:
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS)
    process = subprocess.Popen([*command, "--num-envs", str(NUM_ENVS), "--url", env.url, "--quiet"], stdout=sys.stderr)

    def close() -> None:
        env.close()
        process.wait(20)

    env.reset()
    return Arm(env, close)


def _start_local() -> Arm:
    env = DummyVecEnv([lambda: gym.make("Pendulum-v1")] * NUM_ENVS)
    env.reset()
    return Arm(env, env.close)


def measure(program: Path, steps: int) -> dict[str, dict[str, float]]:
    """Measure all arms.

    Args:
        program: The built pendulum.
        steps: Recorded vector steps per arm.

    Returns:
        Per arm: median and p99 of a vector step in microseconds, and the median's ratio to the Python client's.
    """
    python = [sys.executable, "-m", "plugrl_bridges.client", "--env-id", "Pendulum-v1"]
    arms = {LOCAL: _start_local(), PYTHON: _start(python), CPP: _start([str(program)])}
    actions = np.random.default_rng(0).uniform(-2, 2, (BLOCK, NUM_ENVS, 1)).astype(np.float32)
    try:
        for arm in arms.values():
            arm.run(actions, record=False)
        for _ in tqdm(range(-(-steps // BLOCK)), unit="block", file=sys.stderr, disable=None):
            for arm in arms.values():
                arm.run(actions[:WARM_UP], record=False)
                arm.run(actions, record=True)
    finally:
        for arm in arms.values():
            arm.close()
    medians = {name: float(np.median(arm.times)) for name, arm in arms.items()}
    return {
        name: {
            "median_us": medians[name] * 1e6,
            "p99_us": float(np.percentile(arm.times, 99)) * 1e6,
            "ratio": medians[name] / medians[PYTHON],
        }
        for name, arm in arms.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Build, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="recorded vector steps per arm")
    parser.add_argument("--program", type=Path, help="a pendulum that is built already; else it is built with make")
    parser.add_argument("--json", type=Path, default=Path("runs/cpp_client.json"))
    args = parser.parse_args(argv)
    if args.program is None:
        subprocess.run(["make", "-s", "-C", str(EXAMPLES)], check=True)  # noqa: S607 - make is found by its name
        args.program = EXAMPLES / "build" / "pendulum"
    result = measure(args.program, args.steps)
    print("| 16 pendulums | median µs | p99 µs | median / Python client's |\n|---|---:|---:|---:|")
    for name, row in result.items():
        print(f"| {name} | {row['median_us']:.0f} | {row['p99_us']:.0f} | {row['ratio']:.2f} |")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"python": platform.python_version(), "machine": platform.machine(), "steps": args.steps}
    args.json.write_text(json.dumps({"about": about, "results": result}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
