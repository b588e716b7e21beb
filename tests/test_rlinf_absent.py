"""What ``import plugrl_bridges.rlinf`` says without RLinf, or with a release of it that nobody tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"


def run(code: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(map(str, (*path, SRC)))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": search, **environment},
    )  # fmt: skip


@pytest.fixture
def other_release(tmp_path: Path) -> Path:
    """Give a folder in which an RLinf of another release seems to be installed."""
    folder = tmp_path / "rlinf-9.9.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: rlinf\nVersion: 9.9.0\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("what", ["", ".env", ".installed", ".registration"])
def test_without_rlinf_it_says_what_to_install(what: str) -> None:
    code = "import importlib.metadata as m\ndef gone(name): raise m.PackageNotFoundError(name)\nm.version = gone\n"
    said = run(f"{code}import plugrl_bridges.rlinf{what}")
    assert said.returncode == 1
    last = said.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: plugrl_bridges.rlinf needs RLinf: pip install torch==2.13.0, and then pip install"
    )
    assert "'plugrl-bridges[rlinf]'" in last
    assert "0.3.0" in last


def test_with_another_release_it_names_those_that_were_tested(other_release: Path) -> None:
    said = run("import plugrl_bridges.rlinf", other_release)
    assert said.returncode == 1
    last = said.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: plugrl_bridges.rlinf was tested with RLinf 0.3.0, found 9.9.0: ")
    assert "pip install 'rlinf==0.3.0', or set PLUGRL_RLINF_ANY_VERSION=1" in last


def test_another_release_may_be_tried_all_the_same(other_release: Path) -> None:
    code = "import warnings\nwith warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter('always')\n"
    tried = run(
        f"{code}    import plugrl_bridges.rlinf, sys\nprint(said[0].message, 'rlinf' in sys.modules)",
        other_release, PLUGRL_RLINF_ANY_VERSION="1",
    )  # fmt: skip
    assert tried.stdout == "plugrl_bridges.rlinf was tested with RLinf 0.3.0, found 9.9.0 False\n"
