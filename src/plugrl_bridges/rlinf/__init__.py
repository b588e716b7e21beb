"""Train remote environments from an RLinf config: `PlugRLEnv`, and `register` for ``RLINF_EXT_MODULE``.

``python -m plugrl_bridges.rlinf --config-name plugrl_pendulum_ppo_mlp`` starts a run. With a script of your own, set
``RLINF_EXT_MODULE=plugrl_bridges.rlinf`` and write ``env_type: plugrl``. Importing this package imports neither RLinf
nor torch; it only looks whether a release of RLinf is installed that it was tested with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugrl_bridges.rlinf.installed import check_installed

if TYPE_CHECKING:
    from plugrl_bridges.rlinf.env import PlugRLEnv

__all__ = ["PlugRLEnv", "register"]

check_installed()


def register() -> None:
    """Make ``env_type: plugrl`` known to RLinf in this process; idempotent.

    RLinf calls it in each of its workers, by ``RLINF_EXT_MODULE``. A driver of your own calls it once, before RLinf's
    ``validate_cfg``.
    """
    from plugrl_bridges.rlinf.registration import register as register_here  # noqa: PLC0415 - imports RLinf

    register_here()


def __getattr__(name: str) -> object:
    if name == "PlugRLEnv":
        from plugrl_bridges.rlinf.env import PlugRLEnv  # noqa: PLC0415 - imports RLinf and torch

        return PlugRLEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
