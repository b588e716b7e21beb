"""Train twice, once with the envs in this process and once in others, and compare the weights byte for byte.

    python examples/identical_weights.py --env pendulum --seed 0 --steps 20480 --clients 2

Both arms are one code path but for the line that makes the env. Needs the extras ``demo`` and ``mujoco``.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecMonitor

from plugrl_bridges.sb3 import PlugRemoteVecEnv

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

NUM_ENVS = 16
ENVS = {"pendulum": "Pendulum-v1", "halfcheetah": "HalfCheetah-v5", "cartpole": "CartPole-v1"}
SETTINGS: dict[str, dict[str, Any]] = {
    "pendulum": {"gamma": 0.9, "learning_rate": 1e-3, "use_sde": True, "sde_sample_freq": 4, "n_steps": 256},
    "halfcheetah": {"n_steps": 128, "batch_size": 256, "learning_rate": 3e-4},
    "cartpole": {"n_steps": 64, "batch_size": 256, "learning_rate": 1e-3},
}


def start_clients(url: str, env_id: str, clients: int) -> list[subprocess.Popen[bytes]]:
    """Start ``clients`` env clients that share the envs; their ranks fix who has which slots."""
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-id", env_id, "--url", url, "--quiet"]
    command += ["--num-envs", str(NUM_ENVS // clients)]
    return [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(clients)]


class Stopwatch(VecEnvWrapper):
    """Take the time of every vector step."""

    def reset(self) -> VecEnvObs:
        """Forget the times."""
        self.seconds: list[float] = []
        return self.venv.reset()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Start the watch."""
        self.started = time.perf_counter()
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Stop the watch."""
        result = self.venv.step_wait()
        self.seconds.append(time.perf_counter() - self.started)
        return result


def train(env: VecEnv, monitor: Path, *, seed: int, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train PPO on ``env``; give the digest of its weights, its episodes, and the time per vector step."""
    timed = Stopwatch(env)
    monitored = VecMonitor(timed, str(monitor))
    model = PPO("MlpPolicy", monitored, seed=seed, device="cpu", **settings)
    model.learn(steps)
    digest = hashlib.sha256()
    for key, value in model.policy.state_dict().items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    monitored.close()
    with monitor.open() as file:
        file.readline()  # VecMonitor's header comment
        episodes = [(row["r"], row["l"]) for row in csv.DictReader(file)]
    return {
        "sha256": digest.hexdigest(),
        "episodes": episodes,
        "ms": 1e3 * statistics.median(timed.seconds),
    }


def main() -> int:
    """Run the arms that were asked for; exit 0 unless they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", choices=list(ENVS), default="pendulum")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=102_400, help="env steps, all envs together")
    parser.add_argument("--clients", type=int, choices=(1, 2, 4, 8, 16), default=1)
    parser.add_argument("--via", choices=("in-process", "remote", "both"), default="both")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env_id, settings = ENVS[args.env], SETTINGS[args.env]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for via in ("in-process", "remote") if args.via == "both" else (args.via,):
            clients: list[subprocess.Popen[bytes]] = []
            if via == "in-process":
                env: VecEnv = DummyVecEnv([lambda: gym.make(env_id)] * NUM_ENVS)
            else:
                env = PlugRemoteVecEnv(port=0, num_envs=NUM_ENVS)
                clients = start_clients(env.url, env_id, args.clients)
            results[via] = train(
                env, Path(folder) / f"{via}.monitor.csv", seed=args.seed, steps=args.steps, settings=settings
            )
            for client in clients:
                if client.wait(30) != 0:
                    raise SystemExit(f"an env client ended with exit status {client.returncode}")
            row = results[via]
            print(f"{via:>10}: sha256 {row['sha256']}")
            print(f"            {len(row['episodes'])} episodes, {row['ms']:.3f} ms per vector step (median)")
    if len(results) < 2:
        return 0
    weights = results["in-process"]["sha256"] == results["remote"]["sha256"]
    episodes = results["in-process"]["episodes"] == results["remote"]["episodes"]
    print(f"   weights: {'identical' if weights else 'DIFFERENT'}")
    print(f"  episodes: {'identical, line for line' if episodes else 'DIFFERENT'}")
    return 0 if weights and episodes else 1


if __name__ == "__main__":
    raise SystemExit(main())
