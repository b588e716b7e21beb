"""The probe environment [8.1]: every answer of it can be predicted, so a checker sees what a client did.

Registered as ``PlugRL/Probe-v0`` by ``registration``. ``conformance`` knows it; it knows nothing of messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["ProbeEnv", "probe_length"]


def probe_length(env_index: int) -> int:
    """Return the length of every episode of env ``env_index``, in steps."""
    return 3 + 2 * (env_index % 3)


class ProbeEnv(gymnasium.Env["dict[str, Any]", "Array"]):
    """Count the steps, repeat the last action, pay 1 per step, and terminate on time; never truncate.

    The observation has ``t`` (float64 ``[1]``, steps taken in the episode) and ``a`` (float64 ``[action_dim]``, the
    last action; zeros after a reset).

    Args:
        env_index: Which env of its connection this is: it decides when the episode ends. The client passes it.
        action_dim: Width of the action.

    Raises:
        ValueError: if one of them is out of range.
    """

    def __init__(self, *, env_index: int = 0, action_dim: int = 7) -> None:
        if env_index < 0:
            raise ValueError(f"env_index must be 0 or more, got {env_index}")
        if action_dim < 1:
            raise ValueError(f"action_dim must be 1 or more, got {action_dim}")
        self.observation_space = gymnasium.spaces.Dict(
            {
                "t": gymnasium.spaces.Box(0.0, np.inf, (1,), np.float64),
                "a": gymnasium.spaces.Box(-np.inf, np.inf, (action_dim,), np.float64),
            }
        )
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (action_dim,), np.float32)
        self._length = probe_length(env_index)
        self._t = 0
        self._a = np.zeros(action_dim)

    def _observation(self) -> dict[str, Any]:
        return {"t": np.array([self._t], np.float64), "a": self._a.copy()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode at t = 0, the last action forgotten."""
        super().reset(seed=seed, options=options)
        self._t = 0
        self._a = np.zeros_like(self._a)
        return self._observation(), {}

    def step(self, action: Array) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Run one step."""
        self._t += 1
        self._a = np.asarray(action, np.float64)
        return self._observation(), 1.0, self._t == self._length, False, {}
