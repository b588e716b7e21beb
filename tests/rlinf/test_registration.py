"""How RLinf comes to know the env, and what a process of a run needs besides."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import ray
import rlinf.envs
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.plugins import Plugins
from rlinf.envs import action_utils
from rlinf.scheduler import Worker
from rlinf.workers.env import env_worker

from plugrl_bridges.rlinf import PlugRLEnv, cpu, ending, launcher, register
from tests.support import ClientThread, CountingEnv
from tests.test_all_attributes import defined, exported, order

if TYPE_CHECKING:
    from pathlib import Path


def test_the_env_type_is_a_member_like_any() -> None:
    member = rlinf.envs.SupportedEnvType("plugrl")
    assert rlinf.envs.SupportedEnvType.PLUGRL is rlinf.envs.SupportedEnvType["PLUGRL"] is member
    assert (member.name, member.value, str(member)) == ("PLUGRL", "plugrl", "SupportedEnvType.PLUGRL")
    assert isinstance(member, rlinf.envs.SupportedEnvType)
    assert list(rlinf.envs.SupportedEnvType)[-1] is member
    assert member != rlinf.envs.SupportedEnvType.LIBERO


def test_registering_twice_changes_nothing() -> None:
    before = rlinf.envs.get_env_cls, list(rlinf.envs.SupportedEnvType), signal.getsignal(signal.SIGTERM)
    register()
    assert before == (rlinf.envs.get_env_cls, list(rlinf.envs.SupportedEnvType), signal.getsignal(signal.SIGTERM))


@pytest.mark.parametrize("module", [rlinf.envs, env_worker])
def test_the_class_is_found_wherever_rlinf_looks(module: Any) -> None:
    assert module.get_env_cls("plugrl") is PlugRLEnv
    assert module.get_env_cls("plugrl", {"any": "config"}) is PlugRLEnv
    with pytest.raises(ValueError, match="not a valid SupportedEnvType"):
        module.get_env_cls("unheard-of")


def test_actions_reach_the_env_unchanged() -> None:
    chunk = torch.arange(6, dtype=torch.float32).reshape(3, 2, 1)
    found = action_utils.prepare_actions(chunk, "plugrl", "mlp_policy", 2, 1)
    assert found.tolist() == chunk.tolist()


def test_without_an_accelerator_the_cpu_stands_in_for_it() -> None:
    assert cpu.needed() is not torch.cuda.is_available()
    if not cpu.needed():
        pytest.skip("there is an accelerator here")
    assert Worker.torch_device_type == "cpu"
    assert Worker.torch_platform.current_device() == torch.device("cpu")
    Worker.torch_platform = None  # as RLinf does in each new worker, before it loads extensions
    register()
    assert isinstance(Worker.torch_platform, cpu.CpuPlatform)
    worker = object.__new__(Worker)
    worker.torch_platform = None  # and so
    assert isinstance(worker.torch_platform, cpu.CpuPlatform)


def test_the_cpu_does_what_is_asked_of_a_device() -> None:
    platform = cpu.CpuPlatform()
    state = platform.get_rng_state()
    first = torch.rand(3)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with platform.stream(platform.Stream()):
        event = platform.Event()
        event.record(platform.current_stream())
        event.wait()
        assert event.query()
    assert platform.memory_allocated() == platform.memory_reserved() == 0
    assert platform.is_available()
    assert not platform.is_initialized()


def test_hydra_finds_the_configs_in_their_package() -> None:
    Plugins.instance()
    loader = ConfigLoaderImpl(config_search_path=create_config_search_path(launcher.CONFIGS))
    assert "plugrl" in loader.get_group_options("env")
    assert {"plugrl_pendulum_ppo_mlp", "plugrl_halfcheetah_ppo_mlp"} <= set(loader.get_group_options("", None))


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ("hydra: {searchpath: [pkg://plugrl_bridges.rlinf.config]}\ndefaults: [plugrl_ppo_mlp, _self_]\n", []),
        ("{}", ["--config-path", launcher.CONFIGS, "--config-name", launcher.DEFAULT_CONFIG]),
    ],
    ids=["search path", "config path"],
)
def test_a_driver_of_ones_own_knows_the_env_when_hydra_finds_the_configs(
    tmp_path: Path, config: str, arguments: list[str]
) -> None:
    (tmp_path / "own.yaml").write_text(config, encoding="utf-8")
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            """
            import hydra, rlinf.envs

            @hydra.main(version_base="1.3", config_path=".", config_name="own")
            def main(config):
                print(rlinf.envs.SupportedEnvType(config.env.train.env_type))

            main()
            """
        ),
        encoding="utf-8",
    )
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["SupportedEnvType.PLUGRL"], done.stderr


@pytest.mark.parametrize("module", sorted(name for name in sys.modules if name.startswith("plugrl_bridges.rlinf")))
def test_all_is_kept_honest(module: str) -> None:
    found = sys.modules[module]
    names = exported(found)
    assert names == sorted(names, key=order)
    assert all(hasattr(found, name) for name in names)
    assert not set(defined(found)) - set(names)


# The end of a run -----------------------------------------------------------------------------------------------------


def test_the_driver_closes_the_envs_of_its_workers_however_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []

    class Runner:
        env = object()

        def run(self, how: str) -> str:
            if how == "fails":
                raise RuntimeError(how)
            return how

    monkeypatch.setattr(ending, "close_in_workers", closed.append)
    run = ending._closing(Runner.run)
    assert run(Runner(), "ends") == "ends"
    with pytest.raises(RuntimeError, match="fails"):
        run(Runner(), "fails")
    assert closed == [Runner.env, Runner.env]


def test_without_ray_there_is_nobody_to_ask() -> None:
    assert not ray.is_initialized()
    ending.close_in_workers(SimpleNamespace())


def test_sigterm_tells_the_clients_and_ends_the_process(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys
            import rlinf.envs
            from omegaconf import OmegaConf
            from plugrl_bridges.rlinf import PlugRLEnv, register
            register()
            env = PlugRLEnv(cfg=OmegaConf.create({"port": 0}), num_envs=1, seed_offset=0, total_num_processes=1)
            print(json.dumps(env.url), flush=True)
            env.reset()
            print(json.dumps("ready"), flush=True)
            while True:
                env.chunk_step([[[0.5]]])
            """
        ),
        encoding="utf-8",
    )
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            client = ClientThread(CountingEnv, url=json.loads(process.stdout.readline()))
            assert json.loads(process.stdout.readline()) == "ready"
            process.terminate()
            assert client.join().reason == "server stop"
            assert process.wait(30) == -signal.SIGTERM
        finally:
            process.kill()
