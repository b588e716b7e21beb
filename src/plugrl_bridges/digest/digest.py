"""The digest of a step: 64 bits, chained per env over what that env took and gave.

Pure arithmetic on 32-bit words, quick in numpy over a batch of envs, and a few lines in any language:

- A step is a row of words ``w[0..W-1]``: flags, reward, the entries of the action, the entries of the observation that
  the step returned; entries in the order of their names, since spaces that are equal may have them in different orders.
  Each entry is padded with zero bytes to whole words. Bytes are little-endian.
- Flags: 1 terminated, 2 truncated, 4 reset. A reset has no action and no reward: these words are zero.
- A float of any width, and the reward, is rounded to float32 (nearest, ties to even; beyond the largest: infinity) and
  is one word; so a wire that carries float32 and one that carries float64 have the same digest. Everything else stands
  in the dtype of its space: integers and bools as their bytes, text as UTF-32, padded with NUL to the longest allowed.
  Of a float that was sent for an integer, the whole part counts.
- ``chain = chain * MULTIPLIER + key[0] * w[0] + … + key[W-1] * w[W-1]``, modulo 2**64. ``key[j]`` is the j-th output of
  SplitMix64 from state 0, with the lowest bit set. A reset begins the chain anew, from 0.

A single changed word always changes the sum, since the keys are odd; any other change does but for a chance of about
2**-33; and a chain that differs cannot meet again before the next reset, since the multiplier is odd. It guards against
faults, not against somebody who means harm.

`EnvDigest` is for one env, `StepDigests` for a batch; both give the same values. Knows no file, message or trainer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.wire.arrays import Array

__all__ = [
    "MULTIPLIER",
    "RESET",
    "TERMINATED",
    "TRUNCATED",
    "Entry",
    "EnvDigest",
    "StepDigests",
    "digested_dtype",
    "first_words",
    "keys",
    "sum_of_words",
    "words_of",
]

MULTIPLIER = 0xD1342543DE82EF95
"""What a chain is multiplied with at each step."""

TERMINATED, TRUNCATED, RESET = 1, 2, 4
"""The flags, the first word of a step."""

_MASK = (1 << 64) - 1
_ALONE_WORDS = 256
"""Entries from this size on are summed where they lie; smaller ones are gathered first, for fewer calls."""

_keys = np.empty(0, np.uint64)


class Entry(Protocol):
    """What must be known of one entry of an action or an observation; `plugrl_bridges.spaces.Leaf` is one."""

    @property
    def name(self) -> str:
        """Its path, joined with ``/``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one env's value."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of its space."""


