"""Inject one fault at a time between the ledger of an env and the wire, where a broken client would make it.

A `Plan` says what is spoiled and how often; `Plan.wrap` puts it around the `LedgerEnv` of each env of one process. The
plan notes the first value that it really changed, and how many: a value that is zero already cannot be zeroed.

As the factory of a client:

    plugrl-env-client --env-factory benchmarks.faulty_env:make --env-kwargs '{"fault": "obs zero"}' --num-envs 16
"""

from __future__ import annotations

import atexit
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from plugrl_bridges.ledger import LedgerEnv

__all__ = ["CONTROLS", "DOSES", "FAULTS", "FaultyEnv", "First", "Plan", "make"]

Env = gym.Env[Any, Any]

DOSES = ("one", "percent", "every")
FAULTS = (
    *(f"{what} {how}" for what in ("obs", "action", "reward", "final_obs") for how in ("zero", "stale", "swap", "f16")),
    "reset_obs zero",
    "action clip",
    "spurious terminated",
    "dropped truncated",
    "truncated as terminated",
    "skipped step",
)
"""What can be spoiled: a value and how, or a flag, or a step."""
_VALUES = {"obs", "action", "reward", "final_obs", "reset_obs"}
CONTROLS = ("none", "delay", "float64")
"""What must raise no alarm: nothing, 1 ms of delay per step, and observations as float64 on the wire."""


@dataclass(frozen=True)
class First:
    """Say where the first change was made: episodes from 0, steps from 1, 0 for a reset."""

    env: int
    episode: int
    step: int
    vector_step: int
    field: str


class Plan:
    """Decide which values are spoiled, for all envs of a process.

    Args:
        fault: One of `FAULTS` or `CONTROLS`.
        dose: ``"one"`` cell; ``"percent"``, of all cells, one of them being the one; ``"every"`` cell.
        at: Number of the vector step from which on the one may be, from 1.
        env: The env in which it is.
        seed: For the percent.
    """

    def __init__(self, fault: str = "none", dose: str = "one", *, at: int = 1, env: int = 0, seed: int = 0) -> None:
        if fault not in (*FAULTS, *CONTROLS):
            raise ValueError(f"fault must be one of {', '.join((*FAULTS, *CONTROLS))}, got {fault!r}")
        if dose not in DOSES:
            raise ValueError(f"dose must be one of {', '.join(DOSES)}, got {dose!r}")
        self.fault = fault
        self.what, _, self.how = fault.rpartition(" ") if fault.split(maxsplit=1)[0] in _VALUES else (fault, "", "")
        self.changed = 0
        """Cells, flags or steps that were changed so far."""
        self.first: First | None = None
        self.envs: list[FaultyEnv] = []
        self._dose = dose
        self._at, self._env = at, env
        self._rng = np.random.default_rng(seed)

    def wrap(self, env: Env) -> FaultyEnv:
        """Put the fault around an env; call it for the envs in their order."""
        self.envs.append(FaultyEnv(env, self, len(self.envs)))
        return self.envs[-1]

    def _the_one(self, env: FaultyEnv) -> bool:
        return env.number == self._env and env.steps >= self._at and self.first is None

    def hits(self, env: FaultyEnv, what: str) -> bool:
        """Tell whether a flag or step is to be spoiled now, and note it."""
        if what != self.fault:
            return False
        hit = self._dose == "every" or self._the_one(env)
        if self._dose == "percent":
            hit = bool(self._rng.random() < 0.01) or hit
        if hit:
            self._note(env, {"skipped step": "step_count", "dropped truncated": "truncated"}.get(what, "terminated"), 1)
        return hit

    def spoil(self, env: FaultyEnv, what: str, value: Any) -> Any:
        """Give a value as it leaves the fault.

        Args:
            env: Whose.
            what: ``"obs"``, ``"final_obs"``, ``"reset_obs"``, ``"action"`` or ``"reward"``.
            value: As it came.
        """
        kind = "obs" if what.endswith("obs") else what
        before, neighbour = env.latest.get(kind), self.envs[env.number - 1].latest.get(kind)
        array = np.array(value)
        env.latest[kind] = array
        if what != self.what:
            return value
        other: Any = {
            "zero": np.zeros_like(array),
            "stale": array if before is None else before,
            "swap": array if neighbour is None else neighbour,
            "clip": np.clip(array, *(bound / 4 for bound in _bounds(env.action_space))) if self.how == "clip" else None,
            "f16": array.astype(np.float16).astype(array.dtype) if array.dtype.kind == "f" else array,
        }[self.how]
        differing = other != array
        mask = np.zeros_like(differing)
        if self._dose == "every":
            mask = differing
        elif self._dose == "percent":
            mask = differing & (self._rng.random(array.shape) < 0.01)
        if self._the_one(env) and differing.any():
            mask = np.array(mask)
            mask.reshape(-1)[int(np.argmax(differing))] = True
        if not mask.any():
            return value
        self._note(env, {"final_obs": "terminal_obs"}.get(what, what), int(mask.sum()))
        spoiled = np.where(mask, other, array).astype(array.dtype)
        return spoiled if isinstance(value, np.ndarray) else spoiled.item()

    def _note(self, env: FaultyEnv, field: str, cells: int) -> None:
        self.changed += cells
        if self.first is None:
            self.first = First(env.number, env.episode, env.episode_step, env.steps, field)


