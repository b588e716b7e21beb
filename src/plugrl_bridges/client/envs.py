"""The stepping of ordinary Gymnasium envs, one after another, and where their digests are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_bridges.client.batch import EnvBatch
from plugrl_bridges.digest.env import DigestEnv
from plugrl_bridges.digest.shared import SharedDigests
from plugrl_bridges.errors import FactoryError
from plugrl_bridges.traits import env_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import gymnasium

    from plugrl_bridges.client.batch import Options, Seeds
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["EnvList", "digest_env_in"]

Env: TypeAlias = "gymnasium.Env[Any, Any]"


class EnvList(EnvBatch):
    """Ordinary envs, stepped one after another; a `FactoryError` if their spaces differ, or two are the same object."""

    def __init__(self, envs: Sequence[Env], *, verify: bool = False) -> None:
        first = envs[0]
        if len({id(getattr(env, "unwrapped", env)) for env in envs}) != len(envs):
            raise FactoryError(
                f"the env factory returned the same {env_name(first)} object more than once: it must make a new one at "
                "each call"
            )
        super().__init__(envs, len(envs), first.observation_space, first.action_space)
        for row, env in enumerate(envs):
            if env.observation_space != first.observation_space or env.action_space != first.action_space:
                raise FactoryError(
                    f"the envs of one client must have the same spaces: env {row} has {env.observation_space} and "
                    f"{env.action_space}, env 0 has {first.observation_space} and {first.action_space}"
                )
        self._envs = envs
        if verify:
            self._envs, self.digests = _with_digests(envs)
        self._steps = [env.step for env in self._envs]
        self._infos: list[Mapping[str, Any]] = [{}] * len(envs)
        self._other = self.layout.allocate(len(envs))
        # A lone leaf at the root is stored without a walk over the space.
        root = self.layout.leaves[0] if len(self.layout.leaves) == 1 and not self.layout.leaves[0].path else None
        self._root_shape = root.shape if root is not None and root.dtype.kind != "U" else None
        self._zero_dimensional = not self.action_layout.shape and not self.action_layout.discrete

    def reset(self, rows: Sequence[int], seeds: Seeds = None, options: Options = None) -> None:
        """Reset rows one by one."""
        # In the other set of arrays: what is in this one may be on its way to the socket.
        for target, source in zip(self._other, self.observations, strict=True):
            np.copyto(target, source)
        self.observations, self._other = self._other, self.observations
        for at, row in enumerate(rows):
            asked: dict[str, Any] = {}
            if seeds is not None and seeds[at] is not None:
                asked["seed"] = seeds[at]
            if options is not None and (option := options[at]) is not None:
                asked["options"] = dict(option)
            with self.blaming("reset", row):
                observation, self.reset_infos[row] = self._envs[row].reset(**asked)
                self.layout.store(self.observations, row, observation)

    def step(self, actions: Array, rows: Sequence[int]) -> None:
        """Run one chunk, step by step and env by env."""
        n = self.num_envs
        rewards, lengths = [-0.0] * n, [0] * n  # -0.0 + x is x whatever x is, but 0.0 + -0.0 is 0.0
        terminated, truncated = [False] * n, [False] * n
        steps, infos, arrays, shape = self._steps, self._infos, self.observations, self._root_shape
        root = arrays[0] if arrays else None
        live: Sequence[int] = rows
        row = -1
        self.any_ended = False
        try:
            for step_actions in actions:
                # One fresh array per env step: an env may keep its row, or write to it.
                own: list[Any] = list(step_actions.copy())
                if self._zero_dimensional:
                    own = [np.asarray(value) for value in own]
                ended = False
                for row in live:
                    observation, reward, terminal, cut, infos[row] = steps[row](own[row])
                    if root is not None and type(observation) is np.ndarray and observation.shape == shape:
                        root[row] = observation
                    else:
                        self.layout.store(arrays, row, observation)
                    rewards[row] += float(reward)
                    lengths[row] += 1
                    if terminal or cut:
                        terminated[row], truncated[row], ended = bool(terminal), bool(cut), True
                if ended:
                    self.any_ended = True
                    live = [row for row in live if not (terminated[row] or truncated[row])]
        except Exception as exc:
            raise self.failed("step", row, exc) from exc
        self.rewards[:] = rewards
        if self.any_ended or len(actions) > 1 or len(rows) < n:
            self.lengths[:] = lengths
            self.terminated[:], self.truncated[:] = terminated, truncated
            self.steps = sum(lengths)
        else:  # one step of everybody, and nobody's last
            self.lengths.fill(1)
            self.terminated.fill(False)
            self.truncated.fill(False)
            self.steps = n

    def step_info_of(self, row: int) -> Mapping[str, Any]:
        """Return the info of a row's last step."""
        return self._infos[row]

    def step_infos(self, rows: Sequence[int]) -> dict[str, Value]:
        """Batch the infos of the rows' last steps."""
        infos = self._infos if len(rows) == self.num_envs else [self._infos[row] for row in rows]
        with self.blaming("step"):
            return self.batched(infos) if any(infos) else {}


def _with_digests(envs: Sequence[Env]) -> tuple[list[Env], SharedDigests]:
    """Return the envs, each with a `DigestEnv` around or inside it, and the digests of all.

    A digest is made of the env's own values, before anything else has touched them: of several that an env has already,
    such as a ``LedgerEnv``, the innermost is used, which stands where the factory put it.
    """
    inside = [digest_env_in(env) for env in envs]
    first = inside[0] or DigestEnv(envs[0])
    shared = SharedDigests(len(envs), *first.entries)
    made: list[Env] = []
    for row, (env, found) in enumerate(zip(envs, inside, strict=True)):
        if found is None:
            made.append(DigestEnv(env, shared.row(row)))
        else:
            found.keep_digest(shared.row(row))
            made.append(env)
    return made, shared


def digest_env_in(env: Any) -> DigestEnv | None:  # noqa: ANN401 - each wrapper has an ``env`` of some kind
    """Return the innermost `DigestEnv` of an env and its wrappers; None if there is none."""
    found = None
    while env is not None:
        if isinstance(env, DigestEnv):
            found = env
        env = getattr(env, "__dict__", {}).get("env")
    return found
