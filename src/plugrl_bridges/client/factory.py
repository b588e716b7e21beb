"""The way from what the user names to envs that can be stepped, and the errors when there is none.

`gym_factory` and `env_factory` make a callable of the command line's words, `build_batch` calls it, with the env's
number if it asks for ``env_index``. Every unusable factory is a `FactoryError`, raised before anything connects.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import gymnasium
from gymnasium.envs.registration import load_env_creator

from plugrl_bridges.client.batch import first_line
from plugrl_bridges.client.envs import EnvList
from plugrl_bridges.client.vector_env import VectorBatch
from plugrl_bridges.errors import FactoryError
from plugrl_bridges.place import placing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plugrl_bridges.client.batch import AnyEnv, EnvBatch

__all__ = ["MakeEnv", "build_batch", "env_factory", "gym_factory"]

logger = logging.getLogger(__name__)

MakeEnv: TypeAlias = "Callable[[], AnyEnv] | Callable[..., AnyEnv]"

_INDEX = "env_index"


def gym_factory(env_id: str, kwargs: Mapping[str, Any] | None = None) -> MakeEnv:
    """Return the factory of a registered env; hand it to `EnvClient`.

    Args:
        env_id: As `gymnasium.make` takes it; ``module:Id-v0`` imports the module first.
        kwargs: For `gymnasium.make`. An env whose constructor has a parameter ``env_index`` is given its number within
            the connection, unless it stands in here.

    Raises:
        FactoryError: if there is no such id.
    """
    _cwd_on_path()
    module, colon, rest = env_id.partition(":")
    if colon:
        _import(module, f"env id {env_id}")
    try:
        spec = gymnasium.spec(rest if colon else env_id)
    except Exception as exc:
        raise FactoryError(f"no Gymnasium environment has the id {env_id!r}: {first_line(exc)}") from exc
    make = partial(gymnasium.make, env_id, **(kwargs or {}))
    if _INDEX in make.keywords or not _wants_index(_creator(spec.entry_point)):
        return make

    def make_numbered(env_index: int) -> AnyEnv:
        return make(env_index=env_index)

    return make_numbered


def _creator(entry_point: object) -> object:
    """Return what makes the env; None if it cannot be had, of which `gymnasium.make` gives the better error."""
    if not isinstance(entry_point, str):
        return entry_point
    try:
        return load_env_creator(entry_point)
    except Exception as exc:  # noqa: BLE001 - the module is the user's, and may raise anything
        logger.debug("entry point %s: %s", entry_point, exc)
        return None


def _wants_index(make: object) -> bool:
    """Return whether a factory, or an env's class, has a parameter ``env_index`` that is still open."""
    if not callable(make) or (isinstance(make, partial) and _INDEX in make.keywords):
        return False
    try:
        found = inspect.signature(make).parameters.get(_INDEX)
    except (TypeError, ValueError):  # built in, without a signature
        return False
    return found is not None and found.kind in {found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY}


def env_factory(path: str, kwargs: Mapping[str, Any] | None = None) -> MakeEnv:
    """Find a factory by name; hand it to `EnvClient`.

    Args:
        path: ``package.module:function``, found from the current directory too. The function returns a
            `gymnasium.Env`, or a `gymnasium.vector.VectorEnv` whose rows are the client's envs. A parameter of the
            name ``env_index`` is given the env's number within the connection.
        kwargs: For the function.

    Raises:
        FactoryError: if the module or the function is not there.
    """
    module_name, colon, attribute = path.partition(":")
    if not (colon and module_name and attribute):
        raise FactoryError(f"an env factory is written package.module:function, got {path!r}")
    _cwd_on_path()
    found: Any = _import(module_name, f"env factory {path}")
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise FactoryError(f"env factory {path}: {module_name} has no {attribute!r}")
        found = getattr(found, name)
    if not callable(found):
        raise FactoryError(f"env factory {path}: expected a function, got a {type(found).__name__}")
    return partial(found, **(kwargs or {}))


def _cwd_on_path() -> None:
    """Let the console script find what ``python -m`` would."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _import(name: str, what: str) -> object:
    try:
        return importlib.import_module(name)
    except Exception as exc:
        if isinstance(exc, ModuleNotFoundError) and exc.name is not None and f"{name}.".startswith(f"{exc.name}."):
            raise FactoryError(f"{what}: there is no module {exc.name!r} in {Path.cwd()} or on sys.path") from exc
        logger.exception("%s: importing %s failed", what, name)
        raise FactoryError(f"{what}: importing {name} failed: {first_line(exc)}") from exc


def build_batch(
    make_env: MakeEnv,
    num_envs: int | None,
    *,
    rank: int = 0,
    verify: bool = False,
    before_each: Callable[[], None] = lambda: None,
) -> EnvBatch:
    """Make the envs of one client; without a number one env, or as many as the vector env has rows.

    ``before_each`` is called before each env is made; what it raises is let through, after the envs made so far are
    closed. The ``rank`` is for the ledgers that the factory makes.

    Raises:
        FactoryError: if it raises, returns no env, or returns a vector env of another size.
        SpaceError: if the spaces cannot travel.
    """
    made: list[Any] = []
    try:
        while len(made) < (num_envs or 1):
            before_each()
            env = _make(make_env, rank, len(made))
            made.append(env)
            if not isinstance(env, gymnasium.vector.VectorEnv):
                continue
            if len(made) > 1:
                raise FactoryError("the factory returned first an env, then a vector env")
            if num_envs not in {None, env.num_envs}:
                raise FactoryError(
                    f"the factory returned a vector env of {env.num_envs} envs, but num_envs is {num_envs}"
                )
            return VectorBatch(env, verify=verify)
        return EnvList(made, verify=verify)
    except BaseException:
        for env in made:
            env.close()
        raise


def _make(make_env: MakeEnv, rank: int, row: int) -> AnyEnv:
    try:
        numbered: dict[str, int] = {_INDEX: row} if _wants_index(make_env) else {}
        with placing(rank, row):
            env = cast("Callable[..., AnyEnv]", make_env)(**numbered)
    except Exception as exc:
        logger.exception("the env factory failed")
        raise FactoryError(f"the env factory failed: {first_line(exc)}") from exc
    if not isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        raise FactoryError(
            f"the env factory returned a {type(env).__module__}.{type(env).__qualname__}, expected a gymnasium.Env or "
            "gymnasium.vector.VectorEnv"
        )
    return env
