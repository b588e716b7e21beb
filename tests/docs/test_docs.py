"""Hold the documentation to the code: what it shows is run, what it lists is compared, what it quotes must occur."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
from typing import TYPE_CHECKING

import click
import pytest
from stable_baselines3.common.vec_env import VecEnv

from plugrl_bridges.cleanrl import make_envs
from plugrl_bridges.client.cli import main as client_command
from plugrl_bridges.conformance.client_cli import main as checker_command
from plugrl_bridges.gym import PlugRLVectorEnv
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from plugrl_bridges.server.episodes import COLUMNS
from plugrl_bridges.server.options import BridgeOptions
from tests.docs.markdown import DOCUMENTS, ROOT, Block, anchors, blocks, links, table
from tests.docs.runner import Runner

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
SRC = ROOT / "src" / "plugrl_bridges"
VECTORS = ROOT / "tests" / "vectors"
BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
RUN = [
    block for block in BLOCKS if block.language in {"python", "bash"} and {"run", "serve"}.intersection(block.directive)
]
KNOWN = {
    "python": {"run", "after", "serve", "file"},
    "bash": {"run", "after", "beside", "serve", "make", "install", "rlinf"},
    "yaml": {"rlinf"},
    "hex": {"vector"},
    "cpp": {"build"},  # by tests/cpp
}
UNCHECKED = {"text", "json"}  # text is for people; json is parsed, and messages are looked up

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_block_is_accounted_for(block: Block) -> None:
    assert block.language in KNOWN.keys() | UNCHECKED, f"{block.place}: a block in {block.language!r}"
    if block.language in KNOWN:
        how = KNOWN[block.language].intersection(block.directive)
        assert len(how) == 1, f"{block.place}: {sorted(how)}, expected one of {KNOWN[block.language]}"
    names = {other.directive.get("run") for other in blocks(block.document)} - {None}
    for key in ("beside", "after"):
        assert block.directive.get(key) in {None, *names}, f"{block.place}: no block run={block.directive[key]}"


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.place)
# Stable-Baselines3's progress bar is rich's, by way of tqdm, which calls that experimental; it says so at its first
# import only, and then only if this test is the one that imports it.
@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    try:
        Runner(block, tmp_path).run()
    finally:
        for name in set(sys.modules) - before:  # files of this document, which another may have under the same name
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    shown = {
        match
        for block in BLOCKS
        if "make" in block.directive
        for line in block.text.splitlines()
        for match in re.findall(r"^make ?([\w-]*)", line)
    }
    assert {"demo", "test"} <= shown
    assert shown - {""} <= targets


def test_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # tomllib came with Python 3.11
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = ", section, re.MULTILINE))
    lines = [line for block in BLOCKS if "install" in block.directive for line in block.text.splitlines()]
    assert all(line.startswith("pip install ") for line in lines)
    shown = {name for line in lines for names in re.findall(r"\.\[(.+?)\]", line) for name in names.split(",")}
    assert shown == extras
    assert '\nplugrl-env-client = "plugrl_bridges.client.cli:main"\n' in project


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=lambda block: block.place)
def test_json_parses(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "hex"], ids=lambda block: block.place)
def test_hex_is_the_golden_vector(block: Block) -> None:
    lines = [re.match(r"((?:[0-9a-f]{2} ?)+)(?:  .*)?$", line) for line in block.text.splitlines()]
    shown = b"".join(bytes.fromhex(line[1]) for line in lines if line is not None)
    assert None not in lines, f"{block.place}: a line is not hex, two spaces, a remark"
    assert shown == (VECTORS / block.directive["vector"]).read_bytes()


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in links(document):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        assert path.exists(), f"{document.name}: {target}"
        assert ROOT in path.parents
        if anchor:
            assert anchor in anchors(path), f"{document.name}: {target}"


def test_pictures_are_small() -> None:
    pictures = list((DOCS / "img").glob("*.png"))
    assert pictures
    assert all(picture.stat().st_size < 100_000 for picture in pictures)


@each_document
def test_speaks_of_the_project_alone(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.:/])/(?:work|root|home|Users|tmp|opt|mnt)/", text)
    assert not re.search(r"\b(?:pypi|npmjs|shields\.io|crates\.io)\b", text, re.IGNORECASE)
    assert not re.search(r"[ \t]+$", text, re.MULTILINE), "trailing space"


# What is listed -------------------------------------------------------------------------------------------------------


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize(
    ("command", "document", "heading"),
    [(client_command, "env-client.md", "The command"), (checker_command, "conformance.md", "Options")],
    ids=["plugrl-env-client", "plugrl-conformance"],
)
def test_every_option_of_a_command_is_documented(command: click.Command, document: str, heading: str) -> None:
    rows = table(DOCS / document, heading)
    shown = {tuple(code(name)): code(default) for name, default, _ in rows}
    context = click.Context(command, **command.context_settings)
    options = [parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option)]
    assert {name for names in shown for name in names} == {
        name for option in options for name in (*option.opts, *option.secondary_opts)
    }
    text = command.get_help(context)
    for option in options:
        names = (*option.opts, *option.secondary_opts)
        assert names[0] in text
        [default] = [default for key, default in shown.items() if names[0] in key]
        if option.is_flag and option.secondary_opts:
            assert default == [option.opts[0][2:]]
            assert option.default is True
        elif isinstance(option.default, (str, int, float)) and not option.is_flag:
            assert default == [str(option.default)], names


def options_of(document: str) -> dict[str, str]:
    """Give the options of an adapter's page, and their defaults as they are shown."""
    return {code(name)[0]: code(default)[0] for name, default, _ in table(DOCS / document, "Options")}


