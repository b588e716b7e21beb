"""The infos of several envs in one map: batching them, splitting, merging, and Gymnasium's vector form of them.

A batched info [5.4] holds, per key, an array whose leading dimension is the number of envs. A key that only some envs
have is accompanied by a bool array ``_key`` that says which. Gymnasium 1.x's vector infos have nearly that form, so
what goes from one to the other goes as columns, with no look at any one env. Pure; client and adapters use it alike.

Two names are special on the wire: ``episode`` is the record of [5.4], so an env's own ``episode`` info travels as
``env_episode``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.errors import EncodeError, RemoteProtocolError
from plugrl_bridges.wire.arrays import is_unicode
from plugrl_bridges.wire.codec import encode

if TYPE_CHECKING:
    from plugrl_bridges.wire.arrays import Array, Value

__all__ = [
    "Columns",
    "EpisodeRecord",
    "batch_infos",
    "check_splittable",
    "columns_for_wire",
    "episode_records",
    "merged",
    "own",
    "row_info",
    "scattered",
    "split_info",
    "wide_enough",
]


_WIDEST_BYTES = 8  # a long double stays at home
_MAX_ENTRIES = 4_000_000
"""Keys times envs of one info: every key becomes an entry of every env's dict, so few bytes could cost much."""


class EpisodeRecord:
    """What a client reports of an episode that ended: return ``r``, length ``l`` (env steps), success ``s``."""

    __slots__ = ("length", "ret", "success")

    def __init__(self, ret: float, length: int, success: bool | None) -> None:
        self.ret = ret
        self.length = length
        self.success = success


def check_splittable(info: Mapping[Any, Value], m: int, *, what: str = "feedback: info", clause: str = "5.4") -> None:
    """Refuse an info that cannot be split per env.

    Args:
        info: The map, at least one key.
        m: Number of envs in the message.
        what: Name of the map, for the text of an error.
        clause: Clause that the map is under.

    Raises:
        RemoteProtocolError: if m > 1 and no array of length m stands at the top level or one map down [5.4], or if it
            would come to too many entries.
    """
    if m <= 1:
        return
    if not _is_splittable(info, m):
        raise RemoteProtocolError(
            f"{what} with keys {sorted(str(key)[:40] for key in info)[:8]} holds no array of length {m}, so it "
            "cannot be split per env",
            clause=clause,
        )
    entries = _count_keys(info) * m
    if entries > _MAX_ENTRIES:
        raise RemoteProtocolError(
            f"{what} comes to {entries} entries for {m} envs, at most {_MAX_ENTRIES} are allowed", clause=clause
        )


def _is_splittable(info: Mapping[Any, Value], m: int) -> bool:
    for value in info.values():
        if _is_batched(value, m):
            return True
        if isinstance(value, Mapping) and any(_is_batched(inner, m) for inner in value.values()):
            return True
    return False


def _is_batched(value: Value, m: int) -> bool:
    """Return whether a value has one row per env."""
    return isinstance(value, np.ndarray) and value.ndim >= 1 and len(value) == m


def _count_keys(info: Mapping[Any, Value]) -> int:
    return len(info) + sum(_count_keys(value) for value in info.values() if isinstance(value, Mapping))


def episode_records(info: Mapping[Any, Value], m: int) -> list[EpisodeRecord | None]:
    """Read ``info["episode"]``: one record per env, None where ``mask`` is false or nothing usable stands there.

    Args:
        info: The feedback's info map.
        m: Number of envs in the feedback.
    """
    episode = info.get("episode")
    if not isinstance(episode, Mapping):
        return [None] * m
    returns, lengths, success, mask = (_numbers(episode.get(key), m) for key in ("r", "l", "s", "mask"))
    if returns is None or lengths is None:
        return [None] * m
    usable = np.isfinite(lengths) if mask is None else np.isfinite(lengths) & (mask != 0)
    return [
        EpisodeRecord(float(returns[i]), int(lengths[i]), None if success is None else bool(success[i]))
        if usable[i]
        else None
        for i in range(m)
    ]


