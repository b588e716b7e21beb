"""The view that RLinf's EnvWorker has of remote environments. Translates, decides nothing that is not RLinf's.

``server.lockstep`` steps; ``rlinf.chunk``, ``rlinf.observations`` and ``rlinf.episodes`` put what comes into RLinf's
terms; ``rlinf.ending`` sees to the end of a run, since RLinf never closes an env. Needs RLinf and torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from gymnasium import spaces
from rlinf.utils.logging import get_logger

from plugrl_bridges.errors import EnvPoisoned, SpaceError
from plugrl_bridges.rlinf import ending
from plugrl_bridges.rlinf.chunk import Chunk, Ended
from plugrl_bridges.rlinf.episodes import EpisodeTally
from plugrl_bridges.rlinf.observations import Observations
from plugrl_bridges.rlinf.options import EnvOptions
from plugrl_bridges.server.adapter import Adapter

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from plugrl_bridges.rlinf.chunk import ChunkResult, Infos
    from plugrl_bridges.rlinf.observations import RLinfObservation
    from plugrl_bridges.server.result import StepResult
    from plugrl_bridges.wire.codec import Array

__all__ = ["PlugRLEnv"]


class PlugRLEnv(Adapter):
    """Environments that run in env clients as an environment of RLinf.

    RLinf makes it from ``env.train`` or ``env.eval`` with ``env_type: plugrl``, calls `reset` and `chunk_step`, and
    never closes it; ``docs/rlinf.md`` has the options. It listens at once, on ``port`` plus its own number, and waits
    for its clients in the first `reset`. Call `close` where you use it without RLinf.

    Args:
        cfg: ``env.train`` or ``env.eval``.
        num_envs: Envs of this instance.
        seed_offset: Number of this instance, ``rank * stages + stage``.
        total_num_processes: How many instances there are.
        worker_info: RLinf's record of the worker; not used.

    Raises:
        ValueError: naming the option that is out of its range or does not fit another (`TypeError` for a wrong type).
        OSError: if the port cannot be had; the text names it.
    """

    def __init__(
        self, cfg: DictConfig, num_envs: int, seed_offset: int, total_num_processes: int, worker_info: object = None
    ) -> None:
        del worker_info
        self.cfg = cfg
        self.num_envs = num_envs
        self.options = EnvOptions.from_config(cfg, num_envs=num_envs, index=seed_offset, instances=total_num_processes)
        self.seed = self.options.seed
        self.is_start = True
        self._resets = 0
        self._clock = 0  # env steps of the episodes, with ignore_terminations: then all have the same
        self._ended = Ended(num_envs)
        self._tally = EpisodeTally(num_envs)
        self._observations: Observations | None = None
        self._current: list[Array] = []
        self._all_renewed = False
        self._listen(self.options.bridge)
        ending.remember(self)
        get_logger().info(
            "plugrl env instance %d of %d listens on %s; its clients: plugrl-env-client --num-envs %d --url %s",
            seed_offset, total_num_processes, self.url, num_envs, self.url,
        )  # fmt: skip

    def __repr__(self) -> str:
        """Show the address and the place among the instances."""
        options = self.options
        return f"<{type(self).__name__} {options.index} of {options.instances} {self.url} {self.num_envs} envs>"

    # What RLinf calls ---------------------------------------------------------------------------------------------

    def reset(self) -> tuple[RLinfObservation, Infos]:
        """Begin an episode in every env; the first call waits for the clients. Continue with `chunk_step`.

        Returns:
            Observations, and an empty dict of infos.

        Raises:
            ConnectTimeout: if the clients did not come in time.
            SpaceError: if the clients' observations do not fit the config.
            StepTimeout: naming the slots that did not answer in time.
            ClientLost: if a client went away and none took its place.
        """
        if self._observations is None:
            self._observations = self._meet_clients()
        self._current = self._lockstep.reset(self._seeds()).observations
        self._resets += 1
        self.is_start = False
        self._clock = 0
        self._ended.clear()
        self._tally.restart()
        return self._observations.of(self._current), {}

    def chunk_step(self, chunk_actions: Array | torch.Tensor) -> ChunkResult:
        """Run a chunk of actions in every env.

        An env whose episode ends waits for the rest of the chunk. With ``auto_reset`` its next episode begins at the
        chunk's end, without it at the next `reset`; until then it shows its terminal observation and pays nothing.

        Args:
            chunk_actions: ``[num_envs, C, action_dim]``.

        Returns:
            Observations and infos, one of each per exchange; rewards, terminations and truncations ``[num_envs, C]``.
            With ``auto_reset`` or ``ignore_terminations`` only the last column of the flags is ever set. Where next
            episodes have begun, the last infos have ``final_info`` and ``final_observation``, both for all envs, with
            the masks ``_final_info`` and ``_final_observation``.

        Raises:
            ValueError: for actions of a wrong shape or with NaN; nothing was sent then.
            StepTimeout: naming the slots that did not answer in time.
            ClientLost: if a client went away and none took its place.
            EnvPoisoned: before the first `reset`, or if an earlier step failed.
        """
        if self._observations is None:
            raise EnvPoisoned("step before the first reset: call reset() first")
        actions = self._actions(chunk_actions)
        chunks = actions.shape[1]
        chunk = Chunk(self.num_envs, chunks)
        if self.options.chunk_mode == "remote":
            horizon = self.options.bridge.action_horizon
            if chunks != horizon:
                raise ValueError(f"a chunk has {chunks} actions, but action_horizon is {horizon}")
            self._exchange(self._observations, chunk, actions[:, 0] if chunks == 1 else actions, chunks - 1, chunks)
        else:
            for column in range(chunks):
                self._exchange(self._observations, chunk, actions[:, column], column, 1)
        if self.options.auto_reset and self._ended.mask.any():
            chunk.restarted(self._ended, self._observations.of(self._next_episodes()))
            self._ended.clear()
        return chunk.result(ends_at_last=self.options.auto_reset or self.options.ignore_terminations)

    def update_reset_state_ids(self) -> None:
        """Do nothing: from which states episodes begin is the envs' own business, or that of ``seed``."""

    def close(self) -> None:
        """Tell every client that the run is over, and free the port; idempotent, bounded."""
        self._stop_listening()

    # Inside -------------------------------------------------------------------------------------------------------

    def _meet_clients(self) -> Observations:
        """Wait for the clients, and check what they announce against the config."""
        self._lockstep.connect()
        options = self.options
        observations = Observations(self._lockstep.observation_layout, options.names)
        if options.obs_dim is not None and observations.states_width not in {0, options.obs_dim}:
            raise SpaceError(
                f"the states of the clients' observations have {observations.states_width} numbers, but "
                f"actor.model.obs_dim is {options.obs_dim}"
            )
        limit = self._lockstep.announced.max_episode_steps
        if options.ignore_terminations and limit is not None and limit < (options.max_episode_steps or 0):
            raise SpaceError(
                f"ignore_terminations: the clients' envs end after {limit} steps, before max_episode_steps "
                f"{options.max_episode_steps}: make that {limit} or less"
            )
        return observations

    def _seeds(self) -> list[int] | None:
        """Return the seeds of a reset: of the first one, and of each where the envs of a group must begin alike."""
        options = self.options
        if options.seed is None or (self._resets and options.group_size == 1):
            return None
        groups = self.num_envs // options.group_size
        first = options.seed + self._resets * groups * options.instances
        return [first + env // options.group_size for env in range(self.num_envs)]

    def _actions(self, chunk_actions: Array | torch.Tensor) -> Array:
        """Return ``[N, C, *shape]``, clipped to the action space."""
        if isinstance(chunk_actions, torch.Tensor):
            chunk_actions = chunk_actions.detach().cpu().numpy()
        actions = np.asarray(chunk_actions)
        layout = self._lockstep.action_layout
        width = int(np.prod(layout.shape))
        if actions.ndim != 3 or not actions.shape[1] or (len(actions), actions.shape[2]) != (self.num_envs, width):
            raise ValueError(
                f"chunk_actions have the shape {list(actions.shape)}, expected [{self.num_envs}, C, {width}] for "
                f"{layout.space}; the last is actor.model.action_dim"
            )
        actions = actions.reshape(*actions.shape[:2], *layout.shape)
        if self.options.clip_actions and isinstance(layout.space, spaces.Box):
            clipped: Array = np.clip(actions, layout.space.low, layout.space.high).astype(actions.dtype)
            return clipped
        return actions

    def _exchange(self, observations: Observations, chunk: Chunk, actions: Array, column: int, length: int) -> None:
        """Step the envs that are not waiting, and add what came of it to the chunk."""
        waiting = self._ended.mask
        infos: Infos = {}
        if not waiting.all():
            self._lockstep.send(actions, waiting if waiting.any() else None)
            step = self._lockstep.wait()
            self._current = step.standing()
            chunk.rewards[:, column] = step.rewards
            self._count(step, ~waiting, length)
            self._take_ends(step, ~waiting, length)
            if step.lost:
                infos["client_lost"] = torch.zeros(self.num_envs, dtype=torch.bool)
                infos["client_lost"][list(step.lost)] = True
        infos["episode"] = self._tally.snapshot()
        chunk.append(column, self._ended, observations.of(self._ended.shown(self._current)), infos)

    def _count(self, step: StepResult, stepped: Array, length: int) -> None:
        self._tally.add(step.rewards, length * step.stepped, step.infos, stepped)
        if not self.options.ignore_terminations:
            for slot, told in step.lengths.items():  # a chunk may end early, which only its client knows
                if stepped[slot] and (step.terminated[slot] or step.truncated[slot]):
                    self._tally.set_length(slot, told)

    def _take_ends(self, step: StepResult, stepped: Array, length: int) -> None:
        if not self.options.ignore_terminations:
            self._ended.take(step, step.terminated & stepped, step.truncated & stepped)
            return
        # A remote env cannot be stepped past its end: its next episode goes on as the rest of this one.
        self._clock += length
        self._all_renewed = bool(step.over.all())
        over = np.full(self.num_envs, self._clock >= (self.options.max_episode_steps or 0))
        self._ended.take(step, np.zeros_like(over), over)

    def _next_episodes(self) -> list[Array]:
        """Begin the next episodes of those that ended, as far as clients have not; return everyone's observations."""
        if self.options.ignore_terminations and (self.options.group_size > 1 or not self._all_renewed):
            self._current = self._lockstep.reset(self._seeds()).observations
            self._resets += 1
        self._clock = 0
        self._tally.restart(self._ended.mask)
        return self._current
