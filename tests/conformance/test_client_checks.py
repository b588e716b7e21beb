"""The checks of messages against the golden vectors, and the model of the probe environment against nonsense."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest

from plugrl_bridges.conformance import Report
from plugrl_bridges.conformance.client_checks import Asked, Broken, MessageChecks, Told
from plugrl_bridges.conformance.probe_checks import ProbeModel, probe_actions
from plugrl_bridges.wire.messages import Feedback, Infer
from plugrl_bridges.wire.observation import Observation
from plugrl_bridges.wire.session import ENV_SPEC, REUSE_FEEDBACK_OBS, STEP_DIGEST
from tests.support import ROOT

VECTORS = ROOT / "tests" / "vectors"
MANIFEST = json.loads((VECTORS / "manifest.json").read_text(encoding="utf-8"))
EVERYTHING = frozenset({REUSE_FEEDBACK_OBS, ENV_SPEC, STEP_DIGEST})


def checked(checks: MessageChecks, file: str) -> None:
    message = checks.parsed((VECTORS / file).read_bytes())
    if isinstance(message, Infer):
        checks.infer(message)
    else:
        checks.feedback(message)


def ready(report: Report) -> MessageChecks:
    """Make the checks of a connection on which any row may be marked, and any feedback may come."""
    return MessageChecks(report, EVERYTHING, reusable=frozenset(range(8)))


@pytest.mark.parametrize(
    "file", [case["file"] for case in MANIFEST["good"] if case["type"] in {"infer", "feedback"}], ids=str
)
def test_what_is_well_formed_passes(file: str) -> None:
    report = Report(file)
    checks = ready(report)
    if "feedback" in file:
        checks.holding.update(range(8))
    empty = file == "messages/feedback_empty.bin"  # legal only after an action that resets everyone, never sent here
    checked(checks, file)
    assert report.violations == (["5.4"] if empty else []), report.to_text()
    noted = {"infer_text_bare": ["3.4"], "infer_text_list": ["3.4"]}
    assert report.notes == noted.get(file.split("/")[1][:-4], [])


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in MANIFEST["malformed"]
        if not case["file"].startswith(("malformed/action", "malformed/data_list", "malformed/never_used"))
    ],
    ids=lambda case: case["file"],
)
def test_what_is_malformed_breaks_its_clause(case: dict[str, Any]) -> None:
    report = Report(case["file"])
    checks = ready(report)
    if "feedback" in case["file"]:
        checks.holding.update(range(8))
    with contextlib.suppress(Broken):
        checked(checks, case["file"])
    assert report.violations == [case["clause"]], report.to_text()


def probed(model: ProbeModel, horizon: int, t: float, a: list[float]) -> None:
    """Lead a model through one exchange from a reset, whose feedback reports these states."""
    dim = len(a)
    env, none, flags = np.array([0]), np.zeros((1, 1)), np.array([False])
    start = Observation({}, {"t": none, "a": np.zeros((1, dim))})
    model.infer(Asked(Infer(start, env, env), [0], {0: 0}, frozenset()))
    model.action([0], probe_actions([0], horizon, dim, "float32"))
    after = Observation({}, {"t": none + t, "a": np.array([a])})
    model.feedback(Told(Feedback(after, env, env, np.ones(1, np.float32), flags, flags, {}), [0], {0: 0}))


@pytest.mark.parametrize("a", [[1e300, 0.0], [np.nan, np.inf], [10000 * 1e9, 1.0], [-5.0, 0.0]])
def test_an_action_out_of_all_bounds_costs_nothing(a: list[float]) -> None:
    report = Report("")
    probed(ProbeModel(report, 2), 2, 1.0, a)
    assert report.violations == ["5.3"]


@pytest.mark.parametrize("t", [np.nan, np.inf, 0.5, -1.0, 1e300])
def test_a_clock_that_is_none_is_a_fault(t: float) -> None:
    report = Report("")
    probed(ProbeModel(report, 1), 1, t, [1.0])
    assert report.violations in (["5.3"], ["8.1"])


@pytest.mark.parametrize(("envs", "horizon"), [([0, 1, 2], 4), ([5, 3], 1)])
def test_actions_say_where_they_belong(envs: list[int], horizon: int) -> None:
    action = probe_actions(envs, horizon, 3, "float64")
    assert (action.shape, action.dtype.str) == ((horizon, len(envs), 3), "<f8")
    for step in range(horizon):
        for at, env in enumerate(envs):
            assert action[step, at].tolist() == [10000 * step + 10 * env + component for component in range(3)]
