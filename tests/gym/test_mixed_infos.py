"""Infos of clients that do not agree on what a key means: nothing is cut, and nothing raises in the trainer's step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from plugrl_bridges.gym.infos import InfoDialect, InfoWriter
from plugrl_bridges.server.autoreset import AutoresetMode, AutoresetViews
from plugrl_bridges.server.result import Ended, InfoPart, StepResult
from plugrl_bridges.spaces import ObservationLayout
from plugrl_bridges.wire.info import batch_infos

LAYOUT = ObservationLayout(spaces.Box(-1.0, 1.0, (1,), np.float32))


def step_of(*infos: dict[str, Any], over: tuple[int, ...] = ()) -> StepResult:
    """Make the result of a step of as many connections, of one env each."""
    n = len(infos)
    ended = np.zeros(n, bool)
    ended[list(over)] = True
    return StepResult(
        observations=[np.zeros((n, 1), np.float32)], rewards=np.zeros(n), terminated=ended,
        truncated=np.zeros(n, bool), stepped=np.ones(n, bool), begun=ended, first=[np.zeros((n, 1), np.float32)],
        info_parts=[InfoPart.of(batch_infos([info])[0], np.array([slot])) for slot, info in enumerate(infos)],
        ended={slot: Ended(7.0, 3, 0.5) for slot in over},
    )  # fmt: skip


def written(step: StepResult, dialect: InfoDialect, *, episodes: bool = False) -> dict[str, Any]:
    n = len(step.rewards)
    return InfoWriter(LAYOUT, n, dialect, episodes=episodes).step(AutoresetViews(AutoresetMode.NEXT_STEP, n).step(step))


@pytest.mark.parametrize("dialect", list(InfoDialect))
@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 2.5), (True, 300), (1, "a"), (1, None), ("a", 2), (np.uint8(7), 300), (1.5, {"deep": 1}), ({"deep": 1}, 2)],
    ids=str,
)
def test_each_env_keeps_what_its_client_said(first: Any, second: Any, dialect: InfoDialect) -> None:
    infos = written(step_of({"x": first}, {"x": second}, {}), dialect)
    assert infos["_x"].tolist() == [True, True, False]
    assert [infos["x"][0], infos["x"][1]] == [first, second]


@pytest.mark.parametrize("dialect", list(InfoDialect))
def test_what_an_env_calls_an_episode_and_is_no_record_gives_way_to_the_record(dialect: InfoDialect) -> None:
    infos = written(step_of({"episode": 4}, {"episode": 5}, over=(1,)), dialect, episodes=True)
    if dialect is InfoDialect.ARRAYS:
        assert infos["_episode"].tolist() == [False, True]
        assert (infos["episode"]["r"][1], infos["episode"]["l"][1]) == (7.0, 3)
    else:
        assert (infos["episode"][1]["r"].item(), infos["episode"][1]["l"].item()) == (7.0, 3)
