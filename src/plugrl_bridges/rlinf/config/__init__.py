"""Hydra's configs for RLinf, searched as ``pkg://plugrl_bridges.rlinf.config``.

Hydra imports this package in a program that searches it. If that is a program of RLinf, its driver then knows our
environment, as RLinf's ``validate_cfg`` demands.
"""

from __future__ import annotations

import sys

from plugrl_bridges.rlinf import register

__all__: list[str] = []

if "rlinf" in sys.modules:
    register()
