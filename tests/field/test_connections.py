"""What people run into with connections, timeouts and errors (rows 1 to 11), with SB3's env and the real client."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from plugrl_bridges.errors import ClientLost, ConnectTimeout, EnvFailed, StepTimeout
from tests.foreign_client import pack
from tests.support import ACTIONS, ClientThread, CountingEnv, Proxy, Puppet, hub_of, peers, resync, wait_until
from tests.transport.ends import Task, frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.sb3 import PlugRemoteVecEnv

    Remote = Callable[..., PlugRemoteVecEnv]


def act(env: PlugRemoteVecEnv) -> Any:
    return env.step(np.full((env.num_envs, 1), 0.5, np.float32))


def wait_for_pings(env: PlugRemoteVecEnv) -> None:
    """Wait, while nobody steps, until both ends sent pings and read the other's pongs."""
    [peer] = peers(env)
    websocket = peer.websocket
    sent, received = websocket.bytes_sent + 100, websocket.bytes_received + 100  # a ping or a pong has 6 to 14 bytes
    wait_until(lambda: websocket.bytes_sent > sent and websocket.bytes_received > received)


def test_row_01_a_trainer_that_learns_for_long_keeps_its_client(remote: Remote) -> None:
    env = remote(ping_interval=0.02, client={"ping_interval": 0.02})
    env.reset()
    act(env)
    wait_for_pings(env)
    observations, _, _, infos = act(env)
    assert np.asarray(observations).tolist() == [[0, 0, 2]]
    assert "client_lost" not in infos[0]


def test_row_01_a_slow_env_step_keeps_its_connection(remote: Remote) -> None:
    finish = threading.Event()

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            finish.wait(20)
            return super().step(action)

    env = remote(Slow, ping_interval=0.02, client={"ping_interval": 0.02})
    env.reset()
    task = Task(lambda: act(env))
    wait_for_pings(env)
    finish.set()
    assert task.result()[0].tolist() == [[0, 0, 1]]
    assert env.client_losses == 0


