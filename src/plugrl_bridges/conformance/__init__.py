"""Grade env clients and training servers of any origin, clause by clause.

``plugrl-conformance`` grades a client, ``plugrl-conformance-server`` a server; both fill a `Report`. They know the
codec of ``wire``, for digests also ``spaces`` and ``ledger``, and drive the network with the websockets library's own
server and client, so that they judge this library's transport and sessions as they judge anybody's.
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
