from __future__ import annotations

import json

from plugrl_bridges.conformance import Report


def filled() -> Report:
    report = Report("a client")
    for clause in ("10.1", "4.2", "seeded-reset", "4"):
        report.passed(clause, "in order")
    return report


def test_nothing_found_is_a_pass() -> None:
    report = filled()
    report.note("3.4", "text is a list")
    assert report.exit_code == 0
    assert report.violations == []
    assert report.notes == ["3.4"]
    assert report.to_text().endswith("PASSED: 5 clauses checked, 0 violations, 1 note\n")


def test_clauses_stand_in_the_order_of_the_protocol() -> None:
    assert [record.clause for record in filled().records] == ["4", "4.2", "10.1", "seeded-reset"]


def test_violations_are_counted_and_the_first_details_kept() -> None:
    report = filled()
    for detail in ("a", "a", "b", "c", "d"):
        report.violation("4.2", detail)
    record = report.records[1]
    assert (record.checked, record.violations, record.violation_details) == (6, 5, ["a", "b", "c"])
    assert report.exit_code == 1
    text = report.to_text()
    assert (
        "[4.2]                VIOLATION  6 checked, 5 violations\n    x a\n    x b\n    x c\n    1 x in order" in text
    )
    assert text.endswith("FAILED: 4 clauses checked, 5 violations, 0 notes\n")


def test_json_says_the_same() -> None:
    report = filled()
    report.violation("4.2", "two infers")
    report.note("4.2", "slow")
    report.preamble.append("probe on")
    value = json.loads(report.to_json())
    assert (value["title"], value["passed"], value["exit_code"], value["violations"], value["notes"]) == (
        "a client", False, 1, 1, 1,
    )  # fmt: skip
    assert value["preamble"] == ["probe on"]
    assert value["clauses"][1] == {
        "clause": "4.2",
        "verdict": "violation",
        "checked": 2,
        "violations": 1,
        "notes": 1,
        "violation_details": ["two infers"],
        "note_details": ["slow"],
        "checks": {"in order": 1},
    }
