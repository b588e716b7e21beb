"""Seeds, options, masks, and what the three autoreset modes mean for resets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from plugrl_bridges.errors import RaggedClientError
from plugrl_bridges.gym import AutoresetMode
from tests.remote_vector import MODES, SPACES, act
from tests.support import CountingEnv, Puppet, knows_reset
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.gym import PlugRLVectorEnv
    from tests.remote_vector import MakeVector

    Start = Callable[..., tuple[PlugRLVectorEnv, list[CountingEnv]]]

each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


@pytest.fixture
def start(remote_vector: MakeVector) -> Start:
    """Start a run of envs whose episodes last 2, 3, … steps; give it and the envs, by their slots."""

    def make(envs: int = 2, *, together: bool = True, **options: Any) -> tuple[PlugRLVectorEnv, list[CountingEnv]]:
        made: dict[int, CountingEnv] = {}

        def one(env_index: int) -> CountingEnv:
            made[env_index] = CountingEnv(env_index, length=2 + env_index)
            return made[env_index]

        env = remote_vector(one, envs, together=together, **options)
        assert env.num_envs == envs  # waits until all are made
        return env, [made[index] for index in range(envs)]

    return make


def mask(*rows: bool) -> dict[str, Any]:
    return {"reset_mask": np.array(rows)}


# Seeds and options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (7, [7, 8, 9]),
        (0, [0, 1, 2]),
        (np.int64(5), [5, 6, 7]),
        ([40, 2, 9], [40, 2, 9]),
        ((1, None, 3), [1, None, 3]),
        (np.array([4, 5, 6]), [4, 5, 6]),
    ],
    ids=str,
)
@pytest.mark.parametrize("together", [True, False])
def test_seeds_reach_the_envs_once(start: Start, seed: Any, seeds: list[int | None], *, together: bool) -> None:
    env, made = start(3, together=together)
    env.reset(seed=seed)
    env.reset()
    assert [each.seeds for each in made] == [[each, None] for each in seeds]  # nothing resets an env before the trainer


def test_a_reset_that_is_refused_leaves_the_step_in_flight(start: Start) -> None:
    env, _ = start()
    env.reset()
    env.step_async(np.zeros((2, 1), np.float32))
    for bad in ({"seed": [1, -1]}, {"seed": [1]}, {"options": {"cannot travel": object()}}):
        with pytest.raises(ValueError, match="slot"):
            env.reset(**bad)
    assert env.step_wait()[1].tolist() == [1, 1]


@pytest.mark.parametrize("seed", [[1], [1, 2, 3], ()], ids=str)
def test_too_many_or_too_few_seeds(start: Start, seed: Any) -> None:
    env, made = start()
    with pytest.raises(ValueError, match=f"seeds: expected one per slot, 2, got {len(seed)}"):
        env.reset(seed=seed)
    with pytest.raises(ValueError, match="seeds: slot 1 must have an int from 0"):
        env.reset(seed=[1, -1])
    env.reset()
    assert [each.seeds for each in made] == [[None]] * 2


def test_without_seed_and_options_the_first_reset_is_one_all_the_same(start: Start) -> None:
    env, made = start()
    assert env.reset(seed=None, options=None)[0].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert env.reset(options={})[0].tolist() == [[0, 1, 0], [1, 1, 0]]
    assert [each.seeds for each in made] == [[None, None]] * 2


@each_mode
def test_options_are_one_shot_and_never_changed(start: Start, mode: AutoresetMode) -> None:
    env, made = start(together=False, autoreset_mode=mode)
    options = {"level": {"size": 3}, **mask(True, True)}
    before = repr(options)
    env.reset(options=options)
    assert repr(options) == before
    for _ in range(2):
        act(env)
    env.reset()
    assert [each.options[0] for each in made] == [{"level": {"size": 3}}] * 2  # the mask is for us
    assert not any(option for each in made for option in each.options[1:])


def test_options_that_cannot_travel_are_refused_before_anything_is_sent(start: Start) -> None:
    env, made = start()
    with pytest.raises(ValueError, match="options: those of slot 0 cannot travel"):
        env.reset(options={"call": print})
    env.reset()
    assert [each.options for each in made] == [[None]] * 2


# Masks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        [True, False],
        np.array([1, 0]),
        np.array([True]),
        np.array([[True, False]]),
        np.array([True, False, False]),
        np.array([False, False]),
        "all",
    ],
    ids=repr,
)
def test_a_bad_mask_is_refused_and_nothing_is_reset(start: Start, bad: Any) -> None:
    env, made = start(together=False)
    env.reset()
    with pytest.raises(ValueError, match=r"^options\['reset_mask'\] must"):
        env.reset(options={"reset_mask": bad})
    assert act(env)[1].tolist() == [1, 1]
    assert [len(each.seeds) for each in made] == [1, 1]


@each_mode
def test_the_first_reset_must_be_one_of_all(start: Start, mode: AutoresetMode) -> None:
    env, _ = start(together=False, autoreset_mode=mode)
    with pytest.raises(ValueError, match="the first reset must be one of all slots"):
        env.reset(options=mask(True, False))
    assert env.reset(options=mask(True, True))[0].tolist() == [[0, 0, 0], [1, 0, 0]]
    act(env)


@each_mode
def test_running_envs_of_their_own_connections_can_be_reset_apart(start: Start, mode: AutoresetMode) -> None:
    env, made = start(3, together=False, autoreset_mode=mode)
    env.reset()
    act(env)
    observations, infos = env.reset(seed=[50, 60, 70], options={"level": 1, **mask(False, True, True)})
    assert observations.tolist() == [[0, 0, 1], [1, 1, 0], [2, 1, 0]]  # the first goes on, and keeps its observation
    assert infos["_began"].tolist() == [False, True, True]
    assert infos["began"].tolist() == [0, 1, 1]
    assert [each.seeds for each in made] == [[None], [None, 60], [None, 70]]
    assert [each.options[1:] for each in made] == [[], [{"level": 1}], [{"level": 1}]]
    _, rewards, terminations, *_ = act(env)
    assert (rewards.tolist(), terminations.tolist()) == ([2, 1, 1], [True, False, False])


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
def test_running_envs_of_one_connection_cannot_be_parted(start: Start, mode: AutoresetMode) -> None:
    env, made = start(autoreset_mode=mode)
    env.reset()
    act(env)
    with pytest.raises(
        ValueError, match=r"cannot reset slots 1 alone: the connection of 127\.0\.0\.1:\d+ carries slots 0"
    ):
        env.reset(options=mask(False, True))
    assert act(env)[1].tolist() == [2, 2]  # the run goes on
    assert [each.seeds[1:] for each in made] == [[None], []]  # its own next episode


# DISABLED -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_disabled_an_ended_env_must_be_reset_before_the_next_step(start: Start, *, together: bool) -> None:
    env, made = start(together=together, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    act(env)
    observations, _, terminations, _, infos = act(env)
    assert terminations.tolist() == [True, False]
    assert observations.tolist() == [[0, 0, 2], [1, 0, 2]]  # the terminal one
    assert not {"final_obs", "final_info"} & set(infos)
    assert infos["t"].tolist() == [2, 2]
    for _ in range(2):
        with pytest.raises(ResetNeeded, match="the episodes of slots 0 have ended"):
            act(env)
    assert [len(each.actions) for each in made] == [2, 2]  # nothing was sent
    observations, infos = env.reset(options={"reset_mask": terminations})
    assert observations.tolist() == [[0, 1, 0], [1, 0, 2]]
    assert (infos["began"].tolist(), infos["_began"].tolist()) == ([1, 0], [True, False])
    assert act(env)[1].tolist() == [1, 3]


def test_disabled_a_full_reset_also_begins_what_has_ended(start: Start) -> None:
    env, made = start(together=False, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    act(env)
    act(env)
    assert env.reset()[0].tolist() == [[0, 1, 0], [1, 1, 0]]
    assert [len(each.seeds) for each in made] == [2, 2]
    assert act(env)[1].tolist() == [1, 1]


def test_disabled_a_full_reset_of_one_connection_resets_all_its_envs(start: Start) -> None:
    """One more reset for those whose next episode had begun: the request goes to all envs of a connection."""
    env, made = start(autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    act(env)
    act(env)
    assert env.reset()[0].tolist() == [[0, 2, 0], [1, 1, 0]]
    assert [len(each.seeds) for each in made] == [3, 2]
    assert env.reset(seed=3)[0].tolist() == [[0, 3, 0], [1, 2, 0]]
    assert [each.seeds[-1] for each in made] == [3, 4]


def test_disabled_an_ended_env_is_reset_with_the_seed_and_options_of_its_reset(start: Start) -> None:
    env, made = start(together=False, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    act(env)
    act(env)
    observations, _ = env.reset(seed=[9, None], options={"level": 2, **mask(True, False)})
    assert observations.tolist() == [[0, 2, 0], [1, 0, 2]]
    assert (made[0].seeds, made[0].options) == ([None, None, 9], [None, None, {"level": 2}])
    assert act(env)[1].tolist() == [1, 3]


def test_disabled_ended_envs_of_one_connection_cannot_be_seeded_alone(start: Start) -> None:
    env, made = start(autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    act(env)
    act(env)
    with pytest.raises(ValueError, match=r"cannot reset slots 0 alone.*without seed and options"):
        env.reset(seed=4, options=mask(True, False))
    assert env.reset(options=mask(True, False))[0].tolist() == [[0, 1, 0], [1, 0, 2]]
    assert act(env)[1].tolist() == [1, 3]
    assert made[0].seeds == [None, None]


def test_disabled_envs_that_are_reset_one_after_another(start: Start) -> None:
    env, made = start(3, autoreset_mode=AutoresetMode.DISABLED)
    env.reset()
    for _ in range(2):
        act(env)
    env.reset(options=mask(True, False, False))
    act(env)  # ends the second
    env.reset(options=mask(False, True, False))
    step = act(env)  # ends the first and the third
    assert step[2].tolist() == [True, False, True]
    assert env.reset(options=mask(False, False, True))[0].tolist() == [[0, 1, 2], [1, 1, 1], [2, 1, 0]]
    with pytest.raises(ResetNeeded, match="slots 0 have"):
        act(env)
    assert env.reset(options=mask(True, False, False))[0].tolist() == [[0, 2, 0], [1, 1, 1], [2, 1, 0]]
    assert act(env)[1].tolist() == [1, 2, 1]
    assert [len(each.seeds) for each in made] == [3, 2, 2]


def test_disabled_works_behind_a_wrapper_that_takes_the_mask_out(start: Start) -> None:
    """It takes the mask out of the dict after it has handed that on."""
    bare, _ = start(autoreset_mode=AutoresetMode.DISABLED)
    env = RecordEpisodeStatistics(bare)
    env.reset()
    records: list[tuple[int, float, int]] = []
    for _ in range(12):
        _, _, terminations, _, infos = act(env)
        if terminations.any():
            ended, record = np.flatnonzero(terminations), infos["episode"]
            records += zip(ended.tolist(), record["r"][ended].tolist(), record["l"][ended].tolist(), strict=True)
            env.reset(options={"reset_mask": terminations.copy()})
    assert sorted(records) == [(0, 3, 2)] * 6 + [(1, 6, 3)] * 4


# NEXT_STEP ----------------------------------------------------------------------------------------------------------


def test_next_step_ignores_the_action_and_gives_the_reset_observation(start: Start) -> None:
    env, made = start(together=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    env.reset()
    act(env)
    observations, rewards, terminations, _, infos = act(env)
    assert observations.tolist() == [[0, 0, 2], [1, 0, 2]]
    assert (rewards.tolist(), terminations.tolist()) == ([2, 2], [True, False])
    assert not {"final_obs", "final_info", "began"} & set(infos)
    observations, rewards, terminations, _, infos = act(env)
    assert observations.tolist() == [[0, 1, 0], [1, 0, 3]]
    assert (rewards.tolist(), terminations.tolist()) == ([0, 3], [False, True])
    assert (infos["_began"].tolist(), infos["_t"].tolist()) == ([True, False], [False, True])
    observations, rewards, terminations, _, _ = act(env)
    assert observations.tolist() == [[0, 1, 1], [1, 1, 0]]
    assert (rewards.tolist(), terminations.tolist()) == ([1, 0], [False, False])
    assert [len(each.actions) for each in made] == [3, 3]


def test_next_step_a_reset_between_begins_the_episode_that_waits(start: Start) -> None:
    env, made = start(together=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    env.reset()
    act(env)
    act(env)
    assert env.reset()[0].tolist() == [[0, 1, 0], [1, 1, 0]]
    assert act(env)[1].tolist() == [1, 1]  # nobody sits out this step
    assert [len(each.seeds) for each in made] == [2, 2]


def test_next_step_needs_one_env_per_connection(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=2, autoreset_mode="NEXT_STEP", **SPACES)
    puppet = Puppet(env.url, (1, 2)).infer()
    with pytest.raises(RaggedClientError, match=r"has 2 envs on one connection.*--num-procs as envs, or use SAME_STEP"):
        env.reset()
    assert puppet.close_seen()[0] is not None


def test_next_step_a_spare_of_several_envs_is_sent_away_and_the_run_goes_on(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=1, autoreset_mode="NEXT_STEP", **SPACES)
    puppet = Puppet(env.url).infer()
    env.reset()
    assert Puppet(env.url, (1, 2)).infer().close_seen()[0] is not None
    task = Task(lambda: act(env))
    puppet.step(4.0)
    assert task.result()[1].tolist() == [4]


# One reset per episode ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "together"), [*((mode, False) for mode in MODES), ("SAME_STEP", True), ("DISABLED", True)], ids=str
)
def test_an_env_sees_exactly_one_reset_per_episode(start: Start, mode: Any, *, together: bool) -> None:
    env, made = start(together=together, autoreset_mode=mode)
    env.reset()
    ends = np.zeros(2, int)
    for _ in range(24):
        _, _, terminations, _, _ = act(env)
        ends += terminations
        if terminations.any() and env.metadata["autoreset_mode"].name == "DISABLED":
            env.reset(options={"reset_mask": terminations})
    assert ends.min() >= 6
    assert [len(each.seeds) for each in made] == (1 + ends).tolist()
    assert [each.episode for each in made] == ends.tolist()


@each_mode
def test_what_a_client_without_seeded_reset_cannot_do_is_said(
    make_vector: MakeVector, mode: AutoresetMode, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_vector(num_envs=1, autoreset_mode=mode, **SPACES)
    puppet = Puppet(env.url).infer()
    env.reset(seed=3)
    assert "does not know seeded-reset, so the seed of reset() cannot reach its envs" in caplog.text
    task = Task(lambda: act(env))
    puppet.step(2.0)
    task.result()
    assert env.reset()[0].tolist() == [[0, 0, 1]]
    assert "reset() lets its running episodes go on" in caplog.text
    task = Task(lambda: act(env))
    puppet.step(3.0, terminated=True)
    step = task.result()
    assert (step[1].tolist(), step[2].tolist()) == ([3], [True])
    assert env.reset()[0].tolist() == [[0, 1, 0]]


def test_a_mask_asks_only_the_clients_of_its_slots(make_vector: MakeVector) -> None:
    env = make_vector(num_envs=2, **SPACES)
    puppets = [Puppet(env.url, (tag,)).infer(env_spec=knows_reset(rank=tag)) for tag in (0, 1)]
    env.reset()
    task = Task(lambda: env.reset(seed=[5, 6], options={"map": 1, **mask(False, True)}))
    asked = puppets[1].obey_reset()
    assert (asked["seed"], asked["options"]) == ([6], [{"map": 1}])
    assert task.result()[0].tolist() == [[0, 0, 0], [1, 1, 0]]
    step = Task(lambda: act(env))
    assert [puppet.step().tolist() for puppet in puppets] == [[[[0.5]]]] * 2
    assert puppets[0].reset is None
    step.result()
