"""Clients that go away, at every moment: what the step says, who takes the slot, and what is written down."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges.errors import ClientLost, EnvPoisoned, StepTimeout
from plugrl_bridges.server.result import infos_of
from tests.support import RESYNC, STOP, Puppet, knows_reset, lose, peers, wait_for_log, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plugrl_bridges.server.lockstep import Lockstep
    from plugrl_bridges.server.result import StepResult

    MakeBridge = Callable[..., Lockstep]


def stepping(env: Lockstep) -> Task[StepResult]:
    env.send(np.full((env.num_envs, 1), 0.5, np.float32))
    return Task(env.wait)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_lost(step: StepResult, slot: int, *, final: list[float], reward: float = 0.0) -> None:
    assert slot in step.lost
    assert step.truncated[slot]
    assert not step.terminated[slot]
    assert step.rewards[slot] == reward
    assert step.observations[0][slot].tolist() == final


@pytest.fixture
def run(make_bridge: MakeBridge, tmp_path: Path) -> tuple[Lockstep, Puppet, Path]:
    """Give a run of one slot, two steps into its first episode (return 3 so far), with an episode log."""
    path = tmp_path / "episodes.csv"
    env = make_bridge(num_envs=1, episode_log=path)
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    for reward in (1.0, 2.0):
        task = stepping(env)
        puppet.step(reward)
        task.result()
    return env, puppet, path


def test_between_two_steps(run: tuple[Lockstep, Puppet, Path], caplog: pytest.LogCaptureFixture) -> None:
    env, puppet, path = run
    lose(env, puppet)
    task = stepping(env)
    other = Puppet(env.url, (2,)).infer()
    step = task.result()
    check_lost(step, 0, final=[1, 0, 2])
    assert step.standing()[0].tolist() == [[2, 0, 0]]
    assert f"lost the client of slots 0 at {puppet.address}" in caplog.text
    assert env.client_losses == 1
    [row] = rows(path)
    assert (row["end"], row["return"], row["length"]) == ("lost", "3.0", "2")
    task = stepping(env)
    other.step(7.0, terminated=True)
    step = task.result()
    assert step.lost == ()
    assert rows(path)[1]["return"] == "7.0"


def test_between_two_steps_with_a_replacement_before_the_next(run: tuple[Lockstep, Puppet, Path]) -> None:
    env, puppet, path = run
    lose(env, puppet)
    other = Puppet(env.url, (2,)).infer()
    wait_until(lambda: not env._roster.vacancies())
    step = stepping(env).result()  # no action was for the newcomer
    check_lost(step, 0, final=[1, 0, 2])
    assert step.standing()[0].tolist() == [[2, 0, 0]]
    task = stepping(env)
    other.step(4.0)
    assert task.result().rewards.tolist() == [4]
    assert len(rows(path)) == 1


def test_between_send_and_feedback(run: tuple[Lockstep, Puppet, Path]) -> None:
    env, puppet, path = run
    task = stepping(env)
    puppet.action()
    puppet.vanish()
    Puppet(env.url, (2,)).infer()
    check_lost(task.result(), 0, final=[1, 0, 2])
    assert (rows(path)[0]["return"], rows(path)[0]["length"]) == ("3.0", "2")


def test_between_send_and_wait(run: tuple[Lockstep, Puppet, Path]) -> None:
    env, puppet, _ = run
    env.send(np.zeros((1, 1), np.float32))
    lose(env, puppet)
    other = Puppet(env.url, (2,)).infer()
    wait_until(lambda: not env._roster.vacancies())
    check_lost(env.wait(), 0, final=[1, 0, 2])
    task = stepping(env)
    other.step(4.0)
    assert task.result().rewards.tolist() == [4]


def test_after_the_feedback_and_before_the_infer(run: tuple[Lockstep, Puppet, Path]) -> None:
    env, puppet, path = run
    task = stepping(env)
    puppet.action()
    puppet.t += 1
    puppet.feed_back(4.0)
    puppet.vanish()
    Puppet(env.url, (2,)).infer()
    step = task.result()
    check_lost(step, 0, final=[1, 0, 3], reward=4.0)
    assert step.standing()[0].tolist() == [[2, 0, 0]]
    assert (rows(path)[0]["return"], rows(path)[0]["length"], rows(path)[0]["end"]) == ("7.0", "3", "lost")


def test_after_a_feedback_that_ended_the_episode(run: tuple[Lockstep, Puppet, Path]) -> None:
    env, puppet, path = run
    task = stepping(env)
    puppet.action()
    puppet.t += 1
    puppet.feed_back(4.0, terminated=np.array([True]))
    puppet.vanish()
    Puppet(env.url, (2,)).infer()
    step = task.result()
    assert (step.terminated.tolist(), step.truncated.tolist(), step.lost) == ([True], [False], (0,))
    assert step.observations[0].tolist() == [[1, 0, 3]]
    assert step.standing()[0].tolist() == [[2, 0, 0]]
    assert (rows(path)[0]["return"], rows(path)[0]["length"], rows(path)[0]["end"]) == ("7.0", "3", "terminated")


@pytest.mark.parametrize("ended", [False, True])
def test_the_replacement_is_lost_in_the_same_step_too(make_bridge: MakeBridge, tmp_path: Path, *, ended: bool) -> None:
    path = tmp_path / "episodes.csv"
    env = make_bridge(num_envs=2, episode_log=path)
    puppet, holder = (Puppet(env.url, (tag,)).infer(env_spec={"rank": tag}) for tag in (0, 1))
    env.reset()
    task = stepping(env)
    puppet.action()
    if ended:
        puppet.t += 1
        puppet.feed_back(4.0, terminated=np.array([True]))
    puppet.vanish()
    second = Puppet(env.url, (8,)).infer()
    wait_until(lambda: env.client_losses == 1 and len(env._roster.sitting) == 2)
    second.vanish()
    wait_until(lambda: env.client_losses == 2)
    Puppet(env.url, (2,)).infer()
    holder.step()
    step = task.result()
    assert step.standing()[0].tolist() == [[2, 0, 0], [1, 0, 1]]
    assert step.lost == (0,)
    if ended:
        assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False], [False, False])
        assert step.observations[0][0].tolist() == [0, 0, 1]
    else:
        check_lost(step, 0, final=[0, 0, 0])
    assert [row["end"] for row in rows(path)] == ["terminated" if ended else "lost"]


def test_several_at_once_and_the_rest_undisturbed(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=4)
    puppets = [Puppet(env.url, (tag,)).infer(env_spec={"rank": tag}) for tag in range(4)]
    env.reset()
    task = stepping(env)
    for puppet in (puppets[1], puppets[3]):
        puppet.action()
        puppet.vanish()
    puppets[0].step(1.0)
    puppets[2].step(2.0)
    for tag in (13, 11):  # each gets the slot of its rank back
        Puppet(env.url, (tag,)).infer(env_spec={"rank": tag - 10})
    step = task.result()
    assert step.lost == (1, 3)
    for slot in (1, 3):
        check_lost(step, slot, final=[slot, 0, 0])
    assert step.rewards.tolist() == [1, 0, 2, 0]
    assert step.standing()[0].tolist() == [[0, 0, 1], [11, 0, 0], [2, 0, 1], [13, 0, 0]]
    assert env.client_losses == 2


def test_one_connection_of_several_envs_is_lost_whole(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=3)
    puppet = Puppet(env.url, (1, 2, 3)).infer()
    env.reset()
    task = stepping(env)
    puppet.action()
    puppet.leave()
    Puppet(env.url, (4, 5)).infer()
    Puppet(env.url, (6,)).infer()
    step = task.result()
    assert step.lost == (0, 1, 2)
    assert sorted(step.standing()[0][:, 0].tolist()) == [4, 5, 6]
    assert env.client_losses == 1


def test_a_spare_is_parked_told_in_the_log_and_takes_a_lost_slot_at_once(
    make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "plugrl_bridges")
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    spare = Puppet(env.url, (2,)).infer()
    wait_for_log(caplog, f"{spare.address} is a spare: all 1 slots are taken")
    task = stepping(env)
    puppet.action()
    puppet.vanish()
    step = task.result()
    check_lost(step, 0, final=[1, 0, 0])
    assert step.standing()[0].tolist() == [[2, 0, 0]]
    task = stepping(env)
    spare.step(3.0)
    assert task.result().rewards.tolist() == [3]


def test_a_lost_spare_is_no_loss(make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "plugrl_bridges")
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    spare = Puppet(env.url, (2,)).infer()
    wait_for_log(caplog, f"{spare.address} is a spare")
    spare.vanish()
    wait_for_log(caplog, f"connection of {spare.address} ended")
    task = stepping(env)
    puppet.step()
    assert task.result().lost == ()
    assert env.client_losses == 0


def test_nobody_comes_in_time(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2, timeout=0.4)
    first, second = (Puppet(env.url, (tag,)).infer(env_spec={"rank": tag}) for tag in (0, 1))
    env.reset()
    env.send(np.full((2, 1), 0.5, np.float32))
    second.action()
    second.vanish()
    first.step()
    with pytest.raises(ClientLost) as raised:
        env.wait()
    for part in ("1 of 2 envs", second.address, "slots 1 were at", "last message: infer", "1006", "plugrl-env-client"):
        assert part in str(raised.value)
    with pytest.raises(EnvPoisoned, match="ClientLost"):
        env.reset()


# Before and during a reset ------------------------------------------------------------------------------------------


def test_before_the_first_reset(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url, (1,)).infer()
    env.connect()
    lose(env, puppet)
    Puppet(env.url, (2,)).infer()
    began = env.reset()
    assert began.observations[0].tolist() == [[2, 0, 0]]
    assert began.lost == (0,)


def test_during_a_reset_the_replacement_gets_the_seed(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    puppets = [Puppet(env.url, (tag,)).infer(env_spec=knows_reset(rank=tag)) for tag in (0, 1)]
    task = Task(lambda: env.reset([5, 6], [{"a": 1}, {"a": 2}]))
    puppets[0].obey_reset()
    puppets[1].action()
    puppets[1].vanish()
    other = Puppet(env.url, (7,)).infer(env_spec=knows_reset(rank=1))
    asked = other.obey_reset()
    assert (asked["seed"], asked["options"]) == ([6], [{"a": 2}])
    began = task.result()
    assert began.observations[0].tolist() == [[0, 1, 0], [7, 1, 0]]
    assert began.lost == (1,)
    step = stepping(env)
    puppets[0].step()
    other.step()
    assert not step.result().truncated.any()


def test_during_a_reset_without_a_seed_the_replacement_is_as_it_came(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url, (1,)).infer(env_spec=knows_reset())
    env.reset()
    task = Task(env.reset)
    puppet.action()
    puppet.vanish()
    Puppet(env.url, (2,)).infer(env_spec=knows_reset())
    assert task.result().standing()[0].tolist() == [[2, 0, 0]]


def test_clients_that_come_and_go_do_not_keep_up_a_reset_for_ever(
    make_bridge: MakeBridge, timing: Callable[..., None]
) -> None:
    timing(reset_patience=0.0)
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url, (1,)).infer(env_spec=knows_reset())
    task = Task(lambda: env.reset([5]))
    puppet.action()
    puppet.vanish()
    Puppet(env.url, (2,)).infer(env_spec=knows_reset())
    with pytest.raises(ClientLost, match="come and go during one reset"):
        task.result()


def test_a_loss_between_the_last_step_and_a_reset_shows_in_the_infos(run: tuple[Lockstep, Puppet, Path]) -> None:
    env, puppet, path = run
    lose(env, puppet)
    Puppet(env.url, (2,)).infer()
    began = env.reset()
    assert began.observations[0].tolist() == [[2, 0, 0]]
    assert began.lost == (0,)
    assert rows(path) == []


# The other policy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("moment", ["between steps", "in a step"])
def test_raise_raises_whether_or_not_a_spare_is_there(make_bridge: MakeBridge, moment: str, *, spare: bool) -> None:
    env = make_bridge(num_envs=1, on_client_loss="raise")
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    if spare:
        Puppet(env.url, (2,)).infer()
        wait_until(lambda: len(peers(env)) == 2)
    if moment == "between steps":
        lose(env, puppet)
        task = stepping(env)
    else:
        task = stepping(env)
        puppet.action()
        puppet.vanish()
    with pytest.raises(ClientLost, match=rf"lost the clients of 1 of 1 envs.*slots 0 were at {puppet.address}"):
        task.result()
    with pytest.raises(EnvPoisoned):
        stepping(env)


def test_a_client_that_breaks_the_protocol_is_a_loss_too(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, on_client_loss="raise")
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    task = stepping(env)
    puppet.action()
    puppet.infer()
    with pytest.raises(ClientLost, match=r"\[4\.2\] expected feedback, got infer"):
        task.result()
    assert puppet.close_seen() == RESYNC


def test_the_loss_of_a_timed_out_client_stays_a_timeout_when_nobody_comes(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, timeout=0.3)
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    task = stepping(env)
    with pytest.raises(StepTimeout, match="Feedback timeout"):
        task.result()
    env.close()
    assert puppet.close_seen() != STOP


def test_infos_and_rewards_of_a_replacement_are_its_own(run: tuple[Lockstep, Puppet, Path]) -> None:
    env, puppet, _ = run
    lose(env, puppet)
    other = Puppet(env.url, (2,)).infer(reset_info={"began": np.array([1])}, env_spec=knows_reset())
    wait_until(lambda: not env._roster.vacancies())
    step = stepping(env).result()
    assert infos_of(step.reset_parts) == {0: {"began": 1}}
    assert step.infos == [{}]
    task = stepping(env)
    other.step(5.0, info={"x": np.array([3.5])})
    result: Any = task.result()
    assert result.infos == [{"x": 3.5}]
