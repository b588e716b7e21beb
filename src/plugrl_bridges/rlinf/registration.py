"""The places where RLinf must learn that ``env_type: plugrl`` exists.

RLinf has a closed enum of env types and an if-chain from them to classes, both used in the driver and in its workers.
Called by ``register`` of the package; ``cpu`` and ``ending`` are what else a process of a run needs.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import rlinf.envs

from plugrl_bridges.rlinf import cpu, ending

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENV_TYPE", "register"]

ENV_TYPE = "plugrl"
"""What a config says under ``env_type``."""


def register() -> None:
    """Make the env type known in this process, and whatever else it needs; idempotent."""
    _add_member(rlinf.envs.SupportedEnvType)
    _replace_lookup()
    cpu.install()
    ending.close_on_sigterm()
    ending.close_after_runs()


def _add_member(enum: Any) -> None:  # noqa: ANN401 - RLinf has no types
    """Add the member that the class statement would have added: `Enum` itself offers no way."""
    if ENV_TYPE in enum._value2member_map_:
        return
    member = object.__new__(enum)
    member._name_, member._value_ = ENV_TYPE.upper(), ENV_TYPE
    member.__objclass__, member._sort_order_ = enum, len(enum._member_names_)
    enum._member_names_.append(member._name_)
    enum._member_map_[member._name_] = member
    enum._value2member_map_[ENV_TYPE] = member
    type.__setattr__(enum, member._name_, member)


def _replace_lookup() -> None:
    """Put our lookup before RLinf's, also where a module took RLinf's by ``from rlinf.envs import get_env_cls``."""
    theirs = rlinf.envs.get_env_cls
    if getattr(theirs, "of_plugrl", False):
        return
    ours = _lookup(theirs)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "rlinf" and getattr(module, "get_env_cls", None) is theirs:
            module.get_env_cls = ours  # type: ignore[attr-defined] # a module of RLinf


def _lookup(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def get_env_cls(env_type: Any, env_cfg: Any = None) -> Any:  # noqa: ANN401 - RLinf's signature
        if env_type in {ENV_TYPE, rlinf.envs.SupportedEnvType(ENV_TYPE)}:
            from plugrl_bridges.rlinf.env import PlugRLEnv  # noqa: PLC0415 - only an env worker needs it

            return PlugRLEnv
        return theirs(env_type, env_cfg)

    get_env_cls.of_plugrl = True  # type: ignore[attr-defined] # a mark of ours
    return get_env_cls
