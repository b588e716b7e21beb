"""The pool: an array is given out again only when nobody holds it."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from plugrl_bridges.server.pool import ArrayPool
from plugrl_bridges.spaces import ObservationLayout

LARGE = gym.spaces.Box(0, 255, (200, 200, 3), np.uint8)
SMALL = gym.spaces.Box(0, 1, (3,), np.float32)
pooled = pytest.mark.skipif(
    sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="only a reference count tells whether an array is free",
)


def pool_of(space: gym.spaces.Space[Any], rows: int = 2) -> ArrayPool:
    return ArrayPool(ObservationLayout(space).leaves, rows)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


HOLDS: dict[str, Any] = {
    "the array": lambda array: array,
    "a view of a row": lambda array: array[0],
    "a view of a view": lambda array: array[0][..., 1:],
    "a transposed view": lambda array: array.transpose(0, 3, 1, 2),
    "a reshaped view": lambda array: array.reshape(-1),
    "a memoryview": memoryview,
    "a dict": lambda array: {"obs": array},
    "a closure": lambda array: lambda: array,
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_a_held_array_is_not_given_out_again(hold: Any) -> None:
    pool = pool_of(LARGE)
    [array] = pool.take()
    where = address(array)
    held = hold(array)
    del array
    for _ in range(8):
        [other] = pool.take()
        assert address(other) != where
        del other
    assert held is not None


@pooled
def test_a_free_array_is_given_out_again() -> None:
    pool = pool_of(LARGE)
    [array] = pool.take()
    where = address(array)
    del array
    [again] = pool.take()
    assert address(again) == where


def test_small_arrays_are_always_fresh() -> None:
    pool = pool_of(SMALL)
    [first], [second] = pool.take(), pool.take()
    assert address(first) != address(second)


def test_a_trainer_that_keeps_everything_gets_fresh_arrays() -> None:
    pool = pool_of(LARGE)
    kept = [pool.take()[0] for _ in range(12)]
    assert len({address(array) for array in kept}) == 12


def test_every_leaf_has_its_own_arrays_of_its_shape_and_dtype() -> None:
    pool = pool_of(gym.spaces.Dict({"camera": LARGE, "state": SMALL}), rows=3)
    camera, state = pool.take()
    assert (camera.shape, camera.dtype) == ((3, 200, 200, 3), np.dtype(np.uint8))
    assert (state.shape, state.dtype) == ((3, 3), np.dtype(np.float32))
    assert camera.flags.writeable
    assert state.flags.writeable
