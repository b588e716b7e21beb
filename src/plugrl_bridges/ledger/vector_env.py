"""The ledger around what a Gymnasium trainer sees: `LedgerVectorEnv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np

from plugrl_bridges.ledger.recorder import Recorder
from plugrl_bridges.ledger.schema import Dialect, Flag
from plugrl_bridges.ledger.wrapping import expect_env
from plugrl_bridges.ledger.writer import check_trainer_path
from plugrl_bridges.traits import Autoreset, autoreset_of, env_name

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from gymnasium.vector import VectorWrapper

    from plugrl_bridges.wire.arrays import Array, Value

    _Wrapper: TypeAlias = VectorWrapper[Any, Any, Any, Any, Any]
elif hasattr(gymnasium.vector, "VectorWrapper"):
    _Wrapper = gymnasium.vector.VectorWrapper
else:  # Gymnasium before 1.0
    _Wrapper = gymnasium.vector.VectorEnvWrapper

__all__ = ["LedgerVectorEnv"]

VectorEnv: TypeAlias = "gymnasium.vector.VectorEnv[Any, Any, Any]"

_FINALS = ("final_obs", "final_observation")


class LedgerVectorEnv(_Wrapper):
    """Wrapper that writes down what a Gymnasium trainer sends and gets, and passes it through unchanged.

    Put it right around the vector env whose envs have a `LedgerEnv` each, below wrappers that change observations or
    rewards. `close` it at the end, then `compare`. Knows all three autoreset modes.

    Args:
        env: Any `gymnasium.vector.VectorEnv`.
        path: File to write, which must not exist.
        run: Identity of the run.
        full: Record observations and actions of more than 1 KiB whole, not by their digest.

    Raises:
        LedgerError: for a space that cannot be recorded; if the path exists or is a folder; at the first reset,
            if the file cannot be made.
        TypeError: for an env of another kind, which has a wrapper of its own.
        ValueError: for an unknown autoreset mode in the env's metadata.
    """

    def __init__(self, env: VectorEnv, path: str | os.PathLike[str], *, run: str = "", full: bool = False) -> None:
        expect_env(env, "LedgerVectorEnv")
        check_trainer_path(path)
        super().__init__(env)
        self._mode = autoreset_of(env)
        self._ledger = Recorder(
            path,
            observation_space=env.single_observation_space,
            action_space=env.single_action_space,
            num_envs=env.num_envs,
            dialect=Dialect.GYMNASIUM,
            run=run,
            full=full,
            env_id=env_name(env),
        )
        self._ended = np.zeros(env.num_envs, np.bool_)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the envs, all or those of ``options["reset_mask"]``, and write down the observations.

        Of the others, an observation that is not the one that was handed over last is written down too.
        """
        mask = None if options is None else options.get("reset_mask")  # Gymnasium takes it out of the options
        rows = None if mask is None else np.flatnonzero(mask).tolist()
        env: Any = self.env  # Gymnasium's own signatures differ, and know no list of seeds
        returned: tuple[Any, dict[str, Any]] = env.reset(seed=seed, options=options)
        self._ended[slice(None) if rows is None else rows] = False
        columns = self._ledger.observation.batch(returned[0], self._ledger.num_envs)
        if rows is not None and len(rows) < self._ledger.num_envs:
            self._ledger.kept(columns, sorted({*range(self._ledger.num_envs)}.difference(rows)))
        self._ledger.reset(columns, rows)
        return returned

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401 - the env's own
        """Step the envs, and write it down."""
        ledger = self._ledger
        ledger.take(actions)
        returned = observation, rewards, terminated, truncated, infos = self.env.step(actions)
        columns = ledger.observation.batch(observation, ledger.num_envs)
        flags = np.asarray(terminated, np.uint8) + np.asarray(truncated, np.uint8) * np.uint8(Flag.TRUNCATED)
        ended = flags != 0
        self._mark_lost(infos, ended, flags)
        if self._mode is Autoreset.SAME_STEP and ended.any():
            rows = np.flatnonzero(ended).tolist()
            finals = {row: self._final(infos, row) for row in rows}
            shown, without = ledger.with_finals(columns, finals)
            ledger.step(rewards, flags, shown, without_final=without)
            ledger.reset(columns, rows)
        elif self._mode is Autoreset.NEXT_STEP and self._ended.any():
            ledger.step(rewards, flags, columns, rows=np.flatnonzero(~self._ended).tolist())
            ledger.reset(columns, np.flatnonzero(self._ended).tolist())
            ended &= ~self._ended
        else:
            ledger.step(rewards, flags, columns)
        self._ended = ended
        return returned

    def _final(self, infos: Mapping[str, Value], row: int) -> Sequence[Array] | None:
        final = next((infos[key] for key in _FINALS if key in infos), None)
        if final is None:
            return None
        if isinstance(final, (Mapping, tuple)):  # batched as the observations are
            columns = self._ledger.observation.batch(final, self._ledger.num_envs)
            return [column[row] for column in columns]
        return None if final[row] is None else self._ledger.observation.values(final[row])

    @staticmethod
    def _mark_lost(infos: Mapping[str, Value], ended: Array, flags: Array) -> None:
        lost = infos.get("client_lost")
        if lost is not None:
            flags[ended & np.asarray(lost, np.bool_)] |= np.uint8(Flag.LOST)

    def close(self, **kwargs: Any) -> None:
        """Close the envs and the ledger."""
        super().close(**kwargs)
        self._ledger.close()
