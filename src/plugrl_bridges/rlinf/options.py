"""What an env's part of an RLinf config says: our options, RLinf's own that concern us, and their checks.

Pure but for one environment variable; knows nothing of torch. ``rlinf.env`` reads it in a worker, ``rlinf.launcher``
in the driver, so that a wrong config ends a run before it begins.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from omegaconf import OmegaConf

from plugrl_bridges.arguments import whole, whole_or_none
from plugrl_bridges.server.options import BridgeOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

__all__ = ["API_KEY", "ChunkMode", "EnvOptions", "ObservationNames", "check_config"]

ChunkMode: TypeAlias = Literal["stepwise", "remote"]
"""``"stepwise"``: one exchange per step of a chunk; ``"remote"``: the client takes the whole chunk in one."""

API_KEY = "PLUGRL_API_KEY"
"""Environment variable that stands in for ``api_key``: RLinf prints and saves its config."""
_OF_THE_BRIDGE = ("host", "timeout", "connect_timeout", "on_client_loss")
_SUMMED = "chunk_level"  # the reward_type that adds up a chunk's rewards anyway


@dataclass(frozen=True)
class ObservationNames:
    """Which entries of a client's observations RLinf's policy sees, and as what.

    Attributes:
        states: Entries to flatten and join into ``states``; None takes all that are neither image nor text.
        main_image: Entry for ``main_images``; None takes the only image, if there is just one.
        wrist_image: Entry for ``wrist_images``.
        extra_view_images: Entries to stack into ``extra_view_images``.
        task_text: Text entry for ``task_descriptions``; None takes the only text, if there is just one.
        task_description: The text of all envs, in place of one that the clients send.
    """

    states: tuple[str, ...] | None = None
    main_image: str | None = None
    wrist_image: str | None = None
    extra_view_images: tuple[str, ...] = ()
    task_text: str | None = None
    task_description: str | None = None

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ObservationNames:
        """Check the map under ``observation``; a `ValueError` or `TypeError` names the key that is wrong."""
        known = list(ObservationNames.__dataclass_fields__)
        unknown = sorted(set(config).difference(known))
        if unknown:
            raise ValueError(f"observation: unknown keys {unknown}; known are {known}")
        states = config.get("states")
        return ObservationNames(
            states=None if states is None else _names("states", states),
            extra_view_images=_names("extra_view_images", config.get("extra_view_images") or ()),
            **{
                key: _text(f"observation.{key}", config.get(key))
                for key in ("main_image", "wrist_image", "task_text", "task_description")
            },
        )


@dataclass(frozen=True)
class EnvOptions:
    """Checked options of one env instance.

    Attributes:
        bridge: Options of the bridge below; its port is this instance's own.
        index: Number of this instance among those of its config node.
        instances: How many there are.
        names: Which entries of the observations become what.
        chunk_mode: How a chunk travels.
        clip_actions: Whether actions are clipped to the action space.
        auto_reset: RLinf's: whether the next episode begins by itself, at the end of the chunk.
        ignore_terminations: RLinf's: whether an episode lasts ``max_episode_steps``, whatever the env says.
        max_episode_steps: RLinf's; counts only with ``ignore_terminations``.
        group_size: RLinf's: neighbours that begin an episode from the same state.
        seed: First seed of this instance's envs; None seeds nothing.
        obs_dim: What the policy expects as width of ``states``, if the config says so.
    """

    bridge: BridgeOptions
    index: int = 0
    instances: int = 1
    names: ObservationNames = field(default_factory=ObservationNames)
    chunk_mode: ChunkMode = "stepwise"
    clip_actions: bool = True
    auto_reset: bool = True
    ignore_terminations: bool = False
    max_episode_steps: int | None = None
    group_size: int = 1
    seed: int | None = None
    obs_dim: int | None = None

    @staticmethod
    def from_config(config: DictConfig, *, num_envs: int, index: int, instances: int) -> EnvOptions:
        """Check one env's part of the config; where it hangs in a whole one, its parts are held against others.

        Raises:
            ValueError: naming the option that is out of its range or does not fit another.
            TypeError: naming the option that has a wrong type.
        """
        _check_whole_config(config)
        chunk_mode = config.get("chunk_mode", "stepwise")
        port = whole("port", config.get("port", 8000), 0)
        log = config.get("episode_log")
        given = {name: config[name] for name in _OF_THE_BRIDGE if name in config}
        bridge = BridgeOptions(
            num_envs=num_envs,
            port=port + index if port else 0,
            action_horizon=_horizon(config, chunk_mode),
            api_key=config.get("api_key") or os.environ.get(API_KEY) or None,
            episode_log=None if log is None else _own_log(log, index, instances),
            **given,
        )
        seed = whole_or_none("seed", config.get("seed"), 0)
        limit = whole_or_none("max_episode_steps", config.get("max_episode_steps"), 1)
        ignoring = bool(config.get("ignore_terminations", False))
        if ignoring and limit is None:
            raise ValueError("ignore_terminations needs max_episode_steps: nothing else would end an episode")
        if ignoring and chunk_mode == "remote" and limit is not None and limit % bridge.action_horizon:
            raise ValueError(
                f"max_episode_steps {limit} must be a multiple of action_horizon {bridge.action_horizon} with "
                "ignore_terminations and chunk_mode remote: an exchange cannot end in the middle"
            )
        group_size = whole("group_size", config.get("group_size", 1), 1)
        if num_envs % group_size:
            raise ValueError(f"group_size {group_size} does not divide the {num_envs} envs of an instance")
        return EnvOptions(
            bridge=bridge,
            index=index,
            instances=instances,
            names=ObservationNames.from_config(config.get("observation") or {}),
            chunk_mode=chunk_mode,
            clip_actions=bool(config.get("clip_actions", True)),
            auto_reset=bool(config.get("auto_reset", True)),
            ignore_terminations=ignoring,
            max_episode_steps=limit,
            group_size=group_size,
            seed=None if seed is None else seed + index * num_envs // group_size,
            obs_dim=OmegaConf.select(_root(config), "actor.model.obs_dim"),
        )


def check_config(config: DictConfig, *, instances: int, evaluates: bool) -> None:
    """Check a whole config in the driver, before anything is started.

    Args:
        config: All of it.
        instances: Env workers times pipeline stages.
        evaluates: Whether ``env.eval`` is used too.

    Raises:
        ValueError: naming the option that is out of its range or does not fit another.
        TypeError: naming the option that has a wrong type.
    """
    taken: dict[str, range] = {}
    names = ("train", "eval") if evaluates else ("train",)
    for name in names:
        node = config.env.get(name)
        if node is None or node.get("env_type") != "plugrl":
            continue
        num_envs = node.total_num_envs // instances
        for index in {0, instances - 1}:  # the last has the highest port
            EnvOptions.from_config(node, num_envs=num_envs, index=index, instances=instances)
        port = node.get("port", 8000)
        if port:
            taken[name] = range(port, port + instances)
    logs = [config.env[name].get("episode_log") for name in names if config.env.get(name)]
    if len(logs) == 2 and logs[0] is not None and logs[0] == logs[1]:
        raise ValueError(f"env.train and env.eval both write to episode_log {logs[0]!r}: give each its own")
    if len(taken) == 2 and set(taken["train"]).intersection(taken["eval"]):
        raise ValueError(
            f"env.train and env.eval both listen in one worker: train takes the ports {_shown(taken['train'])}, eval "
            f"{_shown(taken['eval'])}; set env.eval.port to {taken['train'].stop} or more"
        )


def _check_whole_config(config: DictConfig) -> None:
    """Check the chunk mode against what the algorithm wants to be told."""
    mode = config.get("chunk_mode", "stepwise")
    if mode not in get_args(ChunkMode):
        raise ValueError(f"chunk_mode must be one of {list(get_args(ChunkMode))}, got {mode!r}")
    horizon = _horizon(config, mode)
    if mode == "stepwise":
        return
    chunks = OmegaConf.select(_root(config), "actor.model.num_action_chunks")
    reward_type = OmegaConf.select(_root(config), "algorithm.reward_type")
    if chunks is not None and chunks != horizon:
        raise ValueError(
            f"chunk_mode remote: action_horizon {horizon} must equal actor.model.num_action_chunks {chunks}"
        )
    if horizon > 1 and reward_type not in {None, _SUMMED}:
        raise ValueError(
            f"chunk_mode remote: only the sum of a chunk's rewards crosses the wire, so algorithm.reward_type must be "
            f"{_SUMMED!r}, got {reward_type!r}; or use chunk_mode: stepwise"
        )


def _horizon(config: DictConfig, mode: ChunkMode) -> int:
    """Return the actions of one exchange; the chunk's, if the config says how many it has, in remote mode."""
    horizon = config.get("action_horizon")
    if horizon is None and mode == "remote":
        horizon = OmegaConf.select(_root(config), "actor.model.num_action_chunks")
        if horizon is None:
            raise ValueError("chunk_mode remote needs action_horizon, the actions of a chunk")
    if horizon is None:
        return 1
    checked = whole("action_horizon", horizon, 1)
    if mode == "stepwise" and checked != 1:
        raise ValueError(f"chunk_mode stepwise sends one action at a time: action_horizon must be 1, got {checked}")
    return checked


def _root(config: DictConfig) -> Any:  # noqa: ANN401 - as OmegaConf has it
    """Return the whole config that a node hangs in, or the node."""
    return config._get_root()  # noqa: SLF001 - OmegaConf has no public way up


def _own_log(path: str, index: int, instances: int) -> Path:
    """Return the path of an instance's log, of its own if there are several."""
    plain = Path(path)
    return plain if instances == 1 else plain.with_name(f"{plain.stem}-{index}{plain.suffix}")


def _names(key: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401 - whatever the file says
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in found) or len(set(found)) != len(found):
        raise ValueError(f"observation.{key} must be a list of different names, got {list(found)}")
    return found


def _text(key: str, value: Any) -> str | None:  # noqa: ANN401 - whatever the file says
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{key} must be a str or null, got {type(value).__name__} {value!r}")
    return value


def _shown(ports: range) -> str:
    return f"{ports.start} to {ports[-1]}" if len(ports) > 1 else str(ports.start)
