"""The view that Stable-Baselines3 has of remote environments: a ``VecEnv``. Translates, decides nothing.

``server.lockstep`` steps; ``sb3.make`` adds what SB3's ``make_vec_env`` adds. Needs Stable-Baselines3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvObs, VecEnvStepReturn

from plugrl_bridges.errors import SpaceError
from plugrl_bridges.server.adapter import Adapter, known_attribute, no_call, no_set
from plugrl_bridges.server.autoreset import AutoresetMode, AutoresetViews
from plugrl_bridges.server.options import BridgeOptions, VecEnvOptions, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from plugrl_bridges.server.autoreset import View
    from plugrl_bridges.server.result import StepResult
    from plugrl_bridges.wire.codec import Array

__all__ = ["PlugRLVecEnv", "PlugRemoteVecEnv"]

logger = logging.getLogger(__name__)

Indices: TypeAlias = "int | Iterable[int] | None"

_NEEDS_CLIENTS = frozenset(
    {"num_envs", "observation_space", "action_space", "render_mode", "metadata", "reset_infos", "_seeds", "_options"}
)


@takes(VecEnvOptions)
class PlugRemoteVecEnv(Adapter, VecEnv):
    """Present environments that run in env clients as a Stable-Baselines3 ``VecEnv``.

    Listens at once. What only a client can tell (the spaces, ``num_envs``) is waited for when it is first asked, so
    that ``port`` and ``url`` can be read, and a client be started, before. Wrap it with `make_vec_env` for monitoring,
    give it to any SB3 algorithm, and `close` it at the end: clients then hear that the run is over.

    Args:
        **options: Those of `BridgeOptions`.

    Raises:
        ValueError: naming the argument that is out of range (`TypeError` for a wrong type).
        OSError: if the port cannot be had; the text names it and the option.
    """

    def __init__(self, **options: Unpack[VecEnvOptions]) -> None:
        self._listen(BridgeOptions(**options))
        self._connected = False

    # Before and after the clients ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Wait for the clients when something is asked that only they can tell."""
        if name in _NEEDS_CLIENTS and not self.__dict__.get("_connected", True):
            self._connect()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _connect(self) -> None:
        if self._connected:
            return
        lockstep = self._lockstep
        lockstep.connect()
        observation_space = lockstep.observation_layout.space
        if isinstance(observation_space, spaces.Dict) and any(
            isinstance(inner, (spaces.Dict, spaces.Tuple)) for inner in observation_space.spaces.values()
        ):
            raise SpaceError(
                f"Stable-Baselines3 takes no nested observation spaces: {observation_space}; flatten them at the client"
            )
        self._connected = True
        self._autoreset = AutoresetViews(AutoresetMode.SAME_STEP, lockstep.num_envs)
        super().__init__(
            lockstep.num_envs, observation_space, lockstep.action_layout.stacked(lockstep.options.action_horizon)
        )

    def __repr__(self) -> str:
        """Show the address and whether clients are here."""
        state = f"{self.num_envs} envs" if self._connected else "waiting for clients"
        return f"<{type(self).__name__} {self.url} {state}>"

    # The VecEnv methods -------------------------------------------------------------------------------------------

    def reset(self) -> VecEnvObs:
        """Reset every env, with the seeds and options set before, which are then used up.

        Returns:
            First observations, ``[num_envs, ...]`` or a dict or tuple of such arrays.

        Raises:
            ConnectTimeout: if the clients did not come in time.
            StepTimeout: naming the slots that did not answer in time.
            ClientLost: if a client went away and none took its place.
            LedgerMismatch: with ``verify=True``, if an env's first observation is not what it gave.
            UnverifiedClientError: with ``verify=True``, for a client that sends no digests.
            SpaceError: if a client's spaces cannot be used, or are not those in use.
        """
        self._connect()
        return self._first(self._lockstep.reset(self._seeds, self._options))

    def _first(self, step: StepResult) -> VecEnvObs:
        """Return the result of a reset in this trainer's form."""
        view = self._autoreset.reset(step)
        began = view.reset_infos
        self.reset_infos = [began.get(slot, {}) for slot in range(self.num_envs)]
        for slot in step.lost:
            self.reset_infos[slot]["client_lost"] = True
        self._reset_seeds()
        self._reset_options()
        return self._nest(view.observations)

    def step_async(self, actions: Array) -> None:
        """Send every env its action; call `step_wait` next.

        Args:
            actions: ``[num_envs, *action_shape]``.

        Raises:
            ValueError: for NaN or a wrong shape, naming the slot; nothing was sent then.
            EnvPoisoned: if an earlier step failed.
        """
        self._lockstep.send(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Collect the step.

        Returns:
            Observations, float32 rewards ``[num_envs]``, dones ``[num_envs]``, one info dict per env. On a done row the
            observation is the next episode's first, and the info has ``terminal_observation``; ``TimeLimit.truncated``
            is true only for truncated and not terminated; ``client_lost`` is true where the client was lost.

        Raises:
            StepTimeout: naming the slots that did not answer in time.
            ClientLost: if a client went away and none took its place.
            LedgerMismatch: with ``verify=True``, naming the slot whose env took or gave something else.
            EnvPoisoned: if no step is in flight, or an earlier one failed.
        """
        return self._stepped(self._lockstep.wait())

    def _stepped(self, step: StepResult) -> VecEnvStepReturn:
        """Return the result of a step in this trainer's form."""
        view = self._autoreset.step(step)
        if step.info_parts:
            infos = step.infos
            for info in infos:
                # Words of the bridge; a client may use them for something else.
                info.pop("terminal_observation", None)
                info.pop("client_lost", None)
                info["TimeLimit.truncated"] = False
        else:
            infos = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        if view.finals is not None:
            self._end_episodes(view, view.finals, infos)
        return self._nest(view.observations), step.rewards.astype(np.float32), view.over, infos

    def _end_episodes(self, view: View, finals: Sequence[Array], infos: list[dict[str, Any]]) -> None:
        layout, began, step = self._lockstep.observation_layout, view.reset_infos, view.step
        for at, slot in enumerate(np.flatnonzero(view.over).tolist()):
            infos[slot]["TimeLimit.truncated"] = bool(step.truncated[slot] and not step.terminated[slot])
            infos[slot]["terminal_observation"] = layout.nest([array[at] for array in finals])
            self.reset_infos[slot] = began.get(slot, {})
        for slot in step.lost:
            infos[slot]["client_lost"] = True

    def close(self) -> None:
        """Tell every client that the run is over, and free the port; idempotent, bounded."""
        self._stop_listening()

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Set the seeds of the next reset: env i gets ``seed + i``; None lets each client seed as it likes.

        Returns:
            The seeds, one per env.
        """
        if seed is None:
            self._reset_seeds()
            return self._seeds
        return super().seed(int(seed))

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Set the options of the next reset, for all envs or one dict per env; they are used once and never changed."""
        if isinstance(options, Sequence) and len(options) != self.num_envs:
            raise ValueError(f"options: expected one dict per env, {self.num_envs}, got {len(options)}")
        if options is not None and not isinstance(options, (Mapping, Sequence)):
            raise TypeError(f"options must be a dict or a list of dicts, got {type(options).__name__}")
        super().set_options(deepcopy(options))

    # What cannot cross the boundary -------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return what is known here of the envs: ``render_mode``, ``spec`` (id and time limit), and the spaces.

        Raises:
            AttributeError: for anything else: the env is in another process and the protocol carries no attributes.
        """
        self._connect()
        known = known_attribute(self._lockstep, attr_name)
        return [known for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Refuse: the env is in another process.

        Raises:
            AttributeError: always.
        """
        raise no_set(attr_name)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Refuse: the env is in another process.

        Raises:
            NotImplementedError: always.
        """
        raise no_call(method_name)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Return that no env is wrapped on this side; wrappers at the client are not visible from here."""
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[Array | None]:
        """Refuse: pictures of a remote env do not cross the boundary.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "remote environments cannot be rendered from the trainer: protocol version 1 carries no render calls; "
            "render at the client"
        )

    def _nest(self, arrays: list[Array]) -> VecEnvObs:
        nested: VecEnvObs = self._lockstep.observation_layout.nest(arrays)
        return nested


PlugRLVecEnv = PlugRemoteVecEnv
"""The same class, under the name that published experiment scripts use."""
