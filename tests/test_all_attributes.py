"""Keep ``__all__`` honest: there in every module, in order, complete, and made of names that resolve."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from types import FunctionType, ModuleType

import pytest

import plugrl_bridges

MODULES = [
    plugrl_bridges.__name__,
    *(
        found.name
        for found in pkgutil.walk_packages(plugrl_bridges.__path__, f"{plugrl_bridges.__name__}.")
        # Importing the first would run it. The second needs RLinf: tests/rlinf looks at it.
        if not found.name.endswith(".__main__") and not found.name.startswith("plugrl_bridges.rlinf")
    ),
]


def exported(module: ModuleType) -> list[str]:
    names = getattr(module, "__all__", None)
    assert isinstance(names, list), f"{module.__name__} has no list __all__"
    return names


def defined(module: ModuleType) -> dict[str, type | FunctionType]:
    """Return the public classes and functions that this module defines, rather than imports."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and isinstance(value, (type, FunctionType)) and value.__module__ == module.__name__
    }


def order(name: str) -> tuple[int, str]:
    """Order as ruff's RUF022 does: CONSTANTS, then Classes, then the rest."""
    rank = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return rank, name


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return import_module(request.param)


def test_all_is_sorted_and_has_no_duplicates(module: ModuleType) -> None:
    names = exported(module)
    assert len(set(names)) == len(names)
    if "noqa: RUF022" not in inspect.getsource(module):  # there, the order is the author's, and meant
        assert names == sorted(names, key=order)


def test_all_resolves(module: ModuleType) -> None:
    missing = [name for name in exported(module) if not hasattr(module, name)]
    assert not missing, f"in {module.__name__}.__all__ but not in the module"


def test_all_is_complete(module: ModuleType) -> None:
    forgotten = sorted(set(defined(module)) - set(exported(module)))
    assert not forgotten, f"public in {module.__name__} but not in its __all__ (rename with an underscore, or list)"


def test_public_names_have_docstrings(module: ModuleType) -> None:
    assert module.__doc__, f"{module.__name__} has no docstring"
    # A dataclass without a docstring is given its signature for one.
    bare = [
        name
        for name, value in defined(module).items()
        if not (value.__doc__ and not value.__doc__.startswith(f"{name}("))
    ]
    assert not bare, f"public in {module.__name__} without a docstring"
