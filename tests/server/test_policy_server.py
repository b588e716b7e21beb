"""The policy server with real sockets: foreign clients led message by message, and this library's own client."""

from __future__ import annotations

import contextlib
import csv
import threading
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest

from plugrl_bridges.errors import ConnectTimeout, EnvPoisoned
from plugrl_bridges.server.policy_server import Ending, PolicyServer
from tests.foreign_client import unpack
from tests.support import ACTIONS, OBSERVATIONS, PATIENCE_S, RESYNC, STOP, ClientThread, CountingEnv, DictEnv, Puppet
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def tag_and_time(observation: Any) -> Any:
    """Act with what tells one observation from another."""
    return (100 * observation[:, :1] + observation[:, 2:]).astype(np.float32)


class Running:
    """Run a `PolicyServer` in a thread; `join` gives its summary or raises what it raised."""

    def __init__(self, policy: Any = tag_and_time, **options: Any) -> None:
        self.server = PolicyServer(policy, **{"port": 0, "timeout": 20.0, "connect_timeout": 60.0, **options})
        self.url = self.server.url
        self._task = Task(self.server.run)

    def join(self) -> Any:
        return self._task.result(PATIENCE_S)

    def stop(self) -> Any:
        self.server.stop()
        return self.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def start(*args: Any, **options: Any) -> Running:
            running = Running(*args, **options)
            stack.callback(running.server.close)
            return running

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[..., Puppet]]:
    with contextlib.ExitStack() as stack:

        def dial(running: Running, tags: Any = (1.0, 2.0, 3.0), **options: Any) -> Puppet:
            puppet = Puppet(running.url, tags, **options)
            stack.callback(puppet.leave)
            return puppet

        yield dial


def ask(puppet: Puppet, envs: list[int], t: float, **more: Any) -> Any:
    """Ask for a chunk for some envs, whose observation has this time; give the action."""
    puppet.t = int(t)
    names = np.array(envs)
    puppet.infer(data=puppet.observation(names), env_indices=names, step_ids=names * 0, **more)
    return puppet.action()


def tell(puppet: Puppet, envs: list[int], t: float, reward: float = 1.0, terminated: bool = False, **more: Any) -> None:
    puppet.t = int(t)
    names, m = np.array(envs), len(envs)
    puppet.feed_back(
        env_indices=names, step_ids=names * 0, obs=puppet.observation(names), rewards=np.full(m, reward, np.float32),
        terminated=np.full(m, terminated), truncated=np.zeros(m, bool), **more,
    )  # fmt: skip


