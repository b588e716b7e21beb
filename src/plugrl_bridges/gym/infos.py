"""The infos that a Gymnasium vector env returns, in the dialect of each release and autoreset mode.

- ``ARRAYS``, Gymnasium 1.x: arrays with ``_key`` masks, dicts nested. SAME_STEP puts what belongs to an ended episode
  under ``final_obs`` and ``final_info``, and the infos of the reset where the step's would be.
- ``LISTS``, Gymnasium 0.29: ``final_observation`` and ``final_info`` are object arrays, one dict or None per env.

Pure: made of a `StepResult` alone. ``gym.vector_env`` and ``cleanrl`` are the callers.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from plugrl_bridges.wire.info import Columns, wide_enough

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.server.autoreset import View
    from plugrl_bridges.server.result import InfoPart, StepResult
    from plugrl_bridges.spaces import ObservationLayout
    from plugrl_bridges.wire.codec import Array

__all__ = ["InfoDialect", "InfoWriter"]

_NUMBERS = (bool, int, float, np.number)
_RECORD_TYPES = {"r": np.float32, "l": np.int32, "t": np.float32}  # of ``RecordEpisodeStatistics``, in 0.29


class InfoDialect(enum.Enum):
    """The form in which vector infos are given."""

    ARRAYS = "1.x"
    LISTS = "0.29"

    @classmethod
    def installed(cls) -> InfoDialect:
        """Return the dialect of the Gymnasium that is installed."""
        return cls.LISTS if gymnasium.__version__.startswith("0.") else cls.ARRAYS


class InfoWriter:
    """Write the infos of steps and resets.

    Args:
        layout: Of one env's observation.
        num_envs: Number of slots.
        dialect: Form of the infos.
        episodes: Whether to add ``episode`` (``r``, ``l``, ``t``) to the info of each step that ends an episode, as
            ``RecordEpisodeStatistics`` at the client would. Where the client's envs bring their own, that stays, in the
            form of this dialect: a client may have another release of Gymnasium than the trainer.
    """

    def __init__(
        self, layout: ObservationLayout, num_envs: int, dialect: InfoDialect, *, episodes: bool = False
    ) -> None:
        self._layout = layout
        self._n = num_envs
        self._dialect = dialect
        self._episodes = episodes

    def step(self, view: View) -> dict[str, Any]:
        """Return the infos of a step."""
        step = view.step
        if not (step.info_parts or view.reset_parts or step.lost or b"\x01" in view.over.tobytes()):
            return {}
        infos = self._lists(view) if self._dialect is InfoDialect.LISTS else self._arrays(view)
        return self._with_losses(infos, step)

    def reset(self, view: View) -> dict[str, Any]:
        """Return the infos of a reset."""
        if self._dialect is InfoDialect.LISTS:
            infos: dict[str, Any] = {}
            for slot, info in sorted(view.reset_infos.items()):
                self._list(infos, info, slot)
        else:
            infos = self._columns(view.reset_parts).infos
        return self._with_losses(infos, view.step)

    # Gymnasium 1.x ------------------------------------------------------------------------------------------------

    def _arrays(self, view: View) -> dict[str, Any]:
        step, over = view.step, view.over
        if view.finals is None:
            top = self._columns(step.info_parts)
            self._add_episodes(top, step)
            return self._columns(view.reset_parts, top).infos
        final = self._columns([part.only(over) for part in step.info_parts])
        self._add_episodes(final, step)
        top = self._columns([*(part.only(~over) for part in step.info_parts), *view.reset_parts])
        top.infos["final_obs"] = self._final_observations(over, view.finals)
        top.infos["_final_obs"] = over.copy()
        top.infos["final_info"] = final.infos
        top.infos["_final_info"] = over.copy()
        return top.infos

    def _columns(self, parts: Sequence[InfoPart], columns: Columns | None = None) -> Columns:
        """Return the infos of some messages as columns, added to those that there are."""
        columns = columns or Columns(self._n)
        for part in parts:
            columns.add(part.info, part.slots, part.rows)
        return columns

    def _add_episodes(self, columns: Columns, step: StepResult) -> None:
        if not self._episodes:
            return
        if not _is_record(columns.infos.get("episode", {"r": 0, "l": 0})):  # the env calls something else an episode
            del columns.infos["episode"], columns.infos["_episode"]
        _make_flat(columns.infos.get("episode"))
        brought = columns.infos.get("_episode", np.zeros(self._n, np.bool_))
        slots = np.array([slot for slot in step.ended if not brought[slot]], np.int64)
        if len(slots):
            ended = [step.ended[slot] for slot in slots.tolist()]
            record = {
                "r": np.array([each.ret for each in ended]),
                "l": np.array([each.length for each in ended], np.int64),
                "t": np.array([each.elapsed_s for each in ended]),
            }
            columns.add({"env_episode": record}, slots)

    def _final_observations(self, over: Array, finals: Sequence[Array]) -> Array:
        observations = np.full(self._n, None)
        for at, slot in enumerate(np.flatnonzero(over)):
            observations[slot] = self._layout.row(finals, at)
        return observations

    # Gymnasium 0.29 -----------------------------------------------------------------------------------------------

    def _lists(self, view: View) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        step, over = view.step, view.over
        own, began = step.infos, view.reset_infos
        observations = None if view.finals is None else self._final_observations(over, view.finals)
        for slot in range(self._n):
            info = own[slot]
            if over[slot] and self._episodes:
                ended = step.ended[slot]
                counted = {"r": ended.ret, "l": ended.length, "t": ended.elapsed_s}
                record = info.get("episode")
                info["episode"] = _listed(record if _is_record(record) else counted)
            if over[slot] and observations is not None:
                self._list(infos, began.get(slot, {}), slot)
                info = {"final_observation": observations[slot], "final_info": info}
            elif not (over[slot] or step.stepped[slot]):
                info = began.get(slot, {})
            self._list(infos, info, slot)
        return infos

    def _list(self, infos: dict[str, Any], info: Mapping[str, Any], slot: int) -> None:
        for key, value in info.items():
            if key not in infos:
                numeric = type(value) in {int, float, bool} or isinstance(value, np.number)
                infos[key] = np.zeros(self._n, type(value)) if numeric else np.full(self._n, None)
                infos["_" + key] = np.zeros(self._n, np.bool_)
            column, own = infos[key], np.asarray([value]) if isinstance(value, _NUMBERS) else np.array([None])
            if column.dtype not in {np.dtype(object), own.dtype}:
                infos[key] = column = wide_enough(column, own)
            column[slot] = value
            infos["_" + key][slot] = True

    def _with_losses(self, infos: dict[str, Any], step: StepResult) -> dict[str, Any]:
        infos.pop("client_lost", None)  # a word of the bridge; a client may use it for something else
        infos.pop("_client_lost", None)
        if step.lost:
            lost = np.zeros(self._n, np.bool_)
            lost[list(step.lost)] = True
            infos["client_lost"], infos["_client_lost"] = lost, lost.copy()
        return infos


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and "r" in value and "l" in value


def _make_flat(record: object) -> None:
    """Bring a record from Gymnasium 0.29, arrays of one number each, to the form of 1.x: ``[num_envs]``."""
    if isinstance(record, dict):
        for key in _RECORD_TYPES:
            column = record.get(key)
            if isinstance(column, np.ndarray) and column.shape[1:] == (1,):
                record[key] = column[:, 0]


def _listed(record: Any) -> Any:  # noqa: ANN401 - what a client calls "episode" may be anything
    """Return a record in the form of Gymnasium 0.29: arrays of one number each."""
    if not isinstance(record, dict):
        return record
    return {
        key: np.array([value], _RECORD_TYPES[key])
        if key in _RECORD_TYPES and isinstance(value, (int, float))
        else value
        for key, value in record.items()
    }
