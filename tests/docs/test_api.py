"""The page of public names has all of them and no other, and what the guides and examples import is public."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.docs.markdown import DOCUMENTS, ROOT, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "plugrl_bridges"
PAGE = ROOT / "docs" / "api.md"
PUBLIC = (
    PACKAGE,
    *(f"{PACKAGE}.{name}" for name in ("cleanrl", "client", "conformance", "digest", "gym", "ledger")),
    *(f"{PACKAGE}.{name}" for name in ("plot", "rlinf", "sb3")),
)


def exported(module: str) -> list[str]:
    """Read ``__all__`` from the source: a package may need what is not installed here."""
    path = ROOT / "src" / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise AssertionError(f"{module} has no __all__")


NAMES = sorted(f"{module}.{name}" for module in PUBLIC for name in exported(module))


def described() -> set[str]:
    """Return the names that the page describes; an error is one of the package, wherever it is defined."""
    directives = re.findall(r"^::: (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(directives)) == len(directives)
    return {directive.replace(".errors.", ".") for directive in directives}


def imports_of(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == PACKAGE)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_on_the_page(name: str) -> None:
    assert name in described() or f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_every_name_on_the_page_is_public() -> None:
    assert described() <= set(NAMES)


def guides() -> dict[str, str]:
    shown = {block.place: block.text for page in DOCUMENTS for block in blocks(page) if block.language == "python"}
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")}
    return {place: text for place, text in (shown | written).items() if PACKAGE in text}


@pytest.mark.parametrize("place", guides())
def test_what_the_guides_import_is_public(place: str) -> None:
    for module, name in imports_of(guides()[place]):
        assert module in PUBLIC, f"{place}: {module}"
        assert name in {"", *exported(module)}, f"{place}: {module}.{name}"


def test_imports_are_seen() -> None:
    source = "import plugrl_bridges.sb3\nfrom plugrl_bridges.server.hub import Hub, x\nfrom numpy import array"
    assert list(imports_of(source)) == [
        ("plugrl_bridges.sb3", ""),
        ("plugrl_bridges.server.hub", "Hub"),
        ("plugrl_bridges.server.hub", "x"),
    ]
