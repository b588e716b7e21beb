"""What each side says of itself first: a server's metadata, a client's ``env_spec``, and what is surfaced of it.

Pure. ``server.roster`` and ``server.policy_server`` ask for it when a client arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from plugrl_bridges import __version__
from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.spaces import ActionLayout, ObservationLayout, infer_observation_space, space_from_wire
from plugrl_bridges.wire.messages import PROTOCOL_VERSION, Metadata
from plugrl_bridges.wire.session import LATE_RESET, SEEDED_RESET

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.wire.codec import Array, Value
    from plugrl_bridges.wire.messages import Infer, Observation

__all__ = ["Announced", "first_observations", "greeting", "surfaced_layout"]

Space: TypeAlias = "spaces.Space[Any]"
_MOST_ENVS = 1 << 20  # what a client says decides the number of slots, and with it memory


@dataclass(frozen=True)
class Announced:
    """A client's ``env_spec``; everything may be unknown.

    Attributes:
        observation_space: One env's space.
        action_space: One env's space.
        env_id: Gymnasium id of the envs.
        render_mode: As ``gymnasium.make`` was told.
        max_episode_steps: Time limit of an episode, in env steps.
        rank: Place of this client among the clients of a run.
        group_num_envs: Envs of all processes of its client command.
        features: Optional features that the client understands.
        unreset: Whether its envs were never reset: it waits for the trainer's reset to be the first.
        client: Name and version of the client.
    """

    observation_space: Space | None = None
    action_space: Space | None = None
    env_id: str | None = None
    render_mode: str | None = None
    max_episode_steps: int | None = None
    rank: int | None = None
    group_num_envs: int | None = None
    features: frozenset[str] = frozenset()
    unreset: bool = False
    client: str = "a client that announces nothing"

    @property
    def spec(self) -> EnvSpec | None:
        """Gymnasium's spec of the envs, as far as it is known; None without an env id."""
        if self.env_id is None:
            return None
        try:
            return EnvSpec(self.env_id, max_episode_steps=self.max_episode_steps)
        except gymnasium.error.Error:
            return None

    @staticmethod
    def from_wire(spec: Mapping[str, Value] | None, offered: Collection[str] = ()) -> Announced:
        """Parse the map of an infer's ``env_spec``; None gives an `Announced` that knows nothing.

        Args:
            spec: The map.
            offered: Optional features that this server lists.

        Raises:
            RemoteProtocolError: naming the key that is not as the feature says [env-spec].
        """
        if spec is None:
            return Announced()
        features = spec.get("features") or []
        if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
            raise RemoteProtocolError("env_spec: features must be a list of str", clause="env-spec")
        observation, action = spec.get("observation_space"), spec.get("action_space")
        name, version = _typed(spec, "client", str), _typed(spec, "client_version", str)
        return Announced(
            observation_space=None if observation is None else space_from_wire(observation),
            action_space=None if action is None else space_from_wire(action),
            env_id=_typed(spec, "env_id", str),
            render_mode=_typed(spec, "render_mode", str),
            max_episode_steps=_typed(spec, "max_episode_steps", int),
            rank=_bounded(spec, "rank", 0),
            group_num_envs=_bounded(spec, "group_num_envs", 1),
            features=frozenset(features),
            unreset=_unreset(spec, features, offered),
            client=" ".join(filter(None, (name, version))) or Announced.client,
        )

    def surfaced(self, options: BridgeOptions) -> Announced:
        """Return the same with only what the options surface of its observation space.

        Raises:
            SpaceError: naming the keys that the space lacks.
        """
        if self.observation_space is None:
            return self
        return replace(self, observation_space=_surfaced_space(options, self.observation_space))

    def check_against(self, observation_space: Space, action_space: Space | None, warn: Callable[[str], None]) -> None:
        """Refuse a client whose spaces cannot be those in use; say what differs without harm.

        Args:
            observation_space: In use.
            action_space: In use; None takes any.
            warn: Takes the text of a difference in bounds or dtype.

        Raises:
            SpaceError: if a kind, an entry or a shape differs.
        """
        pairs = (
            ("observation", self.observation_space, observation_space),
            ("action", self.action_space, action_space),
        )
        for name, own, used in pairs:
            if own is None or used is None or own == used:
                continue
            if not _same_build(own, used):
                raise SpaceError(f"its {name} space is {own}, in use is {used}")
            warn(f"a client announces the {name} space {own}; {used} is used")


def _typed(spec: Mapping[str, Value], key: str, kind: type) -> Any:  # noqa: ANN401 - the kind says
    value = spec.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise RemoteProtocolError(
            f"env_spec: {key} must be {kind.__name__}, got {type(value).__name__}", clause="env-spec"
        )
    return value


def _unreset(spec: Mapping[str, Value], features: list[str], offered: Collection[str]) -> bool:
    unreset = spec.get("unreset", False)
    if not isinstance(unreset, bool):
        raise RemoteProtocolError(
            f"env_spec: unreset must be a bool, got {type(unreset).__name__}", clause="late-reset"
        )
    if unreset and LATE_RESET not in offered:
        raise RemoteProtocolError("env_spec: unreset, but the metadata does not list late-reset", clause="late-reset")
    if unreset and SEEDED_RESET not in features:
        raise RemoteProtocolError(
            "env_spec: unreset needs seeded-reset among the features, or nobody could reset it", clause="late-reset"
        )
    return unreset


def _bounded(spec: Mapping[str, Value], key: str, least: int) -> int | None:
    value: int | None = _typed(spec, key, int)
    if value is not None and not least <= value <= _MOST_ENVS:
        raise RemoteProtocolError(
            f"env_spec: {key} must be from {least} to {_MOST_ENVS}, got {value}", clause="env-spec"
        )
    return value


def _same_build(own: Space, used: Space) -> bool:
    """Return whether two spaces differ in bounds and dtype at most."""
    if isinstance(own, spaces.Discrete) or isinstance(used, spaces.Discrete):
        return isinstance(own, spaces.Discrete) and isinstance(used, spaces.Discrete) and bool(own.n == used.n)
    left, right = ObservationLayout(own).leaves, ObservationLayout(used).leaves
    return len(left) == len(right) and all(
        a.path == b.path and int(np.prod(a.shape)) == int(np.prod(b.shape)) for a, b in zip(left, right, strict=True)
    )


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
        space = _surfaced_space(options, announced)
    else:
        space = infer_observation_space(observation, image_key=options.image_key, state_key=options.state_key)
    return _named(options, ObservationLayout(space))


def first_observations(
    options: BridgeOptions, announced: Announced, layout: ObservationLayout, infer: Infer
) -> list[Array]:
    """Return the observations of a connection's first infer: one fresh array ``[n, *shape]`` per leaf.

    Raises:
        RemoteProtocolError: if they do not fit the layout [5.2].
        SpaceError: likewise, where the layout is that of a space that the user passed and no client announced: that
            is wrong as likely as the client is, and a resync would only be repeated for ever.
    """
    n = len(infer.env_indices)
    arrays = layout.allocate(n)
    try:
        layout.read(infer.observation, arrays, slice(0, n))
    except RemoteProtocolError as exc:
        if options.observation_space is None or announced.observation_space is not None:
            raise
        raise SpaceError(f"its observations are not of the observation_space that was given: {exc}") from exc
    return arrays


def _surfaced_space(options: BridgeOptions, space: Space) -> Space:
    """Return the part of an announced space that the keys ask for."""
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
