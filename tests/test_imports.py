"""Hold the layering: which part of the package may import which, read from the source and not from a run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "plugrl_bridges"
SRC = Path(__file__).resolve().parents[1] / "src"
SOURCES = sorted((SRC / PACKAGE).rglob("*.py"))

ROOT = "<root>"  # plugrl_bridges/__init__.py
ADAPTERS = frozenset({"gym", "sb3", "cleanrl", "rlinf"})
FRONTS = frozenset({"cli", "demo", "__main__"})
BELOW_SERVER = frozenset({"arguments", "spaces", "transport", "wire", "errors"})

# Unit (a module or a subpackage right below plugrl_bridges) -> the units it may import. What it may not import it must
# not need: the arrow goes down only. A new unit takes its place in this table when it is made.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "arguments": frozenset(),
    "console": frozenset(),
    "wire": frozenset({"errors"}),
    "transport": frozenset({"arguments", "errors"}),
    "spaces": frozenset({"wire", "errors"}),
    "digest": frozenset({"spaces", "wire", "errors"}),
    "traits": frozenset(),
    "place": frozenset(),
    "server": BELOW_SERVER | {"digest"},
    "client": BELOW_SERVER | {"console", "digest", "place", "traits"},
    # The checkers judge our own transport too, so they stand on another one: the websockets library's.
    # What a message means, and what a digest is of, has one definition each, which golden vectors check.
    "conformance": frozenset({"console", "digest", "probe_env", "spaces", "wire", "errors"}),
    "ledger": frozenset({"arguments", "console", "digest", "place", "traits", "spaces", "wire", "errors"}),
    "plot": frozenset(),
    "probe_env": frozenset(),
    "registration": frozenset(),
    **dict.fromkeys(ADAPTERS, BELOW_SERVER | {"server"}),
    "cleanrl": BELOW_SERVER | {"server", "gym"},  # its vector env is that of gym, with other infos
    **dict.fromkeys(FRONTS, BELOW_SERVER | ADAPTERS | {"console", "server", "client", "conformance", "ledger", "plot"}),
    ROOT: frozenset({"errors", "registration"}),
}

# The wire is a pure function of bytes: nothing in there waits, shares or tells the time.
IMPURE = frozenset(
    {
        "_thread",
        "asyncio",
        "concurrent",
        "datetime",
        "multiprocessing",
        "queue",
        "select",
        "selectors",
        "socket",
        "socketserver",
        "ssl",
        "threading",
        "time",
        "websockets",
    }
)
TRAINERS = frozenset({"cleanrl", "matplotlib", "pandas", "rlinf", "stable_baselines3", "torch"})
MAY_IMPORT_TRAINERS = frozenset({"sb3", "cleanrl", "rlinf", "plot"}) | FRONTS
# Of a unit that may not, the modules that are imported only by whoever has the trainer or draws pictures.
TRAINER_MODULES = frozenset({f"{PACKAGE}.ledger.vec_env"})


class Import(NamedTuple):
    """One imported module: its absolute dotted name, the line, and whether it is imported as the module loads."""

    module: str
    line: int
    at_load: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    head, _, rest = module.partition(".")
    assert head == PACKAGE
    return rest.partition(".")[0] or ROOT


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _named_in(node: ast.AST, package: str) -> list[str]:
    """Return the absolute names of the modules that this one node imports, if it is an import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            kept = parents[: len(parents) - node.level + 1]
            base = ".".join([*kept, base] if base else kept)
        if base == PACKAGE:  # `from plugrl_bridges import wire` names a unit, or something of the root's own
            return [f"{base}.{alias.name}" for alias in node.names if alias.name != "__version__"]
        return [base]
    if isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0]
        if called in {"import_module", "__import__"} and isinstance(first, ast.Constant):
            return [str(first.value)]
    return []


