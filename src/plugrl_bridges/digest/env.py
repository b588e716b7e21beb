"""The digest at an env: `DigestEnv`, a wrapper that keeps the digest of what the env took and gave.

A client puts one around each env; ``ledger.env`` derives a wrapper from it that writes all of it down, too.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat, TypeAlias

import gymnasium
import numpy as np

from plugrl_bridges.digest.entries import Entries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.digest.digest import Entry, EnvDigest
    from plugrl_bridges.digest.shared import DigestRow

__all__ = ["DigestEnv"]

Env: TypeAlias = "gymnasium.Env[Any, Any]"


class DigestEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that digests what an env takes and gives, and passes it through unchanged.

    Args:
        env: Any env whose spaces are made of Box, Discrete, MultiDiscrete, MultiBinary and Text.
        digest: Where the steps go, made of `entries`; None: nowhere, until `keep_digest`.
        owner: Whose values they are, for errors.

    Raises:
        LedgerError: for a space that cannot be digested.
    """

    _not_copied: ClassVar[dict[str, Any]] = {"_digest": None}
    """What a deep copy does not share with its original, and what it has instead."""

    def __init__(self, env: Env, digest: EnvDigest | DigestRow | None = None, *, owner: str = "") -> None:
        super().__init__(env)
        self._observation = Entries(env.observation_space, "obs", owner=owner)
        self._action = Entries(env.action_space, "action", owner=owner)
        self._digest = digest

    @property
    def entries(self) -> tuple[Sequence[Entry], Sequence[Entry]]:
        """Entries of the action and of the observation, of which `SharedDigests` is made."""
        return self._action.all, self._observation.all

    def keep_digest(self, digest: EnvDigest | DigestRow) -> None:
        """Keep the digest in here from the next reset on, in place of what was kept before.

        Args:
            digest: Made of `entries`.
        """
        self._digest = digest

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env, and record the observation.

        Args:
            seed: Handed on if it is given; likewise the options: not every env takes both.
            options: For the env.

        Raises:
            LedgerError: for a value that does not fit its space; if a ledger cannot be made or written. What the env
                raises.
        """
        asked: dict[str, Any] = {}
        if seed is not None:
            asked["seed"] = seed
        if options is not None:
            asked["options"] = options
        returned = self.env.reset(**asked)
        try:
            self._record_reset(returned[0])
        except BaseException:
            self._miss()
            raise
        return returned

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:  # noqa: ANN401 - the env's own
        """Step the env, and record what it took and gave.

        Raises:
            LedgerError: for an action that does not fit its space, and the env is not stepped then; for a value of
                another shape than its space's; if a ledger cannot be written. What the env raises.
        """
        # Before the step: the env may change the array that it is given.
        self._record_action(action)
        try:
            returned = self.env.step(action)
            observation, reward, terminated, truncated, _ = returned
            number = reward if type(reward) is float else float(np.asarray(reward).reshape(()))
            self._record_step(number, terminated, truncated, observation)
        except BaseException:
            self._miss()
            raise
        return returned

    def _record_reset(self, observation: Any) -> None:  # noqa: ANN401 - the env's own
        if self._digest is not None:
            self._digest.reset(self._observation.values(observation))

    def _record_action(self, action: Any) -> None:  # noqa: ANN401 - the env's own
        if self._digest is not None:
            self._digest.take(self._action.values(action))

    def _record_step(self, reward: float, terminated: bool, truncated: bool, observation: Any) -> None:  # noqa: ANN401
        if self._digest is not None:
            self._digest.give(reward, terminated, truncated, self._observation.values(observation))

    def _miss(self) -> None:
        """Note that a step or reset may have happened which is not recorded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DigestEnv:
        """Return a copy around a copy of the env, which records nothing: it is no row of a trainer."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = self._not_copied[name] if name in self._not_copied else copy.deepcopy(value, memo)
        return made
