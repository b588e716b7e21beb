"""Train remote environments with Stable-Baselines3: `PlugRemoteVecEnv` and `make_vec_env`."""

from __future__ import annotations

try:
    import stable_baselines3 as _sb3  # noqa: F401 - only to say what is missing
except ImportError as exc:
    raise ImportError("plugrl_bridges.sb3 needs Stable-Baselines3: pip install 'plugrl-bridges[sb3]'") from exc

from plugrl_bridges.sb3.make import make_vec_env
from plugrl_bridges.sb3.policy import ModelPolicy
from plugrl_bridges.sb3.vec_env import PlugRemoteVecEnv, PlugRLVecEnv

__all__ = ["ModelPolicy", "PlugRLVecEnv", "PlugRemoteVecEnv", "make_vec_env"]