def _bounds(space: gym.Space[Any]) -> tuple[Any, Any]:
    return (space.low, space.high) if isinstance(space, spaces.Box) else (0, 0)


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Stand for a client that spoils what it carries; made by `Plan.wrap`."""

    def __init__(self, env: Env, plan: Plan, number: int) -> None:
        super().__init__(env)
        self.number = number
        self.steps = 0
        self.episode = -1
        self.episode_step = 0
        self.latest: dict[str, Any] = {}
        self._plan = plan
        self._last: tuple[Any, float] = (None, 0.0)
        space = env.observation_space
        self._widened = plan.fault == "float64" and isinstance(space, spaces.Box)
        if isinstance(space, spaces.Box) and self._widened:
            self.observation_space = spaces.Box(
                space.low.astype(np.float64), space.high.astype(np.float64), dtype=np.float64
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env."""
        if self.episode_step or self.episode < 0:
            self.episode += 1
        self.episode_step = 0
        observation, info = self.env.reset(seed=seed, options=options)
        self._last = (observation, 0.0)
        return self._shown(self._plan.spoil(self, "reset_obs", observation)), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env, or do not."""
        plan = self._plan
        self.steps += 1
        self.episode_step += 1
        if plan.fault == "delay":
            time.sleep(0.001)
        action = plan.spoil(self, "action", action)
        if self.steps > 1 and plan.hits(self, "skipped step"):
            return self._shown(self._last[0]), self._last[1], False, False, {}
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._last = (observation, float(reward))
        observation = plan.spoil(self, "final_obs" if terminated or truncated else "obs", observation)
        reward = plan.spoil(self, "reward", float(reward))
        if not (terminated or truncated) and plan.hits(self, "spurious terminated"):
            terminated = True
        elif truncated and not terminated and plan.hits(self, "dropped truncated"):
            truncated = False
        elif truncated and not terminated and plan.hits(self, "truncated as terminated"):
            terminated, truncated = True, False
        return self._shown(observation), reward, terminated, truncated, info

    def _shown(self, observation: Any) -> Any:
        return observation.astype(np.float64) if self._widened else observation


_plans: dict[str, Plan] = {}


def make(
    env_index: int,
    env_id: str = "Pendulum-v1",
    ledger: str | None = None,
    report: str | None = None,
    **plan: Any,
) -> Env:
    """Make one env of a faulty client.

    Args:
        env_index: Its number.
        env_id: Gymnasium id.
        ledger: Folder for the ledger of the envs, or None.
        report: File for what was changed, written at the end of the process.
        plan: Arguments of `Plan`.
    """
    key = json.dumps(plan, sort_keys=True)
    if key not in _plans:
        _plans[key] = Plan(**plan)
        if report is not None:
            atexit.register(_write, _plans[key], Path(report))
    inner = LedgerEnv(gym.make(env_id), ledger, env_index=env_index)
    return _plans[key].wrap(inner)


def _write(plan: Plan, path: Path) -> None:
    first = None if plan.first is None else asdict(plan.first)
    path.write_text(json.dumps({"fault": plan.fault, "changed": plan.changed, "first": first}))
