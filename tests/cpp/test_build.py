"""What the header promises of itself: it builds without a warning, its parts can be found, and programs are small."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
HEADER = EXAMPLES / "plugrl_client.hpp"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
KB_AT_MOST = {"-Os": 90, "-O2": 130}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cxx", ["g++", "clang++"])
@pytest.mark.parametrize("source", ["pendulum.cpp", "probe.cpp"])
def test_builds_without_a_warning(cxx: str, source: str, compiler: str, build: Callable[..., Path]) -> None:
    if not shutil.which(cxx):
        pytest.skip(f"{cxx} is not here; {compiler} is")
    build(EXAMPLES / source, "-O2", *STRICT, cxx=cxx)


def test_parts_of_the_header_can_be_found() -> None:
    lines = HEADER.read_text(encoding="utf-8").splitlines()
    banners = [match for line in lines if (match := re.fullmatch(r"// === (\d+) ([^=]+?) =+", line))]
    assert [int(match[1]) for match in banners] == list(range(1, len(banners) + 1))
    assert len(banners) >= 10
    contents = dict(
        re.findall(r"(\d+) ((?:The )?[A-Za-z0-9-]+)", "\n".join(line for line in lines[:20] if line.startswith("//  ")))
    )
    assert contents == {match[1]: re.match(r"(?:The )?[A-Za-z0-9-]+", match[2])[0] for match in banners}  # type: ignore[index]


def test_header_uses_nothing_but_the_standard_library_and_posix() -> None:
    text = HEADER.read_text(encoding="utf-8")
    posix = {"fcntl.h", "netdb.h", "netinet/in.h", "netinet/tcp.h", "poll.h", "sched.h", "sys/socket.h", "unistd.h"}
    included = re.findall(r"^#include [<\"](.+)[>\"]$", text, re.MULTILINE)
    assert {name for name in included if "." in name or "/" in name} <= posix
    code = re.sub(r"//.*", "", text)
    assert not re.search(r"std::c(err|out|log)\b|\b(std::)?(printf|fprintf|puts|perror)\s*\(", code)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("level", KB_AT_MOST)
def test_program_is_small(level: str, compiler: str, build: Callable[..., Path], tmp_path: Path) -> None:
    strip = shutil.which("strip")
    if compiler != "g++" or strip is None or sys.platform != "linux":
        pytest.skip("the size is stated for g++ on Linux")
    program = build(EXAMPLES / "pendulum.cpp", level, name=f"pendulum{level}")
    stripped = tmp_path / "pendulum"
    subprocess.run([strip, "-o", str(stripped), str(program)], check=True)
    assert stripped.stat().st_size <= KB_AT_MOST[level] * 1024


@pytest.mark.timeout(400)
def test_makefile_builds_both(compiler: str, tmp_path: Path) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make")
    environment = {key: value for key, value in os.environ.items() if key not in {"CXXFLAGS", "MAKEFLAGS"}}
    command = [make, "-C", str(EXAMPLES), f"BUILD={tmp_path}", f"CXX={compiler}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"pendulum", "probe"}
    assert all(flag in done.stdout for flag in ("-std=c++17", "-O2", *STRICT))


@pytest.mark.timeout(400)
def test_cmake_builds_both(compiler: str, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    for command in (
        [cmake, "-S", str(EXAMPLES), "-B", str(tmp_path), f"-DCMAKE_CXX_COMPILER={compiler}"],
        [cmake, "--build", str(tmp_path)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "pendulum").exists()
    assert (tmp_path / "probe").exists()
