"""The demo: PPO learns Pendulum-v1 on 16 envs that a separate env-client process steps. Run by ``make demo``.

Starts the client itself, trains with rl-baselines3-zoo's settings for this task, then shows what both sides counted,
and leaves an episode log and a learning curve under ``runs/``. Needs the ``demo`` extra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from stable_baselines3 import PPO

from plugrl_bridges.plot import plot_learning_curves, read_episodes
from plugrl_bridges.sb3 import PlugRemoteVecEnv, make_vec_env

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

NUM_ENVS = 16
GAIN = 500.0
"""By how much the mean return of episodes 20 and later must exceed that of the first two."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 0 if the policy learned and both sides counted the same, else 1."""
    parser = argparse.ArgumentParser(prog="python -m plugrl_bridges.demo", description="Train a remote Pendulum.")
    parser.add_argument("--steps", type=int, default=102_400, help="env steps, all envs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the log and the picture")
    parser.add_argument("--verify", action="store_true", help="check each step at the boundary (docs/ledger.md)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    log, curve, counted = args.out / "episodes.csv", args.out / "learning_curve.png", args.out / "client.json"
    torch.set_num_threads(1)

    env = PlugRemoteVecEnv(port=0, episode_log=log, verify=args.verify)
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-id", "Pendulum-v1", "--num-envs", str(NUM_ENVS)]
    command += ["--url", env.url, "--summary", str(counted), "--quiet", *(["--verify"] if args.verify else [])]
    print(f"bridge: {env.url}\nclient: plugrl-env-client {' '.join(command[3:])}", flush=True)
    client = subprocess.Popen(command)
    try:
        model = PPO(
            "MlpPolicy", make_vec_env(env), n_steps=256, gamma=0.9, gae_lambda=0.95, n_epochs=10, learning_rate=1e-3,
            clip_range=0.2, use_sde=True, sde_sample_freq=4, seed=args.seed, device="cpu",
        )  # fmt: skip
        started = time.perf_counter()
        model.learn(args.steps, progress_bar=True)
        elapsed = time.perf_counter() - started
    finally:
        env.close()
        status = client.wait(30)
    model.save(args.out / "policy.zip")
    plot_learning_curves([log], curve, titles=[f"PPO on remote Pendulum-v1, seed {args.seed}"])
    if args.verify:
        print(f"\nverified:                  {env.verified} env steps and first observations, the same on both sides")
    return _report(
        log, counted, status, f"{args.steps / elapsed:.0f} env steps/s", [log, curve, args.out / "policy.zip"]
    )


def _report(log: Path, counted: Path, status: int, speed: str, files: Sequence[Path]) -> int:
    """Print what both sides counted; return the exit status."""
    slots = [[episode.ret for episode in episodes] for episodes in read_episodes(log).values()]
    bridge = [ret for returns in slots for ret in returns]
    first = float(np.mean([ret for returns in slots for ret in returns[:2]]))
    late = [ret for returns in slots for ret in returns[20:]] or [ret for returns in slots for ret in returns[-2:]]
    last = float(np.mean(late))
    client = json.loads(counted.read_text(encoding="utf-8"))
    same = client["episodes"] == len(bridge) and bool(
        np.isclose(client["mean_return"], np.mean(bridge), rtol=1e-9, atol=0)
    )
    learned = last - first >= GAIN
    print(f"\nspeed:                     {speed}")
    print(f"mean return, first two:    {first:9.1f}   (episodes 1 and 2 of each of {len(slots)} slots)")
    print(f"mean return, 20 and later: {last:9.1f}   ({'learned' if learned else f'gained less than {GAIN:.0f}'})")
    print(f"counted by the bridge:     {len(bridge)} episodes, mean return {np.mean(bridge):.6f}")
    print(
        f"counted by the client:     {client['episodes']} episodes, mean return {client['mean_return']:.6f}"
        f"   ({'the same' if same else 'DIFFERENT'})"
    )
    print(f"client's exit status:      {status}")
    print("written:                   " + ", ".join(map(str, files)))
    return 0 if learned and same and status == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
