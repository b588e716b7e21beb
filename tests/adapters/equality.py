"""Deep equality of what vector envs return: values, dtypes, and the kind of container."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def assert_same(mine: Any, local: Any, where: str = "") -> None:
    """Hold what came from afar to what came from here.

    Raises:
        AssertionError: saying where they differ.
    """
    if isinstance(local, Mapping):
        assert isinstance(mine, Mapping), where
        assert set(mine) == set(local), f"{where}: {sorted(mine)} is not {sorted(local)}"
        for key in local:
            assert_same(mine[key], local[key], f"{where}[{key!r}]")
    elif isinstance(local, tuple):
        assert isinstance(mine, tuple), where
        assert len(mine) == len(local), where
        for at, (one, other) in enumerate(zip(mine, local, strict=True)):
            assert_same(one, other, f"{where}[{at}]")
    elif isinstance(local, np.ndarray) and local.dtype == object:
        assert isinstance(mine, np.ndarray), where
        assert mine.dtype == object, f"{where}: {mine.dtype} is not object"
        assert mine.shape == local.shape, where
        for at, (one, other) in enumerate(zip(mine, local, strict=True)):
            assert_same(one, other, f"{where}[{at}]")
    elif isinstance(local, (np.ndarray, np.generic)):
        array = np.asarray(mine)
        assert array.dtype == local.dtype, f"{where}: {array.dtype} is not {local.dtype}"
        assert array.shape == local.shape, f"{where}: {array.shape} is not {local.shape}"
        assert array.tobytes() == local.tobytes(), f"{where}: {mine!s:.200} is not {local!s:.200}"
    else:
        assert type(mine) is type(local), f"{where}: {type(mine)} is not {type(local)}"
        assert mine == local, f"{where}: {mine!s:.200} is not {local!s:.200}"
