"""Runs made at random, with clients that come and go: no alarm without a fault, and one where the fault is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from plugrl_bridges.gym import AutoresetMode
from plugrl_bridges.ledger import LedgerReader, LedgerVectorEnv, compare
from tests.ledger.simulated import FAULTS, NUM_ENVS, Fault, SimulatedBridge

if TYPE_CHECKING:
    from pathlib import Path

    from plugrl_bridges.ledger import Comparison

RUNS, STEPS = 24, 40
FIELDS = {
    "obs": {"obs", "terminal_obs"},
    "reward": {"reward"},
    "action": {"action"},
    "spurious end": {"terminated"},
    "wrong end": {"terminated"},
    "skipped step": {"step_count"},
}


def run(folder: Path, seed: int, mode: AutoresetMode, *, discrete: bool, fault: Fault | None = None) -> Comparison:
    rng = random.Random(seed)
    one_client = mode is not AutoresetMode.NEXT_STEP and rng.random() < 0.4
    bridge = SimulatedBridge(folder / "envs", mode=mode, discrete=discrete, one_client=one_client, rng=rng, fault=fault)
    env = LedgerVectorEnv(bridge, folder / "trainer.ledger")
    env.action_space.seed(seed)
    env.reset()
    for _ in range(STEPS):
        chance = rng.random()
        if one_client and bridge.waiting.any():
            pass  # of one connection, not all rows can be reset then
        elif chance < 0.1:
            bridge.lose(rng.choice(bridge.clients), forever=chance < 0.05)
        elif chance < 0.14:
            env.reset(seed=rng.choice([None, 9]))
        elif chance < 0.2 and not one_client:
            mask = np.array([rng.random() < 0.5 for _ in range(NUM_ENVS)])
            if mask.any():
                env.reset(seed=rng.choice([None, 9]), options={"reset_mask": mask})
        if mode is AutoresetMode.DISABLED and bridge.waiting.any():
            env.reset(options={"reset_mask": bridge.waiting.copy()})
        env.step(env.action_space.sample())
    env.close()
    return compare(folder / "trainer.ledger", [folder / "envs"])


@pytest.mark.parametrize("discrete", [False, True], ids=["unique", "discrete"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_no_alarm_without_a_fault(tmp_path: Path, mode: AutoresetMode, discrete: bool) -> None:
    lost = files = compared = skipped = 0
    for seed in range(RUNS):
        found = run(tmp_path / str(seed), seed, mode, discrete=discrete)
        assert found.equal, (seed, str(found))
        lost += found.lost_steps
        files += sum("ends without having" in note for note in found.notes)
        compared += found.env_steps
        skipped += found.not_compared
    assert lost > RUNS
    assert compared > 2 * skipped
    assert files > RUNS / 4


@pytest.mark.parametrize("discrete", [False, True], ids=["unique", "discrete"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_one_fault_is_where_it_was_made(tmp_path: Path, mode: AutoresetMode, discrete: bool) -> None:
    """With three observations, nothing tells where an env goes on after a loss: no fault is told from there on."""
    made = located = silent = 0
    kinds = set()
    elsewhere = []
    for seed in range(RUNS):
        fault = Fault(FAULTS[seed % len(FAULTS)], seed % NUM_ENVS, 5 + seed % 25)
        found = run(tmp_path / str(seed), seed, mode, discrete=discrete, fault=fault)
        if fault.at is None:
            assert found.equal, (seed, str(found))
            continue
        made += 1
        kinds.add(fault.kind)
        if found.first is None:
            silent += 1
            reader = LedgerReader(tmp_path / str(seed) / "trainer.ledger")
            excused = lost_before(reader, fault) if discrete else in_an_episode_that_was_lost(reader, fault)
            assert excused, (seed, fault)
            continue
        first = (found.first.slot.number, found.first.vector_step)
        if first == (fault.row, fault.at) and found.first.field in FIELDS[fault.kind]:
            located += 1
        else:
            elsewhere.append((seed, fault, str(found.first)))
    assert kinds == set(FAULTS)
    assert made > 0.8 * RUNS
    assert located > made / (3 if discrete else 2)
    assert located + silent >= (0.9 if discrete else 1) * made, elsewhere


def in_an_episode_that_was_lost(reader: LedgerReader, fault: Fault) -> bool:
    [record] = reader.select("env = ? AND vector_step = ? AND flags & 4 = 0", (fault.row, fault.at))
    # A fault may part the episode in two.
    return reader.count("env = ?1 AND episode IN (?2, ?2 + 1) AND flags & 8", (fault.row, record.episode)) > 0


def lost_before(reader: LedgerReader, fault: Fault) -> bool:
    """Return whether the client of the row was lost before the fault, or in its episode."""
    before = reader.count("env = ? AND vector_step <= ? AND flags & 8", (fault.row, fault.at))
    return before > 0 or in_an_episode_that_was_lost(reader, fault)
