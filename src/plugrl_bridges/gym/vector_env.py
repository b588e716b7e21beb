"""The view that Gymnasium's trainers have of remote environments: a ``VectorEnv``. Translates, decides nothing.

``server.lockstep`` steps, ``gym.infos`` writes the infos. Works under Gymnasium 0.29.1 and every 1.x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from plugrl_bridges.gym.infos import InfoDialect, InfoWriter
from plugrl_bridges.server.adapter import Adapter, known_attribute, no_call, no_set
from plugrl_bridges.server.autoreset import AutoresetMode, AutoresetViews, to_autoreset_mode
from plugrl_bridges.server.options import BridgeOptions, VecEnvOptions, takes

if TYPE_CHECKING:
    from gymnasium import spaces
    from typing_extensions import Unpack

    from plugrl_bridges.server.result import StepResult
    from plugrl_bridges.wire.codec import Array

__all__ = ["PlugRLVectorEnv"]

Space: TypeAlias = "spaces.Space[Any]"
VectorStep: TypeAlias = "tuple[Any, Array, Array, Array, dict[str, Any]]"

_NEEDS_CLIENTS = frozenset(
    {"num_envs", "observation_space", "action_space", "single_observation_space", "single_action_space"}
)
_RESET_MASK = "reset_mask"


@takes(VecEnvOptions)
class PlugRLVectorEnv(Adapter, VectorEnv):  # its type parameters differ between Gymnasium's releases
    """Present environments that run in env clients as a Gymnasium ``VectorEnv``.

    For CleanRL scripts, Gymnasium's vector wrappers, and any trainer that takes a vector env. (Stable-Baselines3 takes
    ``plugrl_bridges.sb3.PlugRemoteVecEnv``.) Listens at once. What only a client can tell (the spaces, ``num_envs``) is
    waited for when it is first asked. Call `reset`, then `step` in turns, and `close` at the end: clients then hear
    that the run is over.

    Args:
        autoreset_mode: Gymnasium's enum, or its name: ``SAME_STEP``; ``NEXT_STEP``, for clients of one env each;
            ``DISABLED``, where the trainer resets with ``options={"reset_mask": …}``.
        **options: Those of `BridgeOptions`.

    Raises:
        ValueError: naming the argument that is out of range (`TypeError` for a wrong type).
        OSError: if the port cannot be had; the text names it and the option.
    """

    def __init__(self, *, autoreset_mode: object = AutoresetMode.SAME_STEP, **options: Unpack[VecEnvOptions]) -> None:
        mode = to_autoreset_mode(autoreset_mode)
        self._listen(BridgeOptions(autoreset_mode=mode, **options))
        self._connected = False
        self._spec: Any = None
        self._infos: InfoWriter
        self._autoreset: AutoresetViews
        self.metadata = {"render_modes": [], "autoreset_mode": _gymnasiums(mode)}
        self.closed = False

    # Before and after the clients ---------------------------------------------------------------------------------

    @property
    def spec(self) -> Any:
        """Spec of the remote env as its client announced it, or of this one if ``gym.make_vec`` made it; or None."""
        if self._spec is None and self._connected:
            return self._lockstep.announced.spec
        return self._spec

    @spec.setter
    def spec(self, spec: Any) -> None:
        self._spec = spec

    @property
    def render_mode(self) -> str | None:  # type: ignore[override] # known only when a client is here
        """Render mode of the remote envs, once a client is here; their pictures do not cross the boundary."""
        return self._lockstep.announced.render_mode if self._connected else None

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
        n, options = lockstep.num_envs, lockstep.options
        self.num_envs = n
        self.single_observation_space = lockstep.observation_layout.space
        self.single_action_space = lockstep.action_layout.stacked(options.action_horizon)
        self.observation_space = batch_space(self.single_observation_space, n)
        self.action_space = batch_space(self.single_action_space, n)
        if InfoDialect.installed() is InfoDialect.LISTS:  # this release has attributes of its own, set there
            super().__init__(n, self.single_observation_space, self.single_action_space)  # type: ignore[call-arg]
        self._infos = self._info_writer()
        self._autoreset = AutoresetViews(options.autoreset_mode, n)
        self._connected = True

    def _info_writer(self) -> InfoWriter:
        return InfoWriter(self._lockstep.observation_layout, self.num_envs, InfoDialect.installed())

    def __repr__(self) -> str:
        """Show the address and whether clients are here."""
        state = f"num_envs={self.num_envs}" if self._connected else "waiting for clients"
        return f"{type(self).__name__}({self.url}, {state})"

    # The VectorEnv methods ----------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every env, or those of a ``reset_mask``; call `step` next.

        Args:
            seed: Env i gets ``seed + i``; or one seed or None per env; None lets each client seed as it likes.
            options: Handed to every env's reset, once; never changed. ``options["reset_mask"]``, bool ``[num_envs]``,
                is not handed on: it says which envs to reset, while the others keep their observations.

        Returns:
            First observations, ``[num_envs, ...]`` or a dict or tuple of such arrays, and infos.

        Raises:
            ValueError: for a mask of a wrong shape, without a true value, or that parts envs of one connection which
                cannot be parted; for seeds that are too many or too few. Nothing was reset then.
            TypeError: for options that are no dict.
            ConnectTimeout: if the clients did not come in time.
            StepTimeout: naming the slots that did not answer in time.
            ClientLost: if a client went away and none took its place.
            LedgerMismatch: with ``verify=True``, if an env's first observation is not what it gave.
            UnverifiedClientError: with ``verify=True``, for a client that sends no digests.
            SpaceError: if a client's spaces cannot be used, or are not those in use.
        """
        self._connect()
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"options must be a dict or None, got {type(options).__name__}")
        seeds = _seeds(seed, self.num_envs)
        given = None if options is None else {key: value for key, value in options.items() if key != _RESET_MASK}
        mask = None if options is None else _mask(options.get(_RESET_MASK), self.num_envs)
        each = [given] * self.num_envs if given else None
        if self._lockstep.stepping:  # its result is dropped, but says who has begun an episode
            self._lockstep.checked_for_reset(seeds, each)
            self._autoreset.step(self._lockstep.wait())
        step = self._lockstep.reset(seeds, each, mask, unseen=self._autoreset.unseen)
        view = self._autoreset.reset(step, mask)
        return self._batch(view.observations), self._infos.reset(view)

    def step(self, actions: Any) -> VectorStep:
        """Step every env.

        Args:
            actions: ``[num_envs, *action_shape]``.

        Returns:
            Observations, float64 rewards ``[num_envs]``, terminations and truncations bool ``[num_envs]``, infos.
            ``infos["client_lost"]`` has the envs whose client was lost.

        Raises:
            ValueError: for NaN or a wrong shape, naming the slot; nothing was sent then.
            gymnasium.error.ResetNeeded: with autoreset DISABLED, for envs whose episode has ended.
            StepTimeout: naming the slots that did not answer in time.
            ClientLost: if a client went away and none took its place.
            LedgerMismatch: with ``verify=True``, naming the slot whose env took or gave something else.
            EnvPoisoned: before the first reset, after a step that failed, or when closed.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Send every env its action; call `step_wait` next.

        Raises:
            gymnasium.error.AlreadyPendingCallError: if a step is in flight; and what `step` raises on sending.
        """
        if self._lockstep.stepping:
            raise AlreadyPendingCallError("a step is in flight already: call step_wait() first", "step")
        self._lockstep.check_ready()
        self._lockstep.send(actions, unseen=self._autoreset.sits_out())

    def step_wait(self, timeout: float | None = None) -> VectorStep:
        """Collect the step.

        Args:
            timeout: Seconds; None takes the option of that name.

        Returns:
            What `step` returns.

        Raises:
            gymnasium.error.NoAsyncCallError: if no step is in flight; and what `step` raises on collecting.
        """
        if not self._lockstep.stepping:
            raise NoAsyncCallError("no step is in flight: call step_async() first", "step")
        return self._stepped(self._lockstep.wait(timeout))

    def _stepped(self, step: StepResult) -> VectorStep:
        """Return the result of a step in this trainer's form."""
        view = self._autoreset.step(step)
        infos = self._infos.step(view)
        return self._batch(view.observations), step.rewards, step.terminated, step.truncated, infos

    def close(self, **kwargs: Any) -> None:
        """Tell every client that the run is over, and free the port; idempotent, bounded."""
        self._stop_listening()
        self.closed = True

    def render(self) -> NoReturn:
        """Refuse: pictures of a remote env do not cross the boundary.

        Raises:
            NotImplementedError: always.
        """
        raise no_call("render")

    # What cannot cross the boundary -------------------------------------------------------------------------------

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return what is known here of the envs, one per env: ``render_mode``, ``spec`` and the spaces.

        Raises:
            AttributeError: for anything else: the env is in another process and the protocol carries no attributes.
        """
        self._connect()
        return (known_attribute(self._lockstep, name),) * self.num_envs

    def set_attr(self, name: str, values: Any) -> None:
        """Refuse: the env is in another process.

        Raises:
            AttributeError: always.
        """
        raise no_set(name)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return a known attribute, as Gymnasium's ``call`` does; refuse methods: the env is in another process.

        Raises:
            NotImplementedError: for anything that is not known here.
        """
        if args or kwargs:
            raise no_call(name)
        try:
            return self.get_attr(name)
        except AttributeError as exc:
            raise no_call(name) from exc

    def _batch(self, arrays: list[Array]) -> Any:
        return self._lockstep.observation_layout.batch(arrays)


def _gymnasiums(mode: AutoresetMode) -> Any:
    """Give Gymnasium's own enum, which its wrappers ask for; ours where Gymnasium has none."""
    own = getattr(gymnasium.vector, "AutoresetMode", None)
    return mode if own is None else own[mode.name]


def _seeds(seed: int | Sequence[int | None] | None, n: int) -> list[int | None] | None:
    if seed is None:
        return None
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        return [int(seed) + i for i in range(n)]
    if isinstance(seed, bool) or not isinstance(seed, (Sequence, np.ndarray)):
        raise TypeError(f"seed must be an int, one int or None per env, or None, got {seed!r}")
    return list(seed)


def _mask(mask: object, n: int) -> Array | None:
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (n,):
        raise ValueError(f"options['{_RESET_MASK}'] must be a bool array of shape ({n},), got {mask!r}")
    if not mask.any():
        raise ValueError(f"options['{_RESET_MASK}'] must have a true value, got {mask!r}")
    return mask
