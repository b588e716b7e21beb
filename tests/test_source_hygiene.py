"""Hold what no linter of ours checks, in the source of the package itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
SOURCES = sorted(SRC.rglob("*.py"))
IDS = [str(path.relative_to(SRC)) for path in SOURCES]

TALKERS = frozenset({"cli.py", "demo.py", "__main__.py"})
# Whatever reads a pickle runs what the pickle says.
PICKLERS = frozenset({"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "pickletools", "shelve"})
ABSOLUTE = re.compile(r"(?<![\w.:/])(?:/(?:work|root|home|Users|tmp|opt|mnt)\b(?:/|(?=[\"'\s]))|[A-Z]:\\\\?Users\b)")

each_source = pytest.mark.parametrize("path", SOURCES, ids=IDS)


def test_there_is_source() -> None:
    assert (SRC / "plugrl_bridges" / "__init__.py") in SOURCES
    assert (SRC / "plugrl_bridges" / "py.typed").is_file()


def prints(source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def pickles(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            off = isinstance(node.value, ast.Constant) and node.value.value is False
            found.extend([] if off else ["allow_pickle"])
        found.extend(name for name in names if name.partition(".")[0] in PICKLERS)
    return found


def absolute_paths(source: str) -> list[str]:
    return [line for line in source.splitlines() if ABSOLUTE.search(line)]


@each_source
def test_library_prints_nothing(path: Path) -> None:
    if path.name not in TALKERS:
        assert prints(path.read_text(encoding="utf-8")) == []


@each_source
def test_no_pickle(path: Path) -> None:
    assert pickles(path.read_text(encoding="utf-8")) == []


@each_source
def test_no_absolute_paths(path: Path) -> None:
    assert absolute_paths(path.read_text(encoding="utf-8")) == []


def test_checks_see_faults() -> None:
    assert prints("x = 1\nprint(x)") == [2]
    assert prints("log.print(x); pprint(x)") == []
    assert pickles("def f():\n    from pickle import loads") == ["pickle"]
    assert pickles("import cloudpickle as c, json") == ["cloudpickle"]
    assert pickles("np.load(p, allow_pickle=True)") == ["allow_pickle"]
    assert pickles("np.load(p, allow_pickle=False)") == []
    bad = ["a = '/work/x'", "b = Path('/root')", 'c = "/home/me"']
    assert absolute_paths("\n".join(bad)) == bad
    assert absolute_paths("a = 'http://host/work/x'\nb = './home/x'\nc = '/healthz'\nd = 'work/root'") == []