def test_serves_ragged_clients(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    running = serve()
    one = connect(running)
    assert np.array_equal(ask(one, [0, 1, 2], 0), [[[100], [200], [300]]])
    tell(one, [1], 1)
    assert np.array_equal(ask(one, [1], 1), [[[201]]])
    tell(one, [2, 0], 4)
    assert np.array_equal(ask(one, [2, 0], 4), [[[304], [104]]])  # env 1 still holds its chunk
    other = connect(running, (7.0,))
    assert np.array_equal(ask(other, [0], 5), [[[705]]])
    tell(one, [0, 1, 2], 6)
    assert np.array_equal(ask(one, [1, 2, 0], 6), [[[206], [306], [106]]])
    summary = running.stop()
    assert one.close_seen() == other.close_seen() == STOP
    assert summary.ending is Ending.STOPPED
    assert [(client.feedbacks, client.steps, client.num_envs) for client in summary.clients] == [(3, 6, 3), (0, 0, 1)]


def test_holds_observations_for_reuse(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    puppet = connect(serve())
    assert puppet.metadata["data"]["features"] == ["reuse-feedback-obs", "env-spec"]
    ask(puppet, [0, 1, 2], 0)
    tell(puppet, [2, 0], 7)
    names = np.array([0, 2])
    puppet.t = 9  # what is sent for env 2; that of env 0 is in the feedback
    puppet.infer(
        data=puppet.observation(np.array([2])), env_indices=names, step_ids=names, reuse=np.array([True, False])
    )
    assert np.array_equal(puppet.action(), [[[107], [309]]])
    tell(puppet, [1], 3)
    tell_nothing = {"images": {}, "states": {}, "text": ""}
    puppet.infer(data=tell_nothing, env_indices=np.array([1]), step_ids=np.array([0]), reuse=np.array([True]))
    assert np.array_equal(puppet.action(), [[[203]]])


@pytest.mark.parametrize("ended", [False, True])
def test_refuses_illegal_reuse(serve: Callable[..., Running], connect: Callable[..., Puppet], ended: bool) -> None:
    running = serve()
    puppet = connect(running, (1.0,))
    if ended:
        ask(puppet, [0], 0)
        tell(puppet, [0], 1, terminated=True)
    puppet.infer(reuse=np.array([True]), data={"images": {}, "states": {}, "text": ""})
    assert puppet.close_seen() == RESYNC
    assert np.array_equal(ask(connect(running, (4.0,)), [0], 0), [[[400]]])


def test_fault_of_one_client_is_its_own(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    running = serve()
    good, bad = connect(running), connect(running)
    ask(good, [0, 1, 2], 0)
    ask(bad, [0, 1, 2], 0)
    bad.feed_back(info={"task": "pick"})
    assert bad.close_seen() == RESYNC
    tell(good, [0], 1)
    assert np.array_equal(ask(good, [0], 1), [[[101]]])


def test_names_outlive_their_message(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    """Pings may land where the infer was: the answer must not be made of them."""
    pinged = threading.Event()

    def slow(observation: Any) -> Any:
        assert pinged.wait(PATIENCE_S)
        return tag_and_time(observation)

    puppet = connect(serve(slow))
    names = np.array([2, 0, 1])
    message = puppet.infer_message(env_indices=names)
    puppet.send({"env_indices": message.pop("env_indices"), **message})
    for _ in range(4):
        assert puppet.websocket.ping(b"\xff" * 125).wait(PATIENCE_S)
    pinged.set()
    assert unpack(puppet.websocket.recv(PATIENCE_S))["data"]["env_ids"].tolist() == [2, 0, 1]


@pytest.mark.parametrize("horizon", [1, 4])
def test_serves_own_client(serve: Callable[..., Running], tmp_path: Path, horizon: int) -> None:
    def policy(observation: Any) -> Any:
        return np.zeros((len(observation), horizon, 1), np.float32)

    running = serve(policy, action_horizon=horizon, episodes=7, episode_log=tmp_path / "log.csv")
    client = ClientThread(lambda: CountingEnv(length=5), num_envs=3, url=running.url)
    summary = running.join()
    assert client.join().reason == "server stop"
    assert summary.ending is Ending.EPISODES
    assert summary.returns == [15.0] * 7
    assert [episode.env for episode in summary.episodes] == [0, 1, 2, 0, 1, 2, 2]
    assert {episode.length for episode in summary.episodes} == {5}
    assert summary.steps == 45
    assert summary.clients[0].returns == [15.0] * 9
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["slot"] for row in rows] == ["0", "1", "2"] * 3
    assert {(row["return"], row["length"], row["end"]) for row in rows} == {("15.0", "5", "terminated")}


def test_ends_after_steps(serve: Callable[..., Running]) -> None:
    running = serve(steps=8)
    client = ClientThread(lambda: CountingEnv(length=5), num_envs=2, url=running.url)
    summary = running.join()
    client.join()
    assert (summary.ending, summary.steps, summary.returns) == (Ending.STEPS, 8, [])


def test_waits_for_num_envs(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    running = serve(num_envs=4)
    first = connect(running)
    first.infer()
    with pytest.raises(TimeoutError):
        first.websocket.recv(0.2)
    assert np.array_equal(ask(connect(running, (9.0,)), [0], 0), [[[900]]])
    assert np.array_equal(first.action(), [[[100], [200], [300]]])


def test_gives_nested_observations(serve: Callable[..., Running]) -> None:
    seen: list[Any] = []

    def policy(observation: Any) -> Any:
        seen.append(observation)
        return np.zeros((2, 1), np.float32)

    running = serve(policy, steps=4)
    client = ClientThread(lambda: DictEnv(CountingEnv(3.0)), num_envs=2, url=running.url)
    running.join()
    client.join()
    assert {key: (array.shape, array.dtype) for key, array in seen[0].items()} == {
        "camera": ((2, 36, 36, 3), np.uint8),
        "state": ((2, 3), np.float32),
    }
    assert [float(each["state"][0, 2]) for each in seen] == [0.0, 1.0]


def test_takes_models(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    class Model:
        state: Any = None

        def predict(self, observation: Any, *, deterministic: bool) -> tuple[Any, Any]:
            assert deterministic
            return tag_and_time(observation), self.state

    assert ask(connect(serve(Model())), [2], 3)[0, 0] == 303
    model = Model()
    model.state = ()
    running = serve(model)
    puppet = connect(running).infer()
    with pytest.raises(ValueError, match="recurrent"):
        running.join()
    assert puppet.close_seen() == STOP


def test_discrete_actions(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    space = gym.spaces.Discrete(5)
    action = ask(connect(serve(lambda obs: np.full(len(obs), 4), action_space=space)), [1, 0], 0)
    assert (action.shape, action.dtype, set(action.ravel())) == ((1, 2, 1), np.int64, {4})


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        (np.zeros((2, 1)), {}),
        (np.full((3, 1), np.nan), {}),
        (np.zeros((3, 2)), {"action_space": ACTIONS}),
        (np.zeros((3, 1)), {"action_space": ACTIONS, "action_horizon": 2}),
        (np.zeros((3, 1)), {"action_horizon": 2}),
        (np.array(["left"] * 3), {}),
    ],
)
def test_what_is_no_action_ends_the_run(
    serve: Callable[..., Running], connect: Callable[..., Puppet], actions: Any, options: Any
) -> None:
    running = serve(lambda _: actions, **options)
    puppet = connect(running).infer()
    with pytest.raises(ValueError, match=f"no actions for {puppet.address}"):
        running.join()
    assert puppet.close_seen() == STOP


def test_refuses_clients_that_do_not_fit(
    serve: Callable[..., Running], connect: Callable[..., Puppet], caplog: pytest.LogCaptureFixture
) -> None:
    running = serve(accepts=lambda space: space.shape == (3,))
    stranger = connect(running)
    stranger.send(stranger.infer_message(data={"images": {}, "states": {"obs": np.zeros((3, 4))}, "text": ""}))
    assert stranger.close_seen() == STOP
    assert "does not take its observation space" in caplog.text
    assert ask(connect(running), [0], 0)[0, 0] == 100


def test_refuses_observations_of_another_space_than_was_given(
    serve: Callable[..., Running], connect: Callable[..., Puppet], caplog: pytest.LogCaptureFixture
) -> None:
    running = serve(observation_space=gym.spaces.Box(-1, 1, (4,), np.float32))
    assert connect(running).infer().close_seen() == STOP
    assert "are not of the observation_space that was given" in caplog.text


def test_feedback_has_a_time_limit(serve: Callable[..., Running], connect: Callable[..., Puppet]) -> None:
    running = serve(timeout=0.2)
    puppet = connect(running)
    ask(puppet, [0, 1, 2], 0)
    assert puppet.close_seen() == (1001, "Feedback timeout")
    assert ask(connect(running), [0], 0)[0, 0] == 100


def test_gives_up_without_clients(
    serve: Callable[..., Running], timing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    timing(first_report_s=0.05)
    running = serve(connect_timeout=1.0)
    with pytest.raises(ConnectTimeout, match=r"gave up waiting .* plugrl-env-client"):
        running.join()
    assert "waiting for env clients" in caplog.text
    with pytest.raises(EnvPoisoned, match="closed"):
        running.server.run()


def test_lost_episodes_do_not_count(
    serve: Callable[..., Running], connect: Callable[..., Puppet], tmp_path: Path
) -> None:
    running = serve(episodes=2, episode_log=tmp_path / "log.csv", observation_space=OBSERVATIONS)
    first = connect(running, (1.0,))
    ask(first, [0], 0)
    tell(first, [0], 1, terminated=True)
    ask(first, [0], 0)
    tell(first, [0], 1, reward=50)
    ask(first, [0], 0)
    first.vanish()
    again = connect(running, (1.0,))
    again.infer(step_ids=np.array([2]))  # in the middle of an episode: only the client has seen all of it
    again.action()
    record = {"r": np.array([53.0]), "l": np.array([3]), "s": np.array([True]), "mask": np.array([True])}
    tell(again, [0], 2, reward=3, terminated=True, info={"episode": record})
    summary = running.join()
    assert summary.returns == [1.0, 53.0]
    assert [(client.returns, client.connected) for client in summary.clients] == [([1.0], False), ([53.0], True)]
    assert [(episode.success, episode.length) for episode in summary.episodes] == [(None, 1), (True, 3)]
    rows = [
        (row["slot"], row["end"], row["return"])
        for row in csv.DictReader((tmp_path / "log.csv").read_text().splitlines())
    ]
    assert rows == [("0", "terminated", "1.0"), ("0", "lost", "50.0"), ("0", "terminated", "53.0")]


def test_progress_is_told(serve: Callable[..., Running]) -> None:
    told: list[Any] = []
    running = serve(on_progress=told.append, episodes=1)
    client = ClientThread(CountingEnv, url=running.url)
    running.join()
    client.join()
    assert told
    assert told[0].ending is None


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"episodes": 0}, ValueError, "episodes"),
        ({"steps": 1.5}, TypeError, "steps"),
        ({"num_envs": 0}, ValueError, "num_envs"),
        ({"policy": 3}, TypeError, "policy"),
    ],
)
def test_checks_its_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        PolicyServer(**{"policy": tag_and_time, "port": 0, **options})
