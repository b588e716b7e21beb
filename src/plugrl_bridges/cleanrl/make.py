"""Own the one line that a CleanRL-style script changes: the vector env whose infos its logging loop understands.

The vector env is ``gym.vector_env``'s, with the episode records that ``RecordEpisodeStatistics`` would have put there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugrl_bridges.gym.infos import InfoDialect, InfoWriter
from plugrl_bridges.gym.vector_env import PlugRLVectorEnv
from plugrl_bridges.server.autoreset import AutoresetMode

if TYPE_CHECKING:
    import os
    import ssl as ssl_module
    from collections.abc import Sequence

    from gymnasium import spaces

    from plugrl_bridges.server.options import OnClientLoss, Verify

__all__ = ["make_envs"]


def make_envs(  # noqa: PLR0913 - the options of every adapter, keyword-only
    *,
    num_envs: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    image_key: str | None = None,
    state_key: str | None = None,
    timeout: float = 60.0,
    connect_timeout: float | None = 300.0,
    on_client_loss: OnClientLoss = "truncate",
    episode_log: str | os.PathLike[str] | None = None,
    api_key: str | None = None,
    ssl: ssl_module.SSLContext | None = None,
    allowed_origins: Sequence[str] = (),
    ping_interval: float | None = 20.0,
    ping_timeout: float | None = 20.0,
    max_message_bytes: int = 1 << 30,
    verify: Verify = False,
    autoreset_mode: object = AutoresetMode.SAME_STEP,
    info_dialect: InfoDialect | str | None = None,
) -> PlugRLVectorEnv:
    """Make the vector env that replaces ``gym.vector.SyncVectorEnv([...])`` in a CleanRL-style script.

    The rest of the script stays as it is, its logging loop included: each step that ends an episode carries the
    ``episode`` record (``r``, ``l``, ``t``) where that loop looks for it. Wrappers of a single env belong into the
    client's ``--env-factory``; wrappers of the vector env go around what this returns.

    Args:
        num_envs: Slots; None takes the envs of the first client.
        host: Address to listen on; loopback unless told otherwise.
        port: Port to listen on; 0 takes a free one, which ``port`` of the result tells.
        observation_space: One env's space; None takes what the client announces, else infers it.
        action_space: One env's space; None takes what the client announces.
        image_key: Surface only this image entry of the observations.
        state_key: Surface only this state entry of the observations.
        timeout: Seconds a step or reset may take, and a lost slot may stay vacant.
        connect_timeout: Seconds to wait for the first clients; None waits for ever.
        on_client_loss: ``"truncate"`` or ``"raise"``.
        episode_log: CSV file to write one row per finished episode to.
        api_key: Clients must send it; None admits all.
        ssl: Server-side context for ``wss``.
        allowed_origins: Web origins whose pages may connect.
        ping_interval: Seconds between pings; None sends none.
        ping_timeout: Seconds a waiting client may leave a ping unanswered; None for ever.
        max_message_bytes: Larger messages close their connection with 1009.
        verify: Compare each step with what the env took and gave, by clients with ``--verify``; a difference is a
            `LedgerMismatch` and a client without an `UnverifiedClientError`, or with ``"warn"`` a warning.
        autoreset_mode: As the script expects it. ``SAME_STEP``: records under ``final_info``. ``NEXT_STEP``, what
            Gymnasium 1.x's own ``SyncVectorEnv`` does by default: records under ``episode``; for clients of one env
            each.
        info_dialect: Form of the infos: ``"0.29"``, a list of dicts or None under ``final_info``; ``"1.x"``, arrays
            with masks. None takes that of the Gymnasium that is installed.

    Returns:
        A Gymnasium vector env; reset it, step it, and close it at the end.

    Raises:
        ValueError: naming the argument that is out of range (`TypeError` for a wrong type).
        OSError: if the port cannot be had; the text names it and the option.
    """
    envs = _RecordingVectorEnv(
        num_envs=num_envs, host=host, port=port, observation_space=observation_space, action_space=action_space,
        image_key=image_key, state_key=state_key, timeout=timeout, connect_timeout=connect_timeout,
        on_client_loss=on_client_loss, episode_log=episode_log, api_key=api_key, ssl=ssl,
        allowed_origins=allowed_origins, ping_interval=ping_interval, ping_timeout=ping_timeout,
        max_message_bytes=max_message_bytes, verify=verify, autoreset_mode=autoreset_mode,
    )  # fmt: skip
    try:
        envs.info_dialect = InfoDialect.installed() if info_dialect is None else InfoDialect(info_dialect)
    except ValueError:
        envs.close()
        names = ", ".join(repr(dialect.value) for dialect in InfoDialect)
        raise ValueError(f"info_dialect must be one of {names} or None, got {info_dialect!r}") from None
    return envs


class _RecordingVectorEnv(PlugRLVectorEnv):
    """Present remote environments with the record of each episode in the infos of its last step."""

    info_dialect: InfoDialect

    def _info_writer(self) -> InfoWriter:
        lockstep = self._lockstep
        return InfoWriter(
            lockstep.observation_layout,
            lockstep.num_envs,
            lockstep.options.autoreset_mode,
            self.info_dialect,
            episodes=True,
        )
