"""Say what came of the matrix of faults: a table of all cases, a summary, a picture, and what is not as it should be.

`boundary_faults` makes the cases. This command makes the summary and the picture anew from the tables that it left:

    python -m benchmarks.faults_report runs/boundary_faults.csv
"""

from __future__ import annotations

import argparse
import csv
import math
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.faulty_env import CONTROLS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOG_FAULTS = ("log: first reward left out", "log: length one short")


@dataclass
class Row:
    """Hold what came of one case; the fields are the columns of the table."""

    fault: str
    dose: str
    seed: int
    changed: int = 0
    first: str = "-"
    ledger: str = "-"
    live: str = "-"
    log: str = "-"
    curve: str = "-"
    weights: str = "-"


def _changed(row: Row) -> bool:
    """Tell whether there was anything to see: a fault may find nothing to change within the budget."""
    return row.fault in CONTROLS or row.changed > 0


DETECTORS: dict[str, Callable[[Row], bool]] = {
    "ledgers locate it": lambda row: row.ledger == "located",
    "live check stops in the step": lambda row: row.live.startswith("in the step"),
    "episode log and record differ": lambda row: row.log == "DIFFERS",
    "learning curve does not rise": lambda row: row.curve.startswith("does not rise"),
    "final weights differ": lambda row: row.weights == "differ",
}
"""What may see a fault, in the order of the summary's columns; the curve is what people look at."""

_COUNTS: dict[str, Callable[[Row], bool]] = {
    "episode log and record differ": lambda row: row.log != "no episode",
    "learning curve does not rise": lambda row: row.curve != "too short",
}
"""Which cases a detector can say something about; the others, and those without a change, are not counted."""


def table(rows: Sequence[Row]) -> str:
    """Write all cases as a Markdown table."""
    names = [each.name for each in fields(Row)]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(str(value) for value in asdict(row).values())} |" for row in rows]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Write a Markdown table: in how many of the cases of a fault, over doses and seeds, each detector saw it.

    A case in which nothing was changed does not count, nor does a curve that is too short; ``-`` if no case is left.
    """
    lines = [f"| fault | {' | '.join(DETECTORS)} |", "|---|" + "---:|" * len(DETECTORS)]
    for fault, cases in _by_fault(rows).items():
        seen = ["-" if not total else f"{count} of {total}" for count, total in map(partial(_seen, cases), DETECTORS)]
        lines.append(f"| {fault} | {' | '.join(seen)} |")
    return "\n".join(lines)


def _seen(cases: Sequence[Row], detector: str) -> tuple[int, int]:
    """Give in how many cases a detector saw the fault, and how many count for it."""
    counted = [row for row in cases if _changed(row) and _COUNTS.get(detector, _changed)(row)]
    return sum(map(DETECTORS[detector], counted)), len(counted)


def _by_fault(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Give the cases of each fault: those of clients as they come, then controls and the faults of logs."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.fault in CONTROLS) + 2 * (row.fault in LOG_FAULTS)):
        name = f"control: {row.fault}" if row.fault in CONTROLS else row.fault
        found.setdefault(name, []).append(row)
    return found


def verdict(rows: Sequence[Row]) -> list[str]:
    """Give what is not as it should be: a fault that is not located or stopped, an alarm without a fault."""
    wrong = []
    for row in rows:
        silent = row.fault in CONTROLS or row.fault in LOG_FAULTS
        if not silent and not row.changed:
            wrong.append(f"{row.fault}, {row.dose}, seed {row.seed}: nothing was changed within the budget")
        elif silent and (row.ledger, row.live, row.weights) not in {
            ("silent", "silent", weights) for weights in ("clean", "equal")
        }:
            wrong.append(f"{row.fault}, seed {row.seed}: an alarm without a fault")
        elif not silent and (row.ledger != "located" or not row.live.startswith("in the step")):
            wrong.append(f"{row.fault}, {row.dose}, seed {row.seed}: ledger {row.ledger}, live {row.live}")
        if row.fault in LOG_FAULTS and row.log != "DIFFERS":
            wrong.append(f"{row.fault}, seed {row.seed}: not caught")
        if row.fault in CONTROLS and row.log == "DIFFERS":
            wrong.append(f"{row.fault}, seed {row.seed}: the episode log differs without a fault")
    return wrong


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw which part of the cases of each fault each detector saw."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - it takes a second to import

    cases = _by_fault(rows)
    seen = [[_seen(rows, detector) for detector in DETECTORS] for rows in cases.values()]
    shares = [[count / total if total else math.nan for count, total in line] for line in seen]
    figure = Figure(figsize=(8, 0.26 * len(cases) + 2.2), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Greens", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(DETECTORS)), [name.replace(" ", "\n", 2) for name in DETECTORS], fontsize=8)
    axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
    axes.xaxis.tick_top()
    for y, line in enumerate(shares):
        for x, share in enumerate(line):
            text, color = "-" if math.isnan(share) else f"{share:.0%}", "white" if share > 0.6 else "0.3"
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color=color)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=80)


def write(rows: Sequence[Row], out: Path, *, title: str = "", picture: bool = True) -> list[Path]:
    """Write tables and picture.

    Args:
        rows: All cases so far.
        out: Path without a suffix.
        title: Of the picture.
        picture: Whether to draw one.

    Returns:
        What was written.
    """
    markdown, values, drawn = (out.with_suffix(suffix) for suffix in (".md", ".csv", ".png"))
    markdown.write_text(f"{summary(rows)}\n\n{table(rows)}\n", encoding="utf-8")
    with values.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(each.name for each in fields(Row))
        writer.writerows(asdict(each).values() for each in rows)
    if not picture:
        return [markdown, values]
    draw(rows, drawn, title)
    return [markdown, values, drawn]


def read(path: Path) -> list[Row]:
    """Read a table that `write` left."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(**{**row, "seed": int(row["seed"]), "changed": int(row["changed"])})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Report on each table. Exit code 1 if anything was missed, or an alarm was false."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="CSV")
    bad = 0
    for path in parser.parse_args(argv).tables:
        rows = read(path)
        wrong = verdict(rows)
        bad += len(wrong)
        print(f"{path}: {len(rows)} cases, {len(wrong)} not as they should be\n\n{summary(rows)}\n")
        for line in wrong:
            print(f"- {line}")
        print(
            "written: "
            + ", ".join(map(str, write(rows, path.with_suffix(""), title=f"{path.stem}, {len(rows)} cases")))
        )
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
