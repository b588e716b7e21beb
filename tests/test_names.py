"""Names, keywords, commands and columns that users and published scripts have: each stays as it is called here.

This list is meant to be a copy. What is added to the library need not be added here; what stands here must not go.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import click
import gymnasium
import pytest

import plugrl_bridges  # noqa: F401 - registers the ids
from plugrl_bridges.server.episodes import COLUMNS

ROOT = Path(__file__).resolve().parents[1]

BRIDGE = (
    "num_envs host port observation_space action_space image_key state_key timeout connect_timeout on_client_loss "
    "episode_log api_key ssl allowed_origins ping_interval ping_timeout max_message_bytes verify"
)
SERVER = (
    "policy episodes steps num_envs accepts on_progress host port observation_space action_space image_key state_key "
    "action_horizon timeout connect_timeout episode_log api_key ssl allowed_origins ping_interval ping_timeout "
    "max_message_bytes"
)
CLIENT = (
    "make_env num_envs url seed rank first_env group_num_envs api_key ssl reuse send_info verify connect_timeout "
    "ping_interval ping_timeout max_backoff progress"
)
MAKE_VEC_ENV = (
    "env n_envs seed start_index monitor_dir wrapper_class env_kwargs vec_env_cls vec_env_kwargs monitor_kwargs "
    "wrapper_kwargs"
)
KEYWORDS = {
    "plugrl_bridges:PlugRLVectorEnv": f"{BRIDGE} action_horizon autoreset_mode",
    "plugrl_bridges.gym:PlugRLVectorEnv": f"{BRIDGE} action_horizon autoreset_mode",
    "plugrl_bridges.gym:RemoteEnv": BRIDGE.removeprefix("num_envs "),
    "plugrl_bridges.sb3:PlugRemoteVecEnv": f"{BRIDGE} action_horizon",
    "plugrl_bridges.sb3:PlugRLVecEnv": f"{BRIDGE} action_horizon",
    "plugrl_bridges.sb3:make_vec_env": MAKE_VEC_ENV,
    "plugrl_bridges.cleanrl:make_envs": f"{BRIDGE} autoreset_mode info_dialect",
    "plugrl_bridges.client:EnvClient": CLIENT,
    "plugrl_bridges.server.policy_server:PolicyServer": SERVER,
    "plugrl_bridges.ledger:LedgerEnv": "env path env_index rank",
    "plugrl_bridges.ledger:LedgerVectorEnv": "env path",
    "plugrl_bridges.ledger:LedgerVecEnv": "venv path",
}

COMMANDS = {
    "plugrl-env-client": (
        "--env-id --env-factory --env-kwargs --num-envs --num-procs --url --seed --rank --api-key --ca-file --reuse "
        "--no-reuse --info --no-info --verify --connect-timeout --ping-interval --ping-timeout --log-level --summary "
        "--quiet"
    ),
    "plugrl-bridges serve-policy": (
        "--algo --episodes --steps --num-envs --deterministic --stochastic --seed --horizon --device --host --port "
        "--image-key --state-key --timeout --connect-timeout --episode-log --api-key --summary --log-level --quiet"
    ),
    "plugrl-bridges plot": "--out -o --title",
    "plugrl-conformance": (
        "--client --scenario --probe --steps --horizon --action-dim --action-dtype --features --host --port --timeout "
        "--report"
    ),
    "plugrl-conformance-server": (
        "--host --port --state-key --state-dim --image-key --image-size --exchanges --timeout --until-stop "
        "--max-exchanges --report"
    ),
    "stepledger compare": "--json --float32",
    "stepledger show": "--env --episode --step --skip --events",
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_public_name_takes_its_keywords(name: str) -> None:
    module, _, attribute = name.partition(":")
    taker = getattr(importlib.import_module(module), attribute)
    assert set(KEYWORDS[name].split()) <= set(inspect.signature(taker).parameters)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_its_options(name: str) -> None:
    program, _, subcommand = name.partition(" ")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # tomllib came with Python 3.11
    [(module, function)] = re.findall(rf'^{program} = "([\w.]+):(\w+)"$', project, re.MULTILINE)
    command: Any = getattr(importlib.import_module(module), function)
    if subcommand:
        command = command.commands[subcommand]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert set(COMMANDS[name].split()) <= {text for option in options for text in option.opts + option.secondary_opts}


def test_gymnasium_knows_the_ids() -> None:
    assert gymnasium.spec("PlugRL/Remote-v0").entry_point == "plugrl_bridges.gym:RemoteEnv"
    assert gymnasium.spec("PlugRL/Remote-v0").vector_entry_point == "plugrl_bridges.gym:PlugRLVectorEnv"
    assert gymnasium.spec("PlugRL/Probe-v0").entry_point == "plugrl_bridges.probe_env:ProbeEnv"


def test_the_episode_log_has_its_columns() -> None:
    assert COLUMNS == ("episode", "slot", "return", "length", "end", "step", "time")


def test_the_env_of_rlinf_is_called_as_it_was() -> None:
    source = (ROOT / "src" / "plugrl_bridges" / "rlinf" / "env.py").read_text(encoding="utf-8")
    assert "class PlugRLEnv(" in source
    names = (ROOT / "src" / "plugrl_bridges" / "rlinf" / "__init__.py").read_text(encoding="utf-8")
    assert '__all__ = ["PlugRLEnv", "register"]' in names
