"""Own the short way of a vector env's infos to the wire: as the columns that they are, with no look at any one env.

What is not all plain arrays takes the long way, env by env, through ``wire.info``. ``client.vector_env`` is the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["columns_for_wire", "merged_columns"]

_WIDEST_BYTES = 8  # a long double stays at home


def columns_for_wire(infos: Mapping[Any, Any], n: int, *, top: bool = True) -> dict[str, Value] | None:
    """Give vector infos as a feedback carries them; None if something in them is no numeric array of n rows.

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


def merged_columns(own: Mapping[str, Value], final: Mapping[str, Value], ended: Array) -> dict[str, Value] | None:
    """Give the rows of ``final`` where episodes ended, and those of ``own`` elsewhere.

    Args:
        own: From `columns_for_wire`.
        final: Likewise.
        ended: bool ``[n]``.

    Returns:
        The merged columns; None if the two have different kinds of values under one key.
    """
    merged: dict[str, Value] = {}
    for key in dict.fromkeys([*own, *final]):
        if key.startswith("_") and (key[1:] in own or key[1:] in final):
            continue
        mine, last = own.get(key), final.get(key)
        present = np.where(ended, _mask(final, key, ended), _mask(own, key, ended))
        if isinstance(mine, Mapping) or isinstance(last, Mapping):
            if not all(isinstance(each, Mapping) or each is None for each in (mine, last)):
                return None
            inner = merged_columns(mine or {}, last or {}, ended)
            if inner is None:
                return None
            merged[key] = inner
        else:
            some: Any = last if mine is None else mine
            if mine is not None and last is not None and (mine.dtype, mine.shape) != (last.dtype, last.shape):
                return None
            column = np.zeros_like(some) if mine is None else mine.copy()
            if last is not None:
                column[ended] = last[ended]
            merged[key] = column
        if not present.all():
            merged["_" + key] = present
    return merged


def _mask(columns: Mapping[str, Value], key: str, ended: Array) -> Array:
    if key not in columns:
        return np.zeros_like(ended)
    mask = columns.get("_" + key)
    return mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else np.ones_like(ended)
