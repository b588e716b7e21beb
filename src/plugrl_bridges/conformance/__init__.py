"""Grade env clients and training servers of any origin, clause by clause.

``plugrl-conformance`` grades a client, ``plugrl-conformance-server`` a server; both fill a `Report`. Messages are read
by ``wire``, which golden vectors hold to the protocol; the network is driven with the websockets library's own server
and client, so that this library's transport and sessions are judged as anybody's are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugrl_bridges.conformance.client_checker import check_client
    from plugrl_bridges.conformance.client_options import ClientCheckOptions
    from plugrl_bridges.conformance.report import Report

__all__ = ["ClientCheckOptions", "Report", "check_client"]

_HOMES = {"ClientCheckOptions": "client_options", "Report": "report", "check_client": "client_checker"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
