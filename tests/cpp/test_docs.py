"""The program that docs/cpp-client.md shows, built and run; its lists, compared with the header."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from plugrl_bridges.server.policy_server import PolicyServer
from tests.docs.markdown import blocks, table
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "cpp"
PAGE = ROOT / "docs" / "cpp-client.md"


@pytest.mark.timeout(400)
def test_the_program_of_the_page(build: Callable[..., Path], tmp_path: Path) -> None:
    (block,) = [block for block in blocks(PAGE) if "build" in block.directive]
    source = tmp_path / "room.cpp"
    source.write_text(block.text, encoding="utf-8")
    program = build(source, "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
    seen: list[dict[str, np.ndarray]] = []

    def thermostat(observation: dict[str, np.ndarray]) -> np.ndarray:
        seen.append(observation)
        return (observation["thermometer"] < 20.0).astype(np.float32)

    server = PolicyServer(thermostat, port=0, episodes=4, connect_timeout=PATIENCE_S)
    with subprocess.Popen([program, server.url], stdout=subprocess.PIPE, text=True) as client:
        summary = server.run()
        output = client.communicate(timeout=PATIENCE_S)[0]
    assert client.returncode == 0
    assert re.fullmatch(r"\d+ episodes\n", output)
    assert {episode.length for episode in summary.episodes} == {50}
    assert {key: (value.dtype.str, value.shape) for key, value in seen[0].items()} == {
        "camera": ("|u1", (4, 36, 36, 3)),
        "thermometer": ("<f4", (4, 1)),
    }
    for observation in seen:
        warm = observation["thermometer"][:, 0] > 20.0
        assert (observation["camera"] == np.where(warm, 255, 0)[:, None, None, None]).all()


def test_options_of_the_page_are_those_of_the_programs() -> None:
    said = {re.findall(r"--[a-z-]+", row[0])[0] for row in table(PAGE, "Try it")}
    taken = set(re.findall(r'is\("(--[a-z-]+)"\)', (EXAMPLES / "command_line.hpp").read_text(encoding="utf-8")))
    assert said == taken - {"--reuse"}


def test_exceptions_of_the_page_are_in_the_header() -> None:
    header = (EXAMPLES / "plugrl_client.hpp").read_text(encoding="utf-8")
    for row in table(PAGE, "Errors, log and stopping"):
        assert f"struct {row[0].strip('`')} : public Error" in header


def test_command_at_the_top_is_that_of_the_page() -> None:
    for name in ("pendulum", "probe"):
        top = (EXAMPLES / f"{name}.cpp").read_text(encoding="utf-8").split("#if", 1)[0]
        command = re.search(r"g\+\+ [^&\n]+", top)
        assert command is not None
        assert command[0].split()[:3] == ["g++", "-std=c++17", "-O2"]
    assert "g++ -std=c++17 -O2 -ffp-contract=off -o pendulum pendulum.cpp" in PAGE.read_text(encoding="utf-8")
