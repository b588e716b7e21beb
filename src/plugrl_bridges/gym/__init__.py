"""The adapters for Gymnasium: remote environments as a ``VectorEnv``, and one remote environment as an ``Env``.

`PlugRLVectorEnv` is what a trainer takes; ``gymnasium.make_vec("plugrl_bridges:PlugRL/Remote-v0")`` makes one.
`RemoteEnv` is a single env, which ``gymnasium.make("plugrl_bridges:PlugRL/Remote-v0")`` makes.
"""

from plugrl_bridges.gym.env import RemoteEnv
from plugrl_bridges.gym.infos import InfoDialect
from plugrl_bridges.gym.vector_env import PlugRLVectorEnv
from plugrl_bridges.server.autoreset import AutoresetMode

__all__ = ["AutoresetMode", "InfoDialect", "PlugRLVectorEnv", "RemoteEnv"]
