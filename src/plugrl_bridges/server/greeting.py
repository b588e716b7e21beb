"""Own what a server of this library says of itself in the metadata [5.1]. ``lockstep`` and ``policy_server`` ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugrl_bridges import __version__
from plugrl_bridges.spaces import ActionLayout
from plugrl_bridges.wire.messages import PROTOCOL_VERSION, Metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.server.options import BridgeOptions

__all__ = ["greeting"]


def greeting(options: BridgeOptions, features: Sequence[str]) -> Metadata:
    """Make the metadata: what is not known yet is left out.

    Args:
        options: Say the horizon, and the width of an action if they have its space.
        features: Names of the optional features that are offered [10].

    Raises:
        SpaceError: for an action space that cannot travel.
    """
    data: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "server": "plugrl-bridges",
        "server_version": __version__,
        "action_horizon": options.action_horizon,
        "features": list(features),
    }
    if options.action_space is not None:
        data["action_dim"] = ActionLayout(options.action_space).width
    return Metadata(data)
