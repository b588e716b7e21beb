from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from plugrl_bridges.probe_env import ProbeEnv
from plugrl_bridges.registration import ENVS, register_envs

ID = "plugrl_bridges:PlugRL/Probe-v0"


@pytest.mark.parametrize(("index", "length"), [(0, 3), (1, 5), (2, 7), (3, 3), (4, 5)])
def test_every_answer_is_predictable(index: int, length: int) -> None:
    env = gymnasium.make(ID, env_index=index, action_dim=2)
    for _ in range(2):
        observation, info = env.reset()
        assert info == {}
        assert observation["t"].tolist() == [0]
        assert observation["a"].tolist() == [0, 0]
        for t in range(1, length + 1):
            action = np.array([t, 10 * t], np.float32)
            observation, reward, terminated, truncated, info = env.step(action)
            assert observation["t"].tolist() == [t]
            assert observation["a"].tolist() == [t, 10 * t]
            assert (reward, terminated, truncated, info) == (1.0, t == length, False, {})
            assert env.observation_space.contains(observation)
    env.close()


def test_observations_are_not_written_to_again() -> None:
    env = ProbeEnv(action_dim=1)
    first, _ = env.reset()
    action = np.ones(1)
    second = env.step(action)[0]
    action[0] = 5
    env.step(action)
    assert (first["a"][0], second["t"][0]) == (0, 1)


@pytest.mark.parametrize("wrong", [{"env_index": -1}, {"action_dim": 0}])
def test_arguments_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProbeEnv(**wrong)


def test_registering_again_changes_nothing() -> None:
    before = {name: gymnasium.registry[name] for name in ENVS}
    register_envs()
    assert {name: gymnasium.registry[name] for name in ENVS} == before


@pytest.mark.parametrize(
    "imports",
    ["import gymnasium", "import plugrl_bridges, gymnasium", "import gymnasium, plugrl_bridges"],
)
def test_id_is_known_in_whatever_order_things_are_imported(imports: str) -> None:
    code = f"{imports}\nenv = gymnasium.make({ID!r})\nassert env.reset()[0]['a'].shape == (7,)\n"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
