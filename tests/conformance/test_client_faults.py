"""Clients that are wrong in one way each: the checker names the clause that they break, and no other."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from plugrl_bridges.conformance.client_checker import check_client
from plugrl_bridges.conformance.client_options import SCENARIOS, ClientCheckOptions
from tests.support import ROOT

if TYPE_CHECKING:
    from plugrl_bridges.conformance import Report


@pytest.fixture(autouse=True)
def delays(request: pytest.FixtureRequest) -> None:
    """Wait for a client that speaks first where there is one, and hardly elsewhere."""
    if "sends before metadata" not in request.node.name:
        request.getfixturevalue("little_delay")


REUSE = frozenset({"reuse-feedback-obs"})
DIGESTS = frozenset({"env-spec", "step-digest"})
DIGESTED: dict[str, Any] = {"features": DIGESTS, "horizon": 1}


def graded(fault: str = "", *, envs: int = 3, **options: Any) -> Report:
    command = [sys.executable, "-m", "tests.conformance.scripted_client", "{url}", str(envs), fault]
    settings: dict[str, Any] = {"port": 0, "steps": 6, "probe": True, "timeout_s": 20.0, **options}
    return check_client(
        ClientCheckOptions(client=f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(command)}", **settings)
    )


class Fault(NamedTuple):
    """What a client does wrong, which clause that breaks, and what stands in the report."""

    fault: str
    clause: str
    detail: str
    scenario: str = "basic"
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to


FAULTS = [
    Fault("text frames", "1", "a text frame"),
    Fault("offers compression", "1", "permessage-deflate"),
    Fault("keeps the 1 MiB cap", "1", "too large"),
    Fault("never connects", "1", "did not connect; it ended with exit status 7"),
    Fault("unknown message_type", "2", "'observe'"),
    Fault("json", "3", "looks like JSON"),
    Fault("text too short", "3.4", "text must hold"),
    Fault("sends before metadata", "4", "before it had read the metadata"),
    Fault("leaves at once", "4", "left before the metadata"),
    Fault("two infers", "4.2", "expected feedback, got infer"),
    Fault("feeds back a stranger", "4.3", "env [40] holds no action"),
    Fault("feeds back half", "4.3", "has fed nothing back"),
    Fault("repeats an index", "4.4", "names an env twice"),
    Fault("names no env", "4.4", "names no env"),
    Fault("requires a key", "5.1", "keys nobody knows", "resync"),
    Fault("indices as a list", "5.2", "env_indices must be a 1-d int array, got a list"),
    Fault("no step_ids", "5.2", "step_ids must be"),
    Fault("no batch dimension", "5.2", "has a leading dimension of 1, expected 3 rows"),
    Fault("float images", "5.2", "must be a uint8 array"),
    Fault("no text", "5.2", "exactly the keys images, states, text"),
    Fault("stale infer", "5.2", "its last feedback said"),
    Fault("crashes", "5.3", "left at its first action"),
    Fault("refuses float64", "5.3", "<f8[4, 3, 7]", options={"action_dtype": "float64"}),
    Fault("assumes float32", "5.3", "of the <f8 array [H, n, d]", options={"action_dtype": "float64"}),
    Fault("reads env-major", "5.3", "the action of env 2 in step 1"),
    Fault("wrong env", "5.3", "the action of env 2 in step"),
    Fault("no action", "5.3", "no action at all"),
    Fault("runs H+1 steps", "5.3", "on a chunk of 2 steps", options={"horizon": 2}),
    Fault("last-step reward", "5.4", "reports a reward of 1 for"),
    Fault("resets inside step", "5.4", "the first observation of the next episode"),
    Fault("ends a chunk late", "5.4", "ends at t = 3"),
    Fault("ends a chunk late, resetting", "5.4", "ended after 3"),
    Fault("no reset", "5.4", "expected t = 0"),
    Fault("no batch dimension in feedback", "5.4", "has a leading dimension of 1, expected 3 rows"),
    Fault("float images in feedback", "5.4", "must be a uint8 array"),
    Fault("no text in feedback", "5.4", "exactly the keys images, states, text"),
    Fault("truncates", "5.4", "truncated = True"),
    Fault("wrong feedback keys", "5.4", "got ['info', 'obs', 'reward', 'terminated', 'truncated']"),
    Fault("flags as ints", "5.4", "terminated must be a bool array"),
    Fault("rewards as a list", "5.4", "rewards must be a float array"),
    Fault("unsplittable info", "5.4", "cannot be split"),
    Fault("exits non-zero", "7.1", "ended with exit status 3, expected 0"),
    Fault("reconnects after stop", "7.1", "came back after plugrl-server-stop"),
    Fault("quits at a resync", "7.2", "did not come back after a resync; it ended with exit status 5", "resync"),
    Fault("ignores a text frame", "7.4", "still connected", "text", {"timeout_s": 2.0}),
    Fault("answers a text frame", "7.4", "went on after", "text"),
    Fault("finishes badly", "7.5", "exit status 6", options={"steps": 5}),
    Fault("resends held feedback", "7.6", "the first message after a reconnect is a feedback", "resync"),
    Fault("other states", "8.1", "of the probe environment, got {'obs': [3, 7]}"),
    Fault("spec unasked", "10", "env_spec"),
    Fault("reuse unasked", "10.1", "does not list"),
    Fault("reuse after an end", "10.1", "whose episode has ended", options={"features": REUSE}),
    Fault("reuse on a fresh connection", "10.1", "without feedback", "resync", {"features": REUSE}),
    Fault("digest unasked", "10", "infer: digest, but the metadata does not list step-digest"),
    Fault("digest wrong in one feedback", "step-digest", "the digest of env 0 at step 2 is 0x", options=DIGESTED),
    Fault("digest wrong in one infer", "step-digest", "infer: the digest of env 0 at step 1 is 0x", options=DIGESTED),
    Fault("digest wrong from one step on", "step-digest", "the digest of env 0 at step 2 is 0x", options=DIGESTED),
    Fault("digest wrong after a resync", "step-digest", "digest of env 0 at step 2 is 0x", "resync", DIGESTED),
    Fault("digest of another action", "step-digest", "action[2] is 2.0 on the wire and 2.5 in the", options=DIGESTED),
    Fault("digest without reward", "step-digest", "reward is 1.0 on the wire and 0.0 in the", options=DIGESTED),
    Fault("digest without flags", "step-digest", "terminated is True on the wire and False in the", options=DIGESTED),
    Fault("digest not begun anew", "step-digest", "the chain was not begun anew", options=DIGESTED),
    Fault("digest not begun anew", "step-digest", "not begun anew", options={"features": DIGESTS, "horizon": 4}),
    Fault("no digest in infer", "step-digest", "infer: no digest, but the env_spec", options=DIGESTED),
    Fault("no digest in feedback", "step-digest", "feedback: no digest, but the env_spec", options=DIGESTED),
    Fault("no digest in feedback", "step-digest", "feedback: no digest, but the", "resync", {"features": DIGESTS}),
    Fault("digest not announced", "step-digest", "is not among the features", options=DIGESTED),
    Fault("step ids of 0", "step-digest", "step_ids says that env 0 took no step since its", options=DIGESTED),
    Fault("digests with a sign", "step-digest", "<u8 array of length 3, got an array <i8[3]", options=DIGESTED),
    Fault("float16 rewards", "step-digest", "must be <f8 or <f4 where digests are sent, got <f2", options=DIGESTED),
    Fault("spec with no such space", "env-spec", "unknown type 'Ball'", options=DIGESTED),
]  # fmt: skip


def details(report: Report, clause: str) -> str:
    [record] = [record for record in report.records if record.clause == clause]
    return "\n".join(record.violation_details)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.fault} [{fault.clause}]")
def test_a_broken_clause_is_named_and_no_other(fault: Fault) -> None:
    report = graded(fault.fault, scenarios=(fault.scenario,), **fault.options)
    assert report.violations == [fault.clause], report.to_text()
    assert fault.detail in details(report, fault.clause)
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("fault", "options", "violations"),
    [
        ("digest wrong in one feedback", DIGESTED, 1),
        ("digest wrong in one infer", DIGESTED, 1),
        ("digest wrong in one infer", {"features": DIGESTS | REUSE, "horizon": 1}, 1),
        ("digest wrong from one step on", DIGESTED, 1),
        ("digest without flags", DIGESTED, 3),  # env 0 ends twice in six steps, env 1 once
        ("digest not begun anew", DIGESTED, 3),
        ("no digest in feedback", DIGESTED, 6),
        ("no digest in infer", DIGESTED, 7),
    ],
)
def test_one_wrong_digest_is_one_violation(fault: str, options: dict[str, Any], violations: int) -> None:
    report = graded(fault, **options)
    assert report.violations == ["step-digest"], report.to_text()
    [record] = [record for record in report.records if record.clause == "step-digest"]
    assert record.violations == violations, report.to_text()


def test_both_digests_are_told() -> None:
    told = details(graded("digest wrong in one feedback", **DIGESTED), "step-digest")
    theirs, ours = (int(word, 16) for word in re.findall(r"0x[0-9a-f]{16}\b", told))
    assert theirs - ours == 1
    assert ": several values differ, or the digest is made in another way" in told


@pytest.mark.parametrize("fault", ["digest without flags", "digest of another action", "digest without reward"])
def test_with_long_chunks_the_digest_of_a_step_is_not_judged(fault: str) -> None:
    report = graded(fault, features=DIGESTS, horizon=4)
    assert (report.violations, report.notes) == ([], []), report.to_text()
    said = (
        "not compared: the digests of the steps themselves, since a chunk has 4 of them; only --horizon 1 compares them"
    )
    assert said in report.preamble
    assert said in report.to_text()


@pytest.mark.parametrize("options", [DIGESTED, {"features": REUSE, "horizon": 4}], ids=["single", "no digests"])
def test_nothing_is_said_of_digests_that_are_compared_or_not_offered(options: dict[str, Any]) -> None:
    assert not [line for line in graded(**options).preamble if "digests" in line]


def test_observations_are_held_to_the_announced_space_where_they_are_digested() -> None:
    report = graded("spec of other observations", **DIGESTED)
    assert report.violations == ["5.2"], report.to_text()
    assert "'a' has shape [7], expected [8], by the observation_space of the env_spec" in details(report, "5.2")


@pytest.mark.parametrize("fault", ["reads env-major", "resets inside step", "assumes float32"])
def test_without_the_probe_environment_actions_are_not_judged(fault: str) -> None:
    report = graded(fault, probe=False)
    assert (report.violations, report.notes) == ([], []), report.to_text()


@pytest.mark.parametrize(
    ("risk", "clause", "detail", "options"),
    [
        ("text as a list", "3.4", "a list of str", {}),
        ("text as one str", "3.4", "one str for all", {}),
        ("float64 rewards", "5.4", "<f8", {}),
        ("wrong return", "5.4", "info.episode says that env 0 had a return of 2, but its rewards come to 3", {}),
        ("last-step reward", "5.4", "had a return of 3, but its rewards come to 1", {"probe": False}),
        ("finishes early", "7.1", "by itself after 5 of 6", {}),
        ("finishes without a close frame", "7.5", "without a close frame", {"steps": 5}),
        ("exits with 0 after text", "7.4", "exits with 0", {"scenarios": ("text",)}),
        ("feature unused", "10.1", "not used", {"features": REUSE}),
        ("", "env-spec", "not used", {"features": frozenset({"env-spec"})}),
        ("digests unused", "step-digest", "step-digest was offered and not used", DIGESTED),
        ("spec without features", "step-digest", "step-digest was offered and not used", DIGESTED),
        ("digests without spaces", "step-digest", "env_spec has no action_space", DIGESTED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a set prints otherwise in each process
)
def test_a_risk_is_a_note(risk: str, clause: str, detail: str, options: dict[str, Any]) -> None:
    report = graded(risk, **options)
    assert (report.violations, report.notes) == ([], [clause]), report.to_text()
    [record] = [record for record in report.records if record.clause == clause]
    assert detail in record.note_details[0]
    assert report.exit_code == 0


@pytest.mark.parametrize("features", [REUSE, REUSE | DIGESTS], ids=["reuse", "digests"])
@pytest.mark.parametrize("envs", [1, 4])
@pytest.mark.parametrize("horizon", [1, 4])
@pytest.mark.parametrize("behaviour", ["", "ragged", "one step of each chunk", "images"])
def test_what_the_protocol_allows_passes(behaviour: str, horizon: int, envs: int, features: frozenset[str]) -> None:
    report = graded(behaviour, envs=envs, horizon=horizon, features=features, steps=12, scenarios=SCENARIOS)
    assert (report.violations, report.notes) == ([], []), report.to_text()


def test_finishing_after_the_last_exchange_is_in_order() -> None:
    report = graded("finishes", steps=5)
    assert (report.violations, report.notes) == ([], []), report.to_text()
    assert "7.5" in [record.clause for record in report.records]
