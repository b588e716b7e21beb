"""How weights are held to be the same."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stable_baselines3.common.base_class import BaseAlgorithm

__all__ = ["digest", "one_thread"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sum in one order: torch splits sums over its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def digest(model: BaseAlgorithm) -> str:
    """Return the SHA-256 of all parameters, with their names."""
    sha = hashlib.sha256()
    for group, state in model.get_parameters().items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                sha.update(f"{group}.{key}".encode())
                sha.update(value.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()
