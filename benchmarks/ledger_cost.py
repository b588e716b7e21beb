"""Measure what the step ledger and the digest cost, in microseconds per env step and side.

All arms step the same 16 envs, which do nothing but hand out a stored observation, in turns: a short block each, so
that whatever else the machine does hits them alike. The figure of an arm is the median time of its vector step less
that of the plain one, by 16.

    plain            DummyVecEnv
    env ledger       each env in a LedgerEnv
    env digest       each env in a LedgerEnv that writes nothing, but keeps the digest
    shared digest    likewise, the envs sharing SharedDigests
    trainer ledger   the DummyVecEnv in a LedgerVecEnv
    trainer digest   the digests of the batch, from what the trainer sends and gets
    remote           a PlugRemoteVecEnv with one client of 16; the figure is the whole vector step by 16, less the plain
    verify, env      likewise with verify=True, but nothing is checked at the trainer: the digests are made at the
                     client, and travel. The figure is less that of the remote one
    verify, trainer  the trainer checks them as well; the figure is less that of the arm before

    python -m benchmarks.ledger_cost --steps 4000
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv
from tqdm import tqdm

from benchmarks.frames_env import FramesEnv
from plugrl_bridges.digest import SharedDigests, StepDigests
from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from plugrl_bridges.spaces import ObservationLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_ENVS = 16
BLOCK = 200
WARM_UP = 20


class IdleEnv(gym.Env[Any, Any]):
    """Hand out one of eight stored observations of 17 floats; an episode has 200 steps."""

    def __init__(self, dtype: type[np.floating[Any]]) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (17,), dtype)
        self.action_space = spaces.Box(-1, 1, (6,), np.float32)
        self._stored = np.random.default_rng(0).normal(size=(8, 17)).astype(dtype)
        self._t = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._t = 0
        return self._stored[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Show the next observation."""
        self._t += 1
        return self._stored[self._t % 8], 0.25, False, self._t >= 200, {}


JOBS: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "17 float32": lambda: IdleEnv(np.float32),
    "17 float64": lambda: IdleEnv(np.float64),
    "84x84x4 uint8": FramesEnv,
}


def make(name: str) -> gym.Env[Any, Any]:
    """Make an env of `JOBS`, at a client."""
    return JOBS[name]()


def _remote(name: str, *, verify: bool) -> tuple[PlugRemoteVecEnv, subprocess.Popen[bytes]]:
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS, verify=verify)
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-factory", "benchmarks.ledger_cost:make", "--quiet"]
    command += ["--env-kwargs", json.dumps({"name": name}), "--num-envs", str(NUM_ENVS), "--url", env.url]
    return env, subprocess.Popen([*command, *(["--verify"] if verify else [])])


def _digested(env: DummyVecEnv) -> Callable[[Any], None]:
    """Give a step of a vector env that keeps the digests of what passes."""
    layout = ObservationLayout(env.observation_space)
    digests = StepDigests(env.num_envs, ObservationLayout(env.action_space).leaves, layout.leaves)
    digests.reset([np.asarray(env.reset())])

    def step(actions: Any) -> None:
        observations, rewards, dones, _ = env.step(actions)
        digests.step([actions], rewards, dones, dones, [np.asarray(observations)])

    return step


def measure(name: str, steps: int, folder: Path) -> dict[str, float]:
    """Measure all arms of one kind of observation.

    Args:
        name: A key of `JOBS`.
        steps: Recorded vector steps per arm.
        folder: For the ledgers.

    Returns:
        Arm to microseconds per env step beyond the plain arm; for the plain arm itself, its whole vector step by 16.
    """
    make = JOBS[name]
    space = make().action_space
    space.seed(0)
    actions = np.array([[space.sample() for _ in range(NUM_ENVS)] for _ in range(BLOCK)])

    def ledger_env(at: int) -> gym.Env[Any, Any]:
        return LedgerEnv(make(), folder / "envs.ledger", env_index=at)

    plain = DummyVecEnv([make] * NUM_ENVS)
    with_ledger = DummyVecEnv([partial(ledger_env, at) for at in range(NUM_ENVS)])
    with_digest = DummyVecEnv([lambda: LedgerEnv(make(), None, digest=True)] * NUM_ENVS)
    entries = LedgerEnv(make(), None).entries
    shared = SharedDigests(NUM_ENVS, *entries)
    with_shared = DummyVecEnv([partial(LedgerEnv, make(), None, digest=shared.row(at)) for at in range(NUM_ENVS)])
    trainer = LedgerVecEnv(DummyVecEnv([make] * NUM_ENVS), folder / "trainer.ledger")
    digested = DummyVecEnv([make] * NUM_ENVS)
    remotes = [_remote(name, verify=verify) for verify in (False, True, True)]
    far, unchecked, live = (env for env, _ in remotes)
    for env in (plain, with_ledger, with_digest, with_shared, trainer, far, unchecked, live):
        env.reset()
    unchecked._lockstep._exchange.verifier = None  # noqa: SLF001 - what comes is read, and then nothing is done with it
    arms: dict[str, Callable[[Any], object]] = {
        "plain": plain.step,
        "env ledger": with_ledger.step,
        "env digest": with_digest.step,
        "shared digest": lambda actions: (with_shared.step(actions), shared.values),
        "trainer ledger": trainer.step,
        "trainer digest": _digested(digested),
        "remote": far.step,
        "verify, env": unchecked.step,
        "verify, trainer": live.step,
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in tqdm(range(-(-steps // BLOCK)), desc=name, unit="block", file=sys.stderr, disable=None):
        for arm, step in arms.items():
            for action in actions[:WARM_UP]:
                step(action)
            for action in actions:
                started = time.perf_counter()
                step(action)
                times[arm].append(time.perf_counter() - started)
    for env in (plain, with_ledger, with_digest, with_shared, trainer, digested, far, unchecked, live):
        env.close()
    for _, client in remotes:
        client.wait(20)
    medians = {arm: float(np.median(values)) * 1e6 / NUM_ENVS for arm, values in times.items()}
    less = {"plain": 0.0, "verify, env": medians["remote"], "verify, trainer": medians["verify, env"]}
    return {arm: value - less.get(arm, medians["plain"]) for arm, value in medians.items()}


def table(results: dict[str, dict[str, float]]) -> str:
    """Write the figures as a Markdown table."""
    arms = list(next(iter(results.values())))
    lines = ["| µs per env step | " + " | ".join(arms) + " |", "|---|" + "---:|" * len(arms)]
    lines += [f"| {name} | " + " | ".join(f"{row[arm]:.2f}" for arm in arms) + " |" for name, row in results.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="recorded vector steps per arm")
    parser.add_argument("--json", type=Path, default=Path("runs/ledger_cost.json"))
    args = parser.parse_args(argv)
    results: dict[str, dict[str, float]] = {}
    for name in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, args.steps, Path(folder))
    print(table(results))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"python": platform.python_version(), "machine": platform.machine(), "steps": args.steps}
    args.json.write_text(json.dumps({"about": about, "results": results}, indent=2))
    print(f"\nwritten: {args.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
