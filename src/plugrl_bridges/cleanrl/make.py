"""The one line that a CleanRL-style script changes: the vector env whose infos its logging loop understands.

The vector env is ``gym.vector_env``'s, with the episode records that ``RecordEpisodeStatistics`` would have put there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugrl_bridges.gym.infos import InfoDialect, InfoWriter
from plugrl_bridges.gym.vector_env import PlugRLVectorEnv
from plugrl_bridges.server.autoreset import AutoresetMode
from plugrl_bridges.server.options import VectorOptions, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["make_envs"]


@takes(VectorOptions)
def make_envs(
    *,
    autoreset_mode: object = AutoresetMode.SAME_STEP,
    info_dialect: InfoDialect | str | None = None,
    **options: Unpack[VectorOptions],
) -> PlugRLVectorEnv:
    """Make the vector env that replaces ``gym.vector.SyncVectorEnv([...])`` in a CleanRL-style script.

    The rest of the script stays as it is, its logging loop included: each step that ends an episode carries the
    ``episode`` record (``r``, ``l``, ``t``) where that loop looks for it. Wrappers of a single env belong into the
    client's ``--env-factory``; wrappers of the vector env go around what this returns.

    Args:
        autoreset_mode: As the script expects it. ``SAME_STEP``: records under ``final_info``. ``NEXT_STEP``, what
            Gymnasium 1.x's own ``SyncVectorEnv`` does by default: records under ``episode``; for clients of one env
            each.
        info_dialect: Form of the infos: ``"0.29"``, a list of dicts or None under ``final_info``; ``"1.x"``, arrays
            with masks. None takes that of the Gymnasium that is installed.
        **options: Those of `BridgeOptions`.

    Returns:
        A Gymnasium vector env; reset it, step it, and close it at the end.

    Raises:
        ValueError: naming the argument that is out of range (`TypeError` for a wrong type).
        OSError: if the port cannot be had; the text names it and the option.
    """
    envs = _RecordingVectorEnv(autoreset_mode=autoreset_mode, **options)
    try:
        envs.info_dialect = InfoDialect.installed() if info_dialect is None else InfoDialect(info_dialect)
    except ValueError:
        envs.close()
        names = ", ".join(repr(dialect.value) for dialect in InfoDialect)
        raise ValueError(f"info_dialect must be one of {names} or None, got {info_dialect!r}") from None
    return envs


class _RecordingVectorEnv(PlugRLVectorEnv):
    """Remote environments with the record of each episode in the infos of its last step."""

    info_dialect: InfoDialect

    def _info_writer(self) -> InfoWriter:
        return InfoWriter(self._lockstep.observation_layout, self.num_envs, self.info_dialect, episodes=True)
