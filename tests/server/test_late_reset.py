"""Clients that leave their envs' first reset to the trainer: who asks for it, when, and with which seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges.errors import RemoteProtocolError, StepTimeout
from plugrl_bridges.server.announced import Announced
from plugrl_bridges.server.autoreset import AutoresetMode
from tests.support import RESYNC, STOP, Puppet, knows_reset, lose, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.server.lockstep import Lockstep
    from plugrl_bridges.server.result import StepResult

    MakeBridge = Callable[..., Lockstep]


def newcomer(env: Lockstep, *tags: float, **spec: Any) -> Puppet:
    return Puppet(env.url, tags).infer(env_spec=knows_reset(unreset=True, **spec))


def stepping(env: Lockstep) -> Task[StepResult]:
    env.send(np.zeros((env.num_envs, 1), np.float32))
    return Task(env.wait)


@pytest.fixture
def begun(make_bridge: MakeBridge) -> tuple[Lockstep, Puppet]:
    env = make_bridge(num_envs=1)
    puppet = newcomer(env, 1)
    task = Task(env.reset)
    puppet.obey_reset()
    task.result()
    return env, puppet


@pytest.mark.parametrize("seeds", [None, [7, None]])
def test_the_trainers_first_reset_is_the_envs_first(make_bridge: MakeBridge, seeds: list[int | None] | None) -> None:
    env = make_bridge(num_envs=2)
    puppet = newcomer(env, 1, 2)
    task = Task(lambda: env.reset(seeds))
    assert puppet.obey_reset()["seed"] == (seeds or [None, None])
    assert task.result().standing()[0].tolist() == [[1, 1, 0], [2, 1, 0]]
    step = stepping(env)
    puppet.step()
    assert puppet.reset is None
    assert not step.result().truncated.any()


def test_who_comes_in_mid_run_is_reset_at_once_and_then_takes_the_slot(begun: tuple[Lockstep, Puppet]) -> None:
    env, puppet = begun
    step = stepping(env)
    puppet.vanish()
    other = newcomer(env, 2)
    assert other.obey_reset()["seed"] == [None]
    result = step.result()
    assert result.lost == (0,)
    assert result.standing()[0].tolist() == [[2, 1, 0]]
    step = stepping(env)
    other.step()
    assert step.result().standing()[0].tolist() == [[2, 1, 1]]


def test_a_spare_of_the_beginning_is_reset_after_the_first_reset_and_moves_up(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    first, spare = newcomer(env, 1, rank=0), newcomer(env, 2, rank=1)
    task = Task(env.reset)
    first.obey_reset()
    task.result()
    assert spare.obey_reset()["seed"] == [None]
    step = stepping(env)
    first.step()
    step.result()
    lose(env, first)
    result = stepping(env).result()
    assert result.lost == (0,)
    assert result.standing()[0].tolist() == [[2, 1, 0]]


def test_a_step_waits_for_a_newcomers_first_reset(begun: tuple[Lockstep, Puppet]) -> None:
    env, puppet = begun
    spare = newcomer(env, 2)
    task = Task(spare.action)
    wait_until(lambda: task.done)  # the keeper asks it while nobody steps
    assert spare.reset is not None
    lose(env, puppet)
    step = stepping(env)
    assert not step.done
    spare.episode = 4
    spare.feed_back_nothing().infer()
    assert step.result().standing()[0].tolist() == [[2, 4, 0]]


def test_a_newcomer_whose_first_reset_takes_for_ever(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, timeout=0.5, connect_timeout=3.0, on_client_loss="raise")
    newcomer(env, 1)
    with pytest.raises(StepTimeout, match="slots 0"):
        env.reset()


def test_who_comes_during_a_reset_gets_its_seed(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    first, second = newcomer(env, 1), newcomer(env, 2)
    task = Task(lambda: env.reset([5, 6]))
    assert [first.obey_reset()["seed"], second.action() is not None] in ([[5], True], [[6], True])
    assert second.reset is not None
    missing = second.reset["seed"]
    second.vanish()
    third = newcomer(env, 3)
    assert third.obey_reset()["seed"] == missing
    assert task.result().lost in {(0,), (1,)}


def test_nobody_could_reset_a_client_that_does_not_know_how(
    make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_bridge(num_envs=1)
    task = Task(env.reset)
    puppet = Puppet(env.url, (1,)).infer(env_spec={"features": ["env-spec"], "unreset": True})
    assert puppet.close_seen() == RESYNC
    assert "[late-reset] env_spec: unreset needs seeded-reset" in caplog.text
    Puppet(env.url, (1,)).infer()
    task.result()


def test_a_spare_that_breaks_the_rules_is_sent_away_and_the_run_goes_on(begun: tuple[Lockstep, Puppet]) -> None:
    env, puppet = begun
    spare = newcomer(env, 2, 3)
    spare.action()
    spare.feed_back_nothing()
    spare.infer(
        env_indices=np.array([0]), step_ids=np.array([0]),
        data={"images": {}, "states": {"obs": np.zeros((1, 3), np.float32)}, "text": ""},
    )  # fmt: skip
    assert spare.close_seen() == STOP
    step = stepping(env)
    puppet.step()
    assert not step.result().truncated.any()


def test_a_spare_that_is_ready_goes_before_one_that_is_not(begun: tuple[Lockstep, Puppet]) -> None:
    env, puppet = begun
    stuck = newcomer(env, 2, rank=0)
    stuck.action()
    ready = newcomer(env, 3, rank=1)
    ready.obey_reset()
    step = stepping(env)
    puppet.vanish()
    assert step.result().standing()[0].tolist() == [[3, 1, 0]]


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
def test_a_replacement_in_the_reset_after_an_end_is_reset(make_bridge: MakeBridge, mode: AutoresetMode) -> None:
    env = make_bridge(num_envs=1, autoreset_mode=mode)
    puppet = newcomer(env, 1)
    task = Task(env.reset)
    puppet.obey_reset()
    task.result()
    step = stepping(env)
    puppet.step(terminated=True)
    assert step.result().terminated.tolist() == [True]
    lose(env, puppet)
    task = Task(env.reset)
    other = newcomer(env, 2)
    other.obey_reset()
    assert task.result().standing()[0].tolist() == [[2, 1, 0]]
    step = stepping(env)
    other.step()
    assert step.result().standing()[0].tolist() == [[2, 1, 1]]


def test_a_client_that_came_back_is_reset_when_the_trainer_resets(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, autoreset_mode=AutoresetMode.DISABLED)
    features = {"features": ["seeded-reset", "env-spec", "late-reset"]}
    puppet = Puppet(env.url, (1,)).infer(env_spec={**features, "unreset": True})
    task = Task(env.reset)
    puppet.obey_reset()
    task.result()
    step = stepping(env)
    puppet.vanish()
    again = Puppet(env.url, (1,))
    again.episode, again.t = 1, 2
    again.infer(env_spec=features)
    assert step.result().lost == (0,)
    task = Task(env.reset)
    again.obey_reset()
    assert task.result().standing()[0].tolist() == [[1, 2, 0]]


def test_a_client_that_cannot_reset_begins_the_episode_that_it_has_begun(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, autoreset_mode=AutoresetMode.DISABLED)
    puppet = Puppet(env.url, (1,)).infer()
    env.reset()
    step = stepping(env)
    puppet.step(terminated=True)
    step.result()
    assert env.reset([5]).observations[0].tolist() == [[1, 1, 0]]


def test_a_server_without_the_feature_takes_no_placeholders() -> None:
    with pytest.raises(RemoteProtocolError, match=r"\[late-reset\].*does not list"):
        Announced.from_wire({"features": ["seeded-reset"], "unreset": True}, ("env-spec",))


def test_a_mask_may_part_envs_of_a_client_that_came_back(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2, autoreset_mode=AutoresetMode.DISABLED)
    features = {"features": ["seeded-reset", "env-spec", "late-reset"]}
    puppet = Puppet(env.url, (1, 2)).infer(env_spec={**features, "unreset": True})
    task = Task(env.reset)
    puppet.obey_reset()
    task.result()
    step = stepping(env)
    puppet.action()
    puppet.feed_back(terminated=np.array([True, False])).infer()
    assert step.result().terminated.tolist() == [True, False]
    lose(env, puppet)
    Puppet(env.url, (3, 4)).infer(env_spec=features)
    began = env.reset(mask=np.array([True, False]))
    assert began.observations[0][0].tolist() == [1, 1, 0]  # of the episode that had begun
    assert stepping(env).result().lost == (0, 1)


def test_a_newcomer_takes_a_slot_that_a_mask_leaves_out_with_a_first_observation(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2, autoreset_mode=AutoresetMode.DISABLED)
    puppets = [newcomer(env, tag, rank=tag) for tag in (0, 1)]
    task = Task(env.reset)
    for puppet in puppets:
        puppet.obey_reset()
    task.result()
    task = Task(lambda: env.reset([5, None], mask=np.array([True, False])))
    puppets[0].action()
    lose(env, puppets[1])
    other = newcomer(env, 7, rank=1)
    other.obey_reset()
    wait_until(lambda: not env._roster.vacancies())
    puppets[0].answer_reset()
    began = task.result()
    assert (began.observations[0].tolist(), began.lost) == ([[0, 2, 0], [1, 1, 0]], ())
    step = stepping(env)
    puppets[0].step()
    result = step.result()
    assert (result.lost, result.truncated.tolist()) == ((1,), [False, True])
    assert result.observations[0][0].tolist() == [0, 2, 1]


def test_a_loss_is_told_slot_by_slot_where_a_mask_parts_those_who_came(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2, autoreset_mode=AutoresetMode.DISABLED)
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    lose(env, puppet)
    first = Puppet(env.url, (3,)).infer()
    wait_until(lambda: len(env._roster.sitting) == 1)
    Puppet(env.url, (4,)).infer()
    began = env.reset(mask=np.array([True, False]))
    assert (began.observations[0].tolist(), began.lost) == ([[3, 0, 0], [2, 0, 0]], (0,))
    step = stepping(env)
    first.step()
    result = step.result()
    assert (result.lost, result.truncated.tolist()) == ((1,), [False, True])
    assert result.observations[0].tolist() == [[3, 0, 1], [2, 0, 0]]
