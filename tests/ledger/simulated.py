"""A vector env that behaves as the bridge does when clients come and go, without processes; and one fault to order.

Each row's env stands in a `LedgerEnv`, whose file a killed client leaves without its end. What the trainer is told
follows the bridge: a lost client's row ends with ``client_lost``, in whichever autoreset mode, unless it is the trainer
who resets then; a client that comes back goes on with its episode; whoever begins an episode whose first observation
the trainer has not seen is not reset again for it, unless it is given a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from plugrl_bridges.gym import AutoresetMode
from plugrl_bridges.ledger import LedgerEnv

if TYPE_CHECKING:
    import random
    from pathlib import Path

__all__ = ["FAULTS", "Fault", "SimulatedBridge"]

NUM_ENVS = 3
FAULTS = ("obs", "reward", "action", "spurious end", "wrong end", "skipped step")


class ShortEnv(gym.Env[Any, Any]):
    """Have episodes of 1 to 6 steps, and observations that occur once only, or that are one of three.

    Args:
        number: Tells it from all others.
        discrete: Whether there are only three observations, two actions and one reward.
    """

    def __init__(self, number: int, *, discrete: bool) -> None:
        self._rng = np.random.default_rng(number)
        self._discrete = discrete
        self._seen = 1000.0 * number
        self._left = 0
        self.observation_space: Any = spaces.Discrete(3) if discrete else spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space: Any = spaces.Discrete(2) if discrete else spaces.Box(-1, 1, (2,), np.float32)

    def _observe(self) -> Any:
        self._seen += 1
        return int(self._rng.integers(3)) if self._discrete else np.array([self._seen, 0.5], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._left = int(self._rng.integers(1, 7))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002 - Gymnasium's
        self._left -= 1
        terminated = bool(self._rng.integers(2))
        reward = 1.0 if self._discrete else self._seen / 3
        return self._observe(), reward, self._left == 0 and terminated, self._left == 0 and not terminated, {}


@dataclass
class Fault:
    """Order a fault, of a row's first step from a vector step on that can have it; ``at`` says which it became."""

    kind: str
    row: int
    since: int
    at: int | None = None


@dataclass
class _Loss:
    """Say how a client was lost: with or without having made its step, and for ever or not."""

    reached: bool
    forever: bool
    killed: bool


