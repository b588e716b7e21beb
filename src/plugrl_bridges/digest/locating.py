"""The way back from two digests to the one value that differs.

If two rows of words differ in one word only, the difference of their digests is that word's key times the difference
of the word, which fits into 33 bits. Dividing by every key tells which word it is: for another key the quotient is as
good as random, and fits with a chance of 2**-31. Nothing is found where several words differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.digest.digest import digested_dtype, first_words, keys, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.digest.digest import Entry
    from plugrl_bridges.wire.arrays import Array

__all__ = ["Located", "locate"]

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Located:
    """The value that differs.

    Attributes:
        field: ``"terminated"``, ``"truncated"``, ``"reward"``, ``"action"`` or ``"obs"``.
        cell: With the name of the entry and the place in it, such as ``"obs[2]"``.
        ours: The value that is known.
        theirs: The one that the other digest is of.
    """

    field: str
    cell: str
    ours: Any
    theirs: Any


def locate(
    difference: int,
    *,
    flags: int,
    reward: float,
    actions: Sequence[tuple[str, Entry, Array]],
    observations: Sequence[tuple[str, Entry, Array]],
) -> Located | None:
    """Find the one value in which a step of one env differs; None if there are several, or something else differs.

    Args:
        difference: The other digest less that of the values below, both after the same digest of the step before.
        flags: 1 for terminated, 2 for truncated, 3 for both; 4 for a reset.
        reward: Of the step; 0 for a reset.
        actions: Name, entry and value of each entry of the action; a reset's are zeros.
        observations: Likewise of the observation.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        head = np.array([flags, np.array(reward, np.float64).astype("<f4").view("<u4")], "<u4")
    pieces = [words_of(value[None], entry)[0] for _, entry, value in (*actions, *observations)]
    firsts, total = first_words([entry for _, entry, _ in actions], [entry for _, entry, _ in observations])
    words = np.empty(total, "<u4")
    words[:2] = head
    for first, piece in zip(firsts, pieces, strict=True):
        words[first : first + len(piece)] = piece
    found = _changed_word(words, difference & _MASK)
    if found is None:
        return None
    at, word = found
    if at == 0:
        changed = int(words[0]) ^ word
        if word > 3 or changed > 3:
            return None
        kind = "truncated" if changed == 2 else "terminated"  # of an end of the wrong kind both differ
        bit = 2 if changed == 2 else 1
        return Located(kind, kind, bool(int(words[0]) & bit), bool(word & bit))
    if at == 1:
        return Located("reward", "reward", words[1:2].view("<f4")[0], np.array([word], "<u4").view("<f4")[0])
    for number, ((name, entry, _), piece) in enumerate(zip((*actions, *observations), pieces, strict=True)):
        place = at - firsts[number]
        if 0 <= place < len(piece):
            changed = piece.copy()
            changed[place] = word
            cell = _first_cell(entry, piece, changed)
            if cell is None:
                return None
            where, ours, theirs = cell
            return Located("action" if number < len(actions) else "obs", f"{name}{where}", ours, theirs)
    return None


def _changed_word(words: Array, difference: int) -> tuple[int, int] | None:
    """Return number and other value of the one word whose change makes this difference of digests."""
    own = keys(len(words))
    with np.errstate(over="ignore"):
        inverse = own.copy()  # right in the lowest three bits; each round doubles them
        for _ in range(5):
            inverse *= np.uint64(2) - own * inverse
        quotients = (inverse * np.uint64(difference)).view(np.int64)
    fitting = np.flatnonzero((np.abs(quotients) < 1 << 32) & (quotients != np.iinfo(np.int64).min))
    for at in fitting.tolist():
        other = int(words[at]) + int(quotients[at])
        if 0 <= other < 1 << 32 and other != int(words[at]):
            return at, other
    return None


def _first_cell(entry: Entry, *words: Array) -> tuple[str, Any, Any] | None:
    """Return place and values of the first element in which two values of an entry differ; None if it is padding."""
    carried = digested_dtype(entry.dtype)
    size = math.prod(entry.shape)
    plain = [each.view(np.uint8)[: size * carried.itemsize] for each in words]
    bits = [each.reshape(size, carried.itemsize) for each in plain]
    cells = np.flatnonzero((bits[0] != bits[1]).any(axis=1)).tolist()
    if not cells:
        return None
    index = np.unravel_index(cells[0], entry.shape)
    ours, theirs = (each.view(carried)[cells[0]] for each in plain)
    return f"[{','.join(map(str, index))}]" if index else "", ours, theirs
