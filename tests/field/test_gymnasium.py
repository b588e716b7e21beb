"""What people run into with episodes, terminal data, spaces and actions (rows 12 to 25), with Gymnasium's env."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from plugrl_bridges.cleanrl import make_envs
from plugrl_bridges.gym import PlugRLVectorEnv
from tests.adapters.equality import assert_same
from tests.remote_vector import act, make_vector, remote_vector
from tests.support import CountingEnv, DictEnv

if TYPE_CHECKING:
    from pathlib import Path

    from tests.remote_vector import MakeVector

__all__ = ["make_vector", "remote_vector"]  # fixtures

each_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)


def run(env: Any, steps: int) -> list[Any]:
    """Reset and step; reset what has ended where nobody else does."""
    results: list[Any] = [env.reset()]
    for _ in range(steps):
        results.append(act(env))
        done = results[-1][2] | results[-1][3]
        if env.metadata["autoreset_mode"] is AutoresetMode.DISABLED and done.any():
            results.append(env.reset(options={"reset_mask": done}))
    return results


@each_mode
@pytest.mark.parametrize("truncate", [False, True])
def test_row_12_a_five_step_episode_of_return_15_is_that_in_every_mode(
    remote_vector: MakeVector, tmp_path: Path, mode: AutoresetMode, *, truncate: bool
) -> None:
    path = tmp_path / "episodes.csv"
    envs = RecordEpisodeStatistics(
        remote_vector(
            lambda: CountingEnv(truncate=truncate), 2, together=False, autoreset_mode=mode, episode_log=path,
            kind=make_envs if mode is AutoresetMode.SAME_STEP else PlugRLVectorEnv,
        )
    )  # fmt: skip
    found: list[tuple[list[float], list[int]]] = []
    for result in run(envs, 23):
        infos = result[-1]
        records = [infos.get("episode"), infos.get("final_info", {}).get("episode")]
        found += [(record["r"].tolist(), record["l"].tolist()) for record in records if record is not None]
    assert found == [([15, 15], [5, 5])] * (8 if mode is AutoresetMode.SAME_STEP else 4)  # there each is told twice
    with path.open(newline="") as file:
        assert {(row["return"], row["length"]) for row in csv.DictReader(file)} == {("15.0", "5")}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"info_dialect": "0.29"}, lambda infos: [each["episode"]["r"][0] for each in infos["final_info"]]),
        ({"info_dialect": "1.x"}, lambda infos: infos["final_info"]["episode"]["r"].tolist()),
        ({"info_dialect": "1.x", "autoreset_mode": "NEXT_STEP"}, lambda infos: infos["episode"]["r"].tolist()),
    ],
    ids=["0.29", "1.x SAME_STEP", "1.x NEXT_STEP"],
)
def test_row_13_each_scripts_logging_finds_the_returns(remote_vector: MakeVector, options: Any, where: Any) -> None:
    envs = remote_vector(envs=2, together=False, kind=make_envs, **options)
    assert where(run(envs, 5)[-1][-1]) == [15, 15]


@each_mode
def test_row_14_the_mode_is_told_as_the_enum_however_it_was_given(make_vector: MakeVector, mode: AutoresetMode) -> None:
    for kind in (PlugRLVectorEnv, make_envs):
        for given in (mode, mode.name, mode.value):
            assert make_vector(kind, autoreset_mode=given).metadata["autoreset_mode"] is mode
    envs: Any = gym.make_vec("plugrl_bridges:PlugRL/Remote-v0", num_envs=2, port=0, autoreset_mode=mode.name)
    assert envs.metadata["autoreset_mode"] is mode
    envs.close()


@pytest.mark.parametrize("kind", [PlugRLVectorEnv, make_envs])
def test_row_16_a_recorder_on_both_sides_counts_once(remote_vector: MakeVector, kind: Any) -> None:
    envs = RecordEpisodeStatistics(
        remote_vector(lambda: gym.wrappers.RecordEpisodeStatistics(CountingEnv()), envs=2, kind=kind)
    )
    ends = 0
    for result in run(envs, 20)[1:]:
        infos = result[-1]
        assert ("episode" in infos) == bool(result[2].any())
        if "episode" in infos:
            ends += 1
            for record in (infos["episode"], infos["final_info"]["episode"]):
                assert (record["r"].tolist(), record["l"].tolist()) == ([15, 15], [5, 5])
    assert ends == 4
    assert list(envs.return_queue) == [15] * 8


@pytest.mark.parametrize("kind", [PlugRLVectorEnv, make_envs])
def test_row_16_in_next_step_a_second_recorder_takes_a_key_of_its_own(remote_vector: MakeVector, kind: Any) -> None:
    """As around local envs: the first one's record is at the top, and Gymnasium's recorder takes no key twice."""

    def make() -> Any:
        return gym.wrappers.RecordEpisodeStatistics(CountingEnv())

    bare = remote_vector(make, envs=2, together=False, autoreset_mode="NEXT_STEP", kind=kind)
    envs = RecordEpisodeStatistics(bare, stats_key="again")
    found = [result[-1] for result in run(envs, 17) if "again" in result[-1]]
    assert len(found) == 3
    for infos in found:
        for key in ("episode", "again"):
            assert (infos[key]["r"].tolist(), infos[key]["l"].tolist()) == ([15, 15], [5, 5])


@each_mode
@pytest.mark.parametrize("make", [CountingEnv, lambda: DictEnv(CountingEnv())], ids=["Box", "Dict"])
def test_row_17_terminal_and_reset_observation_are_both_delivered_where_the_mode_has_them(
    remote_vector: MakeVector, make: Any, mode: AutoresetMode
) -> None:
    envs = remote_vector(make, 2, together=False, autoreset_mode=mode)
    steps = [result for result in run(envs, 12) if len(result) == 5]
    ends = [number for number, step in enumerate(steps) if step[2].any()]
    assert len(ends) == 2

    def states(observations: Any) -> Any:
        return (observations["state"] if isinstance(observations, dict) else observations).tolist()

    for number, step in enumerate(steps):
        final = step[4].get("final_obs")
        assert (final is not None) == (mode is AutoresetMode.SAME_STEP and number in ends)
    for episode, number in enumerate(ends):
        terminal, first = [[0, episode, 5]] * 2, [[0, episode + 1, 0]] * 2
        if mode is AutoresetMode.SAME_STEP:
            assert [states(each) for each in steps[number][4]["final_obs"]] == terminal
            assert states(steps[number][0]) == first
        else:
            assert states(steps[number][0]) == terminal
        if mode is AutoresetMode.NEXT_STEP:
            assert states(steps[number + 1][0]) == first


@each_mode
def test_row_20_options_are_one_shot_and_the_callers_dict_is_not_changed(
    remote_vector: MakeVector, mode: AutoresetMode
) -> None:
    made = CountingEnv(length=2)
    envs = remote_vector(lambda: made, autoreset_mode=mode)
    options = {"level": 3}
    envs.reset(options=options)
    run(envs, 5)
    assert [given for given in made.options if given] == [{"level": 3}]
    assert made.options[0] == {"level": 3}
    assert options == {"level": 3}


def frames(*, channels_first: bool) -> gym.Env[Any, Any]:
    """Observe a picture, in one of the two orders."""
    shape = (3, 36, 48) if channels_first else (36, 48, 3)
    space = gym.spaces.Box(0, 255, shape, np.uint8)
    return gym.wrappers.TransformObservation(
        CountingEnv(), lambda seen: (np.arange(np.prod(shape)).reshape(shape) + seen[2]).astype(np.uint8), space
    )


ENVS: dict[str, Any] = {
    "Box": CountingEnv,
    "Dict": lambda: DictEnv(CountingEnv()),
    "HWC": lambda: frames(channels_first=False),
    "CHW": lambda: frames(channels_first=True),
    "CartPole": lambda: gym.make("CartPole-v1"),
    "Taxi": lambda: gym.make("Taxi-v4"),
    "FrozenLake": lambda: gym.make("FrozenLake-v1"),
}
# FrozenLake's info has an int after a reset and a float after a step: of both in one, Gymnasium cuts the float.
CASES = [(name, AutoresetMode.SAME_STEP) for name in ENVS if name != "FrozenLake"]
CASES += [(name, AutoresetMode.DISABLED) for name in ENVS]


@pytest.mark.parametrize(("name", "mode"), CASES, ids=lambda each: getattr(each, "name", each))
def test_row_22_and_25_a_run_equals_that_of_sync_vector_env(
    remote_vector: MakeVector, name: str, mode: AutoresetMode
) -> None:
    make = ENVS[name]
    mine, local = remote_vector(make, envs=2, autoreset_mode=mode), SyncVectorEnv([make] * 2, autoreset_mode=mode)
    assert repr(mine.observation_space) == repr(local.observation_space)
    assert repr(mine.action_space) == repr(local.action_space)
    assert_same(mine.reset(seed=3), local.reset(seed=3))
    mine.action_space.seed(5)
    for _ in range(30):
        actions = mine.action_space.sample()
        step = local.step(actions)
        assert_same(mine.step(actions), step)
        done = step[2] | step[3]
        if mode is AutoresetMode.DISABLED and done.any():
            again = local.reset(options={"reset_mask": done})
            assert_same(mine.reset(options={"reset_mask": done}), again)


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Discrete(3, start=7),
        gym.spaces.MultiDiscrete([2, 5]),
        gym.spaces.MultiBinary(4),
    ],
    ids=str,
)
def test_row_25_actions_are_of_the_envs_space(remote_vector: MakeVector, space: gym.spaces.Space[Any]) -> None:
    made: dict[int, CountingEnv] = {}

    def make(env_index: int) -> CountingEnv:
        made[env_index] = CountingEnv(action_space=space)
        return made[env_index]

    envs = remote_vector(make, 2)
    envs.reset()
    sent = [envs.action_space.sample() for _ in range(9)]
    for actions in sent:
        envs.step(actions)
    for slot, env in made.items():
        assert len(env.actions) == 9
        for got, actions in zip(env.actions, sent, strict=True):
            assert space.contains(got)
            np.testing.assert_array_equal(got, actions[slot])
            if isinstance(space, gym.spaces.Discrete):
                assert np.ndim(got) == 0
                assert isinstance(got, (int, np.integer))
            else:
                assert got.dtype == space.dtype
