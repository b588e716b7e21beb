"""Train Stable-Baselines3's CnnPolicy on stacked Atari frames of remote environments.

    python examples/sb3_atari.py --remote-port 8000
    plugrl-env-client --env-factory examples.sb3_atari:make_env --num-envs 16

Each frame crosses once: the client sends it as uint8, the four last ones are stacked here. Without ``--remote-port``
the environments are made in this process, and the weights come out the same. Needs the extras ``sb3`` and ``atari``.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import ale_py
import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecMonitor

from plugrl_bridges.sb3 import PlugRemoteVecEnv

NUM_ENVS = 16


def make_env() -> gym.Env[Any, Any]:
    """Make one environment; here, or in the client as its ``--env-factory``."""
    gym.register_envs(ale_py)
    # The wrapper repeats each action for 4 frames; the env's own 4 would make 16 of them.
    return AtariWrapper(gym.make("ALE/Pong-v5", frameskip=1))


def stack(env: VecEnv) -> VecEnv:
    """Monitor, and observe the last four frames."""
    return VecFrameStack(VecMonitor(env), n_stack=4)


def train(env: VecEnv, *, steps: int, seed: int, **settings: Any) -> PPO:
    """Train with the settings that are usual for Atari, but for those given."""
    usual = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4, "clip_range": 0.1}
    return PPO("CnnPolicy", env, seed=seed, ent_coef=0.01, device="cpu", **{**usual, **settings}).learn(steps)


def digest(model: PPO) -> str:
    """Give the SHA-256 of all weights."""
    sha = hashlib.sha256()
    for key, value in model.policy.state_dict().items():
        sha.update(key.encode())
        sha.update(value.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remote-port", type=int, help="listen there for env clients; otherwise all in this process")
    parser.add_argument("--steps", type=int, default=40_960, help="env steps, all envs together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums are the same on every machine then, and the clients need cores too
    remote = args.remote_port is not None
    env: VecEnv = (
        PlugRemoteVecEnv(port=args.remote_port, num_envs=NUM_ENVS) if remote else DummyVecEnv([make_env] * NUM_ENVS)
    )
    stacked = stack(env)
    print(f"observation space: {stacked.observation_space}", flush=True)
    model = train(stacked, steps=args.steps, seed=args.seed, verbose=1)
    stacked.close()
    print(f"weights: sha256 {digest(model)}")


if __name__ == "__main__":
    main()
