"""Own the entries of this package in Gymnasium's registry: ``gym.make("plugrl_bridges:PlugRL/Probe-v0")``.

Gymnasium imports ``plugrl_bridges`` when it sees such an id, and expects it registered then. Importing Gymnasium for
that would make ``import plugrl_bridges`` fifteen times slower, for programs that never use it too. So: at once if
Gymnasium is there already, and otherwise as soon as somebody imports it. ``plugrl_bridges`` itself is the caller.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["ENVS", "register_when_gymnasium_is_there"]

_GYMNASIUM = "gymnasium"
ENVS = {
    "PlugRL/Probe-v0": {"entry_point": "plugrl_bridges.probe_env:ProbeEnv"},
    "PlugRL/Remote-v0": {
        "entry_point": "plugrl_bridges.gym:RemoteEnv",
        "vector_entry_point": "plugrl_bridges.gym:PlugRLVectorEnv",
    },
}
"""Ids and entry points, as text: nothing is imported before an env is made."""


def register_when_gymnasium_is_there() -> None:
    """Register the envs now, or right after Gymnasium's first import. Idempotent."""
    if _GYMNASIUM in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    # By name, since type checkers would follow it into a package that this module must not need.
    registration = importlib.import_module("gymnasium.envs.registration")
    for env_id, entry_points in ENVS.items():
        if env_id not in registration.registry:
            # Gymnasium's own checks would warn of the probe's action space without bounds, which is meant.
            registration.register(id=env_id, disable_env_checker=True, **entry_points)


# Not derived from the classes of importlib.abc: importing those takes longer than everything else here.
class _Watch:
    """See Gymnasium being imported; find nothing else, and leave the finding to the others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _GYMNASIUM:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Loader", _Registering(spec.loader, self))
                return spec
        return None


class _Registering:
    """Load Gymnasium with its own loader, put that back in its place, and register."""

    def __init__(self, loader: Any, watch: _Watch) -> None:  # noqa: ANN401 - a Loader; see above
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever that loader has
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self._watch in sys.meta_path:  # not before: who only asks whether Gymnasium is there does not import it
            sys.meta_path.remove(self._watch)
        self._loader.exec_module(module)
        _register()