def imports_of(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []

    def walk(node: ast.AST, *, at_load: bool) -> None:
        found.extend(Import(name, getattr(node, "lineno", 0), at_load) for name in _named_in(node, package))
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for stmt in node.body:
                walk(stmt, at_load=False)
            for stmt in node.orelse:
                walk(stmt, at_load=at_load)
            return
        deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            walk(child, at_load=at_load and not deferred)

    walk(ast.parse(source), at_load=True)
    return found


def fault_of(importer: str, imported: Import) -> str | None:
    """Return what is wrong with this import, or None."""
    unit = unit_of(importer)
    if unit not in MAY_IMPORT:
        return f"{unit} has no place in the layering: add it to MAY_IMPORT"
    head = imported.module.partition(".")[0]
    if head != PACKAGE:
        if unit == "wire" and head in IMPURE:
            return f"wire must not import {head}"
        if head in TRAINERS and unit not in MAY_IMPORT_TRAINERS and importer not in TRAINER_MODULES:
            return f"{unit} must not import {head}"
        return None
    target = unit_of(imported.module)
    if target == unit:
        return None
    if unit == ROOT and target in ADAPTERS | {"server"} and not imported.at_load:
        return None  # a lazy re-export
    if target not in MAY_IMPORT[unit]:
        return f"{unit} must not import {target}"
    return None


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_down_only(path: Path) -> None:
    module = module_name(path)
    found = imports_of(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    faults = [f"line {each.line}: {fault}" for each in found if (fault := fault_of(module, each))]
    assert not faults, f"{module}:\n" + "\n".join(faults)


@pytest.mark.parametrize("module", [module_name(path) for path in SOURCES])
def test_every_module_has_a_place(module: str) -> None:
    assert unit_of(module) in MAY_IMPORT


def test_table_has_no_cycle() -> None:
    done: set[str] = set()
    while left := set(MAY_IMPORT) - done:
        ready = {unit for unit in left if MAY_IMPORT[unit] <= done}
        assert ready, f"cycle among {sorted(left)}"
        done |= ready


@pytest.mark.parametrize(
    ("importer", "source", "fault"),
    [
        ("plugrl_bridges.wire.codec", "import socket", "wire must not import socket"),
        ("plugrl_bridges.wire.codec", "from time import monotonic", "wire must not import time"),
        ("plugrl_bridges.wire.codec", "import concurrent.futures", "wire must not import concurrent"),
        ("plugrl_bridges.wire.codec", "from ..transport import websocket", "wire must not import transport"),
        ("plugrl_bridges.wire.codec", "from .messages import Infer", None),
        ("plugrl_bridges.wire.codec", "from plugrl_bridges.errors import WireError", None),
        ("plugrl_bridges.wire.codec", "from plugrl_bridges import server", "wire must not import server"),
        ("plugrl_bridges.transport.websocket", "import plugrl_bridges.wire.codec", "transport must not import wire"),
        ("plugrl_bridges.transport.websocket", "import socket", None),
        ("plugrl_bridges.server.hub", "from .. import gym", "server must not import gym"),
        ("plugrl_bridges.server.hub", "def f():\n    from ..client import x", "server must not import client"),
        ("plugrl_bridges.server.hub", "import torch", "server must not import torch"),
        ("plugrl_bridges.server.hub", "import_module('plugrl_bridges.sb3')", "server must not import sb3"),
        (
            "plugrl_bridges.client.run",
            "if TYPE_CHECKING:\n    from ..server import hub",
            "client must not import server",
        ),
        ("plugrl_bridges.client.run", "from plugrl_bridges import __version__", None),
        ("plugrl_bridges.conformance.bridge", "from ..transport import x", "conformance must not import transport"),
        ("plugrl_bridges.conformance.bridge", "from ..server import verify", "conformance must not import server"),
        ("plugrl_bridges.conformance.bridge", "from ..digest.digest import EnvDigest", None),
        ("plugrl_bridges.conformance.bridge", "import websockets.sync.client", None),
        ("plugrl_bridges.sb3.vec_env", "from plugrl_bridges.gym import x", "sb3 must not import gym"),
        ("plugrl_bridges.sb3.vec_env", "from plugrl_bridges.server.lockstep import x", None),
        ("plugrl_bridges.cleanrl.make", "from plugrl_bridges.gym.vector_env import x", None),
        ("plugrl_bridges.cleanrl.make", "from plugrl_bridges.sb3 import x", "cleanrl must not import sb3"),
        ("plugrl_bridges.gym.vector_env", "from plugrl_bridges.cleanrl import x", "gym must not import cleanrl"),
        ("plugrl_bridges.sb3.vec_env", "import stable_baselines3", None),
        ("plugrl_bridges.ledger.vec_env", "import stable_baselines3", None),
        ("plugrl_bridges.ledger.env", "import stable_baselines3", "ledger must not import stable_baselines3"),
        ("plugrl_bridges.ledger.vec_env", "from plugrl_bridges.sb3 import x", "ledger must not import sb3"),
        ("plugrl_bridges.rlinf.env", "import rlinf.envs", None),
        ("plugrl_bridges.demo", "from plugrl_bridges.sb3 import x", None),
        ("plugrl_bridges", "from plugrl_bridges.gym import x", f"{ROOT} must not import gym"),
        ("plugrl_bridges", "def __getattr__(name):\n    from plugrl_bridges.gym import x", None),
        ("plugrl_bridges", "def __getattr__(name):\n    from plugrl_bridges.server import x", None),
        ("plugrl_bridges.novel", "import json", "novel has no place in the layering: add it to MAY_IMPORT"),
    ],
)
def test_scan_sees_faults(importer: str, source: str, fault: str | None) -> None:
    found = imports_of(source, importer, is_package=importer == PACKAGE)
    assert next(filter(None, (fault_of(importer, each) for each in found)), None) == fault


LEDGERS = [(f"{PACKAGE}.ledger.{name}", set[str]()) for name in ("env", "vector_env", "comparing")]


@pytest.mark.parametrize(
    ("module", "more"),
    [(PACKAGE, {"websockets", "msgpack"}), (f"{PACKAGE}.client", set()), (f"{PACKAGE}.cleanrl", set()), *LEDGERS],
)
def test_import_is_light(module: str, more: set[str]) -> None:
    heavy = sorted(TRAINERS | more)
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_vector_env_of_the_root_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import sys, plugrl_bridges; before = 'plugrl_bridges.server' in sys.modules; "
        "kind = plugrl_bridges.PlugRLVectorEnv; print(before, kind.__module__, hasattr(plugrl_bridges, 'PlugRLVecEnv'))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout.split(), done.stderr) == (["False", f"{PACKAGE}.gym.vector_env", "False"], "")


CORE = sorted(BELOW_SERVER | ADAPTERS | {"digest", "server", "client", "place", "traits"})


@pytest.mark.parametrize("unit", CORE)
def test_the_core_needs_neither_ledger_nor_conformance(unit: str) -> None:
    assert not MAY_IMPORT[unit] & {"ledger", "conformance"}


def loaded_by(path: Path, known: frozenset[str]) -> set[str]:
    """Return the modules of the package that a module imports as it loads; packages on the way do not count."""
    module = module_name(path)
    found: set[str] = set()
    for each in imports_of(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py"):
        if each.at_load and each.module in known and each.module != module:
            found.add(each.module)
    return found


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a ring, or import such a ring; an empty list if there are none."""
    left = dict(imports)
    while ready := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in ready:
            del left[module]
    return sorted(left)


def test_no_modules_import_each_other() -> None:
    known = frozenset(map(module_name, SOURCES))
    assert cycle_in({module_name(path): loaded_by(path, known) for path in SOURCES}) == []


def test_a_cycle_is_seen() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set(), "e": {"d"}}) == ["a", "b", "c"]
