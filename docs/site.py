"""What ``make docs`` adds to MkDocs: pages from outside ``docs/``, links to them, and the options of the adapters."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "tests/vectors/README.md": "vectors.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand outside ``docs/``."""
    for source, page in OUTSIDE.items():
        text = _relinked((ROOT / source).read_text(encoding="utf-8"), (ROOT / source).parent)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links that leave ``docs/`` to the pages that are made of those files."""
    return markdown if page.file.src_uri in OUTSIDE.values() else _relinked(markdown, ROOT / "docs")


def _relinked(markdown: str, folder: Path) -> str:
    """Return a page with its links as they are on the site; a link to a file that is not on it becomes its text."""

    def relink(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        name, hash_, anchor = target.partition("#")
        if "://" in target or not name:
            return match[0]
        path = (folder / name).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return f"{picture}[{text}]({path.relative_to(ROOT / 'docs').as_posix()}{hash_}{anchor})"
        page = OUTSIDE.get(path.relative_to(ROOT).as_posix())
        return text if page is None else f"[{text}]({page}{hash_}{anchor})"

    return _LINK.sub(relink, markdown)


class Options(griffe.Extension):
    """Shows what ``@takes(…)`` makes of a signature and a docstring, which the source alone does not say."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Complete a class."""
        if self._takes(cls):
            self._complete(cls, cls.members["__init__"])

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Complete a function."""
        if self._takes(func):
            self._complete(func, func)

    @staticmethod
    def _takes(described: Any) -> bool:
        return any(str(decorator.value).startswith("takes(") for decorator in described.decorators)

    @staticmethod
    def _complete(described: Any, called: Any) -> None:
        taker = getattr(import_module(described.module.path), described.name)
        described.docstring.value = inspect.getdoc(taker)
        options = [each for each in called.parameters if each.kind is not griffe.ParameterKind.var_keyword]
        known = {each.name for each in options}
        options.extend(
            griffe.Parameter(
                parameter.name,
                kind=griffe.ParameterKind.keyword_only,
                annotation=str(parameter.annotation),
                default=repr(parameter.default),
            )
            for parameter in inspect.signature(taker).parameters.values()
            if parameter.name not in known
        )
        called.parameters = griffe.Parameters(*options)
