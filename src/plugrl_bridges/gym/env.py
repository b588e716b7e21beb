"""The view of a single remote environment as a plain ``gymnasium.Env``. Translates, decides nothing.

``server.lockstep`` steps, with one slot and without autoreset: the trainer resets, as it would an env of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import gymnasium
import numpy as np

from plugrl_bridges.server.adapter import Adapter, no_call
from plugrl_bridges.server.autoreset import AutoresetMode, AutoresetViews
from plugrl_bridges.server.options import BridgeOptions, TrainerOptions, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from plugrl_bridges.server.result import StepResult

__all__ = ["RemoteEnv"]

_NEEDS_CLIENTS = frozenset({"observation_space", "action_space"})


@takes(TrainerOptions)
class RemoteEnv(Adapter, gymnasium.Env[Any, Any]):
    """Present one environment that runs in an env client as a Gymnasium ``Env``.

    ``gymnasium.make("plugrl_bridges:PlugRL/Remote-v0", port=8000)`` makes one. For wrappers, checkers, evaluation and
    scripts that take a single env; a trainer that takes several at once is better served by `PlugRLVectorEnv`. Listens
    at once; the spaces are waited for when they are first asked. Call `reset`, `step` until the end of the episode,
    `reset` again, and `close` at the end.

    Args:
        **options: Those of `BridgeOptions`.

    Raises:
        ValueError: naming the argument that is out of range (`TypeError` for a wrong type).
        OSError: if the port cannot be had; the text names it and the option.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as Gymnasium's own

    def __init__(self, **options: Unpack[TrainerOptions]) -> None:
        self._listen(BridgeOptions(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **options))
        self._autoreset = AutoresetViews(AutoresetMode.DISABLED, 1)

    def __repr__(self) -> str:
        """Show the address."""
        return f"<{type(self).__name__} {self.url}>"

    def __getattr__(self, name: str) -> Any:
        """Wait for the client when something is asked that only it can tell."""
        if name not in _NEEDS_CLIENTS or "_lockstep" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        self._lockstep.connect()
        self.observation_space = self._lockstep.observation_layout.space
        self.action_space = self._lockstep.action_layout.space
        return self.__dict__[name]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; call `step` next.

        Args:
            seed: Handed to the env's own reset; None leaves its random stream running.
            options: Handed to the env's own reset, once; never changed.

        Returns:
            The first observation, and the reset's info.

        Raises:
            ConnectTimeout: if the client did not come in time.
            StepTimeout: if it did not answer in time.
            ClientLost: if it went away and none took its place.
            LedgerMismatch: with ``verify=True``, if the first observation is not what the env gave.
            UnverifiedClientError: with ``verify=True``, for a client that sends no digests.
            SpaceError: if the client's spaces cannot be used, or are not those in use.
        """
        super().reset(seed=seed)
        unseen = self._autoreset.unseen
        step = self._lockstep.reset([seed], [dict(options)] if options else None, unseen=unseen)
        infos = self._autoreset.reset(step).reset_infos
        return self._observation(step), _with_loss(infos.get(0, {}), step)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env; call `reset` next when the episode has ended.

        Args:
            action: Of the action space.

        Returns:
            Observation, reward, whether terminated, whether truncated, info. ``info["client_lost"]`` is true where the
            client was lost.

        Raises:
            ValueError: for NaN or a wrong shape; nothing was sent then.
            gymnasium.error.ResetNeeded: if the episode has ended.
            StepTimeout: if the client did not answer in time.
            ClientLost: if it went away and none took its place.
            LedgerMismatch: with ``verify=True``, if the env took or gave something else.
            EnvPoisoned: before the first reset, after a step that failed, or when closed.
        """
        array, shape = np.asarray(action), self.action_space.shape
        if array.shape != shape:
            raise ValueError(f"the action has shape {array.shape}, expected {shape} for {self.action_space}")
        self._lockstep.check_ready()
        self._lockstep.send(array[None], unseen=self._autoreset.sits_out())
        step = self._lockstep.wait()
        self._autoreset.step(step)
        info = _with_loss(step.infos[0], step)
        return self._observation(step), float(step.rewards[0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> NoReturn:
        """Refuse: pictures of a remote env do not cross the boundary.

        Raises:
            NotImplementedError: always.
        """
        raise no_call("render")

    def close(self) -> None:
        """Tell the client that the run is over, and free the port; idempotent, bounded."""
        self._stop_listening()

    def _observation(self, step: StepResult) -> Any:
        return self._lockstep.observation_layout.row(step.observations, 0)


def _with_loss(info: dict[str, Any], step: StepResult) -> dict[str, Any]:
    info.pop("client_lost", None)  # a word of the bridge; a client may use it for something else
    if step.lost:
        info["client_lost"] = True
    return info
