"""Own what a client says of its envs with feature ``env-spec``: parsing it, and holding it against what is in use.

Pure. ``server.roster`` asks for it when a client arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from plugrl_bridges.errors import RemoteProtocolError, SpaceError
from plugrl_bridges.spaces import ObservationLayout, space_from_wire
from plugrl_bridges.wire.session import LATE_RESET, SEEDED_RESET

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from plugrl_bridges.wire.codec import Value

__all__ = ["Announced"]

Space: TypeAlias = "spaces.Space[Any]"
_MOST_ENVS = 1 << 20  # what a client says decides the number of slots, and with it memory


@dataclass(frozen=True)
class Announced:
    """Hold a client's ``env_spec``; everything may be unknown.

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
    """Tell whether two spaces differ in bounds and dtype at most."""
    if isinstance(own, spaces.Discrete) or isinstance(used, spaces.Discrete):
        return isinstance(own, spaces.Discrete) and isinstance(used, spaces.Discrete) and bool(own.n == used.n)
    left, right = ObservationLayout(own).leaves, ObservationLayout(used).leaves
    return len(left) == len(right) and all(
        a.path == b.path and int(np.prod(a.shape)) == int(np.prod(b.shape)) for a, b in zip(left, right, strict=True)
    )
