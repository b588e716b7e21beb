"""``make_vec_env``: SB3's function of that name, for environments that env clients bring.

Follows SB3's argument names as far as they mean anything here; an argument that cannot be honoured is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from plugrl_bridges.arguments import whole, whole_or_none
from plugrl_bridges.sb3.vec_env import PlugRemoteVecEnv

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

__all__ = ["make_vec_env"]

_AT_THE_CLIENT = {
    "wrapper_class": "wrap the envs at the client with plugrl-env-client --env-factory",
    "wrapper_kwargs": "wrap the envs at the client with plugrl-env-client --env-factory",
    "env_kwargs": "pass it to the client: plugrl-env-client --env-kwargs",
}


def make_vec_env(  # noqa: PLR0917 - the order is that of SB3's own make_vec_env
    env: PlugRemoteVecEnv | None = None,
    n_envs: int | None = None,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | os.PathLike[str] | None = None,
    wrapper_class: Callable[..., Any] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    vec_env_cls: type[PlugRemoteVecEnv] | None = None,
    vec_env_kwargs: Mapping[str, Any] | None = None,
    monitor_kwargs: Mapping[str, Any] | None = None,
    wrapper_kwargs: Mapping[str, Any] | None = None,
) -> VecEnv:
    """Monitor remote environments, as SB3's ``make_vec_env`` does for local ones; give the result to an algorithm.

    Waits for the clients.

    Args:
        env: The remote env; None makes one from ``n_envs``, ``vec_env_cls`` and ``vec_env_kwargs``.
        n_envs: Number of envs; checked against ``env`` if that is given.
        seed: Seeds the first reset: env i gets ``seed + start_index + i``. None leaves the seeding to the clients, or
            to the algorithm's own seed.
        start_index: Added to every env's seed.
        monitor_dir: Folder for a ``monitor.csv`` of all envs; created if absent. None writes no file.
        wrapper_class: Refused: a wrapper of one env belongs to the client.
        env_kwargs: Refused: arguments of the env belong to the client.
        vec_env_cls: A `PlugRemoteVecEnv` class to make, if ``env`` is None.
        vec_env_kwargs: Its arguments, such as ``port``.
        monitor_kwargs: Arguments of ``VecMonitor``, such as ``info_keywords``.
        wrapper_kwargs: Refused, as ``wrapper_class``.

    Returns:
        A ``VecMonitor`` around the env, so that ``rollout/ep_rew_mean`` is logged.

    Raises:
        ValueError: naming the argument that cannot be honoured here, and what to do instead.
        ConnectTimeout: if the clients did not come in time.
        UnverifiedClientError: with ``verify=True``, for a client that sends no digests.
        SpaceError: if a client's spaces cannot be used.
    """
    given = {"wrapper_class": wrapper_class, "env_kwargs": env_kwargs, "wrapper_kwargs": wrapper_kwargs}
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} cannot be honoured for remote environments: {_AT_THE_CLIENT[name]}")
    start_index = whole("start_index", start_index, 0)
    seed = whole_or_none("seed", seed, 0)
    made = env is None
    if env is None:
        env = _make(vec_env_cls, n_envs, vec_env_kwargs)
    else:
        _check_given(env, n_envs, vec_env_cls, vec_env_kwargs)
    try:
        if seed is not None:
            env.seed(seed + start_index)
        filename = None if monitor_dir is None else str(Path(monitor_dir) / "monitor.csv")  # with its folder
        return VecMonitor(env, filename, **dict(monitor_kwargs or {}))
    except BaseException:
        if made:  # what the caller made is the caller's to close
            env.close()
        raise


def _make(vec_env_cls: object, n_envs: int | None, vec_env_kwargs: Mapping[str, Any] | None) -> PlugRemoteVecEnv:
    chosen = PlugRemoteVecEnv if vec_env_cls is None else vec_env_cls
    if not isinstance(chosen, type) or not issubclass(chosen, PlugRemoteVecEnv):
        raise TypeError(f"vec_env_cls must be PlugRemoteVecEnv or a class of it, got {chosen!r}")
    kwargs = dict(vec_env_kwargs or {})
    if n_envs is not None and kwargs.setdefault("num_envs", n_envs) != n_envs:
        raise ValueError(f"n_envs is {n_envs}, but vec_env_kwargs has num_envs={kwargs['num_envs']}")
    return chosen(**kwargs)


def _check_given(
    env: PlugRemoteVecEnv,
    n_envs: int | None,
    vec_env_cls: type[PlugRemoteVecEnv] | None,
    vec_env_kwargs: Mapping[str, Any] | None,
) -> None:
    if not isinstance(env, PlugRemoteVecEnv):  # an env id, out of SB3's habit
        raise TypeError(
            f"env must be a PlugRemoteVecEnv, got {type(env).__name__} {env!r}; an env id goes to the client: "
            "plugrl-env-client --env-id"
        )
    for name, value in (("vec_env_cls", vec_env_cls), ("vec_env_kwargs", vec_env_kwargs)):
        if value:
            raise ValueError(f"{name} cannot be honoured for an env that is already made: pass it where env is made")
    if n_envs is not None and n_envs != env.num_envs:
        raise ValueError(f"n_envs is {n_envs}, but env has {env.num_envs} envs")
