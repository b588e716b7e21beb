"""The mapping between Gymnasium spaces and what travels.

``observations`` and ``actions`` say how values of a space travel; ``env_spec`` how a space itself does. Both ends
derive the mapping from the space alone, so it never needs to be negotiated. Nothing in here knows of sessions, slots
or trainers; ``client`` and ``server.lockstep`` are the callers.
"""

from plugrl_bridges.spaces.actions import ActionLayout
from plugrl_bridges.spaces.env_spec import infer_observation_space, space_from_wire, space_to_wire
from plugrl_bridges.spaces.observations import Channel, Leaf, ObservationLayout

__all__ = [
    "ActionLayout",
    "Channel",
    "Leaf",
    "ObservationLayout",
    "infer_observation_space",
    "space_from_wire",
    "space_to_wire",
]
