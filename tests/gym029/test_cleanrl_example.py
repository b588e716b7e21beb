"""The CleanRL-style example, with the Gymnasium that is installed: its logging loop, and its weights here and remote.

These tests run twice: with the newest Gymnasium, and with 0.29.1, which CleanRL pins (``make test-gym029``). So they
need nothing beside the base install, the extras ``cleanrl`` and ``mujoco``, pytest and pytest-timeout.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.cleanrl.ppo_continuous_action import SAME_STEP, Args, finished_episodes, main
from tests.support import CountingEnv

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
FACTORY = "examples.cleanrl.ppo_continuous_action:make_env"
OLD = gym.__version__ == "0.29.1"
CHEETAH = "HalfCheetah-v4" if OLD else "HalfCheetah-v5"
STEPS = 8_192


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Leave torch as it was: the example sets its threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif("EXPECTED_GYMNASIUM" not in os.environ, reason="only the target that installs a release expects it")
def test_this_is_the_release_that_was_asked_for() -> None:
    assert gym.__version__ == os.environ["EXPECTED_GYMNASIUM"]
    assert np.__version__.startswith("1.26.") == OLD


# The logging loop -----------------------------------------------------------------------------------------------------


def counting_envs(**options: Any) -> gym.vector.SyncVectorEnv:
    """Make two envs whose episodes are 5 steps and return 15."""
    return gym.vector.SyncVectorEnv([lambda: gym.wrappers.RecordEpisodeStatistics(CountingEnv())] * 2, **options)


def episodes_of(envs: gym.vector.SyncVectorEnv, steps: int) -> list[list[tuple[float, int]]]:
    envs.reset(seed=0)
    told = [list(finished_episodes(envs.step(envs.action_space.sample())[4])) for _ in range(steps)]
    envs.close()
    return told


def test_every_episode_is_told_of_in_the_step_that_ends_it() -> None:
    told = episodes_of(counting_envs(**SAME_STEP), 11)
    assert told == [[(15.0, 5)] * 2 if t % 5 == 4 else [] for t in range(11)]


@pytest.mark.skipif(not hasattr(gym.vector, "AutoresetMode"), reason="came with Gymnasium 1.1")
def test_every_episode_is_told_of_where_the_next_one_begins_a_step_later() -> None:
    told = episodes_of(counting_envs(autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP), 12)
    assert told == [[(15.0, 5)] * 2 if t in {4, 10} else [] for t in range(12)]


RECORD = {"r": np.array([0.0, 7.5]), "l": np.array([0, 3]), "t": np.array([0.0, 0.1])}
ENDED = np.array([False, True])
LAYOUTS: dict[str, dict[str, Any]] = {
    "0.29": {
        "final_info": np.array([None, {"episode": {"r": np.array([7.5], "f"), "l": np.array([3])}}], object),
        "_final_info": ENDED,
    },
    "1.x, SAME_STEP": {"final_info": {"episode": RECORD, "_episode": ENDED}, "_final_info": ENDED},
    "1.x, NEXT_STEP": {"episode": RECORD, "_episode": ENDED},
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_each_layout_of_infos_is_read(layout: str) -> None:
    assert list(finished_episodes(LAYOUTS[layout])) == [(7.5, 3)]
    assert list(finished_episodes({"reward_run": np.zeros(2)})) == []


def test_the_run_is_logged(tmp_path: Path) -> None:
    main(Args(env_id="Pendulum-v1", total_timesteps=STEPS, update_epochs=1, seed=0, runs=tmp_path))
    [folder] = tmp_path.iterdir()
    events = EventAccumulator(str(folder)).Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    returns = scalars["charts/episodic_return"]
    assert [event.step for event in returns] == [16 * 200] * 16 + [16 * 400] * 16
    assert [event.value for event in scalars["charts/episodic_length"]] == [200.0] * 32
    assert all(-2000 < event.value < 0 for event in returns)  # of the task, not normalised
    assert len({event.value for event in returns}) == 32
    assert len(scalars["charts/SPS"]) == len(scalars["losses/value_loss"]) == STEPS // (16 * 128)
    assert all(np.isfinite(event.value) for events in scalars.values() for event in events)


# The weights ----------------------------------------------------------------------------------------------------------


def settings(seed: int, folder: Path, *, normalize: bool) -> dict[str, Any]:
    # Four envs, so that episodes of 1000 steps end twice.
    options = {"env_id": CHEETAH, "num_envs": 4, "total_timesteps": STEPS, "update_epochs": 2}
    return {**options, "seed": seed, "runs": folder, "normalize": normalize}


def in_process(seed: int, folder: Path, *, normalize: bool) -> str:
    return main(Args(**settings(seed, folder, normalize=normalize)))


def remote(seed: int, folder: Path, *, normalize: bool) -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "plugrl_bridges.client", "--env-factory", FACTORY, "--num-envs", "4", "--quiet"]
    command += ["--url", f"ws://127.0.0.1:{port}"]
    command += ["--env-kwargs", f'{{"env_id": "{CHEETAH}", "normalize": {"true" if normalize else "false"}}}']
    client = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        weights = main(Args(**settings(seed, folder, normalize=normalize), remote_port=port))
    except BaseException:
        client.kill()
        client.wait()
        raise
    assert client.wait(60) == 0
    return weights


CASES = [
    *(pytest.param(seed, True, id=f"normalized-{seed}") for seed in (0, 1, 2)),
    pytest.param(0, False, id="plain-0"),
]


@pytest.mark.parametrize(("seed", "normalize"), CASES)
def test_remote_weights_are_those_of_the_in_process_run(tmp_path: Path, seed: int, *, normalize: bool) -> None:
    assert remote(seed, tmp_path, normalize=normalize) == in_process(seed, tmp_path, normalize=normalize)
