"""The pendulum in C++ against Gymnasium's, bit for bit."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
TRIALS, STEPS = 20, 200
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def harness(build: Callable[..., Path]) -> Path:
    return build(HERE / "harness.cpp", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")


def bits(form: str, value: float) -> str:
    return struct.pack(f">{form}", value).hex()


def ask(harness: Path, commands: list[str]) -> list[tuple[str, float, bool]]:
    """Give observation bits, reward and truncated per answer."""
    done = subprocess.run([harness], input="\n".join(commands), capture_output=True, text=True, timeout=60, check=True)
    answers = []
    for line in done.stdout.splitlines():
        *observation, reward, truncated = line.split()
        answers.append((" ".join(observation), struct.unpack(">d", bytes.fromhex(reward))[0], truncated == "1"))
    return answers


def shown(observation: Any) -> str:
    return " ".join(bits("f", float(value)) for value in observation)


@pytest.mark.parametrize(("form", "dtype"), [("f", np.float32), ("d", np.float64)], ids=["float32", "float64"])
def test_steps_as_gymnasium_does(form: str, dtype: Any, harness: Path) -> None:
    """From random states under random torques, some beyond the bounds."""
    random = np.random.default_rng(0)
    env = gym.make("Pendulum-v1", disable_env_checker=True)
    commands, expected = [], []
    for _ in range(TRIALS):
        env.reset(seed=0)
        state = random.uniform([-20.0, -8.0], [20.0, 8.0])
        env.unwrapped.state = state  # type: ignore[attr-defined]
        commands.append(f"begin {bits('d', state[0])} {bits('d', state[1])}")
        for _ in range(STEPS):
            torque = random.uniform(-3.0, 3.0, 1).astype(dtype)
            commands.append(f"step{8 * torque.itemsize} {bits(form, torque[0])}")
            observation, reward, terminated, truncated, _ = env.step(torque)
            assert not terminated
            expected.append((shown(observation), float(reward), truncated))
    found = ask(harness, commands)
    assert [each[0] for each in found] == [each[0] for each in expected]
    assert [np.float32(each[1]) for each in found] == [np.float32(each[1]) for each in expected]
    assert [each[1] for each in found] == [each[1] for each in expected], "not only as float32: to the last bit"
    assert [each[2] for each in found] == [each[2] for each in expected]
    assert sum(each[2] for each in found) == TRIALS


def test_a_seed_draws_the_state_that_gymnasium_draws(harness: Path) -> None:
    seeds = [0, 1, 2, 15, 123, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**53 + 1]
    env = gym.make("Pendulum-v1", disable_env_checker=True)
    expected = [shown(env.reset(seed=seed)[0]) for seed in seeds]
    assert [each[0] for each in ask(harness, [f"reset {seed:x}" for seed in seeds])] == expected
