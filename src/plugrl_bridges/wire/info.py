"""Own the ``info`` map of a feedback [5.4]: batching the info dicts of several envs, and splitting them again.

A batched info holds, per key, an array whose leading dimension is the number of envs. A key that only some envs have
is accompanied by a bool array ``_key`` that says which, as in Gymnasium's vector infos. Pure; knows no slots.

Two names are special on the wire: ``episode`` is the record of [5.4], so an env's own ``episode`` info travels as
``env_episode``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.codec import Array, Value

__all__ = ["EpisodeRecord", "batch_infos", "check_splittable", "episode_records", "split_info"]


class EpisodeRecord:
    """Say what a client reports of an episode that just ended: return ``r``, length ``l`` (env steps), success ``s``."""

    __slots__ = ("length", "ret", "success")

    def __init__(self, ret: float, length: int, success: bool | None) -> None:
        self.ret = ret
        self.length = length
        self.success = success


def check_splittable(info: Mapping[Any, Value], m: int) -> None:
    """Refuse an info that cannot be split per env.

    Args:
        info: The map, at least one key.
        m: Number of envs in the feedback.

    Raises:
        RemoteProtocolError: if m > 1 and no array of length m stands at the top level or one map down [5.4].
    """
    if m <= 1:
        return
    for value in info.values():
        if _is_batched(value, m):
            return
        if isinstance(value, Mapping) and any(_is_batched(inner, m) for inner in value.values()):
            return
    raise RemoteProtocolError(
        f"feedback: info with keys {sorted(map(str, info))[:8]} holds no array of length {m}, so it cannot be split per env",
        clause="5.4",
    )


def _is_batched(value: Value, m: int) -> bool:
    return isinstance(value, np.ndarray) and value.ndim >= 1 and len(value) == m


def episode_records(info: Mapping[Any, Value], m: int) -> list[EpisodeRecord | None]:
    """Read ``info["episode"]``: one record per env, None where ``mask`` is false or nothing usable stands there.

    Args:
        info: The feedback's info map.
        m: Number of envs in the feedback.
    """
    none: list[EpisodeRecord | None] = [None] * m
    episode = info.get("episode")
    if not isinstance(episode, Mapping):
        return none
    returns, lengths = (np.atleast_1d(np.asarray(episode.get(key, ()))) for key in ("r", "l"))
    if returns.shape != (m,) or lengths.shape != (m,) or returns.dtype.kind not in "iuf" or lengths.dtype.kind not in "iuf":
        return none
    success = np.atleast_1d(np.asarray(episode.get("s", ())))
    mask = np.atleast_1d(np.asarray(episode.get("mask", True)))
    known = success.shape == (m,) and success.dtype.kind in "biuf"
    return [
        EpisodeRecord(float(returns[i]), int(lengths[i]), bool(success[i]) if known else None)
        if bool(mask[i if mask.shape == (m,) else 0])
        else None
        for i in range(m)
    ]


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
    for key, value in info.items():
        name = key if isinstance(key, str) else str(key, "utf-8", "replace")
        if top and name == "episode":
            continue
        if name.startswith("_") and name[1:] in info and _is_mask(value, m):
            continue
        mask = info.get("_" + name)
        present = mask if _is_mask(mask, m) else None
        if top and name == "env_episode":
            name = "episode"
        if isinstance(value, Mapping):
            inner: list[dict[str, Any]] = [{} for _ in range(m)]
            _split(value, m, inner, top=False)
            items: Sequence[Any] = inner
        elif _is_batched(value, m):
            items = value.tolist() if value.ndim == 1 else [row.copy() for row in value]
        elif isinstance(value, list) and len(value) == m:
            items = value
        else:
            items = [value.copy() if isinstance(value, np.ndarray) else value] * m
        for i in range(m):
            if present is None or present[i]:
                rows[i][name] = items[i]


def _is_mask(value: Value, m: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (m,)


def batch_infos(infos: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Value], set[str]]:
    """Batch the info dicts of several envs for the wire.

    Args:
        infos: One dict per env.

    Returns:
        The batched map, and the keys that the wire cannot carry (they are left out; warn about them once).
    """
    batched: dict[str, Value] = {}
    refused: set[str] = set()
    if any(infos):
        for key in dict.fromkeys(key for info in infos for key in info):
            _batch_key(key, infos, batched, refused)
        if "episode" in batched:
            batched["env_episode"] = batched.pop("episode")
            if "_episode" in batched:
                batched["_env_episode"] = batched.pop("_episode")
    return batched, refused


def _batch_key(key: Any, infos: Sequence[Mapping[str, Any]], batched: dict[str, Value], refused: set[str]) -> None:
    present = [key in info for info in infos]
    values = [info[key] for info in infos if key in info]
    if not isinstance(key, str):
        refused.add(str(key))
        return
    if all(isinstance(value, Mapping) for value in values):
        inner, inner_refused = batch_infos_flat([info.get(key, {}) for info in infos])
        refused.update(f"{key}.{name}" for name in inner_refused)
        batched[key] = inner
    else:
        column = _column(values, present)
        if column is None:
            refused.add(key)
            return
        batched[key] = column
    if not all(present):
        batched["_" + key] = np.array(present)


def batch_infos_flat(infos: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Value], set[str]]:
    """Batch nested info dicts, where no name is special; see `batch_infos`."""
    batched: dict[str, Value] = {}
    refused: set[str] = set()
    for key in dict.fromkeys(key for info in infos for key in info):
        _batch_key(key, infos, batched, refused)
    return batched, refused


def _column(values: list[Any], present: list[bool]) -> Array | None:
    """Stack the values of one key; None if they are of different kinds or not of a kind that the wire carries."""
    try:
        arrays = [np.asarray(value) for value in values]
    except (ValueError, TypeError):
        return None
    first = arrays[0]
    if any(array.shape != first.shape or array.dtype.kind != first.dtype.kind for array in arrays):
        return None
    if first.dtype.kind not in "biufU" or first.dtype.itemsize > 8 and first.dtype.kind != "U":
        return None
    if all(present):
        return np.stack(arrays)
    dtype = np.result_type(*arrays) if first.dtype.kind != "U" else max((a.dtype for a in arrays), key=lambda d: d.itemsize)
    column = np.zeros((len(present), *first.shape), dtype)
    column[present] = arrays
    return column