def test_every_option_of_the_bridge_is_documented() -> None:
    shown = options_of("sb3.md")
    fields = {field.name: repr(field.default) for field in dataclasses.fields(BridgeOptions)}
    del fields["autoreset_mode"]  # Stable-Baselines3 knows one mode
    assert shown == fields
    taken = set(inspect.signature(PlugRemoteVecEnv).parameters)
    assert fields.keys() == taken
    assert issubclass(PlugRemoteVecEnv, VecEnv)


@pytest.mark.parametrize(
    ("taker", "document", "without"),
    [(PlugRLVectorEnv, "gymnasium.md", set()), (make_envs, "cleanrl.md", {"action_horizon"})],
    ids=["gymnasium", "cleanrl"],
)
def test_every_option_of_the_other_adapters_is_documented(taker: object, document: str, without: set[str]) -> None:
    shown = {**options_of("sb3.md"), **options_of(document)}
    defaults = {
        name: getattr(parameter.default, "name", parameter.default)
        for name, parameter in inspect.signature(taker).parameters.items()  # type: ignore[arg-type]
    }
    assert shown.keys() - without == defaults.keys()
    assert {name: shown[name] for name in defaults} == {name: repr(default) for name, default in defaults.items()}


def test_columns_of_the_episode_log_are_documented() -> None:
    assert tuple(code(row[0])[0] for row in table(DOCS / "sb3.md", "The episode log")) == COLUMNS


def test_every_module_is_in_the_architecture() -> None:
    tree = next(block.text for block in blocks(DOCS / "architecture.md") if "plugrl_bridges/" in block.text)
    shown: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines():
        match = re.match(r"( *)([\w.]+(?:/|\.py))(?:\s|$)", line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        folders = [*folders[:depth], match[2].rstrip("/")]
        if match[2].endswith(".py"):
            shown.add("/".join(folders[1:]))
    modules = {str(path.relative_to(SRC).as_posix()) for path in SRC.rglob("*.py")}
    assert shown == {module for module in modules if not module.endswith(("__init__.py", "__main__.py"))}


def _strings_of_the_source() -> list[str]:
    """Give every string in the source; what an f-string fills in is an ellipsis."""
    found: list[str] = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdg.]|%\.1f", "…", node.value))
    return found


STRINGS = _strings_of_the_source()


@pytest.mark.parametrize(
    "text",
    [
        line
        for block in blocks(DOCS / "troubleshooting.md")
        if block.language == "text" and "foreign" not in block.directive
        for line in block.text.splitlines()
    ],
)
def test_quoted_messages_occur_in_the_source(text: str) -> None:
    for part in filter(None, (part.strip() for part in text.split("…"))):
        assert any(part in string for string in STRINGS), f"no string of the source has {part!r}"


def test_quotes_are_looked_up() -> None:
    assert not any("the moon is made of" in string for string in STRINGS)
    assert any("lost the clients of … of … envs at" in string for string in STRINGS)


def test_clauses_and_keys_are_in_the_protocol() -> None:
    text = (DOCS / "protocol.md").read_text(encoding="utf-8")
    clauses: set[str] = set()
    for path in SRC.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        clauses.update(re.findall(r'clause="([\w.-]+)"', source))
        clauses.update(re.findall(r"\[(\d+(?:\.\d+)?)\]", source) if "wire" in path.parts else ())
    assert {"4.2", "10.1", "seeded-reset"} <= clauses
    missing = sorted(clause for clause in clauses if f"[{clause}]" not in text)
    assert not missing, "clauses without a place in docs/protocol.md"
    spec = (SRC / "client" / "env_client.py").read_text(encoding="utf-8") + (SRC / "server" / "announced.py").read_text(
        encoding="utf-8"
    )
    for key in re.findall(r'_typed\(spec, "(\w+)"|spec\.get\("(\w+)"', spec):
        assert f"`{''.join(key)}`" in text
