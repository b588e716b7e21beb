"""What an env client needs is little: the base install, in a fresh virtual environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a virtual environment with the base install alone."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(found), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(ROOT)]
    subprocess.run(command, check=True, env=environment, timeout=500)
    return found


def _run(python: Path, *args: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *args], check=True, capture_output=True, text=True, env=environment, cwd=python.parent
    ).stdout


@pytest.mark.timeout(600)
def test_the_base_install_is_small_and_knows_no_trainer(python: Path) -> None:
    listed = json.loads(_run(python, "-m", "pip", "list", "--format", "json"))
    packages = {package["name"].lower() for package in listed} - {"pip", "setuptools"}
    assert len(packages) <= 12, packages
    assert packages.isdisjoint({"torch", "stable-baselines3", "matplotlib"})
    assert "plugrl-bridges" in packages
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_run(python, "-c", code).strip())
    ours = [path for path in site.rglob("*") if path.is_file() and path.relative_to(site).parts[0] not in _NOT_OURS]
    assert sum(path.stat().st_size for path in ours) < 115 * MIB


_NOT_OURS = {"pip", "setuptools", "_distutils_hack", "pkg_resources"}


@pytest.mark.timeout(600)
def test_the_help_of_the_client_imports_little_beside_gymnasium(python: Path) -> None:
    def imported(code: str) -> set[str]:
        listing = "import sys, atexit; atexit.register(lambda: print('\\n' + ' '.join(sys.modules)))"
        return set(_run(python, "-c", f"{listing}\n{code}").splitlines()[-1].split())

    helped = imported("from plugrl_bridges.client.cli import main; sys.argv = ['plugrl-env-client', '--help']; main()")
    assert "plugrl_bridges.client.cli" in helped
    more = helped - imported("import gymnasium")
    assert len(more) < 100, sorted(more)
    assert {name.partition(".")[0] for name in more} <= {"plugrl_bridges", "click", *_standard_library(python)}


def _standard_library(python: Path) -> list[str]:
    return _run(python, "-c", "import sys; print(*sys.stdlib_module_names)").split()


@pytest.mark.timeout(600)
def test_the_command_and_the_client_in_code_work_without_any_extra(python: Path) -> None:
    command = python.with_name("plugrl-env-client" + python.suffix)
    shown = subprocess.run([str(command), "--help"], check=True, capture_output=True, text=True).stdout
    assert "--env-id" in shown
    code = (
        "import sys, plugrl_bridges.client as c; c.EnvClient; print({'torch', 'stable_baselines3'} & set(sys.modules))"
    )
    assert _run(python, "-c", code).strip() == "set()"
    missing = subprocess.run(
        [str(python), "-c", "import plugrl_bridges.sb3"], capture_output=True, text=True, check=False
    )
    assert "pip install 'plugrl-bridges[sb3]'" in missing.stderr
