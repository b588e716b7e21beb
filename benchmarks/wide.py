"""Measure how the time of a vector step grows with the number of envs of one batched simulator on one connection.

All sizes are alive at once and are stepped in turns, a short block each; medians over steps, and their ratios to the
smallest, are reported.

    python -m benchmarks.wide --steps 1000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np

from benchmarks.wide_env import WIDTH
from plugrl_bridges.gym import PlugRLVectorEnv

SIZES = (16, 256, 1024, 4096)
BLOCK = 100
WARM_UP = 10  # steps of a block that are not recorded: caches and sleepers wake after the turns of the others


class Arm:
    """Step one size, and keep the time of every step."""

    def __init__(self, num_envs: int) -> None:
        self.times: list[float] = []
        self._env = PlugRLVectorEnv(port=0, num_envs=num_envs)
        self._client = subprocess.Popen(
            [
                *(sys.executable, "-m", "plugrl_bridges.client", "--url", self._env.url, "--quiet"),
                *("--env-factory", "benchmarks.wide_env:make", "--env-kwargs", f'{{"num_envs": {num_envs}}}'),
            ]
        )
        self._env.reset(seed=0)
        self._actions = np.zeros((num_envs, 4), np.float32)

    def block(self) -> None:
        """Take one turn."""
        for at in range(BLOCK + WARM_UP):
            started = time.perf_counter()
            self._env.step(self._actions)
            if at >= WARM_UP:
                self.times.append(time.perf_counter() - started)

    def close(self) -> None:
        """End the run and its client."""
        self._env.close()
        self._client.wait(30)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="vector steps per size")
    args = parser.parse_args()
    arms = {size: Arm(size) for size in SIZES}
    try:
        for _ in range(-(-args.steps // BLOCK)):
            for arm in arms.values():
                arm.block()
    finally:
        for arm in arms.values():
            arm.close()
    medians = {size: float(np.median(arm.times)) for size, arm in arms.items()}
    print(f"observation of {WIDTH} float32, one connection")
    for size, median in medians.items():
        share = median / medians[SIZES[0]]
        print(f"{size:5d} envs: {1000 * median:6.2f} ms a vector step, {share:5.2f} of {SIZES[0]} envs'")


if __name__ == "__main__":
    main()
