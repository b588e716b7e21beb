"""What RLinf's EnvWorker asks of an env: shapes, dtypes, masks, resets, chunk modes; over real connections."""

from __future__ import annotations

import contextlib
import csv
import gc
import inspect
import logging
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from rlinf.workers.env.env_worker import EnvWorker

from plugrl_bridges.errors import ConnectTimeout, EnvPoisoned, RaggedClientError, SpaceError
from plugrl_bridges.rlinf import PlugRLEnv
from plugrl_bridges.spaces import space_to_wire
from tests.support import ACTIONS, STOP, ClientThread, CountingEnv, Puppet, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Remote = Callable[..., PlugRLEnv]

each_layout = pytest.mark.parametrize("apart", [False, True], ids=["one connection", "a connection each"])


def chunk(env: PlugRLEnv, length: int = 1, value: float = 0.5) -> Any:
    return env.chunk_step(np.full((env.num_envs, length, 1), value, np.float32))


def lengths(*each: int, truncate: bool = False) -> Callable[[int], CountingEnv]:
    """Make envs whose episodes last so long."""
    return lambda index: CountingEnv(index, length=each[index], truncate=truncate)


# One action per chunk -------------------------------------------------------------------------------------------------


def test_a_reset_gives_tensors_of_the_policy(remote: Remote) -> None:
    env = remote()
    assert env.is_start
    observation, infos = env.reset()
    assert infos == {}
    assert list(observation) == ["states"]
    assert (observation["states"].dtype, observation["states"].tolist()) == (torch.float32, [[0, 0, 0], [1, 0, 0]])
    assert not env.is_start
    env.is_start = True  # as RLinf does


def test_a_chunk_gives_tensors_of_n_by_c(remote: Remote) -> None:
    env = remote()
    env.reset()
    observations, rewards, terminations, truncations, infos = chunk(env)
    assert [observation["states"].tolist() for observation in observations] == [[[0, 0, 1], [1, 0, 1]]]
    assert (rewards.dtype, rewards.tolist()) == (torch.float32, [[1], [1]])
    for flags in (terminations, truncations):
        assert (flags.dtype, flags.shape, flags.any().item()) == (torch.bool, (2, 1), False)
    [info] = infos
    assert set(info) == {"episode"}
    assert {key: value.tolist() for key, value in info["episode"].items()} == {
        "success_once": [False, False], "return": [1, 1], "episode_len": [1, 1], "reward": [1, 1],
    }  # fmt: skip
    assert info["episode"]["success_once"].dtype == torch.bool


@each_layout
def test_with_auto_reset_the_next_episode_begins_and_the_last_one_stands_beside_it(remote: Remote, apart: bool) -> None:
    env = remote(lengths(2, 3), apart=apart)
    env.reset()
    chunk(env)
    observations, rewards, terminations, truncations, [info] = chunk(env)
    assert observations[-1]["states"].tolist() == [[0, 1, 0], [1, 0, 2]]
    assert rewards.tolist() == [[2], [2]]
    assert terminations.tolist() == [[True], [False]]
    assert not truncations.any()
    assert info["final_observation"]["states"].tolist() == [[0, 0, 2], [1, 0, 2]]
    assert info["_final_observation"].tolist() == info["_final_info"].tolist() == [True, False]
    assert info["final_info"]["episode"]["return"].tolist() == [3, 3]
    assert info["final_info"]["episode"]["episode_len"].tolist() == [2, 2]
    [info] = chunk(env)[4]
    assert info["final_info"]["episode"]["return"].tolist() == [1, 6]  # the first began anew


def test_truncated_is_not_terminated(remote: Remote) -> None:
    env = remote(lengths(1, 2, truncate=True))
    env.reset()
    _, _, terminations, truncations, _ = chunk(env)
    assert (terminations.tolist(), truncations.tolist()) == ([[False], [False]], [[True], [False]])


