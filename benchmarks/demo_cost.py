"""Measure by how much the live check lengthens the demo's training run.

Runs the demo without and with ``--verify`` in turns, so that whatever else the machine does hits both alike, and
compares the speeds of each pair; the final weights must be the same.

    python -m benchmarks.demo_cost --pairs 5
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from stable_baselines3 import PPO
from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(steps: int, folder: Path, *options: str) -> tuple[float, bytes]:
    """Run the demo once; give the seconds that it trained, and the weights that it ended with."""
    command = [sys.executable, "-m", "plugrl_bridges.demo", "--steps", str(steps), "--out", str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    speed = re.search(r"^speed: +(\d+) env steps/s$", done.stdout, re.MULTILINE)
    if speed is None:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    state = PPO.load(folder / "policy.zip", device="cpu").policy.state_dict()
    return steps / float(speed[1]), b"".join(value.numpy().tobytes() for value in state.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print each pair and the median. Exit code 1 if the weights of a pair differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=102_400, help="env steps of each run")
    args = parser.parse_args(argv)
    growth, same = [], True
    for pair in tqdm(range(args.pairs), unit="pair", file=sys.stderr, disable=None):
        arms = ([], ["--verify"]) if pair % 2 == 0 else (["--verify"], [])
        with tempfile.TemporaryDirectory() as folder:
            results = {bool(arm): run(args.steps, Path(folder) / f"{len(arm)}", *arm) for arm in arms}
        (plain, weights), (verified, others) = results[False], results[True]
        same = same and weights == others
        growth.append(verified / plain - 1)
        print(f"{plain:.1f} s without, {verified:.1f} s with verify: {growth[-1]:+.1%}", flush=True)
    print(f"median: {np.median(growth):+.1%}; final weights {'the same' if same else 'DIFFER'}")
    return int(not same)


if __name__ == "__main__":
    raise SystemExit(main())
