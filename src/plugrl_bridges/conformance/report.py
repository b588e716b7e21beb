"""What a checker has found: per clause how often it was checked, what broke it, and what may be a risk.

Two severities. A **violation** is what the other end would reject or mishandle; it makes the exit status 1. A **note**
is a portability risk, and changes nothing. Both checkers fill a `Report`; their commands print it.
"""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plugrl_bridges.errors import RemoteProtocolError

__all__ = ["MAX_DETAILS", "ClauseRecord", "Report"]

MAX_DETAILS = 3
"""So many details of each severity are kept per clause; the rest are only counted."""
_WIDTH = 110


@dataclass
class ClauseRecord:
    """What was found for one clause.

    Attributes:
        clause: Its number in the protocol, such as ``"4.2"``, or the name of a feature.
        checks: What was found in order, and how often.
        violations: How many violations.
        notes: How many notes.
        violation_details: The first of them, none twice.
        note_details: The first of them, none twice.
    """

    clause: str
    checks: dict[str, int] = field(default_factory=dict)
    violations: int = 0
    notes: int = 0
    violation_details: list[str] = field(default_factory=list)
    note_details: list[str] = field(default_factory=list)

    @property
    def checked(self) -> int:
        """How often the clause was checked: all that was found in order, and all violations."""
        return sum(self.checks.values()) + self.violations

    @property
    def verdict(self) -> str:
        """One of ``"VIOLATION"``, ``"note"`` and ``"ok"``."""
        return "VIOLATION" if self.violations else "note" if self.notes else "ok"


class Report:
    """What a checker finds.

    Args:
        title: What was graded, such as ``"env client on port 8000"``.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.preamble: list[str] = []
        """Lines about the run as a whole, such as what could not be checked."""
        self._records: dict[str, ClauseRecord] = {}

    def passed(self, clause: str, text: str) -> None:
        """Count one check that found everything in order; the same ``text`` each time, since they are counted."""
        checks = self._record(clause).checks
        checks[text] = checks.get(text, 0) + 1

    def violation(self, clause: str, detail: str) -> None:
        """Add what the other end would reject or mishandle: what was expected and what came."""
        record = self._record(clause)
        record.violations += 1
        _keep(record.violation_details, detail)

    def check(self, ok: bool, clause: str, text: str, detail: str) -> bool:
        """Count a check that was passed, or add the violation; return ``ok``."""
        if ok:
            self.passed(clause, text)
        else:
            self.violation(clause, detail)
        return ok

    def broken(self, exc: RemoteProtocolError, *, before: str = "", after: str = "", or_else: str = "3") -> None:
        """Add the violation that an error of ``wire`` names, or of another clause where it names none."""
        text = str(exc).removeprefix(f"[{exc.clause}] ")
        self.violation(exc.clause or or_else, f"{before}{text}{after}")

    def note(self, clause: str, detail: str) -> None:
        """Add a portability risk: what was seen, and who may stumble over it."""
        record = self._record(clause)
        record.notes += 1
        _keep(record.note_details, detail)

    @property
    def records(self) -> list[ClauseRecord]:
        """Every clause that was checked, in the order of the protocol."""
        return sorted(self._records.values(), key=lambda record: _order(record.clause))

    @property
    def violations(self) -> list[str]:
        """Clauses with a violation, in the order of the protocol."""
        return [record.clause for record in self.records if record.violations]

    @property
    def notes(self) -> list[str]:
        """Clauses with a note, in the order of the protocol."""
        return [record.clause for record in self.records if record.notes]

    @property
    def exit_code(self) -> int:
        """1 if there is a violation, else 0."""
        return 1 if self.violations else 0

    def to_text(self) -> str:
        """Return the report for people."""
        records = self.records
        lines = [self.title, *self.preamble, ""]
        for record in records:
            label = f"[{record.clause}]"
            count = f"{record.checked} checked"
            for number, what in ((record.violations, "violation"), (record.notes, "note")):
                if number:
                    count += f", {_count(number, what)}"
            lines.append(f"{label:<21}{record.verdict:<10} {count}")
            for mark, details in (("x", record.violation_details), ("!", record.note_details)):
                for detail in details:
                    lines.extend(_indented(f"{mark} {detail}"))
            for text, times in record.checks.items():
                lines.extend(_indented(f"{times} x {text}"))
        violations, notes = (sum(getattr(record, kind) for record in records) for kind in ("violations", "notes"))
        verdict = "FAILED" if violations else "PASSED"
        counted = (
            f"{_count(len(records), 'clause')} checked, {_count(violations, 'violation')}, {_count(notes, 'note')}"
        )
        lines += ["", f"{verdict}: {counted}"]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Return the report for programs, as a JSON object."""
        records = self.records
        keys = ("clause", "verdict", "checked", "violations", "notes", "violation_details", "note_details", "checks")
        value = {
            "title": self.title,
            "passed": not self.violations,
            "exit_code": self.exit_code,
            "violations": sum(record.violations for record in records),
            "notes": sum(record.notes for record in records),
            "preamble": self.preamble,
            "clauses": [
                {key: getattr(record, key) for key in keys} | {"verdict": record.verdict.lower()} for record in records
            ],
        }
        return json.dumps(value, indent=2) + "\n"

    def _record(self, clause: str) -> ClauseRecord:
        return self._records.setdefault(clause, ClauseRecord(clause))


def _keep(details: list[str], detail: str) -> None:
    if len(details) < MAX_DETAILS and detail not in details:
        details.append(detail)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _order(clause: str) -> tuple[int, tuple[int, ...], str]:
    """Sort 4.2 before 10.1, and names of features last."""
    if re.fullmatch(r"\d+(\.\d+)*", clause):
        return 0, tuple(int(part) for part in clause.split(".")), ""
    return 1, (), clause


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
