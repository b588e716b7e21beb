"""Run what the documentation shows, with real sockets and real client processes.

Keys of a directive (see ``markdown``). One of these says what is done with a block:

- ``run=NAME`` (python): it is executed in an empty folder. The bash blocks of the same document with ``beside=NAME``
  are started before it, as the reader would in another terminal, and must end with exit code 0 after it. Blocks with
  ``after=NAME`` are executed in the same namespace when it is over; if they are bash, in the same folder, all lines
  at once.
- ``serve=STEPS`` (python or bash): a bridge is there that steps whoever comes with random actions, so many times, and
  then says stop; ``envs=N`` is its number of slots (the first client's otherwise). All lines of a bash block are
  started at once, and must end with exit code 0.
- ``run`` (bash): each line must end with exit code 0, one after another, in the project's root.
- ``file=NAME`` (python): it is a file that other blocks of the document use.
- ``make``, ``install`` (bash): nothing is run; the target, or the extra, must exist.
- ``rlinf`` (bash, yaml): ``make test-rlinf`` looks at it, see ``tests/rlinf/test_docs.py``.
- ``vector=FILE`` (hex): it must be the bytes of this golden vector.

And these change what is run, because a test has neither port 8000 nor minutes:

- ports 8000 and 8001 become free ones, and a client command without ``--url`` is given the first of them;
- ``100_000`` env steps become ``steps=`` many (512 by default), and PPO's rollouts are cut to 16 steps, one epoch;
- ``replace="OLD=>NEW"`` does what it says;
- ``plugrl-env-client`` is run as ``python -m plugrl_bridges.client``, which is the same program, also where it is named
  within an argument, and the other commands likewise; ``python`` is the one that runs the tests;
- ``client="ARGUMENTS"`` (with ``run`` or ``after``) starts one more client, where the text shows none.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.server.lockstep import Lockstep
from plugrl_bridges.server.options import BridgeOptions
from tests.docs.markdown import ROOT, Block, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Runner"]

_CLIENT = "plugrl-env-client"
_CHECKER = "plugrl-conformance"
_MODULES = {
    _CHECKER: "plugrl_bridges.conformance.client_cli",
    "plugrl-bridges": "plugrl_bridges.cli",
    "plugrl-conformance-server": "plugrl_bridges.conformance.server_cli",
    "stepledger": "plugrl_bridges.ledger.cli",
}
_PATIENCE_S = 60.0
_QUICK_PPO = ", n_steps=16, batch_size=64, n_epochs=1"


class Runner:
    """Run one block; make a new one for each.

    Args:
        block: What to run.
        folder: Empty; what the block writes goes there.
    """

    def __init__(self, block: Block, folder: Path) -> None:
        self._block = block
        self._folder = folder
        self._ports = _free_ports()
        for other in blocks(block.document):
            if "file" in other.directive:
                (folder / other.directive["file"]).write_text(other.text, encoding="utf-8")

    def run(self) -> None:
        """Do what the block's directive says."""
        directive = self._block.directive
        with contextlib.ExitStack() as stack:
            if "serve" in directive:
                stack.enter_context(self._bridge(int(directive["serve"])))
            if self._block.language == "python":
                self._execute()
                return
            commands = _commands(self._block.text)
            if "serve" in directive:
                for command in commands:
                    stack.enter_context(self._process(command))
                return
            for command in commands:
                with self._process(command, folder=ROOT):
                    pass

    def _execute(self) -> None:
        """Execute the block, and those that go on from it, each with its clients beside it."""
        others = blocks(self._block.document)
        name = self._block.directive.get("run")
        beside = [other for other in others if name and other.directive.get("beside") == name]
        after = [other for other in others if name and other.directive.get("after") == name]
        names: dict[str, Any] = {"__name__": "__main__"}
        commands = [command for other in beside for command in _commands(other.text)]
        for block in [self._block, *after]:
            if "client" in block.directive:
                commands.append(f"{_CLIENT} {block.directive['client']}")
            with contextlib.ExitStack() as stack:
                if block.language == "bash":
                    commands = _commands(block.text)
                for command in commands:
                    stack.enter_context(self._process(command))
                if block.language == "bash":
                    continue
                # The block's place in its document is its place in a traceback.
                source = "\n" * block.line + self._adapted(_replaced(block))
                exec(compile(source, str(block.document), "exec"), names)  # noqa: S102 - what the test is for
            commands = []

    def _adapted(self, text: str) -> str:
        directive = self._block.directive
        if "n_steps" not in text:
            text = re.sub(r'PPO\("\w+", \w+', lambda match: match[0] + _QUICK_PPO, text)
        text = text.replace("100_000", directive.get("steps", "512"))
        for port, free in zip((8000, 8001), self._ports, strict=True):
            text = re.sub(rf"\b{port}\b", str(free), text)
        return text

    def _argv(self, command: str) -> list[str]:
        program, *arguments = shlex.split(self._adapted(command))
        if program == _CLIENT:
            if not {"--url", "--help"}.intersection(arguments):
                arguments += ["--url", f"ws://127.0.0.1:{self._ports[0]}"]
            return [sys.executable, "-m", "plugrl_bridges.client", *arguments]
        if program == _CHECKER:
            python = shlex.quote(sys.executable)
            arguments = [
                argument.replace(_CLIENT, f"{python} -m plugrl_bridges.client").replace(
                    "python examples/", f"{python} examples/"
                )
                for argument in arguments
            ]
        if program in _MODULES:
            return [sys.executable, "-m", _MODULES[program], *arguments]
        assert program == "python", f"{self._block.place}: neither {_CLIENT}, {_CHECKER} nor python: {command}"
        if (ROOT / arguments[0]).is_file():  # an example, for a reader who stands in the project's root
            arguments[0] = str(ROOT / arguments[0])
        return [sys.executable, *arguments]

    @contextlib.contextmanager
    def _process(self, command: str, folder: Path | None = None) -> Iterator[None]:
        """Start a command; it must end well when what is done meanwhile is over."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(
            self._argv(command), cwd=folder or self._folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        output = ""
        try:
            yield
            output = process.communicate(timeout=_PATIENCE_S)[0]
        finally:
            if process.poll() is None:
                process.kill()
                output = process.communicate()[0]
        assert process.returncode == 0, f"{self._block.place}: {command}: {process.returncode}\n{output}"

    @contextlib.contextmanager
    def _bridge(self, steps: int) -> Iterator[None]:
        """Step whoever comes."""
        envs = self._block.directive.get("envs")
        lockstep = Lockstep(
            BridgeOptions(port=self._ports[0], num_envs=None if envs is None else int(envs), connect_timeout=60.0)
        )
        faults: list[BaseException] = []

        def serve() -> None:
            try:
                lockstep.reset()
                space = lockstep.action_layout.space
                for _ in range(steps):
                    lockstep.send(np.array([space.sample() for _ in range(lockstep.num_envs)]))
                    lockstep.wait()
            except BaseException as exc:  # noqa: BLE001 - the test raises it
                faults.append(exc)
            finally:
                lockstep.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
            thread.join(_PATIENCE_S)
        finally:
            lockstep.close()  # a block that failed is not waited for
            thread.join(_PATIENCE_S)
        assert not faults, f"{self._block.place}: {faults}"
        assert not thread.is_alive(), f"{self._block.place}: the bridge does not end"


def _replaced(block: Block) -> str:
    if "replace" not in block.directive:
        return block.text
    old, _, new = block.directive["replace"].partition("=>")
    assert old in block.text, f"{block.place}: no {old!r} to replace"
    return block.text.replace(old, new)


def _commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]