def keys(count: int) -> Array:
    """Return the first keys, uint64 ``[count]``: SplitMix64 from state 0, lowest bit set."""
    global _keys  # noqa: PLW0603 - a table that only grows
    if count > len(_keys):
        more = max(count, 2 * len(_keys), 256)
        mixed = np.arange(1, more + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        _keys = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return _keys[:count]


def digested_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of a space's dtype are digested."""
    return np.dtype("<f4") if dtype.kind == "f" else dtype.newbyteorder("<")


def _word_count(entry: Entry) -> int:
    return -(-math.prod(entry.shape) * digested_dtype(entry.dtype).itemsize // 4)


def first_words(actions: Sequence[Entry], observations: Sequence[Entry]) -> tuple[list[int], int]:
    """Return the number of each entry's first word in the row of a step, and that of all words.

    Args:
        actions: Entries of the action, in any order.
        observations: Entries of the observation, likewise.

    Returns:
        One number per entry, those of the action first, in the order of the arguments; then the length of the row.
    """
    firsts: list[int] = []
    at = 2
    for entries in (actions, observations):
        names = [entry.name for entry in entries]
        own = [0] * len(names)
        for place in sorted(range(len(names)), key=names.__getitem__):
            own[place] = at
            at += _word_count(entries[place])
        firsts += own
    return firsts, at


def words_of(values: Array, entry: Entry) -> Array:
    """Return the words of one entry of n envs; a view where the bytes may be taken as they are.

    Args:
        values: ``[n, *shape]``.
        entry: What it is an entry of.

    Returns:
        uint32 ``[n, words]``.
    """
    carried = digested_dtype(entry.dtype)
    if values.dtype != carried:
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(carried)
    n = len(values)
    plain = np.ascontiguousarray(values).reshape(n, math.prod(entry.shape)).view(np.uint8)
    plain = plain.reshape(n, math.prod(entry.shape) * carried.itemsize)
    if plain.shape[1] % 4:
        padded = np.zeros((n, 4 * _word_count(entry)), np.uint8)
        padded[:, : plain.shape[1]] = plain
        plain = padded
    return plain.view("<u4")


def sum_of_words(words: Array, first: int = 0) -> Array:
    """Sum words times keys, modulo 2**64.

    Args:
        words: uint32 ``[n, words]``.
        first: Number of the first word's key.

    Returns:
        uint64 ``[n]``.
    """
    own = keys(first + words.shape[1])[first:]
    # Two ways to the same sums: numpy is quicker with one row where that is said to be one.
    result: Array = np.einsum("j,j->", words[0], own)[None] if len(words) == 1 else np.einsum("ij,j->i", words, own)
    return result


class _Gathered:
    """The words of n envs that are gathered, and the views through which entries are put among them."""

    def __init__(self, num_envs: int, actions: Sequence[Entry], observations: Sequence[Entry]) -> None:
        entries = [*actions, *observations]
        numbers = [0, 1]
        self.alone: list[int | None] = []
        """Per entry the number of its first key, where it is summed alone."""
        firsts, total = first_words(actions, observations)
        places = list[int | None]()
        for entry, at in zip(entries, firsts, strict=True):
            count = _word_count(entry)
            alone = count >= _ALONE_WORDS
            self.alone.append(at if alone else None)
            places.append(None if alone else len(numbers))
            if not alone:
                numbers += range(at, at + count)
        self.keys = keys(total)[numbers]
        self.words = np.zeros((num_envs, len(numbers)), "<u4")
        self.flags = self.words[:, 0]
        self.rewards = self.words.view("<f4")[:, 1]
        self.columns: list[Array | None] = []
        """Per entry ``[n, elements]`` among the words; None where it is summed alone."""
        for entry, place in zip(entries, places, strict=True):
            carried = digested_dtype(entry.dtype)
            size = math.prod(entry.shape)
            column = None
            if place is not None:
                own = self.words[:, place : place + _word_count(entry)].view(np.uint8)[:, : size * carried.itemsize]
                column = own.view(carried)
            self.columns.append(column)
        gathered = zip(actions, places, strict=False)
        self.action_words = self.words[
            :, 2 : 2 + sum(_word_count(each) for each, place in gathered if place is not None)
        ]


class StepDigests:
    """The chained digests of a batch of envs.

    Begin each env with `reset`; give each step to `step`. Values are never changed, and may be forgotten afterwards.

    Args:
        num_envs: n.
        actions: Entries of the action.
        observations: Entries of the observation.
    """

    def __init__(self, num_envs: int, actions: Sequence[Entry], observations: Sequence[Entry]) -> None:
        self.values = np.zeros(num_envs, np.uint64)
        """uint64 ``[n]``: the chain of each env. Each call makes a new array."""
        self._actions = tuple(actions)
        self._observations = tuple(observations)
        self._gathered = _Gathered(num_envs, actions, observations)
        self._multiplier = np.uint64(MULTIPLIER)

    def step(
        self,
        actions: Sequence[Array],
        rewards: Array,
        terminated: Array,
        truncated: Array,
        observations: Sequence[Array],
    ) -> Array:
        """Add one step of all envs.

        Args:
            actions: Per entry ``[n, *shape]``: what each env took.
            rewards: ``[n]``.
            terminated: bool ``[n]``.
            truncated: bool ``[n]``.
            observations: Per entry ``[n, *shape]``: what each step returned, on an episode's last step the terminal
                observation.

        Returns:
            uint64 ``[n]``: the chains after the step.
        """
        flags = np.add(truncated, truncated, dtype=np.uint8)
        return self.step_with_flags(actions, rewards, np.add(flags, terminated, out=flags), observations)

    def step_with_flags(
        self,
        actions: Sequence[Array],
        rewards: Array | Sequence[float],
        flags: Array | Sequence[int],
        observations: Sequence[Array],
    ) -> Array:
        """Add one step of all envs, as `step` does.

        Args:
            actions: As of `step`.
            rewards: As of `step`.
            flags: ``[n]``: 1 for terminated, 2 for truncated, 3 for both.
            observations: As of `step`.
        """
        to = self._gathered
        with np.errstate(over="ignore", invalid="ignore"):
            to.rewards[:] = rewards
            to.flags[:] = flags
            alone = self._gather(0, self._actions, actions)
            alone += self._gather(len(self._actions), self._observations, observations)
            self.values = self.values * self._multiplier + np.einsum("ij,j->i", to.words, to.keys) + alone
        return self.values

    def reset(self, observations: Sequence[Array], rows: Sequence[int] | Array | None = None) -> Array:
        """Begin the chains of envs anew.

        Args:
            observations: Per entry ``[n, *shape]``; only the rows named are read.
            rows: Which envs; None: all.

        Returns:
            uint64 ``[n]``: the chains after the reset.
        """
        to = self._gathered
        with np.errstate(over="ignore", invalid="ignore"):
            to.flags[:] = RESET
            to.rewards[:] = 0.0
            to.action_words[:] = 0
            alone = self._gather(len(self._actions), self._observations, observations)
            sums = np.einsum("ij,j->i", to.words, to.keys) + alone
        values = self.values.copy()
        picked: Any = slice(None) if rows is None else np.asarray(rows)
        values[picked] = sums[picked]
        self.values = values
        return values

    def _gather(self, first: int, entries: Sequence[Entry], arrays: Sequence[Array]) -> Array | np.uint64:
        """Gather the small entries, and give the sum over the others."""
        to = self._gathered
        sums: Array | np.uint64 = np.uint64(0)
        for at, (entry, array) in enumerate(zip(entries, arrays, strict=True), first):
            column = to.columns[at]
            if column is not None:
                column[:] = array.reshape(column.shape)
            else:
                sums = sums + sum_of_words(words_of(array, entry), to.alone[at] or 0)
        return sums


class EnvDigest:
    """The chained digest of one env; quicker than a batch of one.

    Args:
        actions: Entries of the action.
        observations: Entries of the observation.
    """

    def __init__(self, actions: Sequence[Entry], observations: Sequence[Entry]) -> None:
        self.value = 0
        """The chain."""
        entries = [*actions, *observations]
        to = self._gathered = _Gathered(1, actions, observations)
        self._words = to.words[0]
        self._floats = to.words.view("<f4")[0]
        self._rows = [
            None if column is None else column[0].reshape(entry.shape)
            for column, entry in zip(to.columns, entries, strict=True)
        ]
        self._keys = to.keys
        self._entries = entries
        self._taken = 0
        self._first = len(actions)
        # Whether values may be put in place as they are: no entry that is summed alone, none that is rounded.
        plain = [
            row is not None and not (entry.dtype.kind == "f" and entry.dtype.itemsize > 4)
            for row, entry in zip(self._rows, entries, strict=True)
        ]
        self._plain_action, self._plain_observation = all(plain[: self._first]), all(plain[self._first :])

    def take(self, actions: Sequence[Any]) -> None:
        """Record the action of a step, before the env may change it; call `give` next.

        Args:
            actions: Per entry the value that the env takes.
        """
        self._taken = self._put(0, actions, plain=self._plain_action)

    def give(self, reward: float, terminated: bool, truncated: bool, observations: Sequence[Any]) -> int:
        """Add the step whose action was taken.

        Args:
            reward: As the env gave it.
            terminated: As the env gave it.
            truncated: As the env gave it.
            observations: Per entry the value that the step returned.

        Returns:
            The chain after the step.
        """
        words = self._words
        words[0] = (TERMINATED if terminated else 0) | (TRUNCATED if truncated else 0)
        if -3e38 < reward < 3e38:
            self._floats[1] = reward
        else:
            with np.errstate(over="ignore"):
                self._floats[1] = np.float64(reward)
        total = self._taken + self._put(self._first, observations, plain=self._plain_observation)
        total += int(words.astype(np.uint64).dot(self._keys))
        self.value = value = (self.value * MULTIPLIER + total) & _MASK
        return value

    def reset(self, observations: Sequence[Any]) -> int:
        """Begin the chain anew.

        Args:
            observations: Per entry the value that the reset returned.

        Returns:
            The chain after the reset.
        """
        self._words[0], self._words[1] = RESET, 0
        self._gathered.action_words[:] = 0
        total = self._put(self._first, observations, plain=self._plain_observation)
        self.value = (total + int(self._words.astype(np.uint64).dot(self._keys))) & _MASK
        return self.value

    def _put(self, first: int, values: Sequence[Any], *, plain: bool) -> int:
        """Gather the small entries, and give the sum over the others."""
        if plain:
            for at, value in enumerate(values, first):
                self._rows[at][...] = value  # type: ignore[index]
            return 0
        total = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for at, value in enumerate(values, first):
                row = self._rows[at]
                if row is not None:
                    row[...] = value
                else:
                    entry = self._entries[at]
                    total += int(
                        sum_of_words(words_of(np.asarray(value)[None], entry), self._gathered.alone[at] or 0)[0]
                    )
        return total
