"""Own the stepping of a `gymnasium.vector.VectorEnv` (a batched simulator) as one `EnvBatch`: one call per step.

Gymnasium's vector envs differ in how they begin the next episode, and in where they put the terminal observation; that
is settled here, once. ``factory.build_batch`` makes it. It must not know of connections or messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from plugrl_bridges.client.batch import EnvBatch
from plugrl_bridges.client.columns import columns_for_wire, merged_columns
from plugrl_bridges.client.envs import traits_of
from plugrl_bridges.client.verified import digest_env_in
from plugrl_bridges.digest.digest import StepDigests
from plugrl_bridges.errors import FactoryError
from plugrl_bridges.spaces import ObservationLayout
from plugrl_bridges.traits import HAS_MODES, Autoreset, autoreset_of, env_name

if TYPE_CHECKING:
    from plugrl_bridges.spaces import Leaf
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["VectorBatch", "row_info"]

logger = logging.getLogger(__name__)

VectorEnv: TypeAlias = "gymnasium.vector.VectorEnv[Any, Any, Any]"

_FINALS = ("final_obs", "final_observation")
_FINAL_KEYS = {*_FINALS, "final_info", "_final_obs", "_final_observation", "_final_info"}


class VectorBatch(EnvBatch):
    """Step a vector env as a whole.

    It may autoreset in the same step, or be one that resets single rows when asked to (``options["reset_mask"]``: the
    mode DISABLED, and Gymnasium's own SyncVectorEnv and AsyncVectorEnv in every mode).

    A vector env steps all rows or none. So a chunk of several steps ends for all rows when an episode ends, and a row
    that the trainer wants reset while others step is stepped once with its (ignored) action, and then reset.

    Args:
        env: The vector env; its rows are the envs.
        verify: Keep the digests of their steps.

    Raises:
        FactoryError: if it autoresets in the next step, which would cost each episode a step of the others; for an
            unknown autoreset mode.
        SpaceError: if a space cannot travel.
    """

    def __init__(self, env: VectorEnv, *, verify: bool = False) -> None:
        super().__init__(int(env.num_envs), env.single_observation_space, env.single_action_space, env_name(env))
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
        self._infos: Mapping[str, Any] = {}
        self._final_infos: dict[int, Mapping[str, Any]] = {}
        self._final = self.layout.allocate(self.num_envs)
        self._next: list[Array] | None = None
        self._next_infos: dict[int, Mapping[str, Any]] = {}
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

    def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Reset rows in one call; see `EnvBatch.reset`. A vector env takes one ``options`` for all of them."""
        with self.blaming("reset"):
            observation, infos = self._env.reset(seed=self._seeds(rows, seeds), options=self._options(rows, options))
            columns = self._columns(observation)
            if self._chains is not None:
                self._chains.reset(columns, rows)
            self._replace(columns, rows)
            self.reset_infos.update((row, row_info(infos, row)) for row in rows)

    def _seeds(self, rows: Sequence[int], seeds: Sequence[int | None] | None) -> int | list[int | None] | None:
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

    def _options(
        self, rows: Sequence[int], options: Sequence[Mapping[str, Any] | None] | None
    ) -> dict[str, Any] | None:
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

    def _replace(self, columns: list[Array], rows: Sequence[int]) -> None:
        """Take over the rows named, in arrays of our own: the env's may change, and ours may be on their way out."""
        if len(rows) == self.num_envs:
            self.observations = columns
            return
        picked = list(rows)
        self.observations = [array.copy() for array in self.observations]
        for target, source in zip(self.observations, columns, strict=True):
            target[picked] = source[picked]

    def _columns(self, observation: Value) -> list[Array]:
        return [self._column(leaf, _at(observation, leaf)) for leaf in self.layout.leaves]

    def _column(self, leaf: Leaf, value: Value) -> Array:
        column = np.asarray(value, leaf.dtype)
        if column.shape != (self.num_envs, *leaf.shape):
            raise ValueError(
                f"observation entry {leaf.name!r} has shape {column.shape}, expected {(self.num_envs, *leaf.shape)}"
            )
        return column

    def step(self, actions: Array, rows: Sequence[int]) -> None:
        """Run one chunk, which ends for all rows at the first end of an episode; see `EnvBatch.step`."""
        self.rewards[:], self.lengths[:] = -0.0, 0  # -0.0 + x is x whatever x is, but 0.0 + -0.0 is 0.0
        self.any_ended = False
        observation: Any = None
        rewards: Any = None
        with self.blaming("step"):
            for at, taken in enumerate(actions, 1):
                observation, rewards, terminated, truncated, self._infos = self._env.step(taken.copy())
                self.rewards += np.asarray(rewards)
                self.lengths += 1
                self.terminated[:], self.truncated[:] = terminated, truncated
                self.any_ended = bool(self.terminated.any() or self.truncated.any())
                if self.any_ended:
                    break
                if self._chains is not None and at < len(actions):
                    self._digest(taken, rewards, self._columns(observation))
            self.steps = int(self.lengths[0]) * len(rows)
            self.observations = self._columns(observation)
            self._next = None
            self._final_infos, self._next_infos = {}, {}
            if self.any_ended:
                self._part_ended(np.flatnonzero(self.terminated | self.truncated).tolist())
            self._digest(taken, rewards, self.observations)

    def _digest(self, actions: Array, rewards: Any, columns: list[Array]) -> None:  # noqa: ANN401 - the env's own
        """Take a step into the digests, if they are kept: the action in the dtype of its space, as everything."""
        if self._chains is not None:
            actions = actions.astype(self.action_layout.dtype)
            self._chains.step([actions], rewards, self.terminated, self.truncated, columns)

    def _part_ended(self, rows: list[int]) -> None:
        """Tell the terminal observations and infos of ended rows from those of the next episodes."""
        for target, source in zip(self._final, self.observations, strict=True):
            np.copyto(target, source)
        returned, self.observations = self.observations, self._final
        if not self._same_step:
            return
        self._next = returned
        final = next((self._infos[key] for key in _FINALS if key in self._infos), None)
        if final is None:
            raise KeyError(f'infos of a step that ended rows {rows} hold no "final_obs"')
        final_infos = self._infos.get("final_info", {})
        for row in rows:
            if isinstance(final, (Mapping, tuple)):  # batched as the observations are
                for leaf, array in zip(self.layout.leaves, self._final, strict=True):
                    array[row] = _at(final, leaf)[row]
            else:
                self.layout.store(self._final, row, final[row])
            self._final_infos[row] = (
                row_info(final_infos, row) if isinstance(final_infos, Mapping) else final_infos[row] or {}
            )
            info = row_info(self._infos, row)
            self._next_infos[row] = {key: value for key, value in info.items() if key not in _FINAL_KEYS}

    def renew(self, ended: Array) -> None:
        """Begin the next episodes: with what the same step brought, or by a masked reset; see `EnvBatch.renew`."""
        rows = np.flatnonzero(ended).tolist()
        if self._next is None:
            if rows:
                self.reset(rows)
            return
        if self._chains is not None:
            self._chains.reset(self._next, rows)
        self.observations, self._next = self._next, None
        self.reset_infos.update((row, self._next_infos[row]) for row in rows)

    def step_info_of(self, row: int) -> Mapping[str, Any]:
        """Give the info of a row's last step."""
        if row in self._final_infos:
            return self._final_infos[row]
        return {key: value for key, value in row_info(self._infos, row).items() if key not in _FINAL_KEYS}

    def step_infos(self, rows: Sequence[int]) -> dict[str, Value]:
        """Give the infos of the rows' last steps; as they stand where they are batched already."""
        with self.blaming("step"):
            if not self._infos:
                return {}
            if len(rows) == self.num_envs and (columns := self._step_columns()) is not None:
                return columns
            return self.batched([self.step_info_of(row) for row in rows])

    def _step_columns(self) -> dict[str, Value] | None:
        """Give the infos of all rows' last steps without looking at any row; None if they are not all plain arrays."""
        n = self.num_envs
        own = columns_for_wire({key: value for key, value in self._infos.items() if key not in _FINAL_KEYS}, n)
        if own is None or not self._final_infos:
            return own
        final = self._infos.get("final_info", {})
        last = columns_for_wire(final, n) if isinstance(final, Mapping) else None
        ended = np.zeros(n, np.bool_)
        ended[list(self._final_infos)] = True
        return None if last is None else merged_columns(own, last, ended)

    def traits(self) -> dict[str, Value]:
        """Give what is known of the vector env."""
        return traits_of(self._env)

    def close(self) -> None:
        """Close the vector env."""
        try:
            self._env.close()
        except Exception:
            logger.exception("vector env %s failed in close()", self.name)


def _at(observation: Value, leaf: Leaf) -> Value:
    for key in leaf.path:
        observation = observation[key]
    return observation


def row_info(infos: Mapping[Any, Any], row: int) -> dict[str, Any]:
    """Give one env's info of a vector env's infos: the keys whose mask, if there is one, holds for this row.

    What has no row of this number, as a scalar or an array without dimensions, is nobody's info and is left out.
    """
    info: dict[str, Any] = {}
    for key, value in infos.items():
        if isinstance(key, str) and key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and _has_row(mask, row) and not mask[row]:
            continue
        if isinstance(value, Mapping):
            info[key] = row_info(value, row)
        elif _has_row(value, row):
            info[key] = value[row]
    return info


def _has_row(value: Value, row: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) > row
    return isinstance(value, (list, tuple)) and len(value) > row
