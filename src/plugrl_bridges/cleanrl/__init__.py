"""The adapter for CleanRL-style scripts: `make_envs` replaces the line that makes the vector env."""

from plugrl_bridges.cleanrl.make import make_envs

__all__ = ["make_envs"]