def test_success_is_what_the_client_says(remote: Remote) -> None:
    class Succeeding(CountingEnv):
        def step(self, action: Any) -> Any:
            *result, info = super().step(action)
            return (*result, {**info, "is_success": self.t == 2 and self.tag == 1})

    env = remote(lambda index: Succeeding(index, length=3))
    env.reset()
    seen = [chunk(env)[4][-1] for _ in range(3)]
    assert seen[1]["episode"]["success_once"].tolist() == [False, True]
    assert seen[2]["final_info"]["episode"]["success_once"].tolist() == [False, True]
    assert chunk(env)[4][-1]["episode"]["success_once"].tolist() == [False, False]


def test_what_was_returned_does_not_change(remote: Remote) -> None:
    env = remote()
    first = env.reset()[0]["states"]
    kept = first.clone()
    observation = chunk(env)[0][0]["states"]
    other = observation.clone()
    for _ in range(3):
        chunk(env)
    assert torch.equal(first, kept)
    assert torch.equal(observation, other)


# Chunks ---------------------------------------------------------------------------------------------------------------


@each_layout
def test_stepwise_has_the_reward_of_each_step_and_waits_after_an_end(remote: Remote, apart: bool) -> None:
    env = remote(lengths(2, 9), apart=apart)
    env.reset()
    observations, rewards, terminations, truncations, infos = chunk(env, 4)
    assert rewards.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert terminations.tolist() == [[False, False, False, True], [False] * 4]
    assert not truncations.any()
    terminal = [[0, 0, 1], [0, 0, 2], [0, 0, 2]]
    assert [observation["states"][0].tolist() for observation in observations[:3]] == terminal
    last = observations[3]["states"].tolist()
    assert last[0][2] == 0  # a first observation, with not one step taken from it
    assert last[1] == [1, 0, 4]
    assert infos[3]["final_observation"]["states"].tolist() == [[0, 0, 2], [1, 0, 4]]
    assert infos[3]["final_info"]["episode"]["return"].tolist() == [3, 10]
    assert infos[3]["final_info"]["episode"]["episode_len"].tolist() == [2, 4]
    assert len(infos) == len(observations) == 4
    _, rewards, terminations, _, _ = chunk(env, 4)
    assert rewards.tolist() == [[1, 2, 0, 0], [5, 6, 7, 8]]
    assert terminations[:, 3].tolist() == [True, False]


def test_a_client_that_cannot_let_an_env_wait_is_told_what_to_do(make_env: Remote) -> None:
    env = make_env(envs=2)
    puppet = Puppet(env.url, (0, 1)).infer(env_spec={"action_space": space_to_wire(ACTIONS)})
    env.reset()
    task = Task(lambda: chunk(env, 2))
    puppet.action()
    puppet.t += 1
    puppet.feed_back(terminated=np.array([True, False])).infer()
    with pytest.raises(RaggedClientError, match="use one env per connection"):
        task.result()


@each_layout
def test_remote_sends_the_chunk_whole_and_has_the_sum(remote: Remote, apart: bool) -> None:
    env = remote(lengths(2, 9), apart=apart, chunk_mode="remote", action_horizon=4)
    env.reset()
    observations, rewards, terminations, _, infos = chunk(env, 4)
    assert rewards.tolist() == [[0, 0, 0, 3], [0, 0, 0, 10]]
    assert terminations.tolist() == [[False, False, False, True], [False] * 4]
    assert len(observations) == len(infos) == 1
    assert observations[0]["states"].tolist() == [[0, 1, 0], [1, 0, 4]]
    assert infos[0]["final_observation"]["states"].tolist() == [[0, 0, 2], [1, 0, 4]]
    assert infos[0]["final_info"]["episode"]["episode_len"].tolist() == [2, 4]
    assert infos[0]["final_info"]["episode"]["return"].tolist() == [3, 10]


