"""Own the one interface behind which the envs of a connection stand, and the failure of one of them.

``envs.EnvList`` (ordinary envs) and ``vector_env.VectorBatch`` (a batched simulator) implement it, ``exchange`` drives
it. It must not know of connections or messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_bridges.errors import EnvFailed
from plugrl_bridges.spaces import ActionLayout, ObservationLayout, space_to_wire
from plugrl_bridges.wire.info import batch_infos, scattered

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gymnasium import spaces

    from plugrl_bridges.client.verified import Digests
    from plugrl_bridges.wire.codec import Array, Value

Space: TypeAlias = "spaces.Space[Any]"

__all__ = ["EnvBatch"]


class EnvBatch(ABC):
    """Step, reset and describe n envs; row i is env i of the connection.

    Call `reset` for all rows first. Then, per chunk: `step`, read the attributes, `step_infos`; `renew` the envs that
    ended and `reset` those the trainer wants reset. What `observations` held when `step` returned stays as it is until
    the next `step`, so that it may be on its way to the socket meanwhile.

    Args:
        num_envs: n.
        observation_space: Of one env.
        action_space: Of one env.
        name: The env's id or class, for messages.

    Raises:
        SpaceError: if a space cannot travel.
    """

    def __init__(self, num_envs: int, observation_space: Space, action_space: Space, name: str) -> None:
        self.num_envs = num_envs
        self.name = name
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
        self.digests: Digests | None = None
        """The chained digests of the rows' steps (feature ``step-digest``), if they are kept."""
        self.refused: set[str] = set()
        """Keys of infos that the wire cannot carry, met so far."""

    @abstractmethod
    def reset(
        self,
        rows: Sequence[int],
        seeds: Sequence[int | None] | None = None,
        options: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Reset rows, in `observations` and `reset_infos`.

        Args:
            rows: Which envs.
            seeds: One per row; None leaves the env's random stream running.
            options: One per row.

        Raises:
            EnvFailed: naming the env and what it raised.
        """

    @abstractmethod
    def step(self, actions: Array, rows: Sequence[int]) -> None:
        """Run one chunk for the rows named; fills the attributes at these rows.

        An env's chunk ends at the step that ends its episode. A batch that cannot leave out an env ends it for all
        then, which the protocol allows: any prefix of a chunk may be used [5.3].

        Args:
            actions: ``[H, n, *shape]`` from `ActionLayout.from_wire`; may be a view that dies afterwards.
            rows: Which envs.

        Raises:
            EnvFailed: naming the env and what it raised.
        """

    @abstractmethod
    def renew(self, ended: Array) -> None:
        """Begin the next episode of the rows whose episode ended in the last `step`: exactly one reset each, no seed.

        Args:
            ended: bool ``[n]``.
        """

    @abstractmethod
    def step_info_of(self, row: int) -> Mapping[str, Any]:
        """Give the info of a row's last step."""

    @abstractmethod
    def step_infos(self, rows: Sequence[int]) -> dict[str, Value]:
        """Give the infos of the rows' last steps, batched for a feedback [5.4].

        Raises:
            EnvFailed: if they are no infos; likewise `successes` and `take_reset_infos`.
        """

    @abstractmethod
    def traits(self) -> dict[str, Value]:
        """Give ``env_id``, ``render_mode`` and ``max_episode_steps``, as far as they are known."""

    @abstractmethod
    def close(self) -> None:
        """Close the envs; what they raise meanwhile is logged."""

    def describe(self) -> dict[str, Value]:
        """Give the part of the env-spec map that the envs themselves know."""
        return {
            "observation_space": space_to_wire(self.layout.space),
            "action_space": space_to_wire(self.action_layout.space),
            **self.traits(),
        }

    def successes(self, ended: Array) -> Array:
        """Give, as bool ``[n]``, which of the ended rows report ``is_success`` or ``success`` in their last info."""
        found = np.zeros(self.num_envs, np.bool_)
        with self.blaming("step"):
            for row in np.flatnonzero(ended).tolist():
                info = self.step_info_of(row)
                value = info.get("is_success", info.get("success", False))
                found[row] = bool(np.any(value)) if np.asarray(value).dtype.kind in "biuf" else False
        return found

    def take_reset_infos(self) -> dict[str, Value]:
        """Give the infos of the resets since they were last cleared, batched to n."""
        with self.blaming("reset"):
            if not any(self.reset_infos.values()):
                return {}
            rows = [row for row in sorted(self.reset_infos) if self.reset_infos[row]]
            return scattered(self.batched([self.reset_infos[row] for row in rows]), rows, self.num_envs)

    def batched(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
        """Batch infos for the wire, noting what it cannot carry."""
        batched, refused = batch_infos(infos)
        if refused:
            self.refused |= refused
        return batched

    @contextmanager
    def blaming(self, what: str) -> Iterator[None]:
        """Turn what is raised in here, over something that the envs returned, into an `EnvFailed`."""
        try:
            yield
        except Exception as exc:
            raise self.failed(what, None, exc) from exc

    def failed(self, what: str, row: int | None, exc: Exception) -> EnvFailed:
        """Give the error for what an env raised, to be raised from it."""
        who = f"env {self.name}" if row is None or row < 0 else f"env {row} ({self.name})"
        text = str(exc).strip().partition("\n")[0]
        return EnvFailed(f"{who} failed in {what}(): {type(exc).__name__}" + (f": {text}" if text else ""))
