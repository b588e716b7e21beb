"""Grade env clients and training servers of any origin, clause by clause.

``plugrl-conformance`` grades a client, ``plugrl-conformance-server`` a server; both fill a `Report`. They know the
codec of ``wire``, for digests also ``spaces`` and ``ledger``, and drive the network with the websockets library's own
server and client, so that they judge this library's transport and sessions as they judge anybody's.
"""

from __future__ import annotations

from plugrl_bridges.conformance.report import Report

__all__ = ["Report"]
