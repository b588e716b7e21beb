"""Every way of being wrong is caught, by the clause that it breaks and by no other."""

from __future__ import annotations

import pytest

from plugrl_bridges.conformance.server_checker import ServerChecker, ServerCheckOptions
from tests.conformance.foreign_server import ForeignServer

BROKEN = [
    # what is wrong                        clause
    ("no metadata", "5.1"),
    ("env-major", "5.3"),
    ("no env_ids", "5.3"),
    ("env_ids in another order", "5.3"),
    ("wrong horizon", "5.1"),
    ("wrong action_dim", "5.1"),
    ("wrong message_type", "4.2"),
    ("routes by the last infer", "4.3"),
    ("lenient on a malformed infer", "5.2"),
    ("lenient on two infers", "4.2"),
    ("dies on an unsplittable info", "5.4"),
    ("ignores an unsplittable info", "5.4"),
    ("plain close instead of stop", "7.1"),
    ("plain close instead of resync", "7.2"),
    ("honours an illegal reuse", "10.1"),
    ("offers a reuse that it does not have", "10.1"),
    ("leaks env 0 between connections", "4.4"),
    ("compresses", "1"),
    ("keeps the 1 MiB cap", "1"),
    ("answers in text", "1"),
]


@pytest.mark.parametrize(("fault", "clause"), BROKEN, ids=[fault for fault, _ in BROKEN])
def test_fault_is_caught(fault: str, clause: str) -> None:
    with ForeignServer(fault).running() as server:
        report = ServerChecker(ServerCheckOptions(port=server.port, until_stop=True, timeout_s=5)).run()
    assert report.violations == [clause], report.to_text()
    assert report.exit_code == 1


def test_right_server_passes() -> None:
    with ForeignServer().running() as server:
        report = ServerChecker(ServerCheckOptions(port=server.port, until_stop=True, timeout_s=5)).run()
    assert (report.violations, report.notes, report.preamble) == ([], [], []), report.to_text()


def test_run_that_does_not_end_is_caught() -> None:
    with ForeignServer(stop_after=None).running() as server:
        options = ServerCheckOptions(port=server.port, until_stop=True, timeout_s=5, max_exchanges=20)
        report = ServerChecker(options).run()
    assert report.violations == ["7.1"], report.to_text()


def test_run_that_ends_too_soon_is_caught() -> None:
    with ForeignServer(stop_after=3).running() as server:
        report = ServerChecker(ServerCheckOptions(port=server.port, timeout_s=5)).run()
    assert report.violations == ["7.1"], report.to_text()
    assert report.preamble == ["not checked, since the run is over: errors, scoping, reuse, exchange, ragged, stop"]