def _numbers(value: Value, m: int) -> Array | None:
    """Return an array of m numbers, or of the one number that stands there for a single env; None for anything else."""
    if isinstance(value, (bool, int, float, list, np.generic)):
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError):  # a ragged list
            return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf" or value.size != m or value.ndim > 1:
        return None
    return value.reshape(m)


def split_info(info: Mapping[Any, Value], m: int) -> list[dict[str, Any]]:
    """Return one info dict per env of a batched info, without the ``episode`` record.

    Args:
        info: A map that passed `check_splittable`. Arrays may be views; the result holds copies.
        m: Number of envs.

    Returns:
        A list of m dicts. Scalars are Python scalars, larger entries arrays. What is not batched goes to every env.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(m)]
    _split(info, m, rows, top=True)
    return rows


def _split(info: Mapping[Any, Value], m: int, rows: list[dict[str, Any]], *, top: bool) -> None:
    for name, value, present in _entries(info, m, top=top):
        if isinstance(value, Mapping):
            inner: list[dict[str, Any]] = [{} for _ in range(m)]
            _split(value, m, inner, top=False)
            items: Sequence[Any] = inner
        elif _is_batched(value, m):
            items = value.tolist() if value.ndim == 1 else [row.copy() for row in value]
        elif isinstance(value, list) and len(value) == m:
            items = [own(item) for item in value]
        else:
            items = [own(value) for _ in range(m)]
        for i in range(m):
            if present is None or present[i]:
                rows[i][name] = items[i]


def _entries(info: Mapping[Any, Value], m: int, *, top: bool) -> Iterator[tuple[str, Value, Array | None]]:
    """Return the entries of a batched info under the names that the envs gave them, each with its mask.

    Args:
        info: The map.
        m: Number of envs in the message.
        top: Whether this is the whole map, and not a map inside of it.

    Yields:
        Name, what is under it, and a bool array ``[m]`` of the envs that have it; None: all. Masks and the record of
        [5.4] are no entries.
    """
    for key, value in info.items():
        name = key if isinstance(key, str) else str(key, "utf-8", "replace")
        if top and name == "episode":
            continue
        if name.startswith("_") and name[1:] in info and _is_mask(value, m):
            continue
        mask = info.get("_" + name)
        yield "episode" if top and name == "env_episode" else name, value, mask if _is_mask(mask, m) else None


def own(value: Value) -> Value:
    """Copy a value that lives as long as the message, or that several envs would share."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [own(item) for item in value]
    if isinstance(value, Mapping):
        return {key: own(item) for key, item in value.items()}
    return value


