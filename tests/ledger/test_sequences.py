"""Sequences of events written out: what a trainer saw of one env, and what the env saw, in one file or several.

``R2`` is a reset that shows 2; ``1>0`` a step with action 1 that shows 0; ``t`` and ``u`` say that it terminated or
truncated the episode, ``!`` that the client was lost, ``*5`` that the reward was 5, otherwise 1. A bar parts the files
of an env.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from plugrl_bridges.ledger import LedgerEnv, compare
from plugrl_bridges.ledger.recorder import Recorder
from plugrl_bridges.ledger.schema import Dialect, Flag

if TYPE_CHECKING:
    from pathlib import Path

    from plugrl_bridges.ledger import Comparison

SHOWN, ACTIONS = spaces.Discrete(1 << 16), spaces.Discrete(2)
FLAGS = {"t": Flag.TERMINATED, "u": Flag.TRUNCATED, "!": Flag.LOST}

Told = tuple[int | None, int, int, float]
"""Action, None for a reset; observation; flags; reward."""


def told(text: str) -> list[Told]:
    found: list[Told] = []
    for word in text.split():
        match = re.fullmatch(r"(?:R|([01])>)(\d+)([tu!]*)(?:\*(\d+))?", word)
        assert match is not None, word
        action, shown, flags, reward = match.groups()
        summed = sum(FLAGS[each] for each in flags)
        found.append((None if action is None else int(action), int(shown), summed, float(reward or 1)))
    return found


class Script(gym.Env[Any, Any]):
    """Do as it is told."""

    def __init__(self, events: list[Told]) -> None:
        self.observation_space: Any = SHOWN
        self.action_space: Any = ACTIONS
        self._events = iter(events)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002 - Gymnasium's
        return next(self._events)[1], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002 - Gymnasium's
        _, shown, flags, reward = next(self._events)
        return shown, reward, bool(flags & Flag.TERMINATED), bool(flags & Flag.TRUNCATED), {}


def compared(folder: Path, trainer: str, env: str) -> Comparison:
    for number, part in enumerate(env.split("|")):
        events = told(part)
        (folder / "envs").mkdir(parents=True, exist_ok=True)
        one = LedgerEnv(Script(events), folder / "envs" / f"{number}.ledger")
        for action, *_ in events:
            if action is None:
                one.reset()
            else:
                one.step(action)
        one.close()
    recorder = Recorder(
        folder / "trainer.ledger", observation_space=SHOWN, action_space=ACTIONS, num_envs=1, dialect=Dialect.GYMNASIUM,
        run="", full=False, env_id="script",
    )  # fmt: skip
    for action, shown, flags, reward in told(trainer):
        if action is None:
            recorder.reset([np.array([shown])])
        else:
            recorder.take(np.array([action]))
            recorder.step(np.array([reward]), np.array([flags], np.uint8), [np.array([shown])])
    recorder.close()
    return compare(folder / "trainer.ledger", [folder / "envs"])


@pytest.mark.parametrize(
    ("trainer", "env"),
    [
        ("R1 0>1u! R2 0>3 0>4", "R1 R2 0>3 0>4"),
        ("R1 0>1u! R1 R2 0>3 0>4", "R1 R2 0>3 0>4"),
        ("R1 0>2 0>3 0>3u! R3 0>3u! R7 0>8 0>9", "R1 0>2 0>3 | R7 0>8 0>9"),
        ("R1 0>2 0>2u! R2 0>3 0>4", "R1 0>2 0>3 0>4"),
        ("R1 0>2 0>2u! R3 0>4 0>5", "R1 0>2 0>3 0>4 0>5"),
        ("R1 0>2 0>2u! R4 0>5 0>6", "R1 0>2 0>3u R4 0>5 0>6"),
        ("R1 0>2 0>3u! R4 0>5 0>6", "R1 0>2 0>3u R4 0>5 0>6"),
        ("R1 0>2 0>2u! R6 0>7", "R1 0>2 | R4 R5 | R6 0>7"),
    ],
    ids=[
        "lost before the first step, then reset", "and reset at once", "back, then replaced",
        "back where it stood", "back a step later", "back in the next episode", "its own end", "replaced twice",
    ],
)  # fmt: skip
def test_a_loss_is_no_difference(tmp_path: Path, trainer: str, env: str) -> None:
    found = compared(tmp_path, trainer, env)
    assert found.equal, str(found)


@pytest.mark.parametrize(
    ("trainer", "env"),
    [
        (
            "R0 0>1 0>1u! R1 0>2 1>1 R2 0>2 R0 0>2 0>0 1>2u R2 0>2u! R2 R0 1>1 0>2 R0 1>0 R0 1>1 1>2 0>0 1>1 1>0t R2",
            "R0 0>1 0>2 1>1 R2 0>2 R0 0>2 0>0 1>2u R2 R0 1>1 0>2 R0 1>0 R0 1>1 1>2 0>0 1>1 1>0t R2",
        ),
        (
            "R0 1>2 0>2u! R2 1>2 0>0 0>0u R1 0>1u! R1 R0 0>0 1>1t R2 0>0t R0 R1 0>0 1>1 0>1",
            "R0 1>2 1>2 0>0 0>0u R1 R0 0>0 1>1t R2 0>0t R0 R1 0>0 1>1 0>1",
        ),
        (
            "R2 1>1 0>1 1>1 1>1 0>0u R0 0>0u! R0 R0 0>1 0>2t R0 1>2 0>0 0>1 0>0 1>0 0>1t R1 1>2 0>0",
            "R2 1>1 0>1 1>1 1>1 0>0u R0 R0 0>1 0>2t R0 1>2 0>0 0>1 0>0 1>0 0>1t R1 1>2 0>0",
        ),
        (
            "R0 R1 0>2t R1 1>0t R0 1>1 1>2 0>1 0>2 1>2t R2 1>2u R0 0>0u! R1 0>2u R2 0>1 1>0 0>0t R2 1>0 0>1",
            "R0 R1 0>2t R1 1>0t R0 1>1 1>2 0>1 0>2 1>2t R2 1>2u R0 R1 0>2u R2 0>1 1>0 0>0t R2 1>0 0>1",
        ),
    ],
    ids=["a reset behind a loss", "two losses", "the same shown twice", "a reset in place of the next episode"],
)
def test_observations_that_repeat_around_a_loss(tmp_path: Path, trainer: str, env: str) -> None:
    """Each run is one in which a client was really lost, and nothing else happened."""
    found = compared(tmp_path, trainer, env)
    assert found.equal, str(found)


@pytest.mark.parametrize(
    ("shown", "at"), [("R4 0>5", (3, "reset_obs")), ("R3 0>9", (4, "obs"))], ids=["what came back", "the step behind"]
)
def test_a_fault_right_behind_a_loss(tmp_path: Path, shown: str, at: tuple[int, str]) -> None:
    found = compared(tmp_path, f"R1 0>2 0>3 0>3u! {shown} 0>6 0>7", "R1 0>2 0>3 0>5 0>6 0>7")
    assert found.first is not None
    assert (found.first.vector_step, found.first.field) == at, str(found)


def stale(since: int, actions: list[int], shown: list[int]) -> tuple[str, str]:
    """Show the observation before from a step on."""
    late = [shown[number - 1] if number >= since else shown[number] for number in range(len(shown))]
    ours, theirs = (
        " ".join(f"{action}>{value}" for action, value in zip(actions, values, strict=True)) for values in (late, shown)
    )
    return f"R0 {ours}", f"R0 {theirs}"


@pytest.mark.parametrize("actions", ["constant", "any"])
def test_a_stale_observation_is_no_skipped_step(tmp_path: Path, actions: str) -> None:
    rng = np.random.default_rng(0)
    for number in range(10):
        taken = [1] * 60 if actions == "constant" else rng.integers(0, 2, 60).tolist()
        found = compared(tmp_path / str(number), *stale(8, taken, list(range(1, 61))))
        assert found.first is not None
        assert (found.first.vector_step, found.first.field) == (9, "obs"), str(found)


def test_a_skipped_step_is_one_where_its_action_is_missing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(20):
        at, actions = 5 + number, rng.integers(0, 2, 60).tolist()
        actions[at + 1] = 1 - actions[at]
        ours = [f"{action}>{count - (count > at) + 1}" for count, action in enumerate(actions)]
        ours[at] = f"{actions[at]}>{at}"  # what was shown before
        theirs = [f"{action}>{count + 1}" for count, action in enumerate(actions[:at] + actions[at + 1 :])]
        found = compared(tmp_path / str(number), f"R0 {' '.join(ours)}", f"R0 {' '.join(theirs)}")
        assert found.first is not None
        assert (found.first.vector_step, found.first.field) == (at + 1, "step_count"), str(found)


@pytest.mark.parametrize("period", [1, 7, 40])
def test_rewards_in_place_tell_a_stale_observation_from_a_skipped_step(tmp_path: Path, period: int) -> None:
    steps = [(at + 1, 2 + at // period) for at in range(60)]
    theirs = " ".join(f"1>{shown}*{reward}" for shown, reward in steps)
    ours = " ".join(f"1>{shown - (shown > 8)}*{reward}" for shown, reward in steps)
    found = compared(tmp_path, f"R0 {ours}", f"R0 {theirs}")
    assert found.first is not None
    assert (found.first.vector_step, found.first.field) == (9, "obs"), str(found)


def test_skipped_steps_close_to_each_other(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        "R1 1>2 1>3 0>4 1>5 0>5 1>6 0>6 1>7 1>8 0>9 0>10 0>11 1>12 0>13",
        "R1 1>2 1>3 0>4 1>5 1>6 1>7 1>8 0>9 0>10 0>11 1>12 0>13",
    )
    assert found.first is not None
    assert (found.first.vector_step, found.first.field) == (5, "step_count"), str(found)
