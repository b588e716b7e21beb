"""What people run into with shutdown, throughput, security and deployment (rows 26 to 34), with SB3's env."""

from __future__ import annotations

import ast
import inspect
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
import pytest
import trustme
from stable_baselines3 import PPO
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import plugrl_bridges
from plugrl_bridges.client import EnvClient
from plugrl_bridges.errors import ConnectTimeout, HandshakeError
from plugrl_bridges.sb3 import PlugRemoteVecEnv, make_vec_env
from tests.foreign_client import pack
from tests.support import ACTIONS, PATIENCE_S, RESYNC, STOP, ClientThread, CountingEnv, Proxy, Puppet
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    Remote = Callable[..., PlugRemoteVecEnv]

ROOT = Path(__file__).resolve().parents[2]


def act(env: Any) -> Any:
    return env.step(np.full((env.num_envs, 1), 0.5, np.float32))


def test_row_26_close_is_bounded_idempotent_forwarded_and_heard(make_env: Remote) -> None:
    remote = make_env(num_envs=3, action_space=ACTIONS, timeout=300.0)
    clients = [ClientThread(CountingEnv, url=remote.url) for _ in range(2)]
    never_reads = Puppet(remote.url).infer()
    env = make_vec_env(remote)
    env.reset()
    started = time.monotonic()
    env.close()  # of the wrapper
    assert time.monotonic() - started < 60  # and not the timeout of a step
    env.close()
    assert [client.join().reason for client in clients] == ["server stop"] * 2
    assert never_reads.close_seen() == STOP


NEVER_CLOSES = """
import sys
from plugrl_bridges.sb3 import PlugRemoteVecEnv
env = PlugRemoteVecEnv(port=0)
print(env.port, flush=True)
env.reset()
for _ in range(3):
    env.step([env.action_space.sample()])
"""


