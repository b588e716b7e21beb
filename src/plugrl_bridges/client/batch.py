"""What the envs of a connection have in common, and the failure of one of them.

``envs.EnvList`` (ordinary envs) and ``vector_env.VectorBatch`` (a batched simulator) are `EnvBatch`es, ``exchange``
drives them. Nothing here knows of connections or messages.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_bridges.errors import EnvFailed
from plugrl_bridges.spaces import ActionLayout, ObservationLayout, space_to_wire
from plugrl_bridges.traits import env_name
from plugrl_bridges.wire.info import batch_infos, scattered

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import gymnasium

    from plugrl_bridges.digest.digest import StepDigests
    from plugrl_bridges.digest.shared import SharedDigests
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["AnyEnv", "EnvBatch", "Options", "Seeds", "first_line"]

logger = logging.getLogger(__name__)

AnyEnv: TypeAlias = "gymnasium.Env[Any, Any] | gymnasium.vector.VectorEnv[Any, Any, Any]"
Space: TypeAlias = "gymnasium.Space[Any]"
Seeds: TypeAlias = "Sequence[int | None] | None"
Options: TypeAlias = "Sequence[Mapping[str, Any] | None] | None"


def first_line(exc: Exception) -> str:
    """Return the kind of an exception and the first line of its text."""
    return f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}".removesuffix(": ")


class EnvBatch(ABC):
    """The n envs of a connection; row i is env i there.

    Call `reset` for all rows first. Then, per chunk: `step`, read the attributes, `step_infos`; `renew` the envs that
    ended and `reset` those the trainer wants reset. What `observations` held when `step` returned stays as it is until
    the next `step`, so that it may be on its way to the socket meanwhile.

    ``made`` is what the factory returned: n envs, or one vector env. The spaces are those of one env. What an env
    raises becomes an `EnvFailed` that names it.
    """

    def __init__(self, made: Sequence[AnyEnv], num_envs: int, observation_space: Space, action_space: Space) -> None:
        self.num_envs = num_envs
        self.name = env_name(made[0])
        self._made = made
        self.layout = ObservationLayout(observation_space)
        self.action_layout = ActionLayout(action_space)
        self.observations: list[Array] = self.layout.allocate(num_envs)
        """One array ``[n, *shape]`` per leaf: what each env's last step or reset returned."""
        self.rewards = np.zeros(num_envs, np.float64)
        """Sum over the last chunk, in float64."""
        self.lengths = np.zeros(num_envs, np.int64)
        """Env steps of the last chunk."""
        self.terminated = np.zeros(num_envs, np.bool_)
        self.truncated = np.zeros(num_envs, np.bool_)
        self.began = False
        """Whether every row was reset once; before, `observations` mean nothing."""
        self.any_ended = False
        """Whether the last `step` ended any row's episode."""
        self.steps = 0
        """Env steps of all rows together in the last chunk."""
        self.reset_infos: dict[int, Mapping[str, Any]] = {}
        """Row to info of its last reset, since the caller last cleared it."""
        self.digests: SharedDigests | StepDigests | None = None
        """The chained digests of the rows' steps (feature ``step-digest``), if they are kept."""
        self._refused: set[str] = set()

    @abstractmethod
    def reset(self, rows: Sequence[int], seeds: Seeds = None, options: Options = None) -> None:
        """Reset rows, in `observations` and `reset_infos`; without a seed an env's random stream goes on."""

    @abstractmethod
    def step(self, actions: Array, rows: Sequence[int]) -> None:
        """Run one chunk for the rows named; fills the attributes at these rows.

        An env's chunk ends at the step that ends its episode. A batch that cannot leave out an env ends it for all
        then, which the protocol allows: any prefix of a chunk may be used [5.3]. The actions
        ``[H, n, *shape]`` may be a view that dies afterwards.
        """

    def renew(self, ended: Array) -> None:
        """Begin the next episode of the rows that ended in the last `step`, bool ``[n]``: one reset each, no seed."""
        rows = np.flatnonzero(ended).tolist()
        if rows:
            self.reset(rows)

    @abstractmethod
    def step_info_of(self, row: int) -> Mapping[str, Any]:
        """Return the info of a row's last step."""

    @abstractmethod
    def step_infos(self, rows: Sequence[int]) -> dict[str, Value]:
        """Return the infos of the rows' last steps, batched for a feedback [5.4]."""

    def close(self) -> None:
        """Close the envs; what they raise meanwhile is logged."""
        for row, env in enumerate(self._made):
            try:
                env.close()
            except Exception:  # noqa: PERF203 - each env is closed, whatever the others do
                logger.exception("%s failed in close()", self._who(row if len(self._made) > 1 else -1))

    def describe(self) -> dict[str, Value]:
        """Return the part of the env-spec map that the envs themselves know; what is not known is left out."""
        env = self._made[0]
        spec = getattr(env, "spec", None)
        traits = {
            "env_id": getattr(spec, "id", None),
            "render_mode": getattr(env, "render_mode", None),
            "max_episode_steps": getattr(spec, "max_episode_steps", None),
        }
        return {
            "observation_space": space_to_wire(self.layout.space),
            "action_space": space_to_wire(self.action_layout.space),
            **{key: value for key, value in traits.items() if isinstance(value, (str, int))},
        }

    def successes(self, ended: Array) -> Array:
        """Return, as bool ``[n]``, which of the ended rows report ``is_success`` or ``success`` in their last info."""
        found = np.zeros(self.num_envs, np.bool_)
        with self.blaming("step"):
            for row in np.flatnonzero(ended).tolist():
                info = self.step_info_of(row)
                value = info.get("is_success", info.get("success", False))
                found[row] = bool(np.any(value)) if np.asarray(value).dtype.kind in "biuf" else False
        return found

    def take_reset_infos(self) -> dict[str, Value]:
        """Return the infos of the resets since they were last cleared, batched to n."""
        with self.blaming("reset"):
            if not any(self.reset_infos.values()):
                return {}
            rows = [row for row in sorted(self.reset_infos) if self.reset_infos[row]]
            return scattered(self.batched([self.reset_infos[row] for row in rows]), rows, self.num_envs)

    def batched(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
        """Batch infos for the wire, and warn once of each key that it cannot carry."""
        batched, refused = batch_infos(infos)
        for key in sorted(refused - self._refused):
            logger.warning("info key %r cannot travel and is left out: expected numbers, str, or arrays of them", key)
        self._refused |= refused
        return batched

    @contextmanager
    def blaming(self, what: str, row: int = -1) -> Iterator[None]:
        """Turn what is raised in here, over something that the envs returned, into an `EnvFailed`."""
        try:
            yield
        except Exception as exc:
            raise self.failed(what, row, exc) from exc

    def failed(self, what: str, row: int, exc: Exception) -> EnvFailed:
        """Return the error for what an env raised, to be raised from it; -1 is no row in particular."""
        return EnvFailed(f"{self._who(row)} failed in {what}(): {first_line(exc)}")

    def _who(self, row: int) -> str:
        return f"env {self.name}" if row < 0 else f"env {row} ({self.name})"
