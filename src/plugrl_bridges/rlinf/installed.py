"""The releases of RLinf this adapter was tested with, and what is said without one. Imports nothing heavy."""

from __future__ import annotations

import os
import warnings
from importlib import metadata

__all__ = ["ANYWAY", "TESTED_VERSIONS", "check_installed"]

TESTED_VERSIONS = ("0.3.0",)
"""Releases of RLinf that the tests run with."""
ANYWAY = "PLUGRL_RLINF_ANY_VERSION"
"""Environment variable that, set to 1, lets another release pass with a warning."""


def check_installed() -> None:
    """Refuse to go on without a release of RLinf that was tested.

    RLinf has no registry of environments, so this adapter holds on to details that any release may change.

    Raises:
        ImportError: without RLinf, saying what to install; with another release, naming those tested.
    """
    tested = ", ".join(TESTED_VERSIONS)
    try:
        version = metadata.version("rlinf")
    except metadata.PackageNotFoundError as exc:
        raise ImportError(
            "plugrl_bridges.rlinf needs RLinf: pip install torch==2.13.0, and then pip install 'plugrl-bridges[rlinf]' "
            f"(RLinf {tested}; docs/rlinf.md says more)"
        ) from exc
    if version in TESTED_VERSIONS:
        return
    text = f"plugrl_bridges.rlinf was tested with RLinf {tested}, found {version}"
    if os.environ.get(ANYWAY) != "1":
        raise ImportError(
            f"{text}: pip install 'rlinf=={TESTED_VERSIONS[-1]}', or set {ANYWAY}=1 to try it all the same"
        )
    warnings.warn(text, stacklevel=3)
