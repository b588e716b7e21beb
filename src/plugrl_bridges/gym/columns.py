"""Own the form of Gymnasium 1.x's vector infos: per key an array of all envs, and a mask ``_key`` of who has it.

Made of batched infos as they came from the wire, so that no env is looked at by itself. ``gym.infos`` decides which
infos go where.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.wire.info import info_entries, is_batched, own, split_info

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.server.result import InfoPart
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["Columns", "wide_enough"]


class Columns:
    """Collect infos of n envs; `add` parts of them, then read ``infos``.

    Args:
        num_envs: n.

    Attributes:
        infos: What was collected, as ``SyncVectorEnv`` would give it.
    """

    def __init__(self, num_envs: int) -> None:
        self.infos: dict[str, Any] = {}
        self._n = num_envs

    def add(self, part: InfoPart) -> None:
        """Take in what one message said of some envs."""
        if len(part.rows):
            self._add(self.infos, part.info, part.slots, part.rows, top=True)

    def put(self, path: tuple[str, ...], slots: Array, values: Array) -> None:
        """Set one entry of some envs.

        Args:
            path: Its key, and those of the dicts it is in.
            slots: int ``[k]``.
            values: ``[k, *shape]``.
        """
        target = self.infos
        for key in path[:-1]:
            self._mark(target, key, slots)
            target = target.setdefault(key, {})
        self._put(target, path[-1], values, slots)

    def _add(self, target: dict[str, Any], info: Mapping[Any, Value], slots: Array, rows: Array, *, top: bool) -> None:
        m = len(slots)
        for name, value, present in info_entries(info, m, top=top):
            at = rows if present is None else rows[present[rows]]
            if not len(at):
                continue
            if isinstance(value, Mapping):
                inner = target.setdefault(name, {})
                if isinstance(inner, dict):
                    self._add(inner, value, slots, at, top=False)
                    self._mark(target, name, slots[at])
                else:  # others have no dict under this key
                    rows_of_dicts = [split_info({"it": value}, m)[row]["it"] for row in at.tolist()]
                    self._put(target, name, _objects(rows_of_dicts), slots[at])
            else:
                self._put(target, name, _rows_of(value, m, at), slots[at])

    def _put(self, target: dict[str, Any], name: str, values: Array, slots: Array) -> None:
        column = target.get(name)
        if column is None:
            column = np.full(self._n, None) if values.dtype == object else _zeros(self._n, values)
        elif isinstance(column, dict):  # others have a dict under this key
            column = _objects([_row(column, slot) for slot in range(self._n)])
        elif column.dtype != values.dtype or column.shape[1:] != values.shape[1:]:
            column = wide_enough(column, values)
        target[name] = column
        if column.dtype == object:
            for slot, value in zip(slots.tolist(), values, strict=True):
                column[slot] = value
        else:
            column[slots] = values
        self._mark(target, name, slots)

    def _mark(self, target: dict[str, Any], name: str, slots: Array) -> None:
        mask = target.get("_" + name)
        if mask is None:
            mask = target["_" + name] = np.zeros(self._n, np.bool_)
        mask[slots] = True


def _zeros(n: int, like: Array) -> Array:
    return np.zeros((n, *like.shape[1:]), like.dtype)


def _rows_of(value: Value, m: int, at: Array) -> Array:
    """Give the rows of one entry: an array of numbers, or of objects where Gymnasium would have objects."""
    if is_batched(value, m):
        rows: Array = value[at]
        return rows.astype(object) if rows.dtype.kind == "U" and rows.ndim == 1 else rows
    if isinstance(value, list) and len(value) == m:
        listed = [own(value[row]) for row in at.tolist()]
    else:
        listed = [own(value) for _ in at]
    kinds = {type(each) for each in listed}
    if len(kinds) == 1 and kinds <= {int, float, bool}:
        return np.array(listed)
    first = listed[0]
    if isinstance(first, np.ndarray) and all(
        isinstance(each, np.ndarray) and each.shape == first.shape for each in listed
    ):
        return np.stack(listed)
    return _objects(listed)


def wide_enough(column: Array, values: Array) -> Array:
    """Give a column that can hold its own values and others: of the numbers' common dtype, else of objects."""
    kinds = {column.dtype.kind, values.dtype.kind}
    if column.shape[1:] == values.shape[1:] and kinds <= set("iuf"):
        return column.astype(np.result_type(column, values))
    return column if column.dtype == object else _objects(column.tolist() if column.ndim == 1 else list(column))


def _objects(listed: Sequence[Any]) -> Array:
    objects = np.full(len(listed), None)
    for i, each in enumerate(listed):
        objects[i] = each
    return objects


def _row(columns: Mapping[str, Any], slot: int) -> dict[str, Any]:
    """Give one env's dict of columns with masks."""
    row: dict[str, Any] = {}
    for key, value in columns.items():
        mask = columns.get("_" + key)
        if mask is not None and mask[slot]:
            row[key] = _row(value, slot) if isinstance(value, dict) else value[slot]
    return row
