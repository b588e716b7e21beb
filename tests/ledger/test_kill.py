"""Kill -9 of a client process in mid-run, through the bridge: ledgers are equal but for what nobody can know."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges import ClientLost
from plugrl_bridges.gym import AutoresetMode, PlugRLVectorEnv
from plugrl_bridges.ledger import LedgerReader, LedgerVecEnv, LedgerVectorEnv, compare
from plugrl_bridges.ledger.schema import Flag
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from tests.ledger.envs import forget_losses
from tests.support import ROOT, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Start = Callable[..., subprocess.Popen[bytes]]

NUM_ENVS, BEFORE, AFTER = 2, 13, 20
"""Envs; the vector step in which the client is killed; steps behind it, in which each env's episode ends thrice."""


class Trainer:
    """Step a bridge with random actions, with a ledger around it."""

    def __init__(self, kind: str, path: Path, **options: Any) -> None:
        self.env: Any
        self._rng = np.random.default_rng(0)
        self._kind, self._path = kind, path
        options = {"port": 0, "num_envs": NUM_ENVS, "timeout": 60.0, "connect_timeout": 60.0, **options}
        if kind == "sb3":
            self.bridge: Any = PlugRemoteVecEnv(**options)
        else:
            self.bridge = PlugRLVectorEnv(autoreset_mode=AutoresetMode[kind], **options)

    def begin(self) -> None:
        """Wait for the client, and reset its envs."""
        self.env = (LedgerVecEnv if self._kind == "sb3" else LedgerVectorEnv)(self.bridge, self._path)
        self.env.reset()

    def step(self) -> tuple[list[bool], list[bool]]:
        """Give which envs' episodes ended, and whose client was lost."""
        actions = self._rng.uniform(-1, 1, (NUM_ENVS, 2)).astype(np.float32)
        if self._kind == "sb3":
            _, _, dones, infos = self.env.step(actions)
            return dones.tolist(), [info.get("client_lost", False) for info in infos]
        _, _, terminated, truncated, infos = self.env.step(actions)
        dones = terminated | truncated
        if self._kind == "DISABLED" and dones.any():
            self.env.reset(options={"reset_mask": dones})
        return dones.tolist(), np.asarray(infos.get("client_lost", [False] * NUM_ENVS)).tolist()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(url: str, hangs_at: int = 0) -> subprocess.Popen[bytes]:
        kwargs = {"folder": f"{tmp_path}/envs/", "hangs_at": hangs_at, "arrived": str(tmp_path / "arrived")}
        command = [
            sys.executable, "-m", "plugrl_bridges.client", "--env-factory", "tests.ledger.envs:make_recorded",
            "--env-kwargs", json.dumps(kwargs), "--num-envs", str(NUM_ENVS), "--url", url, "--quiet",
        ]  # fmt: skip
        processes.append(subprocess.Popen(command, cwd=ROOT))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(20)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(20)


def files(folder: Path) -> list[LedgerReader]:
    found = [LedgerReader(path) for path in folder.glob("*.ledger")]
    return sorted(found, key=lambda reader: reader.header.started_ns)


@pytest.mark.parametrize("in_flight", [True, False], ids=["in a step", "between steps"])
@pytest.mark.parametrize("kind", ["sb3", "SAME_STEP", "DISABLED"])
def test_killed_client_is_replaced(tmp_path: Path, start: Start, kind: str, in_flight: bool) -> None:
    trainer = Trainer(kind, tmp_path / "trainer.ledger")
    first = start(trainer.bridge.url, BEFORE if in_flight else 0)

    def replace() -> None:
        if in_flight:
            wait_until((tmp_path / "arrived").exists, 60)  # one env made its step, the other is in it
        kill(first)
        start(trainer.bridge.url)

    trainer.begin()
    count = 0
    dones = lost = [False] * NUM_ENVS
    with ThreadPoolExecutor(1) as pool:
        while not in_flight and count < BEFORE - 1:
            trainer.step()
            count += 1
        replacing = pool.submit(replace)
        if not in_flight:
            replacing.result(60)
        while not any(lost):
            dones, lost = trainer.step()
            count += 1
        replacing.result(60)
    assert lost == dones == [True] * NUM_ENVS
    ends = np.zeros(NUM_ENVS, int)
    for _ in range(AFTER):
        ends += np.array(trainer.step()[0], int)
    assert (ends >= 2).all()
    trainer.env.close()
    assert trainer.bridge.client_losses == 1

    killed, replacement = files(tmp_path / "envs")
    assert not killed.closed
    wait_until(lambda: LedgerReader(replacement.path).closed)
    found = compare(tmp_path / "trainer.ledger", [tmp_path / "envs"])
    assert found.equal, str(found)
    steps = [event for event in LedgerReader(tmp_path / "trainer.ledger").records() if not event.is_reset]
    flagged = [event for event in steps if event.flags & Flag.LOST]
    assert [event.flags for event in flagged] == [Flag.LOST | Flag.TRUNCATED] * NUM_ENVS
    assert found.lost_steps == NUM_ENVS
    assert found.env_steps == len(steps) - found.not_compared
    assert any("ends without having been closed" in note and killed.path.name in note for note in found.notes)

    forget_losses(tmp_path / "trainer.ledger")
    found = compare(tmp_path / "trainer.ledger", [tmp_path / "envs"])
    assert found.first is not None, "an end that is made up is a difference, if it is not said to be"
    assert (
        flagged[0].vector_step - 1 <= found.first.vector_step <= flagged[0].vector_step
    )  # one env begins an episode in the step before


@pytest.mark.parametrize("ending", ["raise", "truncate", "close"])
@pytest.mark.parametrize("kind", ["sb3", "SAME_STEP"])
def test_run_ends_at_the_kill(tmp_path: Path, start: Start, kind: str, ending: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "raise": {"on_client_loss": "raise"},
        "truncate": {"timeout": 3.0},
        "close": {},
    }
    trainer = Trainer(kind, tmp_path / "trainer.ledger", **options[ending])
    hangs = ending != "close"
    first = start(trainer.bridge.url, BEFORE if hangs else 0)

    def kill_in_the_step() -> None:
        wait_until((tmp_path / "arrived").exists, 60)
        kill(first)

    trainer.begin()
    for _ in range(BEFORE - 1):
        trainer.step()
    if hangs:
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill_in_the_step)
            with pytest.raises(ClientLost):
                trainer.step()
            killing.result(60)
    else:
        kill(first)
    trainer.env.close()
    trained = LedgerReader(tmp_path / "trainer.ledger")
    assert trained.closed
    assert trained.count("flags & 32") == NUM_ENVS * hangs, "the outcome of the last step is missing"
    found = compare(tmp_path / "trainer.ledger", [tmp_path / "envs"])
    assert found.equal, str(found)
    made = NUM_ENVS * (BEFORE - 1)
    assert found.lost_steps == 0
    assert found.env_steps + found.not_compared >= made
    assert any("envs" in note and "ends without having been closed" in note for note in found.notes)
