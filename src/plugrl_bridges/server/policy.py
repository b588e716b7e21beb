"""Own what counts as a policy, and the way of what it returns onto the wire. Pure; ``policy_server`` is the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from plugrl_bridges.wire.arrays import Array, Value

if TYPE_CHECKING:
    from plugrl_bridges.spaces import ActionLayout

__all__ = ["Policy", "Predicts", "as_function", "to_wire"]

Policy: TypeAlias = Callable[[Value], Array]
"""A function of a batch of observations, nested as their space is, that gives actions."""


@runtime_checkable
class Predicts(Protocol):
    """Stand for a model of Stable-Baselines3, or what looks like one."""

    def predict(self, observation: Any, *, deterministic: bool) -> tuple[Any, Any]:  # noqa: ANN401 - its own signature
        """Give the actions for a batch of observations, and the state of a recurrent policy or None."""


def as_function(policy: Policy | Predicts) -> Policy:
    """Give the function of a policy; a model's deterministic actions."""
    if isinstance(policy, Predicts):
        return lambda observation: _predicted(policy, observation)
    if not callable(policy):
        raise TypeError(f"policy must be callable or have a predict method, got {type(policy).__name__} {policy!r}")
    return policy


def _predicted(model: Predicts, observation: Value) -> Array:
    actions, state = model.predict(observation, deterministic=True)
    if state is not None:
        raise ValueError("a recurrent policy cannot be served: nobody keeps its state for it from call to call")
    return np.asarray(actions)


def to_wire(actions: object, layout: ActionLayout | None, n: int, horizon: int) -> Array:
    """Make ``[H, n, *da]`` of what a policy gave for n envs.

    Raises:
        ValueError: naming what is wrong with it.
    """
    array = np.asarray(actions)
    if layout is not None:
        if horizon == 1 and array.shape == (n, 1, *layout.shape):
            array = array[:, 0]
        return layout.to_wire(array, n, horizon)
    steps = () if horizon == 1 else (horizon,)
    if array.shape[: 1 + len(steps)] != (n, *steps) or array.dtype.kind not in "biuf":
        raise ValueError(f"an array {array.dtype}{list(array.shape)}, expected numbers {[n, *steps, '...']}")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ValueError("there is NaN in it")
    array = array[None] if horizon == 1 else np.moveaxis(array, 1, 0)
    return array[..., None] if array.ndim == 2 else array
