"""``plugrl-bridges serve-policy`` as a program: what a trained policy earns remotely is what it earns in process."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from click.testing import CliRunner
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecTransposeImage

from plugrl_bridges.cli import main
from plugrl_bridges.sb3.policy import ModelPolicy, guess_algorithm, load_model
from plugrl_bridges.server.policy_server import PolicyServer
from tests.support import ClientThread, CountingEnv, DictEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
QUICK: dict[str, Any] = {"n_steps": 32, "batch_size": 32, "n_epochs": 1, "seed": 0, "device": "cpu"}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Train a policy briefly, for an environment's id; give its file."""

    @functools.cache
    def train(env_id: str) -> Path:
        path: Path = tmp_path_factory.mktemp("models") / "policy.zip"
        env = make_vec_env(env_id, n_envs=4, seed=0)
        PPO("MlpPolicy", env, **QUICK).learn(512).save(path)
        env.close()
        return path

    return train


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start ``serve-policy`` on a free port; give the process and its URL."""
    started: list[subprocess.Popen[str]] = []

    def serve(path: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "plugrl_bridges.cli", "serve-policy", str(path), "--port", "0", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("serving"):
                return process, line.split()[-1]
        raise AssertionError(f"it did not start: {process.wait(PATIENCE_S)}")

    yield serve
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPole-v1"])
def test_returns_are_those_of_evaluate_policy(
    env_id: str, trained: Callable[[str], Path], start: Callable[..., Any], tmp_path: Path
) -> None:
    path = trained(env_id)
    episodes = 7  # not a multiple of the envs: each has its share
    env = make_vec_env(env_id, n_envs=3, seed=5)
    expected, lengths = evaluate_policy(PPO.load(path, device="cpu"), env, episodes, return_episode_rewards=True)
    env.close()
    process, url = start(
        path, "--episodes", str(episodes), "--num-envs", "3", "--device", "cpu", "--summary", "summary.json"
    )
    client = ClientThread(lambda: gym.make(env_id), num_envs=3, url=url, seed=5)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert client.join().reason == "server stop"
    found = json.loads((tmp_path / "summary.json").read_text())
    # A Monitor rounds to six digits; nothing else differs, so that the digits of float32 are the same.
    assert [round(ret, 6) for ret in found["returns"]] == expected
    assert np.array_equal(np.array(found["returns"], np.float32), np.array(expected, np.float32))
    assert found["lengths"] == lengths
    assert found["ending"] == "episodes"
    assert [line.split(",")[0] for line in output.splitlines()] == [
        f"{found['clients'][0]['address']} ({found['clients'][0]['name']}): 3 envs",
        f"{episodes} episodes",
    ]


def test_a_signal_ends_it(trained: Callable[[str], Path], start: Callable[..., Any]) -> None:
    process, url = start(trained("CartPole-v1"))
    client = ClientThread(lambda: gym.make("CartPole-v1"), url=url)
    while process.stderr is not None and "connected:" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in errors
    assert client.join().reason == "server stop"


def test_nobody_comes(trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    arguments = ["serve-policy", str(trained("CartPole-v1")), "--port", "0", "--connect-timeout", "0.2"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert "gave up waiting for env clients at ws://127.0.0.1:" in done.output


def test_wrong_command_lines(trained: Callable[[str], Path], tmp_path: Path) -> None:
    path, text = str(trained("CartPole-v1")), tmp_path / "text.zip"
    text.write_text("no archive")
    for arguments, told in (
        ([str(tmp_path / "none.zip")], "does not exist"),
        ([str(text)], "not a model that Stable-Baselines3 saved"),
        ([path, "--algo", "reinforce"], "algorithm must be one of"),
        ([path, "--algo", "dqn"], "cannot be loaded as a model of DQN"),
        ([path, "--horizon", "4"], "no chunks of 4"),
        ([path, "--episode-log", str(tmp_path / "none" / "log.csv")], "episode_log"),
        ([path, "--summary", str(tmp_path / "none" / "summary.json")], "the folder does not exist"),
    ):
        done = CliRunner().invoke(main, ["serve-policy", *arguments, "--port", "0"])
        assert done.exit_code == 2, (arguments, done.output)
        assert told in " ".join(done.output.split()), done.output


@pytest.mark.parametrize(("algorithm", "env_id"), [(A2C, "CartPole-v1"), (DQN, "CartPole-v1"), (SAC, "Pendulum-v1")])
def test_guesses_the_algorithm(algorithm: Any, env_id: str, tmp_path: Path) -> None:
    options = {} if algorithm is A2C else {"buffer_size": 10}
    algorithm("MlpPolicy", env_id, device="cpu", **options).save(tmp_path / "model.zip")
    assert guess_algorithm(tmp_path / "model.zip") == algorithm.__name__.lower()
    assert type(load_model(tmp_path / "model.zip", device="cpu")) is algorithm


@pytest.mark.parametrize("damage", [{"policy.pth": b"garbage"}, {"policy.pth": b""}], ids=["garbage", "nothing"])
def test_a_damaged_model_is_one_line(trained: Callable[[str], Path], tmp_path: Path, damage: dict[str, bytes]) -> None:
    damaged = tmp_path / "damaged.zip"
    with zipfile.ZipFile(trained("CartPole-v1")) as source, zipfile.ZipFile(damaged, "w") as target:
        for name in source.namelist():
            target.writestr(name, damage.get(name, source.read(name)))
    done = CliRunner().invoke(main, ["serve-policy", str(damaged), "--port", "0"])
    assert done.exit_code == 2, done.output
    assert "cannot be loaded as a model of PPO" in " ".join(done.output.split())


def test_does_not_guess_what_it_does_not_know(trained: Callable[[str], Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(trained("CartPole-v1")) as source:
        settings = json.loads(source.read("data"))
    settings["policy_class"]["__module__"] = "sb3_contrib.ppo_recurrent.policies"
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as target:
        target.writestr("data", json.dumps(settings))
    with pytest.raises(ValueError, match="not known here"):
        guess_algorithm(tmp_path / "other.zip")


def test_serves_images_and_dicts() -> None:
    env = make_vec_env(lambda: DictEnv(CountingEnv(2.0)), n_envs=2)
    model = PPO("MultiInputPolicy", VecTransposeImage(env), **QUICK)
    policy = ModelPolicy(model)
    assert not policy.accepts(CountingEnv().observation_space)
    server = PolicyServer(
        policy, accepts=policy.accepts, action_space=policy.action_space, port=0, episodes=2, connect_timeout=20
    )
    client = ClientThread(lambda: DictEnv(CountingEnv(2.0)), num_envs=2, url=server.url)
    assert server.run().returns == [15.0, 15.0]
    client.join()


def test_serves_chunks() -> None:
    space = gym.spaces.Box(-2.0, 2.0, (4, 1), np.float32)
    model = PPO("MlpPolicy", make_vec_env(lambda: CountingEnv(action_space=space)), **QUICK)
    policy = ModelPolicy(model, action_horizon=4, deterministic=False)
    server = PolicyServer(
        policy, action_space=policy.action_space, action_horizon=4, port=0, episodes=2, connect_timeout=20
    )
    client = ClientThread(CountingEnv, url=server.url)
    assert server.run().returns == [15.0, 15.0]
    client.join()
