"""What a config may say, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rlinf.runners.embodied_runner import EmbodiedRunner

import plugrl_bridges
from plugrl_bridges.rlinf import launcher
from plugrl_bridges.rlinf.options import API_KEY, EnvOptions, check_config

CONFIGS = Path(plugrl_bridges.__file__).parent / "rlinf" / "config"


def config(**changes: Any) -> Any:
    node = {"env_type": "plugrl", "total_num_envs": 8, "max_episode_steps": 50}
    whole = {
        "env": {"train": {**node, **changes}, "eval": {**node, "port": 8500}},
        "actor": {"model": {"num_action_chunks": 4, "obs_dim": 3}},
        "algorithm": {"reward_type": "action_level"},
    }
    return OmegaConf.create(whole)


def options(**changes: Any) -> EnvOptions:
    return EnvOptions.from_config(config(**changes).env.train, num_envs=8, index=0, instances=1)


def test_defaults_are_those_of_the_config_group() -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        group = compose(overrides=["+env@env.train=plugrl"]).env.train
    assert EnvOptions.from_config(group, num_envs=16, index=0, instances=1) == EnvOptions.from_config(
        OmegaConf.create({"seed": 0, "max_episode_steps": 200}), num_envs=16, index=0, instances=1
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chunk_mode": "whole"}, r"chunk_mode must be one of \['stepwise', 'remote'\], got 'whole'"),
        (
            {"chunk_mode": "remote"},
            "algorithm.reward_type must be 'chunk_level', got 'action_level'; or use chunk_mode: stepwise",
        ),
        ({"chunk_mode": "remote", "action_horizon": 3}, r"action_horizon 3 must equal actor.model.num_action_chunks 4"),
        ({"action_horizon": 4}, "stepwise sends one action at a time: action_horizon must be 1, got 4"),
        ({"port": -1}, "port must be a whole number of at least 0, got -1"),
        ({"port": 65536}, "port must be a whole number from 0 to 65535"),
        ({"timeout": 0}, "timeout must be a finite number of seconds above 0"),
        ({"host": 5}, "host must be a host name or address"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"group_size": 3}, "group_size 3 does not divide the 8 envs"),
        ({"on_client_loss": "wait"}, "on_client_loss must be 'truncate' or 'raise'"),
        ({"ignore_terminations": True, "max_episode_steps": None}, "ignore_terminations needs max_episode_steps"),
        ({"observation": {"image": "x"}}, r"observation: unknown keys \['image'\]"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        options(**changes)


def test_remote_goes_with_chunk_level_and_takes_its_horizon_from_the_policy() -> None:
    whole = config(chunk_mode="remote")
    whole.algorithm.reward_type = "chunk_level"
    assert EnvOptions.from_config(whole.env.train, num_envs=8, index=0, instances=1).bridge.action_horizon == 4
    whole.algorithm.reward_type, whole.actor.model.num_action_chunks = "action_level", 1
    assert EnvOptions.from_config(whole.env.train, num_envs=8, index=0, instances=1).bridge.action_horizon == 1


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "from-outside")
    assert options().bridge.api_key == "from-outside"
    assert options(api_key="told").bridge.api_key == "told"


def test_training_and_evaluation_must_not_share_ports() -> None:
    check_config(config(port=8496), instances=4, evaluates=True)
    with pytest.raises(
        ValueError, match=r"train takes the ports 8497 to 8500, eval 8500 to 8503; set env.eval.port to 8501"
    ):
        check_config(config(port=8497), instances=4, evaluates=True)
    check_config(config(port=8497), instances=4, evaluates=False)
    check_config(config(port=0), instances=4, evaluates=True)
    with pytest.raises(ValueError, match="from 0 to 65535"):  # that of the last instance
        check_config(config(port=65534), instances=4, evaluates=False)


def test_training_and_evaluation_need_logs_of_their_own(tmp_path: Path) -> None:
    whole = config(episode_log=str(tmp_path / "a.csv"))
    whole.env.eval.episode_log = str(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="both write to episode_log"):
        check_config(whole, instances=1, evaluates=True)
    whole.env.eval.episode_log = str(tmp_path / "b.csv")
    check_config(whole, instances=1, evaluates=True)


def test_a_remote_chunk_cannot_end_in_the_middle() -> None:
    whole = config(chunk_mode="remote", ignore_terminations=True, max_episode_steps=50)
    whole.algorithm.reward_type = "chunk_level"
    with pytest.raises(ValueError, match="max_episode_steps 50 must be a multiple of action_horizon 4"):
        EnvOptions.from_config(whole.env.train, num_envs=8, index=0, instances=1)


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in CONFIGS.glob("*_mlp.yaml") if path.stem != "plugrl_ppo_mlp")
)
def test_every_config_composes_and_is_consistent(name: str) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        whole = compose(config_name=name)
    OmegaConf.resolve(whole)
    assert not OmegaConf.missing_keys(whole)
    check_config(whole, instances=1, evaluates=True)
    batch = whole.env.train.total_num_envs * whole.env.train.max_steps_per_rollout_epoch
    assert batch == 4096
    assert batch % whole.actor.global_batch_size == 0


def test_a_wrong_config_ends_a_run_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf.config.validate_cfg", None)  # which starts Ray
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        wrong = compose(config_name=launcher.DEFAULT_CONFIG, overrides=["env.train.timeout=-1"])
        evaluating = compose(config_name=launcher.DEFAULT_CONFIG, overrides=["runner.only_eval=true"])
    with pytest.raises(ValueError, match="timeout must be"):
        launcher.train(wrong)
    with pytest.raises(ValueError, match="this launcher trains"):
        launcher.train(evaluating)
    assert EmbodiedRunner.run.of_plugrl