def _is_mask(value: Value, m: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (m,)


def batch_infos(infos: Sequence[Mapping[str, Any]], *, nested: bool = False) -> tuple[dict[str, Value], set[str]]:
    """Batch the info dicts of several envs for the wire.

    Args:
        infos: One dict per env.
        nested: These are dicts inside infos, where no name is special.

    Returns:
        The batched map, and the keys that the wire cannot carry (they are left out; warn about them once).
    """
    batched: dict[str, Value] = {}
    refused: set[str] = set()
    for key in dict.fromkeys(key for info in infos for key in info):
        present = [key in info for info in infos]
        values = [info[key] for info in infos if key in info]
        column: Value | None
        if not isinstance(key, str):
            column = None
        elif all(isinstance(value, Mapping) for value in values):
            column, inner_refused = batch_infos([info.get(key, {}) for info in infos], nested=True)
            refused.update(f"{key}.{name}" for name in inner_refused)
        else:
            column = _column(values, present)
        if column is None and isinstance(key, str):
            column = _scalars(infos, key)
        if column is None:
            refused.add(str(key))
            continue
        name = "env_episode" if key == "episode" and not nested else key
        batched[name] = column
        if not all(present) or isinstance(column, list):
            batched["_" + name] = np.array(present)
    if batched and not nested and len(infos) > 1 and not _is_splittable(batched, len(infos)):
        # Nothing but maps of maps: a mask lends the array of length m that splitting wants [5.4].
        batched["_" + next(iter(batched))] = np.ones(len(infos), np.bool_)
    return batched, refused


def scattered(batched: Mapping[str, Value], rows: Sequence[int], n: int) -> dict[str, Value]:
    """Return the batched info of a few envs as that of n, whose others have none.

    Args:
        batched: From `batch_infos`, of k envs.
        rows: Which of the n they are, ``[k]``.
        n: Number of envs.
    """
    k = len(rows)
    if k == n:
        return dict(batched)
    return merged([(batched, np.arange(k), np.array(rows, np.int64))], n) or {}


def merged(parts: Sequence[tuple[Mapping[str, Value], Array, Array]], n: int) -> dict[str, Value] | None:
    """Return rows of several batched infos as one of n envs.

    Args:
        parts: Of each its info, which of its rows to take, int ``[k]``, and where they go, int ``[k]``.
        n: Number of envs.

    Returns:
        The merged info; None if two have different kinds of values under one key.
    """
    wide: dict[str, Value] = {}
    for key in dict.fromkeys(key for info, _, _ in parts for key in info):
        having = [(info, rows, at) for info, rows, at in parts if key in info]
        if key.startswith("_") and any(key[1:] in info for info, _, _ in parts):
            continue
        present = np.zeros(n, np.bool_)
        for info, rows, at in having:
            mask = info.get("_" + key)
            present[at] = mask[rows] if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else True
        values = [(info[key], rows, at) for info, rows, at in having]
        column = merged(values, n) if all(isinstance(value, Mapping) for value, _, _ in values) else _merged(values, n)
        if column is None:
            return None
        wide[key] = column
        if isinstance(column, list) or not present.all():
            wide["_" + key] = present
    return wide


def _merged(values: Sequence[tuple[Value, Array, Array]], n: int) -> Value:
    first = values[0][0]
    if isinstance(first, np.ndarray):
        column = np.zeros((n, *first.shape[1:]), first.dtype)
        for value, rows, at in values:
            if not isinstance(value, np.ndarray) or (value.dtype, value.shape[1:]) != (first.dtype, first.shape[1:]):
                return None
            column[at] = value[rows]
        return column
    listed: list[Value] = [None] * n
    for value, rows, at in values:
        if not isinstance(value, list):
            return None
        for row, target in zip(rows.tolist(), at.tolist(), strict=True):
            listed[target] = value[row]
    return listed


def _column(values: list[Any], present: list[bool]) -> Array | None:
    """Stack the values of one key; None if they are of different kinds or not of a kind that the wire carries."""
    try:
        arrays = [np.asarray(value) for value in values]
    except (ValueError, TypeError):
        return None
    first = arrays[0]
    kinds = {array.dtype.kind for array in arrays}
    if any(array.shape != first.shape for array in arrays) or (len(kinds) > 1 and (not first.shape or "U" in kinds)):
        return None
    dtype = np.result_type(*arrays)
    if dtype.kind not in "biufU" or (dtype.itemsize > 8 and dtype.kind != "U"):
        return None
    column = np.zeros((len(present), *first.shape), dtype)
    column[np.array(present)] = arrays
    if dtype.kind == "U" and not is_unicode(column.tobytes(), dtype):
        return None
    return column


def _scalars(infos: Sequence[Mapping[str, Any]], key: str) -> list[Value] | None:
    """List the scalars of one key where they are of several kinds, or None; None if one is no scalar of the wire.

    Each keeps its own type: what is 0 in one env and 0.5 in another is an int and a float in the trainer's infos too.
    """
    listed: list[Value] = []
    for info in infos:
        value = info.get(key)
        if isinstance(value, np.generic):
            value = value.item()
        if value is not None and not isinstance(value, (bool, int, float, str)):
            return None
        listed.append(value)
    try:
        encode(listed)
    except EncodeError:  # an int beyond 64 bits, text that is no Unicode
        return None
    return listed


# A vector env's infos ----------------------------------------------------------------------------------------------


def columns_for_wire(infos: Mapping[Any, Any], n: int, *, top: bool = True) -> dict[str, Value] | None:
    """Return vector infos as a feedback carries them; None if something in them is no numeric array of n rows.

    What is not takes the long way, env by env, through `row_info` and `batch_infos`.

    Args:
        infos: As a vector env returned them.
        n: Number of rows.
        top: Whether these are the infos, and not a dict inside of them. There the name ``episode`` is the wire's own
            [5.4], so an ``episode`` of the env travels as ``env_episode``.
    """
    columns: dict[str, Value] = {}
    for key, value in infos.items():
        if not isinstance(key, str):
            return None
        name = key.replace("episode", "env_episode") if top and key in {"episode", "_episode"} else key
        if isinstance(value, Mapping):
            inner = columns_for_wire(value, n, top=False)
            if inner is None:
                return None
            columns[name] = inner
        elif (
            isinstance(value, np.ndarray)
            and value.dtype.kind in "biuf"
            and value.dtype.itemsize <= _WIDEST_BYTES
            and value.ndim >= 1
            and len(value) == n
        ):
            columns[name] = value
        else:
            return None
    return columns


def row_info(infos: Mapping[Any, Any], row: int) -> dict[str, Any]:
    """Return one env's info of a vector env's infos: the keys whose mask, if there is one, holds for this row.

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


class Columns:
    """Infos of n envs in the form of Gymnasium 1.x, collected: `add` batched infos, then read ``infos``.

    Args:
        num_envs: n.

    Attributes:
        infos: What was collected, as ``SyncVectorEnv`` would give it: per key an array, and a mask ``_key``.
    """

    def __init__(self, num_envs: int) -> None:
        self.infos: dict[str, Any] = {}
        self._n = num_envs

    def add(self, info: Mapping[Any, Value], slots: Array, rows: Array | None = None) -> None:
        """Add what one message said of some envs.

        Args:
            info: As it came, batched over m envs.
            slots: int ``[m]``, which of the n they are.
            rows: int ``[k]``, which of the m to add; None for all.
        """
        self._add(self.infos, info, slots, np.arange(len(slots)) if rows is None else rows, top=True)

    def _add(self, target: dict[str, Any], info: Mapping[Any, Value], slots: Array, rows: Array, *, top: bool) -> None:
        m = len(slots)
        for name, value, present in _entries(info, m, top=top):
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
            shape = (self._n, *values.shape[1:])
            column = np.full(shape, None) if values.dtype == object else np.zeros(shape, values.dtype)
        elif isinstance(column, dict):  # others have a dict under this key
            column = _objects([row_info(column, slot) for slot in range(self._n)])
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


def _rows_of(value: Value, m: int, at: Array) -> Array:
    """Return the rows of one entry: an array of numbers, or of objects where Gymnasium would have objects."""
    if _is_batched(value, m):
        rows: Array = value[at]
        return rows.astype(object) if rows.dtype.kind == "U" and rows.ndim == 1 else rows
    every = isinstance(value, list) and len(value) == m
    listed = [own(value[row] if every else value) for row in at.tolist()]
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
    """Return a column that can hold its own values and others: of the numbers' common dtype, else of objects."""
    kinds = {column.dtype.kind, values.dtype.kind}
    if column.shape[1:] == values.shape[1:] and kinds <= set("iuf"):
        return column.astype(np.result_type(column, values))
    return column if column.dtype == object else _objects(column.tolist() if column.ndim == 1 else list(column))


def _objects(listed: Sequence[Any]) -> Array:
    objects = np.full(len(listed), None)
    for i, each in enumerate(listed):
        objects[i] = each
    return objects
