"""The ledger around what a Stable-Baselines3 trainer sees: `LedgerVecEnv`. Needs Stable-Baselines3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvObs, VecEnvStepReturn, VecEnvWrapper

from plugrl_bridges.ledger.recorder import Recorder
from plugrl_bridges.ledger.schema import Dialect, Flag
from plugrl_bridges.ledger.wrapping import expect_env
from plugrl_bridges.ledger.writer import check_trainer_path

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.wire.arrays import Array

__all__ = ["LedgerVecEnv"]


class LedgerVecEnv(VecEnvWrapper):
    """Wrapper that writes down what a Stable-Baselines3 trainer sends and gets, and passes it through unchanged.

    Put it right around the `VecEnv` whose envs have a `LedgerEnv` each, below wrappers that change observations or
    rewards. `close` it at the end, then `compare`.

    Args:
        venv: Any `VecEnv`.
        path: File to write, which must not exist.
        run: Identity of the run.
        full: Record observations and actions of more than 1 KiB whole, not by their digest.

    Raises:
        LedgerError: for a space that cannot be recorded; if the path exists or is a folder; at the first reset,
            if the file cannot be made.
        TypeError: for an env of another kind, which has a wrapper of its own.
    """

    def __init__(self, venv: VecEnv, path: str | os.PathLike[str], *, run: str = "", full: bool = False) -> None:
        expect_env(venv, "LedgerVecEnv")
        check_trainer_path(path)
        super().__init__(venv)
        self._ledger = Recorder(
            path,
            observation_space=self.observation_space,
            action_space=self.action_space,
            num_envs=self.num_envs,
            dialect=Dialect.SB3,
            run=run,
            full=full,
            env_id=type(venv).__name__,
        )
        self._nobody = np.zeros(self.num_envs, np.uint8)

    def reset(self) -> VecEnvObs:
        """Reset the envs, and write down the observations."""
        observation = self.venv.reset()
        self._ledger.reset(self._ledger.observation.batch(observation, self.num_envs))
        return observation

    def step_async(self, actions: Array) -> None:
        """Hand the actions on; they are written down as they are now."""
        self._ledger.take(actions)
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Collect the step, and write it down."""
        returned = observation, rewards, dones, infos = self.venv.step_wait()
        ledger = self._ledger
        columns = ledger.observation.batch(observation, self.num_envs)
        if not dones.any():
            ledger.step(rewards, self._nobody, columns)
            return returned
        rows = np.flatnonzero(dones).tolist()
        flags = np.zeros(self.num_envs, np.uint8)
        finals = {row: self._final(infos[row], row, flags) for row in rows}
        shown, without = ledger.with_finals(columns, finals)
        ledger.step(rewards, flags, shown, without_final=without)
        ledger.reset(columns, rows)
        return returned

    def _final(self, info: Mapping[str, Any], row: int, flags: Array) -> Sequence[Array] | None:
        flags[row] = Flag.TRUNCATED if info.get("TimeLimit.truncated", False) else Flag.TERMINATED
        if info.get("client_lost", False):
            flags[row] |= Flag.LOST
        final = info.get("terminal_observation")
        return None if final is None else self._ledger.observation.values(final, f"terminal_observation of row {row}")

    def close(self) -> None:
        """Close the envs and the ledger."""
        super().close()
        self._ledger.close()