def test_the_actions_of_a_chunk_are_taken_in_order_and_clipped(remote: Remote) -> None:
    made: list[CountingEnv] = []

    def make(index: int) -> CountingEnv:
        made.append(CountingEnv(index))
        return made[-1]

    for mode, horizon in (("stepwise", None), ("remote", 3)):
        made.clear()
        env = remote(make, chunk_mode=mode, action_horizon=horizon)
        env.reset()
        env.chunk_step(np.array([[[0.25], [5], [-0.5]], [[1], [-7], [0.125]]], np.float32))
        assert [[float(a[0]) for a in one.actions] for one in made[-2:]] == [[0.25, 2, -0.5], [1, -2, 0.125]]
    env = remote(make, clip_actions=False)
    env.reset()
    env.chunk_step(torch.full((2, 1, 1), 5.0))
    assert [float(one.actions[0][0]) for one in made[-2:]] == [5, 5]


@pytest.mark.parametrize("shape", [(2, 1), (3, 1, 1), (2, 1, 2), (2, 0, 1)])
def test_actions_of_a_wrong_shape_are_refused_and_nothing_is_broken(remote: Remote, shape: tuple[int, ...]) -> None:
    env = remote()
    env.reset()
    with pytest.raises(ValueError, match=r"expected \[2, C, 1\].*actor.model.action_dim"):
        env.chunk_step(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="NaN"):
        chunk(env, value=float("nan"))
    assert chunk(env)[1].tolist() == [[1], [1]]


def test_a_remote_chunk_has_as_many_actions_as_was_said(remote: Remote) -> None:
    env = remote(chunk_mode="remote", action_horizon=4)
    env.reset()
    with pytest.raises(ValueError, match="a chunk has 2 actions, but action_horizon is 4"):
        chunk(env, 2)


# Without auto_reset, and with ignore_terminations ---------------------------------------------------------------------


@each_layout
def test_without_auto_reset_an_ended_env_waits_for_the_next_reset(remote: Remote, apart: bool) -> None:
    env = remote(lengths(2, 9), apart=apart, auto_reset=False)
    env.reset()
    chunk(env)
    for t in (2, 3, 4):
        [observation], rewards, terminations, _, [info] = chunk(env)
        assert observation["states"].tolist() == [[0, 0, 2], [1, 0, t]]
        assert rewards.tolist() == [[2 if t == 2 else 0], [t]]
        assert terminations.tolist() == [[True], [False]]
        assert info["episode"]["return"].tolist() == [3, sum(range(t + 1))]
        assert info["episode"]["episode_len"].tolist() == [2, t]
        assert "final_info" not in info
    env.is_start = True
    observation, _ = env.reset()
    assert observation["states"][:, 2].tolist() == [0, 0]
    assert observation["states"][1, 1] == 1
    assert chunk(env)[1].tolist() == [[1], [1]]


def test_without_auto_reset_the_flags_stand_where_the_episode_ended(remote: Remote) -> None:
    env = remote(lengths(2, 9), auto_reset=False, apart=True)
    env.reset()
    _, rewards, terminations, _, _ = chunk(env, 4)
    assert terminations.tolist() == [[False, True, True, True], [False] * 4]
    assert rewards.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]


def test_nobody_is_asked_for_anything_once_all_have_ended(remote: Remote) -> None:
    env = remote(lengths(2, 2), auto_reset=False)
    env.reset()
    chunk(env, 2)
    env.close()  # a step would fail now
    _, rewards, terminations, _, [*_, info] = chunk(env, 3)
    assert not rewards.any()
    assert terminations.all()
    assert info["episode"]["return"].tolist() == [3, 3]


@each_layout
def test_with_ignore_terminations_all_episodes_last_as_long(remote: Remote, apart: bool) -> None:
    env = remote(lengths(2, 3), apart=apart, ignore_terminations=True, max_episode_steps=4)
    env.reset()
    for _ in range(3):
        _, _, terminations, truncations, [info] = chunk(env)
        assert not terminations.any()
        assert not truncations.any()
        assert "final_info" not in info
    observations, _, terminations, truncations, [info] = chunk(env)
    assert not terminations.any()
    assert truncations.tolist() == [[True], [True]]
    assert info["final_info"]["episode"]["return"].tolist() == [1 + 2 + 1 + 2, 1 + 2 + 3 + 1]
    assert info["final_info"]["episode"]["episode_len"].tolist() == [4, 4]
    assert info["final_observation"]["states"].tolist() == [[0, 1, 2], [1, 1, 1]]
    assert observations[0]["states"][:, 2].tolist() == [0, 0]  # both were reset, though one was in mid-episode
    assert chunk(env)[1].tolist() == [[1], [1]]


