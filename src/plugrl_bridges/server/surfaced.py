"""Own which part of a client's observations is surfaced, by ``image_key`` and ``state_key``, and the layout of it.

Pure. ``server.roster`` asks for it with the first client of a run, ``server.policy_server`` with each client.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from gymnasium import spaces

from plugrl_bridges.errors import SpaceError
from plugrl_bridges.spaces import ObservationLayout, infer_observation_space

if TYPE_CHECKING:
    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.wire.messages import Observation

__all__ = ["surfaced_layout", "surfaced_space"]

Space: TypeAlias = "spaces.Space[Any]"


def surfaced_layout(options: BridgeOptions, announced: Space | None, observation: Observation) -> ObservationLayout:
    """Make the layout of what is surfaced.

    Args:
        options: Its space goes before what is announced, and that before what can be inferred.
        announced: The observation space that a client announces, or None.
        observation: Its first observation, for what can be inferred.

    Raises:
        SpaceError: if a key is not there, the observations are empty, or a space cannot travel.
    """
    if options.observation_space is not None:
        space = options.observation_space
    elif announced is not None:
        space = surfaced_space(options, announced)
    else:
        space = infer_observation_space(observation, image_key=options.image_key, state_key=options.state_key)
    return _named(options, ObservationLayout(space))


def surfaced_space(options: BridgeOptions, space: Space) -> Space:
    """Give the part of an announced space that the keys ask for.

    Raises:
        SpaceError: naming the keys that the space lacks.
    """
    keys = _keys(options)
    if not keys or not isinstance(space, spaces.Dict):
        return space
    missing = [key for key in keys if key not in space.spaces]
    if missing:
        raise SpaceError(f"it announces no entry {missing}: it has {list(space.spaces)}")
    return space[keys[0]] if len(keys) == 1 else spaces.Dict({key: space[key] for key in keys})


def _keys(options: BridgeOptions) -> list[str]:
    """Entries to surface; none means all."""
    return [key for key in (options.image_key, options.state_key) if key is not None]


def _named(options: BridgeOptions, layout: ObservationLayout) -> ObservationLayout:
    """Have the one entry that is surfaced found under its own name, for the space no longer says it."""
    keys = _keys(options)
    if len(keys) == 1:
        [key] = keys
        if not (isinstance(layout.space, spaces.Dict) and key in layout.space.spaces):
            layout.leaves = tuple(
                replace(leaf, name=f"{key}/{leaf.name}" if leaf.path else key) for leaf in layout.leaves
            )
    return layout
