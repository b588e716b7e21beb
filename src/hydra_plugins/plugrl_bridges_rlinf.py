"""Let Hydra find the configs of ``plugrl_bridges.rlinf``, and let RLinf's own scripts know our environment.

Hydra imports every module of the namespace package ``hydra_plugins`` in every one of its programs, so this one does
next to nothing unless the program is RLinf's.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.plugins.search_path_plugin import SearchPathPlugin

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath

__all__ = ["PlugRLSearchPath"]


class PlugRLSearchPath(SearchPathPlugin):  # type: ignore[misc] # Hydra is not installed where types are checked
    """Add the folder of our configs behind those that the program has."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add it, and where RLinf is imported, register our environment: its driver checks the config with it."""
        package = find_spec("plugrl_bridges")
        if package is None or package.origin is None:
            return
        search_path.append("plugrl_bridges", f"file://{Path(package.origin).parent / 'rlinf' / 'config'}")
        if "rlinf" in sys.modules:
            try:
                from plugrl_bridges.rlinf import register  # noqa: PLC0415 - only for programs of RLinf
            except ImportError as exc:  # another release: programs that do not use our environment are left alone
                warnings.warn(f"env_type plugrl is not known in here: {exc}", stacklevel=2)
            else:
                register()