def test_where_the_clients_end_all_at_the_limit_nothing_is_reset_twice(remote: Remote) -> None:
    env = remote(lengths(3, 3, truncate=True), ignore_terminations=True, max_episode_steps=3)
    env.reset()
    assert chunk(env, 3)[0][-1]["states"].tolist() == [[0, 1, 0], [1, 1, 0]]


def test_with_ignore_terminations_and_no_auto_reset_all_truncate_together(remote: Remote) -> None:
    env = remote(lengths(2, 9), ignore_terminations=True, max_episode_steps=4, auto_reset=False)
    env.reset()
    _, _, terminations, truncations, infos = chunk(env, 6)
    assert not terminations.any()
    assert truncations.tolist() == [[False] * 5 + [True]] * 2
    assert infos[-1]["episode"]["episode_len"].tolist() == [4, 4]


def test_an_episode_that_the_client_cuts_before_the_limit_is_an_error_at_once(remote: Remote) -> None:
    def make(_: int) -> gym.Env[Any, Any]:
        return gym.make("Pendulum-v1")  # 200 steps

    env = remote(make, ignore_terminations=True, max_episode_steps=300)
    with pytest.raises(SpaceError, match="end after 200 steps, before max_episode_steps 300"):
        env.reset()


# The worker itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("auto_reset", [True, False])
def test_rlinfs_worker_takes_what_it_is_handed(remote: Remote, chunks: int, auto_reset: bool) -> None:
    env = remote(lengths(2, 4), auto_reset=auto_reset, apart=True)
    node = {"env_type": "plugrl", "auto_reset": auto_reset, "ignore_terminations": False}
    worker: Any = SimpleNamespace(
        cfg=OmegaConf.create({"env": {"train": node, "eval": node}}),
        model_cfg=OmegaConf.create({"model_type": "mlp_policy", "num_action_chunks": chunks, "action_dim": 1}),
        env_list=[env], eval_env_list=[env], use_external_reward_model=False,
        eval_prev_done=[torch.zeros(2, dtype=torch.bool)], worker_timer=contextlib.nullcontext,
    )  # fmt: skip
    env.reset()
    seen: list[list[float]] = []
    for _ in range(12 // chunks):
        output, info = inspect.unwrap(EnvWorker.env_interact_step)(worker, torch.full((2, chunks, 1), 0.5), 0)
        batch = output.to_dict()
        assert batch["obs"]["states"].shape == (2, 3)
        assert batch["dones"].shape == batch["rewards"].shape == (2, chunks)
        seen.append(info["return"].tolist() if info else [])
    if auto_reset:
        assert next(each for each in seen if each)[0] == 3
        assert {value for each in seen for value in each} == {3, 10}
    else:
        assert seen[-1] == [3, 10]
    env.reset()
    worker.eval_prev_done[0][:] = False
    found = [
        float(value)
        for _ in range(6 // chunks)
        for value in EnvWorker.env_evaluate_step(worker, torch.full((2, chunks, 1), 0.5), 0)[1].get("return", [])
    ]
    assert set(found) == {3, 10}
    assert auto_reset or sorted(found) == [3, 10]


# Clients, ports, seeds, ends ------------------------------------------------------------------------------------------


def test_a_lost_client_truncates_and_a_replacement_goes_on(make_env: Remote) -> None:
    env = make_env(envs=2)
    one, other = (ClientThread(lambda: CountingEnv(7), url=env.url, rank=rank) for rank in range(2))
    env.reset()
    chunk(env)
    one.stop()
    newcomer = ClientThread(lambda: CountingEnv(9), url=env.url)
    wait_until(lambda: env.client_losses == 1)
    [observation], _, terminations, truncations, [info] = chunk(env)
    assert info["client_lost"].tolist() == [True, False]
    assert (terminations.tolist(), truncations.tolist()) == ([[False], [False]], [[True], [False]])
    assert observation["states"].tolist() == [[9, 0, 0], [7, 0, 2]]
    assert info["final_observation"]["states"][0].tolist() == [7, 0, 1]
    assert "client_lost" not in chunk(env)[4][-1]
    env.close()
    assert newcomer.join().reason == other.join().reason == "server stop"


def test_without_clients_the_first_reset_says_how_to_start_one(make_env: Remote) -> None:
    env = make_env(envs=3, connect_timeout=0.2)
    with pytest.raises(ConnectTimeout, match=f"plugrl-env-client --env-id <id> --num-envs 3 --url {env.url}"):
        env.reset()


def test_a_step_before_the_first_reset_is_refused(make_env: Remote) -> None:
    with pytest.raises(EnvPoisoned, match="call reset"):
        chunk(make_env())


def test_each_instance_listens_on_a_port_of_its_own_and_says_so(
    make_env: Remote, free_ports: Callable[[int], int], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(3)
    logging.getLogger("RLinf").propagate = True
    with caplog.at_level(logging.INFO):
        envs = [make_env(port=port, index=index, instances=3) for index in range(3)]
    assert [env.port for env in envs] == [port, port + 1, port + 2]
    assert f"plugrl env instance 2 of 3 listens on ws://127.0.0.1:{port + 2}" in caplog.text
    assert repr(envs[1]) == f"<PlugRLEnv 1 of 3 ws://127.0.0.1:{port + 1} 2 envs>"
    with pytest.raises(OSError, match=str(port)):
        make_env(port=port)


def test_each_instance_has_an_episode_log_of_its_own(remote: Remote, tmp_path: Path) -> None:
    env = remote(lengths(1, 2), episode_log=str(tmp_path / "log.csv"), index=1, instances=2)
    env.reset()
    chunk(env, 2)
    with (tmp_path / "log-1.csv").open(newline="") as file:
        assert [(row["slot"], row["return"]) for row in csv.DictReader(file)] == [("0", "1.0"), ("1", "3.0")]
    assert not (tmp_path / "log.csv").exists()


def test_the_first_reset_seeds_and_no_two_instances_alike(remote: Remote) -> None:
    made: list[CountingEnv] = []

    def make(index: int) -> CountingEnv:
        made.append(CountingEnv(index))
        return made[-1]

    env = remote(make, seed=40, index=3, instances=4)
    env.reset()
    env.reset()
    assert [one.seeds[-2:] for one in made[-2:]] == [[46, None], [47, None]]


def test_the_envs_of_a_group_begin_alike_each_time(remote: Remote) -> None:
    made: list[CountingEnv] = []

    def make(index: int) -> CountingEnv:
        made.append(CountingEnv(index))
        return made[-1]

    env = remote(make, envs=4, seed=40, group_size=2, index=1, instances=2, auto_reset=False)
    env.reset()
    env.update_reset_state_ids()
    env.reset()
    assert [one.seeds[-2:] for one in made[-4:]] == [[42, 46], [42, 46], [43, 47], [43, 47]]


def test_the_policy_must_fit_the_observations(remote: Remote) -> None:
    env = remote(whole={"actor": {"model": {"obs_dim": 4}}})
    with pytest.raises(SpaceError, match=r"have 3 numbers, but actor\.model\.obs_dim is 4"):
        env.reset()


def test_close_tells_the_clients_and_so_does_forgetting_the_env(make_env: Remote) -> None:
    env = make_env(envs=1)
    puppet = Puppet(env.url).infer(env_spec={"action_space": space_to_wire(ACTIONS)})
    env.close()
    env.close()
    assert puppet.close_seen() == STOP


def test_nothing_keeps_an_env_that_is_dropped() -> None:
    config = OmegaConf.create({"port": 0})
    env = PlugRLEnv(cfg=config, num_envs=1, seed_offset=0, total_num_processes=1, worker_info=None)
    puppet = Puppet(env.url)
    ref = weakref.ref(env)
    del env
    gc.collect()
    assert ref() is None
    assert puppet.close_seen() == STOP