class SimulatedBridge(gym.vector.VectorEnv[Any, Any, Any]):
    """Stand for the bridge and its clients.

    Args:
        folder: Of the envs' ledgers.
        mode: How episodes begin anew.
        discrete: As of `ShortEnv`.
        one_client: Whether all rows are of one client, and are lost together.
        rng: Decides what is left to chance.
        fault: To make, or None.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: AutoresetMode,
        discrete: bool,
        one_client: bool,
        rng: random.Random,
        fault: Fault | None = None,
    ) -> None:
        self.num_envs = NUM_ENVS
        self.metadata = {"autoreset_mode": mode}
        self.clients = [list(range(NUM_ENVS))] if one_client else [[row] for row in range(NUM_ENVS)]
        self.waiting = np.zeros(NUM_ENVS, np.bool_)
        self._folder, self._mode, self._discrete, self._rng, self.fault = folder, mode, discrete, rng, fault
        folder.mkdir(parents=True)
        self._made = self._steps = 0
        self._envs: dict[int, LedgerEnv] = {}
        self._shown: dict[int, Any] = {}  # to the trainer
        self._stands: dict[int, Any] = {}  # what the env gave last
        self._rewards = dict.fromkeys(range(NUM_ENVS), 1.0)
        self._losses: dict[int, _Loss] = {}
        self._returned: set[int] = set()  # rows whose client came back, and has not begun an episode since
        for client in self.clients:
            self._start(client)
        env = self._envs[0]
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, NUM_ENVS)
        self.action_space = batch_space(env.action_space, NUM_ENVS)

    def _start(self, client: list[int]) -> None:
        self._made += 1
        for row in client:
            env = ShortEnv(10 * self._made + row, discrete=self._discrete)
            self._envs[row] = LedgerEnv(env, self._folder / f"{self._made:03}.ledger", env_index=row)
        for row in client:
            self._stands[row] = self._envs[row].reset()[0]

    def lose(self, client: list[int], *, forever: bool) -> None:
        """Lose a client before the next step, or in it; another one takes its place, or it comes back."""
        killed = self._rng.random() < 0.7
        for row in client:
            before = self._losses.get(row)
            if before is not None:
                forever = forever or before.forever
            reached = not self.waiting[row] and self._rng.random() < 0.5
            self._losses[row] = _Loss(reached, forever, killed)

    def _settle(self, actions: Any = None) -> set[int]:
        """Have the clients that were lost do what they still did, and come back; give their rows."""
        lost = set(self._losses)
        for client in self.clients:
            if client[0] not in lost:
                continue
            for row in client:
                if self._losses[row].reached and actions is not None:
                    self._advance(row, actions[row])
            loss = self._losses[client[0]]
            self._returned.update(client)
            if loss.forever:
                self._returned.difference_update(client)
                self._stop(client, killed=loss.killed)
                self._start(client)
        self._losses.clear()
        return lost

    def _stop(self, client: list[int], *, killed: bool) -> None:
        if not killed:
            for row in client:
                self._envs[row].close()
            return
        writer = self._envs[client[0]]._writer
        assert writer is not None
        writer._waiting.clear()
        writer.close(whole=False)

    def _advance(self, row: int, action: Any) -> tuple[Any, float, bool, bool]:
        """Step an env; as every client does, it begins the next episode at once."""
        observation, reward, terminated, truncated, _ = self._envs[row].step(action)
        self._stands[row] = observation
        if terminated or truncated:
            self._stands[row] = self._envs[row].reset()[0]
            self._returned.discard(row)
        return observation, float(reward), terminated, truncated

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = None if options is None else options.get("reset_mask")
        rows = list(range(NUM_ENVS)) if mask is None else np.flatnonzero(mask).tolist()
        lost = self._settle() if set(self._losses) <= set(rows) else set()
        for row in rows:
            if row in lost | self._returned or not self.waiting[row] or seed is not None:
                self._stands[row] = self._envs[row].reset(seed=seed)[0]
            self.waiting[row] = False
            self._shown[row] = self._stands[row]
            self._returned.discard(row)
        return self._batch(), {}

    def _batch(self) -> Any:
        return np.stack([np.asarray(self._shown[row]) for row in range(NUM_ENVS)])

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._steps += 1
        rewards, terminated, truncated = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, bool), np.zeros(NUM_ENVS, bool)
        finals = np.full(NUM_ENVS, None, object)
        waited = self.waiting.copy()
        lost = self._settle(actions)
        for row in range(NUM_ENVS):
            if waited[row]:
                self.waiting[row] = False
                self._shown[row] = self._stands[row]
                continue
            if row in lost:
                final, truncated[row] = self._shown[row], True
            else:
                final, rewards[row], terminated[row], truncated[row] = self._faulty(row, actions[row])
            self._shown[row] = final
            if not (terminated[row] or truncated[row]):
                continue
            if self._mode is AutoresetMode.SAME_STEP:
                finals[row], self._shown[row] = final, self._stands[row]
            else:
                self.waiting[row] = True
        infos: dict[str, Any] = {"final_obs": finals} if self._mode is AutoresetMode.SAME_STEP else {}
        infos["client_lost"] = np.isin(np.arange(NUM_ENVS), list(lost))
        return self._batch(), rewards, terminated, truncated, infos

    def _faulty(self, row: int, action: Any) -> tuple[Any, float, bool, bool]:
        fault = self.fault
        due = fault is not None and fault.at is None and fault.row == row and self._steps >= fault.since
        if fault is None or not due:
            result = self._advance(row, action)
            self._rewards[row] = result[1]
            return result
        if fault.kind == "skipped step":
            fault.at = self._steps
            return self._stands[row], self._rewards[row], False, False
        if fault.kind == "action":
            action = 1 - action if self._discrete else action * np.float32(0.5)
            fault.at = self._steps
        observation, reward, terminated, truncated = self._advance(row, action)
        ended = terminated or truncated
        if fault.kind == "obs":
            observation = (observation + 1) % 3 if self._discrete else observation * np.array([1, 0], np.float32)
        elif fault.kind == "reward":
            reward += 0.25
        elif fault.kind == "wrong end" and ended:
            terminated, truncated = truncated, terminated
        elif fault.kind == "spurious end" and not ended:
            terminated = True
        elif fault.kind != "action":
            return observation, reward, terminated, truncated
        fault.at = self._steps
        return observation, reward, terminated, truncated

    def close(self, **kwargs: Any) -> None:  # noqa: ARG002 - Gymnasium's
        for client in self.clients:
            self._stop(client, killed=False)
