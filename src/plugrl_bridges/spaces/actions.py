"""How actions of a space travel: ``[H, n, *da]``, time-major [5.3]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces

from plugrl_bridges.errors import RemoteProtocolError, SpaceError

if TYPE_CHECKING:
    from plugrl_bridges.wire.arrays import Array, Value

__all__ = ["ActionLayout"]

Space: TypeAlias = "spaces.Space[Any]"


class ActionLayout:
    """The mapping between actions of one space and the wire's ``[H, n, *da]`` [5.3].

    Args:
        space: Box, Discrete, MultiDiscrete or MultiBinary.

    Raises:
        SpaceError: for any other space.
    """

    def __init__(self, space: Space) -> None:
        if not isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise SpaceError(
                f"action space {space} cannot travel: expected Box, Discrete, MultiDiscrete or MultiBinary"
            )
        self.space = space
        self.discrete = isinstance(space, spaces.Discrete)
        self.shape: tuple[int, ...] = tuple(space.shape or ())
        self.dtype = np.dtype(space.dtype)
        self.width = 1 if self.discrete or not self.shape else self.shape[-1]

    def to_wire(self, actions: Value, slots: int, horizon: int = 1) -> Array:
        """Return the ``[H, slots, *da]`` of what a trainer gave.

        Args:
            actions: ``[slots, *shape]``, or ``[slots, H, *shape]`` with a horizon above 1. For a Box they keep the
                trainer's own dtype, so the env gets what the trainer sent; the discrete kinds travel in the space's.
            slots: Number of slots.
            horizon: H.

        Raises:
            ValueError: naming the slot, for a NaN; or naming the shape, for a wrong shape or a non-integer value.
        """
        array = np.asarray(actions)
        steps = () if horizon == 1 else (horizon,)
        if array.shape != (slots, *steps, *self.shape):
            raise ValueError(f"actions have shape {array.shape}, expected {(slots, *steps, *self.shape)}")
        if array.dtype.kind not in "biuf":
            raise ValueError(f"actions have dtype {array.dtype}, expected numbers for {self.space}")
        if array.dtype.kind == "f" and np.isnan(array).any():
            slot = int(np.isnan(array).reshape(slots, -1).any(axis=1).argmax())
            raise ValueError(f"the action for slot {slot} holds NaN; it is not sent: {array[slot]}")
        if not isinstance(self.space, spaces.Box) and array.dtype != self.dtype:
            whole = _whole(array, self.dtype)
            if whole is None:
                raise ValueError(
                    f"actions {array.reshape(-1)[:4].tolist()} must be whole numbers of {self.dtype} for {self.space}"
                )
            array = whole
        array = array[None] if horizon == 1 else np.moveaxis(array, 1, 0)
        if not self.shape:
            array = array[..., None]  # clients in the wild read a[h][i][0]
        return array

    def from_wire(self, action: Array) -> Array:
        """Return a received ``[H, n, *da]`` in the space's own shape per env: ``[H, n, *shape]``.

        Raises:
            RemoteProtocolError: if it has another number of elements, or cannot be rounded to integers [5.3].
        """
        own = (*action.shape[:2], *self.shape)
        if math.prod(action.shape) != math.prod(own):
            raise RemoteProtocolError(
                f"action: shape {list(action.shape)} does not fit {self.space}: expected {list(own)}", clause="5.3"
            )
        shaped = action if action.shape == own else action.reshape(own)
        if isinstance(self.space, spaces.Box):
            return shaped if shaped.dtype.isnative else shaped.astype(shaped.dtype.newbyteorder("="))
        whole = _whole(np.rint(shaped) if shaped.dtype.kind == "f" else shaped, self.dtype)
        if whole is None:
            raise RemoteProtocolError(
                f"action: {shaped.reshape(-1)[:4].tolist()} cannot be the integers of {self.space}", clause="5.3"
            )
        return whole

    def stacked(self, horizon: int) -> Space:
        """Return the space of a whole chunk per env, for a trainer that acts in chunks."""
        if horizon == 1:
            return self.space
        if not isinstance(self.space, spaces.Box):
            raise SpaceError(f"action_horizon {horizon} needs a Box action space, got {self.space}")
        low, high = (np.broadcast_to(bound, (horizon, *self.shape)) for bound in (self.space.low, self.space.high))
        return spaces.Box(low.copy(), high.copy(), dtype=self.dtype.type)


def _whole(array: Array, dtype: np.dtype[Any]) -> Array | None:
    """Cast to an integer dtype; None if that would change a value."""
    if array.dtype == dtype:
        return array
    with np.errstate(invalid="ignore"):
        whole = array.astype(dtype)
    return whole if np.array_equal(whole, array) else None
