"""Compilers, and programs that are built once per session, however many test processes there are."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conformance.conftest import little_delay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Build = Callable[..., Path]

__all__ = ["little_delay"]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
BUILD_TIMEOUT_S = 300


@cache
def compilers() -> list[str]:
    return [name for name in ("g++", "clang++") if shutil.which(name)]


@pytest.fixture(scope="session")
def compiler() -> str:
    if not compilers():
        if os.environ.get("CI"):
            pytest.fail("neither g++ nor clang++ is here, and continuous integration must build the C++ client")
        pytest.skip("neither g++ nor clang++ is here")
    return compilers()[0]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fcntl = pytest.importorskip("fcntl", reason="the C++ client is for POSIX")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def build(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Give a function that compiles one source and returns the program, made by whichever test process comes first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "cpp"
    folder.mkdir(exist_ok=True)

    def make(source: Path, *flags: str, name: str | None = None, cxx: str = compiler) -> Path:
        program = folder / (name or f"{source.stem}-{cxx}")
        with _locked(folder / f"{program.name}.lock"):
            if not program.exists():
                half = program.with_suffix(".half")
                command = [
                    cxx,
                    "-std=c++17",
                    "-ffp-contract=off",
                    *flags,
                    f"-I{EXAMPLES}",
                    "-o",
                    str(half),
                    str(source),
                ]
                done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
                assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[:5000]}"
                half.rename(program)
        return program

    return make


@pytest.fixture(scope="session")
def pendulum(build: Build) -> Path:
    return build(EXAMPLES / "pendulum.cpp", "-O2", *STRICT)


@pytest.fixture(scope="session")
def probe(build: Build) -> Path:
    return build(EXAMPLES / "probe.cpp", "-O2", *STRICT)