def test_row_02_a_client_that_closed_shows_in_log_counter_and_infos(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    env = remote()
    env.reset()
    other = ClientThread(lambda: CountingEnv(2), url=env.url)
    wait_until(lambda: len(peers(env)) == 2)
    peers(env)[0].websocket.abort()
    _, rewards, dones, infos = act(env)
    assert (rewards.tolist(), dones.tolist(), infos[0]["client_lost"]) == ([0], [True], True)
    assert env.client_losses == 1
    assert "lost the client of slots 0 at 127.0.0.1:" in caplog.text
    env.close()
    other.join()


@pytest.mark.parametrize("timeouts", [{"ping_interval": None}, {"ping_interval": 0.05, "ping_timeout": None}], ids=str)
def test_row_03_a_tunnel_that_eats_pings(make_env: Remote, timeouts: dict[str, Any]) -> None:
    env = make_env(num_envs=1, **timeouts)
    with Proxy(env.port, eat_pings=True) as proxy:
        client = ClientThread(CountingEnv, url=proxy.url, **timeouts)
        env.reset()
        act(env)
        if timeouts["ping_interval"] is not None:
            wait_until(lambda: proxy.eaten > 4)
        assert np.asarray(act(env)[0]).tolist() == [[0, 0, 2]]
        assert (env.client_losses, proxy.connections) == (0, 1)
        env.close()
        assert client.join().reconnects == 0


def test_row_04_a_black_holed_peer_is_lost_by_its_silence_on_both_sides(make_env: Remote) -> None:
    env = make_env(num_envs=1, ping_interval=0.1, ping_timeout=2.0)
    with Proxy(env.port) as proxy:
        client = ClientThread(CountingEnv, url=proxy.url, ping_interval=0.1, ping_timeout=2.0)
        env.reset()
        proxy.frozen.set()
        # Nothing but the ping timeout ends this connection: it stays open, and the step timeout is 20 s away.
        wait_until(lambda: env.client_losses == 1)
        wait_until(lambda: proxy.connections == 2)  # the client noticed too, and dials again
        proxy.frozen.clear()
        _, _, _, infos = act(env)
        assert infos[0]["client_lost"]
        assert act(env)[1].tolist() == [1]
        env.close()
        client.join()


def test_row_04_a_peer_that_is_black_holed_in_a_step_is_a_timeout(make_env: Remote) -> None:
    env = make_env(num_envs=1, action_space=ACTIONS, timeout=0.4, on_client_loss="raise")
    with Proxy(env.port) as proxy:
        puppet = Puppet(proxy.url).infer()
        env.reset()
        proxy.frozen.set()
        with pytest.raises(StepTimeout, match=r"longer than 0\.4 s: 0 of 1 envs answered.*last message: infer"):
            act(env)
        assert env.client_losses == 1
        hub_of(env).close(0.1)
        puppet.vanish()


def test_row_05_after_a_reconnect_the_next_step_works_and_the_episode_goes_on(remote: Remote) -> None:
    env = remote()
    env.reset()
    act(env)
    act(env)
    resync(env)
    observations, rewards, dones, infos = act(env)
    assert infos[0]["client_lost"]
    assert (rewards.tolist(), dones.tolist()) == ([0], [True])
    assert np.asarray(observations).tolist() == [[0, 0, 2]]  # the client's own episode goes on
    assert act(env)[1].tolist() == [3]
    assert env.client_losses == 1


KILLED_CLIENT = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.sendall(bytes.fromhex(sys.argv[2]))
print("sent", flush=True)
while True:
    sock.recv(4096)
"""
HEAD = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no kill -9 on this platform")
def test_row_06_more_clients_than_slots_are_killed_and_new_ones_are_admitted(make_env: Remote) -> None:
    env = make_env(num_envs=2, action_space=ACTIONS)
    first = Puppet(env.url, (1, 2)).infer()
    env.reset()
    infer = {**first.infer_message(), "env_indices": np.arange(2)}
    said = (HEAD + frame(pack(infer), masked=True)).hex()
    process = psutil.Process()
    flat: list[tuple[int, int]] = []
    first.vanish()
    for number in range(12):
        command = [sys.executable, "-I", "-S", "-c", KILLED_CLIENT, str(env.port), said]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"sent\n"
            _, _, dones, _ = act(env)  # it was admitted: the step of the one before it ends
            assert dones.all()
            client.send_signal(signal.SIGKILL)
            client.wait(20)
        losses = number + 2
        wait_until(lambda: env.client_losses == losses)  # noqa: B023 - called at once
        flat.append((process.num_fds(), process.memory_info().rss))
    assert max(fds for fds, _ in flat) - min(fds for fds, _ in flat) <= 2
    assert flat[-1][1] - flat[2][1] < 4 << 20
    assert peers(env) == []


def test_row_07_a_peer_that_never_speaks(
    remote: Remote, timing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "plugrl_bridges.server")
    env = remote()
    env.reset()
    timing(handshake_timeout_s=0.1)
    with socket.create_connection(("127.0.0.1", env.port), 20) as mute:
        mute.settimeout(20)
        with contextlib.suppress(ConnectionError):
            assert mute.recv(1) == b""
    timing(handshake_timeout_s=10.0)
    puppet = Puppet(env.url)
    timing(first_message_timeout_s=0.0)
    assert puppet.close_seen() == (None, "")
    assert act(env)[1].tolist() == [1]
    assert caplog.text.count("connected: ") == 1


def test_row_07_a_server_that_never_speaks_is_given_up_by_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = ClientThread(CountingEnv, url=f"ws://127.0.0.1:{mute.getsockname()[1]}", connect_timeout=0.5)
        with pytest.raises(ConnectTimeout, match="no training server served this client"):
            client.join()


def test_row_08_a_timeout_says_who_where_how_many_and_how_long(make_env: Remote) -> None:
    env = make_env(num_envs=3, action_space=ACTIONS, timeout=0.3, on_client_loss="raise")
    quick, slow = Puppet(env.url, (1,)).infer(env_spec={"rank": 0}), Puppet(env.url, (2, 3)).infer(env_spec={"rank": 1})
    env.reset()
    env.step_async(np.full((3, 1), 0.5, np.float32))
    quick.step()
    slow.action()
    with pytest.raises(StepTimeout) as raised:
        env.step_wait()
    for part in (env.url, slow.address, "1 of 3 envs", "slots 1-2", "0.3 s", "last message: infer"):
        assert part in str(raised.value)


def test_row_09_ports(make_env: Remote) -> None:
    first, second = make_env(), make_env()
    assert first.port != second.port
    with pytest.raises(OSError, match=rf"{first.port}.*port=0"):
        make_env(port=first.port)
    first.close()
    assert make_env(port=first.port).port == first.port


class Crashing(CountingEnv):
    def step(self, action: Any) -> Any:
        if self.t == 2:
            raise RuntimeError("the simulator fell over")
        return super().step(action)


def test_row_10_a_simulator_crash_does_not_end_the_run(make_env: Remote) -> None:
    env = make_env(num_envs=1)
    crashing = ClientThread(Crashing, url=env.url)
    env.reset()
    healthy = ClientThread(lambda: CountingEnv(7), url=env.url)
    act(env)
    act(env)
    observations, _, dones, infos = act(env)
    assert dones.tolist() == [True]
    assert infos[0]["client_lost"]
    assert infos[0]["terminal_observation"].tolist() == [0, 0, 2]
    assert np.asarray(observations).tolist() == [[7, 0, 0]]
    with pytest.raises(EnvFailed):
        crashing.join()
    env.close()
    healthy.join()


def test_row_10_and_11_a_crash_is_an_error_with_slot_and_address_and_the_clients_log_has_the_traceback(
    make_env: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(num_envs=1, on_client_loss="raise")
    client = ClientThread(Crashing, url=env.url)
    env.reset()
    address = peers(env)[0].address
    act(env)
    act(env)
    with pytest.raises(ClientLost, match=rf"slots 0 were at {address}.*1011 'env failed'"):
        act(env)
    with pytest.raises(EnvFailed, match="the simulator fell over"):
        client.join()
    assert "Traceback" in caplog.text
    assert 'raise RuntimeError("the simulator fell over")' in caplog.text
