"""Own the ``info`` map of a feedback [5.4]: batching the info dicts of several envs, and splitting them again.

A batched info holds, per key, an array whose leading dimension is the number of envs. A key that only some envs have
is accompanied by a bool array ``_key`` that says which, as in Gymnasium's vector infos. Pure; knows no slots.

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
    "EpisodeRecord",
    "batch_infos",
    "check_splittable",
    "episode_records",
    "info_entries",
    "is_batched",
    "own",
    "scattered",
    "split_info",
]


_MAX_ENTRIES = 4_000_000
"""Keys times envs of one info: every key becomes an entry of every env's dict, so few bytes could cost much."""


class EpisodeRecord:
    """Say what a client reports of an episode that ended: return ``r``, length ``l`` (env steps), success ``s``."""

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
        if is_batched(value, m):
            return True
        if isinstance(value, Mapping) and any(is_batched(inner, m) for inner in value.values()):
            return True
    return False


def is_batched(value: Value, m: int) -> bool:
    """Tell whether a value has one row per env."""
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
    """Give an array of m numbers, or of the one number that stands there for a single env; None for anything else."""
    if isinstance(value, (bool, int, float, list, np.generic)):
        try:
            value = np.asarray(value)
        except (ValueError, OverflowError):  # a ragged list
            return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf" or value.size != m or value.ndim > 1:
        return None
    return value.reshape(m)


def split_info(info: Mapping[Any, Value], m: int) -> list[dict[str, Any]]:
    """Make one info dict per env of a batched info, without the ``episode`` record.

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
    for name, value, present in info_entries(info, m, top=top):
        if isinstance(value, Mapping):
            inner: list[dict[str, Any]] = [{} for _ in range(m)]
            _split(value, m, inner, top=False)
            items: Sequence[Any] = inner
        elif is_batched(value, m):
            items = value.tolist() if value.ndim == 1 else [row.copy() for row in value]
        elif isinstance(value, list) and len(value) == m:
            items = [own(item) for item in value]
        else:
            items = [own(value) for _ in range(m)]
        for i in range(m):
            if present is None or present[i]:
                rows[i][name] = items[i]


def info_entries(info: Mapping[Any, Value], m: int, *, top: bool) -> Iterator[tuple[str, Value, Array | None]]:
    """Give the entries of a batched info under the names that the envs gave them, each with its mask.

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
    """Give the batched info of a few envs as that of n, whose others have none.

    Args:
        batched: From `batch_infos`, of k envs.
        rows: Which of the n they are, ``[k]``.
        n: Number of envs.
    """
    k, at = len(rows), list(rows)
    if k == n:
        return dict(batched)
    there = np.zeros(n, np.bool_)
    there[at] = True
    wide: dict[str, Value] = {}
    for key, value in batched.items():
        if isinstance(value, Mapping):
            wide[key] = scattered(value, rows, n)
        elif isinstance(value, np.ndarray):
            wide[key] = np.zeros((n, *value.shape[1:]), value.dtype)
            wide[key][at] = value
        else:
            listed: list[Value] = [None] * n
            for row, item in zip(at, value, strict=True):
                listed[row] = item
            wide[key] = listed
        if not (key.startswith("_") and key[1:] in batched) and "_" + key not in batched:
            wide["_" + key] = there
    return wide


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
