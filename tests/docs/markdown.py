"""Read what the documentation promises: its code blocks with their directives, its tables, its links.

A directive is an HTML comment right above a block, invisible to a reader:

    <!-- test: run=main steps=512 -->

Its keys are explained in ``runner``. A block of python, bash or hex without one is a fault, so nothing goes unchecked.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCUMENTS", "ROOT", "Block", "anchors", "blocks", "links", "table"]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\s*$")
_DIRECTIVE = re.compile(r"^<!-- test: (.+?) -->$")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CELL = re.compile(r"(?<!\\)\|")  # a bar inside a cell is written \|


@dataclass(frozen=True)
class Block:
    """Hold one fenced code block.

    Attributes:
        document: The file it stands in.
        line: Line of its fence.
        language: What the fence says.
        text: What is between the fences.
        directive: Keys and values of the comment above it; a key without a value has "".
    """

    document: Path
    line: int
    language: str
    text: str
    directive: dict[str, str]

    @property
    def place(self) -> str:
        """Say where it stands, for the name of a test."""
        return f"{self.document.name}:{self.line}"


def blocks(document: Path) -> list[Block]:
    """Give the fenced blocks of a document, in order."""
    found: list[Block] = []
    directive: dict[str, str] = {}
    language: str | None = None
    start, body = 0, list[str]()
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if language is None:
            comment = _DIRECTIVE.match(line)
            if comment is not None:
                pairs = [word.partition("=") for word in shlex.split(comment[1])]
                directive = {key: value for key, _, value in pairs}
            elif fence is not None:
                language, start, body = fence[1], number, []
            elif line.strip():
                directive = {}
        elif fence is not None and not fence[1]:
            found.append(Block(document, start, language, "\n".join(body) + "\n", directive))
            language, directive = None, {}
        else:
            body.append(line)
    assert language is None, f"{document.name}: the block of line {start} has no end"
    return found


def _prose(document: Path) -> str:
    """Give a document without its blocks."""
    return re.sub(r"^```.*?^```\s*$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Give the anchors that a document's headings make."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(_prose(document))
    }


def links(document: Path) -> list[str]:
    """Give the targets of a document's links and pictures."""
    return _LINK.findall(_prose(document))


def table(document: Path, heading: str) -> list[list[str]]:
    """Give the rows of the first table below a heading, header and rule left out, cells stripped."""
    _, found, rest = _prose(document).partition(f" {heading}\n")
    assert found, f"{document.name} has no heading {heading!r}"
    rows: list[list[str]] = []
    for line in rest.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip().replace("\\|", "|") for cell in _CELL.split(line)[1:-1]])
        elif rows:
            break
    return rows[2:]