def test_row_27_a_trainer_that_never_calls_close_sends_its_clients_home() -> None:
    with subprocess.Popen([sys.executable, "-c", NEVER_CLOSES], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            client = ClientThread(CountingEnv, url=f"ws://127.0.0.1:{int(trainer.stdout.readline())}")
            assert client.join(60).reason == "server stop"
            assert trainer.wait(20) == 0
        finally:
            trainer.kill()


def test_row_27_a_client_bounds_its_waiting_for_a_server(make_env: Remote) -> None:
    env = make_env()
    env.close()
    with pytest.raises(ConnectTimeout):
        EnvClient(CountingEnv, url=env.url, connect_timeout=0.3, max_backoff=0.1).run()


class Cameras(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Dict(
            {f"camera{i}": gym.spaces.Box(0, 255, (480, 640, 3), np.uint8) for i in range(4)}
        )
        self.pictures = {f"camera{i}": np.zeros((480, 640, 3), np.uint8) for i in range(4)}

    def _observation(self) -> Any:
        for picture in self.pictures.values():
            picture[:] = self.t
        return self.pictures


def test_row_28_four_cameras_of_sixteen_envs_pass_and_nothing_is_compressed(remote: Remote) -> None:
    env = remote(Cameras, envs=16)
    env.reset()
    for t in (1, 2):
        observations = act(env)[0]
        assert all(observations[f"camera{i}"].shape == (16, 480, 640, 3) for i in range(4))
        assert all((observations[f"camera{i}"][:, ::160, ::160] == t).all() for i in range(4))
    with connect(env.url, compression="deflate") as websocket:
        assert websocket.protocol.extensions == []


def test_row_29_four_client_processes_step_at_the_same_time(make_env: Remote) -> None:
    env = make_env(num_envs=4, connect_timeout=60.0)
    command = [
        sys.executable, "-m", "plugrl_bridges.client", "--env-factory", "tests.field.slow_env:Dialling",
        "--num-envs", "4", "--num-procs", "4", "--url", env.url, "--log-level", "error",
    ]  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        meeting.settimeout(PATIENCE_S)
        environ = {**os.environ, "STEP_PORT": str(meeting.getsockname()[1])}
        with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL) as client:
            try:
                env.reset()
                for _ in range(3):
                    task = Task(lambda: act(env))
                    steps = [meeting.accept()[0] for _ in range(4)]  # all four are in their step before one goes on
                    for step in steps:
                        step.sendall(b".")
                        step.close()
                    task.result()
                env.close()
                assert client.wait(30) == 0
            finally:
                client.kill()


def test_row_30_nothing_in_the_package_unpickles() -> None:
    banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    for path in sorted(Path(plugrl_bridges.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned.intersection(name.split(".")[0] for name in names), path


def test_row_30_an_object_array_is_refused_and_nothing_internal_is_on_the_wire(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    env = remote()
    env.reset()
    array = {b"__ndarray__": True, b"data": b"\x80\x04K\x00.", b"dtype": "|O", b"shape": [1]}
    puppet = Puppet(env.url)
    puppet.websocket.send(pack({**puppet.infer_message(), "env_indices": array}))
    assert puppet.close_seen() == RESYNC
    assert "dtype" in caplog.text
    assert urlsplit(env.url).hostname == "127.0.0.1"
    assert act(env)[1].tolist() == [1]


def test_row_30_a_client_needs_the_api_key(make_env: Remote) -> None:
    env = make_env(api_key="k3y")
    with pytest.raises(HandshakeError, match="401"):
        EnvClient(CountingEnv, url=env.url, api_key="wrong", connect_timeout=60).run()
    client = ClientThread(CountingEnv, url=env.url, api_key="k3y")
    assert env.num_envs == 1
    env.close()
    client.join()


def test_row_31_a_web_page_cannot_reach_the_trainer(make_env: Remote) -> None:
    env = make_env()
    for origin in ("http://localhost:3000", "https://evil.example", "null"):
        with pytest.raises(InvalidStatus, match="403"):
            Puppet(env.url, origin=origin)


@pytest.mark.parametrize("secure", [False, True])
def test_row_32_the_client_dials_out_to_a_url_with_a_path(make_env: Remote, *, secure: bool) -> None:
    options: dict[str, Any] = {}
    client_ssl = None
    if secure:
        authority = trustme.CA()
        options["ssl"] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(options["ssl"])
        client_ssl = ssl.create_default_context()
        authority.configure_trust(client_ssl)
    env = make_env(**options)
    with Proxy(env.port) as proxy:
        url = proxy.url.replace("ws:", "wss:") if secure else proxy.url
        client = ClientThread(CountingEnv, url=url, ssl=client_ssl)
        env.reset()
        assert act(env)[1].tolist() == [1]
        env.close()
        assert client.join().reason == "server stop"


def test_row_32_both_ends_ping_at_least_every_30_s_so_that_idle_proxies_let_them_live() -> None:
    for owner in (PlugRemoteVecEnv, EnvClient):
        assert inspect.signature(owner).parameters["ping_interval"].default <= 30


def test_row_33_the_mean_episode_reward_is_logged(remote: Remote) -> None:
    model = PPO("MlpPolicy", make_vec_env(remote(envs=2)), n_steps=16, batch_size=32, n_epochs=1, device="cpu")
    model.learn(32)
    assert model.ep_info_buffer is not None
    assert [(info["r"], info["l"]) for info in model.ep_info_buffer] == [(15, 5)] * 6


def test_row_34_it_is_said_which_trainer_takes_the_env() -> None:
    assert "Stable-Baselines3 ``VecEnv``" in (inspect.getdoc(PlugRemoteVecEnv) or "")
    with pytest.raises(TypeError, match=r"env must be a PlugRemoteVecEnv, got SyncVectorEnv"):
        make_vec_env(gym.make_vec("CartPole-v1", num_envs=1, vectorization_mode="sync"))  # type: ignore[arg-type]
