"""The way from a saved model of Stable-Baselines3 to a policy that ``server.policy_server`` can serve.

Needs Stable-Baselines3. Loading a model runs what its author put into the file, as it does everywhere: only what tells
the algorithm is read without that.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import stable_baselines3
from gymnasium import spaces

if TYPE_CHECKING:
    import os

    from stable_baselines3.common.base_class import BaseAlgorithm

    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["ALGORITHMS", "ModelPolicy", "guess_algorithm", "load_model"]

Space: TypeAlias = "spaces.Space[Any]"

ALGORITHMS = ("a2c", "ddpg", "dqn", "ppo", "sac", "td3")
"""Algorithms whose models can be loaded, by their names in lower case."""

_HALLMARKS = (
    # a setting that only this algorithm has (what DDPG saves are settings of TD3, which acts alike)
    ("exploration_fraction", "dqn"),
    ("target_entropy", "sac"),
    ("target_policy_noise", "td3"),
    ("clip_range", "ppo"),
    ("gae_lambda", "a2c"),
)
_OTHERS = "sb3_contrib."


def guess_algorithm(path: str | os.PathLike[str]) -> str:
    """Return the algorithm that a model was saved by, from the names of its settings; nothing of the file is run.

    Args:
        path: The zip file that ``model.save`` wrote.

    Raises:
        ValueError: if it is no such file, or one of an algorithm that is not known here.
        OSError: if it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            settings = json.loads(archive.read("data"))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError) as exc:
        raise ValueError(f"{path} is not a model that Stable-Baselines3 saved: {exc}") from exc
    policy_class = settings.get("policy_class") if isinstance(settings, dict) else None
    if isinstance(policy_class, dict) and not str(policy_class.get("__module__")).startswith(_OTHERS):
        for setting, algorithm in _HALLMARKS:
            if setting in settings:
                return algorithm
    raise ValueError(f"{path} is a model of an algorithm that is not known here: name it, one of {list(ALGORITHMS)}")


def load_model(path: str | os.PathLike[str], *, algorithm: str | None = None, device: str = "auto") -> BaseAlgorithm:
    """Load a saved model, without an environment. Only load files that you trust: they can run code.

    Args:
        path: The zip file that ``model.save`` wrote.
        algorithm: One of `ALGORITHMS`; None guesses.
        device: Where torch computes.

    Raises:
        ValueError: if the algorithm is not known, or the file holds no model of it.
        OSError: if it cannot be read.
    """
    name = guess_algorithm(path) if algorithm is None else algorithm.lower()
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {list(ALGORITHMS)}, got {algorithm!r}")
    kind: type[BaseAlgorithm] = getattr(stable_baselines3, name.upper())
    try:
        return kind.load(Path(path), device=device)
    except OSError:
        raise
    except Exception as exc:  # a pickle that is damaged can raise anything
        raise ValueError(f"{path} cannot be loaded as a model of {name.upper()}: {exc!r}") from exc


class ModelPolicy:
    """Policy of a model of Stable-Baselines3; give it to a ``PolicyServer``, with `accepts` and `action_space`.

    Args:
        model: A trained model.
        deterministic: Whether to take the likeliest action instead of a random one.
        action_horizon: Actions per env in one exchange: with more than one, the model must have been trained with it.

    Raises:
        ValueError: if the model's actions are not chunks of so many.
    """

    def __init__(self, model: BaseAlgorithm, *, deterministic: bool = True, action_horizon: int = 1) -> None:
        self._model = model
        self._deterministic = deterministic
        self.action_space: Space = _one_of_a_chunk(model.action_space, action_horizon)

    def __call__(self, observation: Value) -> Array:
        """Return the actions for a batch of observations.

        Raises:
            ValueError: if the policy is recurrent.
        """
        actions, state = self._model.predict(observation, deterministic=self._deterministic)
        if state is not None:
            raise ValueError("a recurrent policy cannot be served: nobody keeps its state for it from call to call")
        return np.asarray(actions)

    def accepts(self, space: Space) -> bool:
        """Return whether the model takes observations of a space: the same entries of the same shapes.

        Frames may have their channels last where the model has them first, as Stable-Baselines3 puts them.
        """
        return _fits(space, self._model.observation_space)


def _one_of_a_chunk(space: Space, horizon: int) -> Space:
    if horizon == 1:
        return space
    if not isinstance(space, spaces.Box) or len(space.shape) < 1 or space.shape[0] != horizon:
        raise ValueError(f"the model's actions are {space}, no chunks of {horizon}: serve it with the horizon it has")
    return spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)


def _fits(space: Space, own: Space) -> bool:
    if isinstance(own, spaces.Dict):
        return (
            isinstance(space, spaces.Dict)
            and own.spaces.keys() <= space.spaces.keys()
            and all(_fits(space.spaces[key], inner) for key, inner in own.spaces.items())
        )
    if isinstance(space, (spaces.Dict, spaces.Tuple)) or space.shape is None or own.shape is None:
        return False
    shapes = [space.shape]
    if len(space.shape) == 3 and space.dtype == np.uint8:
        height, width, channels = space.shape
        shapes.append((channels, height, width))
    return own.shape in shapes
