"""Hold docs/rlinf.md to the code: its commands and configs compose, its tables list what there is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import plugrl_bridges
from plugrl_bridges.rlinf.installed import ANYWAY, TESTED_VERSIONS
from plugrl_bridges.rlinf.options import API_KEY, EnvOptions, ObservationNames, check_config
from tests.docs.markdown import ROOT, Block, blocks, table

PAGE = ROOT / "docs" / "rlinf.md"
CONFIGS = Path(plugrl_bridges.__file__).parent / "rlinf" / "config"
BLOCKS = [block for block in blocks(PAGE) if "rlinf" in block.directive]


def lines(kind: str) -> list[str]:
    shown = [block for block in BLOCKS if block.language == "bash" and block.directive["rlinf"] == kind]
    return [line for block in shown for line in block.text.splitlines()]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("command", lines(""))
def test_every_run_that_is_shown_is_one_that_hydra_composes(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    assert (program, arguments[:2]) == ("python", ["-m", "plugrl_bridges.rlinf"])
    shown = subprocess.run(
        [sys.executable, *arguments, "--cfg", "job", "--resolve"], cwd=tmp_path, capture_output=True, text=True,
        check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    config = OmegaConf.create(shown.stdout)
    check_config(config, instances=config.rollout.pipeline_stage_num, evaluates=config.runner.val_check_interval > 0)
    assert not list(tmp_path.iterdir())  # neither Hydra's folders nor a Ray's are left


def test_the_clients_that_are_shown_are_those_that_the_runs_need() -> None:
    urls = [line.split()[-1] for line in lines("clients")]
    assert urls == [f"ws://127.0.0.1:{port}" for port in (8000, 8001, 8002, 8003, 8500)]
    assert all(
        line.startswith("plugrl-env-client --env-id Pendulum-v1 --num-envs 4 --url ") for line in lines("clients")
    )


def configs(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == "yaml" and block.directive["rlinf"] == kind]


@pytest.mark.parametrize("block", configs(""), ids=lambda block: block.place)
def test_every_config_that_is_shown_composes(block: Block, tmp_path: Path) -> None:
    [searchpath] = configs("searchpath")
    (tmp_path / "shown.yaml").write_text(f"{searchpath.text}\n{block.text}", encoding="utf-8")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose(config_name="shown")
    train = config.env.train
    options = EnvOptions.from_config(train, num_envs=train.total_num_envs, index=0, instances=1)
    assert options.bridge.action_horizon == config.actor.model.num_action_chunks


def test_the_variable_of_the_extension_is_the_module() -> None:
    assert lines("extension") == [f"export RLINF_EXT_MODULE={plugrl_bridges.__name__}.rlinf"]


def test_every_option_is_documented() -> None:
    shown = {code(name)[0]: code(default)[0] for name, default, _ in table(PAGE, "Options")}
    group = OmegaConf.to_container(OmegaConf.load(CONFIGS / "env" / "plugrl.yaml"))
    assert isinstance(group, dict)
    own = list(group)[: list(group).index("total_num_envs")]
    assert set(shown) == set(own)
    observation = group.pop("observation")
    assert set(observation.values()) == {None}
    for name in own:
        if name != "observation":
            assert OmegaConf.create(f"x: {shown[name]}").x == group[name], name
    assert [code(row[0])[0] for row in table(PAGE, "Observations")] == list(observation)
    assert list(observation) == list(ObservationNames.__dataclass_fields__)


def test_versions_and_names_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in (ANYWAY, API_KEY, *(f"RLinf {version}" for version in TESTED_VERSIONS)):
        assert name in text
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints-rlinf.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    for package, name in (
        ("torch", "torch"),
        ("ray", "Ray"),
        ("transformers", "transformers"),
        ("hydra-core", "Hydra"),
    ):
        assert f"{name} {pins[package]}" in text
    assert pins["rlinf"] in TESTED_VERSIONS
