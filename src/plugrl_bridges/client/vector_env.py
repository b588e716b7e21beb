"""The stepping of a `gymnasium.vector.VectorEnv`, such as a batched simulator, with one call per step.

Such envs differ in how they begin the next episode and in where they put the terminal observation: settled here, once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from plugrl_bridges.client.batch import EnvBatch
from plugrl_bridges.client.envs import digest_env_in
from plugrl_bridges.digest.digest import StepDigests
from plugrl_bridges.errors import FactoryError
from plugrl_bridges.spaces import ObservationLayout
from plugrl_bridges.traits import HAS_MODES, Autoreset, autoreset_of
from plugrl_bridges.wire.info import columns_for_wire, merged, row_info

if TYPE_CHECKING:
    from plugrl_bridges.client.batch import Options, Seeds
    from plugrl_bridges.spaces import Leaf
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["VectorBatch"]

logger = logging.getLogger(__name__)

VectorEnv: TypeAlias = "gymnasium.vector.VectorEnv[Any, Any, Any]"

_FINALS = ("final_obs", "final_observation")
_FINAL_KEYS = {*_FINALS, "final_info", "_final_obs", "_final_observation", "_final_info"}


class VectorBatch(EnvBatch):
    """A vector env, stepped as a whole.

    It may autoreset in the same step, or be one that resets single rows when asked to (``options["reset_mask"]``: the
    mode DISABLED, and Gymnasium's own SyncVectorEnv and AsyncVectorEnv in every mode).

    A vector env steps all rows or none. So a chunk of several steps ends for all rows when an episode ends, and a row
    that the trainer wants reset while others step is stepped once with its (ignored) action, and then reset.

    One that autoresets in the next step, which would cost each episode a step of the others, is a `FactoryError`.
    """

    def __init__(self, env: VectorEnv, *, verify: bool = False) -> None:
        super().__init__([env], int(env.num_envs), env.single_observation_space, env.single_action_space)
        try:
            mode = autoreset_of(env)
        except ValueError as exc:
            raise FactoryError(f"the vector env {exc}") from None
        own = isinstance(getattr(env, "unwrapped", env), (SyncVectorEnv, AsyncVectorEnv))
        self._masked = mode is Autoreset.DISABLED or (own and HAS_MODES)
        self._same_step = mode is Autoreset.SAME_STEP
        if not self._same_step and not self._masked:
            raise FactoryError(
                f"the vector env {self.name} starts the next episode in the step after the end (autoreset mode "
                f"{mode.name}), which a client cannot use: make it with autoreset_mode=AutoresetMode.SAME_STEP (or "
                'DISABLED, with options["reset_mask"]), and say so in its metadata["autoreset_mode"]'
                + ("" if HAS_MODES else f"; Gymnasium {gymnasium.__version__} has no such modes, 1.1 has")
            )
        # Gymnasium's own signatures differ between releases, and know no list of seeds.
        self._env: Any = env
        # What the last step returned is told apart at once: what the steps gave, and what begins.
        self._infos: Mapping[str, Any] = {}
        self._final_infos: Any = None  # of the rows that ended, if the simulator has them apart; else in `_infos`
        self._final = self.layout.allocate(self.num_envs)
        self._next: list[Array] | None = None  # where all rows stand, if those that ended have begun the next episode
        self._chains: StepDigests | None = None
        if verify:
            actions = ObservationLayout(self.action_layout.space).leaves
            self.digests = self._chains = StepDigests(self.num_envs, actions, self.layout.leaves)
            if any(digest_env_in(each) is not None for each in getattr(env, "envs", ())):
                logger.warning(
                    "verify: the digests of %s are made of what its vector step took and returned, not by the "
                    "LedgerEnv around each of its envs: wrappers between the two are not checked. Give the client a "
                    "factory of single envs for that",
                    self.name,
                )

    def reset(self, rows: Sequence[int], seeds: Seeds = None, options: Options = None) -> None:
        """Reset rows in one call; see `EnvBatch.reset`. A vector env takes one ``options`` for all of them."""
        with self.blaming("reset"):
            observation, infos = self._env.reset(seed=self._seeds(rows, seeds), options=self._options(rows, options))
            columns = self._columns(observation)
            if self._chains is not None:
                self._chains.reset(columns, rows)
            if len(rows) < self.num_envs:
                # In arrays of our own: the env's may change, and ours may be on their way out.
                ours = [array.copy() for array in self.observations]
                for target, source in zip(ours, columns, strict=True):
                    target[list(rows)] = source[list(rows)]
                columns = ours
            self.observations = columns
            self.reset_infos.update((row, row_info(infos, row)) for row in rows)

    def _seeds(self, rows: Sequence[int], seeds: Seeds) -> int | list[int | None] | None:
        if seeds is None or all(seed is None for seed in seeds):
            return None
        first = seeds[0]
        # Batched simulators often know the int form only, which means seed, seed + 1, …
        if first is not None and len(rows) == self.num_envs and list(seeds) == list(range(first, first + len(rows))):
            return first
        listed: list[int | None] = [None] * self.num_envs
        for row, seed in zip(rows, seeds, strict=True):
            listed[row] = seed
        return listed

    def _options(self, rows: Sequence[int], options: Options) -> dict[str, Any] | None:
        first = options[0] if options else None
        if options is not None and any(repr(option) != repr(first) for option in options):
            raise ValueError(f"a vector env takes one options for all its rows, but was asked for {list(options)}")
        asked = None if first is None else dict(first)
        if len(rows) == self.num_envs:
            return asked
        if not self._masked:
            raise ValueError(
                f"asked to reset rows {list(rows)} of {self.num_envs}, but {self.name} is not known to take "
                'options["reset_mask"]'
            )
        mask = np.zeros(self.num_envs, np.bool_)
        mask[list(rows)] = True
        return {**(asked or {}), "reset_mask": mask}

    def _columns(self, observation: Value) -> list[Array]:
        columns = []
        for leaf in self.layout.leaves:
            column = np.asarray(_at(observation, leaf), leaf.dtype)
            if column.shape != (self.num_envs, *leaf.shape):
                raise ValueError(
                    f"observation entry {leaf.name!r} has shape {column.shape}, expected {(self.num_envs, *leaf.shape)}"
                )
            columns.append(column)
        return columns

    def step(self, actions: Array, rows: Sequence[int]) -> None:
        """Run one chunk, which ends for all rows at the first end of an episode; see `EnvBatch.step`."""
        self.rewards[:], self.lengths[:] = -0.0, 0  # -0.0 + x is x whatever x is, but 0.0 + -0.0 is 0.0
        self._final_infos = self._next = None
        with self.blaming("step"):
            for taken in actions:
                observation, rewards, terminated, truncated, infos = self._env.step(taken.copy())
                self.rewards += np.asarray(rewards)
                self.lengths += 1
                self.terminated[:], self.truncated[:] = terminated, truncated
                self.observations = self._columns(observation)
                self._infos = {key: value for key, value in infos.items() if key not in _FINAL_KEYS}
                self.any_ended = bool(self.terminated.any() or self.truncated.any())
                if self.any_ended:
                    self._part_ended(infos)
                if self._chains is not None:  # the action in the dtype of its space, as everything
                    entries = [taken.astype(self.action_layout.dtype)]
                    self._chains.step(entries, rewards, self.terminated, self.truncated, self.observations)
                if self.any_ended:
                    break
            self.steps = int(self.lengths[0]) * len(rows)

    def _part_ended(self, infos: Mapping[str, Any]) -> None:
        """Separate the terminal observations and infos of ended rows from those of the next episodes."""
        for target, source in zip(self._final, self.observations, strict=True):
            np.copyto(target, source)
        returned, self.observations = self.observations, self._final
        if not self._same_step:
            return
        rows = np.flatnonzero(self.terminated | self.truncated).tolist()
        final = next((infos[key] for key in _FINALS if key in infos), None)
        if final is None:
            raise KeyError(f'infos of a step that ended rows {rows} hold no "final_obs"')
        if isinstance(final, (Mapping, tuple)):  # batched as the observations are
            for leaf, array in zip(self.layout.leaves, self._final, strict=True):
                array[rows] = _at(final, leaf)[rows]
        else:
            for row in rows:
                self.layout.store(self._final, row, final[row])
        self._next = returned
        self._final_infos = infos.get("final_info", {})

    def renew(self, ended: Array) -> None:
        """Begin the next episodes: with what the same step brought, or by a masked reset; see `EnvBatch.renew`."""
        if self._next is None:
            super().renew(ended)
            return
        rows = np.flatnonzero(ended).tolist()
        if self._chains is not None:
            self._chains.reset(self._next, rows)
        self.observations, self._next = self._next, None
        self.reset_infos.update((row, row_info(self._infos, row)) for row in rows)

    def step_info_of(self, row: int) -> Mapping[str, Any]:
        """Return the info of a row's last step."""
        final = self._final_infos
        if final is None or not (self.terminated[row] or self.truncated[row]):
            return row_info(self._infos, row)
        return row_info(final, row) if isinstance(final, Mapping) else final[row] or {}

    def step_infos(self, rows: Sequence[int]) -> dict[str, Value]:
        """Return the infos of the rows' last steps; as they stand where they are batched already."""
        with self.blaming("step"):
            if not (self._infos or self._final_infos is not None):
                return {}
            if len(rows) == self.num_envs and (columns := self._step_columns()) is not None:
                return columns
            return self.batched([self.step_info_of(row) for row in rows])

    def _step_columns(self) -> dict[str, Value] | None:
        """Return the infos of the last steps with no look at any row; None if they are not all plain arrays."""
        n, final = self.num_envs, self._final_infos
        own = columns_for_wire(self._infos, n)
        if own is None or final is None:
            return own
        last = columns_for_wire(final, n) if isinstance(final, Mapping) else None
        ended = self.terminated | self.truncated
        going_on, over = np.flatnonzero(~ended), np.flatnonzero(ended)
        return None if last is None else merged([(own, going_on, going_on), (last, over, over)], n)


def _at(observation: Value, leaf: Leaf) -> Value:
    for key in leaf.path:
        observation = observation[key]
    return observation
