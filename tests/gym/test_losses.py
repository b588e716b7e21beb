"""Clients that go away in each autoreset mode: what the trainer is told, who takes the slot, what is written down."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from plugrl_bridges.errors import ClientLost, EnvPoisoned
from plugrl_bridges.gym import AutoresetMode, RemoteEnv
from tests.remote_vector import MODES, SPACES, act
from tests.support import CountingEnv, Puppet, knows_reset, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plugrl_bridges.gym import PlugRLVectorEnv
    from tests.remote_vector import MakeVector

SAME_STEP, NEXT_STEP, DISABLED = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


class Run:
    """Lead two clients of one env each; the episodes of slot 0 are at its second step (return 3 so far)."""

    def __init__(self, env: PlugRLVectorEnv, path: Path) -> None:
        self.env = env
        self._path = path
        self.first, self.second = (Puppet(env.url, (tag,)).infer(env_spec=knows_reset(rank=tag)) for tag in (0, 1))
        env.reset()
        for reward in (1.0, 2.0):
            self.step(self.first, self.second, reward=reward)

    def stepping(self) -> Task[Any]:
        self.env.step_async(np.full((2, 1), 0.5, np.float32))
        return Task(self.env.step_wait)

    def step(self, *puppets: Puppet, reward: float = 1.0, ends: Puppet | None = None) -> Any:
        """Step; the puppets that are named take part, and the episode of one of them ends."""
        task = self.stepping()
        for puppet in puppets:
            puppet.step(reward, terminated=puppet is ends)
        return task.result()

    def lose(self, puppet: Puppet) -> None:
        """Have a client vanish, and wait until the bridge knows."""
        before = self.env.client_losses
        puppet.vanish()
        wait_until(lambda: self.env.client_losses == before + 1)

    def replace(self, tag: int, rank: int = 0) -> Puppet:
        """Have another client take the slot."""
        puppet = Puppet(self.env.url, (tag,)).infer(
            env_spec=knows_reset(rank=rank), reset_info={"mark": np.array([tag])}
        )
        wait_until(lambda: not self.env._lockstep._roster.vacancies())
        return puppet

    def step_and_replace(self, *, first: bool) -> tuple[Task[Any], Puppet]:
        """Have another client take slot 0, before a step begins or while it waits."""
        if first:
            spare = self.replace(7)
            return self.stepping(), spare
        task = self.stepping()
        return task, self.replace(7)

    @property
    def log(self) -> list[tuple[int, float, int, str]]:
        with self._path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return [(int(row["slot"]), float(row["return"]), int(row["length"]), row["end"]) for row in rows]


@pytest.fixture
def start(make_vector: MakeVector, tmp_path: Path) -> Callable[..., Run]:
    def make(mode: AutoresetMode, **options: Any) -> Run:
        path = tmp_path / "episodes.csv"
        return Run(make_vector(num_envs=2, autoreset_mode=mode, episode_log=path, **SPACES, **options), path)

    return make


def only_first(infos: dict[str, Any]) -> bool:
    return bool(infos["client_lost"].tolist() == infos["_client_lost"].tolist() == [True, False])


# In the middle of an episode ----------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("moment", ["between steps", "in a step", "between steps, with a spare at once"])
def test_an_episode_is_truncated_and_the_next_one_is_a_replacements(
    start: Callable[..., Run], mode: AutoresetMode, moment: str
) -> None:
    run = start(mode)
    if moment == "in a step":
        task = run.stepping()
        run.first.action()
        run.first.vanish()
        spare = run.replace(7)
    else:
        run.lose(run.first)
        task, spare = run.step_and_replace(first="spare" in moment)
    run.second.step(4.0)
    observations, rewards, terminations, truncations, infos = task.result()
    assert (rewards.tolist(), terminations.tolist(), truncations.tolist()) == ([0, 4], [False] * 2, [True, False])
    assert only_first(infos)
    assert run.env.client_losses == 1
    assert run.log == [(0, 3, 2, "lost")]
    if mode is SAME_STEP:
        assert observations.tolist() == [[7, 0, 0], [1, 0, 3]]
        assert infos["final_obs"][0].tolist() == [0, 0, 2]
        assert infos["_final_obs"].tolist() == [True, False]
        assert infos["mark"].tolist() == [7, 0]
    elif mode is NEXT_STEP:
        assert observations.tolist() == [[0, 0, 2], [1, 0, 3]]
        assert "mark" not in infos
        observations, rewards, terminations, truncations, infos = run.step(run.second, reward=5.0)
        assert observations.tolist() == [[7, 0, 0], [1, 0, 4]]
        assert (rewards.tolist(), truncations.any(), terminations.any()) == ([0, 5], False, False)
        assert (infos["mark"].tolist(), "client_lost" in infos) == ([7, 0], False)
    else:
        assert observations.tolist() == [[0, 0, 2], [1, 0, 3]]
        with pytest.raises(ResetNeeded):
            act(run.env)
        observations, infos = run.env.reset(options={"reset_mask": truncations})
        assert observations.tolist() == [[7, 0, 0], [1, 0, 3]]
        assert (infos["mark"].tolist(), "client_lost" in infos) == ([7, 0], False)
    observations, rewards, terminations, _, infos = run.step(spare, run.second, reward=6.0, ends=spare)
    assert (rewards.tolist(), terminations.tolist()) == ([6, 6], [True, False])
    assert "client_lost" not in infos
    assert run.log == [(0, 3, 2, "lost"), (0, 6, 1, "terminated")]


@each_mode
def test_a_step_whose_feedback_came_counts_as_reported(start: Callable[..., Run], mode: AutoresetMode) -> None:
    run = start(mode)
    task = run.stepping()
    run.first.action()
    run.first.t += 1
    run.first.feed_back(4.0, info={"x": np.array([9])})
    run.first.vanish()
    run.replace(7)
    run.second.step(1.0)
    observations, rewards, _, truncations, infos = task.result()
    assert (rewards.tolist(), truncations.tolist()) == ([4, 1], [True, False])
    assert only_first(infos)
    final = infos["final_obs"][0] if mode is SAME_STEP else observations[0]
    assert final.tolist() == [0, 0, 3]
    assert (infos["final_info"] if mode is SAME_STEP else infos)["x"].tolist() == [9, 0]
    assert run.log == [(0, 7, 3, "lost")]


@each_mode
def test_an_episode_that_had_ended_is_not_ended_once_more(start: Callable[..., Run], mode: AutoresetMode) -> None:
    run = start(mode)
    task = run.stepping()
    run.first.action()
    run.first.t += 1
    run.first.feed_back(4.0, terminated=np.array([True]))
    run.first.vanish()
    spare = run.replace(7)
    run.second.step(1.0)
    observations, _, terminations, truncations, infos = task.result()
    assert (terminations.tolist(), truncations.tolist()) == ([True, False], [False, False])
    assert only_first(infos)
    if mode is SAME_STEP:
        assert (observations[0].tolist(), infos["final_obs"][0].tolist()) == ([7, 0, 0], [0, 0, 3])
    else:
        assert observations[0].tolist() == [0, 0, 3]
    if mode is NEXT_STEP:
        observations, _, _, truncations, infos = run.step(run.second)
        assert (observations[0].tolist(), truncations.any(), "client_lost" in infos) == ([7, 0, 0], False, False)
    elif mode is DISABLED:
        observations, infos = run.env.reset(options={"reset_mask": terminations})
        assert (observations[0].tolist(), "client_lost" in infos) == ([7, 0, 0], False)
    assert run.step(spare, run.second, reward=2.0)[1].tolist() == [2, 2]
    assert run.log == [(0, 7, 3, "terminated")]


# While the next episode waits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before the step", "in the step", "before the step, with a spare at once"])
def test_next_step_a_loss_while_the_next_episode_waits_is_no_second_end(start: Callable[..., Run], moment: str) -> None:
    run = start(NEXT_STEP)
    run.step(run.first, run.second, reward=3.0, ends=run.first)
    if moment == "in the step":
        task = run.stepping()
        run.lose(run.first)
        spare = run.replace(7)
    else:
        run.lose(run.first)
        task, spare = run.step_and_replace(first="spare" in moment)
    run.second.step(4.0)
    observations, rewards, terminations, truncations, infos = task.result()
    assert observations.tolist() == [[7, 0, 0], [1, 0, 4]]
    assert (rewards.tolist(), terminations.any(), truncations.any()) == ([0, 4], False, False)
    assert only_first(infos)
    assert infos["mark"].tolist() == [7, 0]
    observations, rewards, terminations, _, infos = run.step(spare, run.second, reward=5.0, ends=spare)
    assert (rewards.tolist(), terminations.tolist(), "client_lost" in infos) == ([5, 5], [True, False], False)
    assert run.log == [(0, 6, 3, "terminated"), (0, 5, 1, "terminated")]  # none of no length


def test_next_step_a_replacement_that_is_lost_while_its_episode_waits(start: Callable[..., Run]) -> None:
    run = start(NEXT_STEP)
    run.lose(run.first)
    second = run.replace(7)
    assert run.step(run.second)[3].tolist() == [True, False]
    run.lose(second)
    third = run.replace(8)
    observations, _, terminations, truncations, infos = run.step(run.second)
    assert (observations[0].tolist(), terminations.any(), truncations.any()) == ([8, 0, 0], False, False)
    assert only_first(infos)
    assert run.step(third, run.second, reward=2.0)[1].tolist() == [2, 2]
    assert run.log == [(0, 3, 2, "lost")]
    assert run.env.client_losses == 2


@pytest.mark.parametrize("full", [False, True], ids=["masked", "full"])
@pytest.mark.parametrize("first", [False, True], ids=["a spare comes", "a spare is there"])
def test_disabled_a_loss_between_end_and_reset(start: Callable[..., Run], *, first: bool, full: bool) -> None:
    run = start(DISABLED)
    step = run.step(run.first, run.second, reward=3.0, ends=run.first)
    options = None if full else {"reset_mask": step[2]}
    run.lose(run.first)
    if first:
        spare = run.replace(7)
        task = Task(lambda: run.env.reset(options=options))
    else:
        task = Task(lambda: run.env.reset(options=options))
        spare = run.replace(7)
    if full:
        run.second.obey_reset()
    observations, infos = task.result()
    assert observations.tolist() == [[7, 0, 0], [1, 1, 0] if full else [1, 0, 3]]
    assert only_first(infos)
    assert infos["mark"].tolist() == [7, 0]
    assert run.step(spare, run.second, reward=2.0)[1].tolist() == [2, 2]
    assert run.log == [(0, 6, 3, "terminated")]


def test_disabled_a_loss_in_the_full_reset_that_begins_the_kept_episode(start: Callable[..., Run]) -> None:
    """The client was not asked, since its next episode had begun; it goes away while the other is reset."""
    run = start(DISABLED)
    run.step(run.first, run.second, reward=3.0, ends=run.first)
    task = Task(run.env.reset)
    wait_until(lambda: run.env._lockstep.stepping)  # the reset has begun
    run.lose(run.first)
    spare = run.replace(7)
    run.second.obey_reset()
    observations, infos = task.result()
    assert observations.tolist() == [[7, 0, 0], [1, 1, 0]]
    assert only_first(infos)
    assert run.step(spare, run.second, reward=2.0)[1].tolist() == [2, 2]
    assert run.log == [(0, 6, 3, "terminated")]


def test_disabled_a_loss_in_a_masked_reset_that_asks_a_client(start: Callable[..., Run]) -> None:
    run = start(DISABLED)
    task = Task(lambda: run.env.reset(seed=[5, 6], options={"map": 1, "reset_mask": np.array([True, False])}))
    run.first.action()
    assert run.first.reset["seed"] == [5]
    run.first.vanish()
    spare = Puppet(run.env.url, (7,)).infer(env_spec=knows_reset(rank=0))
    asked = spare.obey_reset()
    assert (asked["seed"], asked["options"]) == ([5], [{"map": 1}])
    observations, infos = task.result()
    assert observations.tolist() == [[7, 1, 0], [1, 0, 2]]
    assert only_first(infos)
    assert run.step(spare, run.second, reward=2.0)[1].tolist() == [2, 2]
    assert run.log == []


@each_mode
def test_a_loss_outside_the_mask_is_reported_by_the_next_step(start: Callable[..., Run], mode: AutoresetMode) -> None:
    run = start(mode)
    task = Task(lambda: run.env.reset(seed=[5, 6], options={"reset_mask": np.array([True, False])}))
    run.first.action()
    run.lose(run.second)
    spare = run.replace(7, rank=1)
    # The rest of what `obey_reset` does, with the action taken already.
    first = run.first
    first.episode, first.t = 1, 0
    none = np.zeros(0, np.int64)
    empty = {"images": {}, "states": {"obs": np.zeros((0, 3), np.float32)}, "text": []}
    first.feed_back(
        env_indices=none, step_ids=none, obs=empty, rewards=np.zeros(0, np.float32), terminated=np.zeros(0, bool),
        truncated=np.zeros(0, bool),
    )  # fmt: skip
    first.infer()
    observations, infos = task.result()
    assert observations.tolist() == [[0, 1, 0], [1, 0, 2]]  # as if nothing had happened there
    assert "client_lost" not in infos
    observations, rewards, terminations, truncations, infos = run.step(first, reward=4.0)
    assert (rewards.tolist(), terminations.any(), truncations.tolist()) == ([4, 0], False, [False, True])
    assert infos["client_lost"].tolist() == [False, True]
    final = infos["final_obs"][1] if mode is SAME_STEP else observations[1]
    assert final.tolist() == [1, 0, 2]
    assert run.log == [(1, 3, 2, "lost")]
    if mode is DISABLED:
        run.env.reset(options={"reset_mask": truncations})
    elif mode is NEXT_STEP:
        run.step(first)
    assert run.step(first, spare, reward=2.0)[1].tolist() == [2, 2]


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
def test_a_loss_of_one_whose_episode_waits_while_others_are_reset(
    start: Callable[..., Run], mode: AutoresetMode
) -> None:
    run = start(mode)
    run.step(run.first, run.second, reward=3.0, ends=run.first)
    run.lose(run.first)
    spare = run.replace(7)
    task = Task(lambda: run.env.reset(options={"reset_mask": np.array([False, True])}))
    run.second.obey_reset()
    observations, infos = task.result()
    assert observations.tolist() == [[0, 0, 3], [1, 1, 0]]
    assert "client_lost" not in infos
    if mode is DISABLED:
        observations, infos = run.env.reset(options={"reset_mask": np.array([True, False])})
    else:
        observations, _, terminations, truncations, infos = run.step(run.second)
        assert not (terminations | truncations).any()
    assert observations[0].tolist() == [7, 0, 0]
    assert only_first(infos)
    assert run.step(spare, run.second, reward=2.0)[1].tolist() == [2, 2]
    assert run.log == [(0, 6, 3, "terminated")]


# The policies -------------------------------------------------------------------------------------------------------


@each_mode
def test_nobody_comes_in_time(start: Callable[..., Run], mode: AutoresetMode) -> None:
    run = start(mode, timeout=0.4)
    run.env.step_async(np.full((2, 1), 0.5, np.float32))
    run.first.action()
    run.first.vanish()
    run.second.step()
    with pytest.raises(ClientLost, match=rf"slots 0 were at {run.first.address}.*plugrl-env-client"):
        run.env.step_wait()
    with pytest.raises(EnvPoisoned, match="ClientLost"):
        run.env.reset()


@each_mode
@pytest.mark.parametrize("waits", [False, True])
def test_raise_raises_also_while_the_next_episode_waits(
    start: Callable[..., Run], mode: AutoresetMode, *, waits: bool
) -> None:
    run = start(mode, on_client_loss="raise")
    if waits:
        run.step(run.first, run.second, ends=run.first)
    run.lose(run.first)
    options = {"reset_mask": np.array([True, False])}
    call = (lambda: run.env.reset(options=options)) if waits and mode is DISABLED else (lambda: act(run.env))
    with pytest.raises(ClientLost, match="lost the clients of 1 of 2 envs"):
        call()


def test_before_the_first_reset(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=1, **SPACES)
    puppet = Puppet(env.url, (1,)).infer()
    assert env.num_envs == 1
    puppet.vanish()
    wait_until(lambda: env.client_losses == 1)
    Puppet(env.url, (2,)).infer()
    observations, infos = env.reset()
    assert observations.tolist() == [[2, 0, 0]]
    assert infos["client_lost"].tolist() == [True]


@each_mode
def test_an_info_of_the_env_cannot_pass_for_a_lost_client(remote_vector: MakeVector, mode: AutoresetMode) -> None:
    class Liar(CountingEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return (*super().step(action)[:4], {"client_lost": True, "true": 1})

    env = remote_vector(Liar, autoreset_mode=mode)
    env.reset()
    assert set(act(env)[4]) == {"true", "_true"}


# A single env -------------------------------------------------------------------------------------------------------


def test_a_single_env_tells_it_too(make_vector: MakeVector) -> None:
    env: Any = make_vector(RemoteEnv, **SPACES)
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    task = Task(lambda: env.step(np.zeros(1, np.float32)))
    puppet.action()
    puppet.vanish()
    spare = Puppet(env.url, (2,)).infer(reset_info={"mark": np.array([2])})
    observation, reward, terminated, truncated, info = task.result()
    assert (observation.tolist(), reward, terminated, truncated) == ([1, 0, 0], 0.0, False, True)
    assert info == {"client_lost": True}
    observation, info = env.reset()
    assert (observation.tolist(), info) == ([2, 0, 0], {"mark": 2})
    spare.vanish()
    wait_until(lambda: env._lockstep.client_losses == 2)
    Puppet(env.url, (3,)).infer()
    observation, info = env.reset()
    assert (observation.tolist(), info) == ([3, 0, 0], {"client_lost": True})
