"""The entries of this package in Gymnasium's registry: ``gym.make("plugrl_bridges:PlugRL/Probe-v0")``.

Gymnasium imports ``plugrl_bridges`` when it sees such an id, and expects it registered then.
"""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

__all__ = ["ENVS", "register_envs"]

ENVS: dict[str, tuple[str, str | None]] = {
    "PlugRL/Probe-v0": ("plugrl_bridges.probe_env:ProbeEnv", None),
    "PlugRL/Remote-v0": ("plugrl_bridges.gym:RemoteEnv", "plugrl_bridges.gym:PlugRLVectorEnv"),
}
"""Entry points of an env and of a vector env for each id, as text: nothing else is imported before an env is made."""


def register_envs() -> None:
    """Register the envs; idempotent."""
    for env_id, (env, vector_env) in ENVS.items():
        if env_id not in registry:
            # Gymnasium's own checks would warn of the probe's action space without bounds, which is meant.
            register(env_id, env, disable_env_checker=True, vector_entry_point=vector_env)
