"""Run the learning jobs that docs/results.md records, and hold the trainer's own log to the bridge's episode log.

    python -m benchmarks.learning cleanrl --seeds 1 2 3
    python -m benchmarks.learning sb3 --seeds 0 1 2

Both train PPO on 16 remote HalfCheetah-v5: with ``examples/cleanrl/ppo_continuous_action.py`` on raw observations and
rewards, and with Stable-Baselines3 behind ``VecNormalize``. Each run leaves its logs in a folder of its own, and all of
them together one picture. Exit code 1 if a policy did not learn or the two logs differ.
"""

from __future__ import annotations

import argparse
import csv
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plugrl_bridges.plot import plot_learning_curves
from plugrl_bridges.sb3 import PlugRemoteVecEnv

ROOT = Path(__file__).resolve().parents[1]
NUM_ENVS = 16
GAIN = 200.0
"""By how much the mean of each slot's episodes 21 to 25 must exceed that of its first."""
CLEANRL = "examples/cleanrl/ppo_continuous_action.py"


def run_cleanrl(folder: Path, seed: int, steps: int) -> tuple[Path, list[float]]:
    """Run the example as a user would; give the bridge's episode log and the returns that TensorBoard was told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    factory = f"{CLEANRL.removesuffix('.py').replace('/', '.')}:make_env"
    client = start_client(f"ws://127.0.0.1:{port}", "--env-factory", factory, "--env-kwargs", '{"normalize": false}')
    command = [sys.executable, str(ROOT / CLEANRL), "--remote-port", str(port), "--seed", str(seed), "--no-normalize"]
    command += ["--total-timesteps", str(steps), "--runs", str(folder.resolve())]
    trainer = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if trainer.returncode or client.wait(60):
        raise SystemExit(f"the trainer ended with {trainer.returncode}, the client with {client.returncode}")
    [log] = folder.rglob("episodes.csv")
    events = EventAccumulator(str(log.parent), size_guidance={"scalars": 0}).Reload()
    return log, [event.value for event in events.Scalars("charts/episodic_return")]


def run_sb3(folder: Path, seed: int, steps: int) -> tuple[Path, list[float]]:
    """Train SB3's PPO with VecNormalize; give the bridge's episode log and the returns that VecMonitor wrote down."""
    log, monitor = folder / "episodes.csv", folder / "monitor.csv"
    env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS, episode_log=log)
    client = start_client(env.url, "--env-id", "HalfCheetah-v5")
    normalised = VecNormalize(VecMonitor(env, str(monitor)))
    try:
        PPO("MlpPolicy", normalised, n_steps=128, batch_size=64, seed=seed, device="cpu").learn(steps)
    finally:
        normalised.close()
        status = client.wait(60)
    if status:
        raise SystemExit(f"the client ended with {status}")
    with monitor.open(newline="") as file:
        next(file)
        return log, [float(row["r"]) for row in csv.DictReader(file)]


def start_client(url: str, *args: str) -> subprocess.Popen[bytes]:
    """Start an env client of all envs."""
    command = [
        sys.executable,
        "-m",
        "plugrl_bridges.client",
        "--num-envs",
        str(NUM_ENVS),
        "--url",
        url,
        "--quiet",
        *args,
    ]
    return subprocess.Popen(command, cwd=ROOT)


def judge(log: Path, told: list[float]) -> tuple[float, float, bool]:
    """Give the means of each slot's first and last episodes, and whether both logs agree episode by episode."""
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    per_slot: dict[str, list[float]] = {}
    for row in rows:
        per_slot.setdefault(row["slot"], []).append(float(row["return"]))
    first = float(np.mean([returns[0] for returns in per_slot.values()]))
    last = float(np.mean([returns[20:25] for returns in per_slot.values()]))
    # VecMonitor and TensorBoard add up or store float32; sorted, since two that end in one step have no order.
    mine, theirs = np.sort([float(row["return"]) for row in rows]), np.sort(told)
    return first, last, len(mine) == len(theirs) and bool(np.allclose(mine, theirs, rtol=1e-4, atol=1e-2))


def main() -> int:
    """Run the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["cleanrl", "sb3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=409_600, help="env steps, all envs together")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    logs, fine = [], True
    for seed in args.seeds:
        folder = args.out / f"{args.job}-{seed}"
        folder.mkdir(parents=True)
        log, told = (run_cleanrl if args.job == "cleanrl" else run_sb3)(folder, seed, args.steps)
        first, last, same = judge(log, told)
        print(
            f"{args.job}, seed {seed}: {len(told)} episodes; mean of each slot's first episode {first:.0f}, of its "
            f"episodes 21 to 25 {last:.0f}; trainer's own log {'equal' if same else 'DIFFERENT'}",
            flush=True,
        )
        logs.append(log)
        fine = fine and same and last - first >= GAIN
    picture = args.out / f"{args.job}.png"
    plot_learning_curves(logs, picture, titles=[f"{args.job}, seed {seed}" for seed in args.seeds])
    print(f"picture: {picture}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
