"""Both sides together, with every kind of vector env there is; nothing is changed on its way through."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecTransposeImage

from benchmarks.frames_env import FramesEnv
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger import LedgerEnv, LedgerReader, LedgerVecEnv, LedgerVectorEnv, compare
from tests.identical.weights import digest
from tests.ledger.envs import CountingEnv, FaultyVecEnv, MixedEnv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM_ENVS = 3


def make(folder: str, number: int, env: Callable[[], gym.Env[Any, Any]], *, full: bool = False) -> LedgerEnv:
    return LedgerEnv(env(), folder, env_index=number, full=full)


def make_all(
    folder: Path, env: Callable[[], gym.Env[Any, Any]], *, full: bool = False
) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [partial(make, f"{folder}/envs/", number, env, full=full) for number in range(NUM_ENVS)]


@pytest.mark.parametrize("fault", [False, True], ids=["clean", "fault"])
@pytest.mark.parametrize("kind", [DummyVecEnv, SubprocVecEnv])
def test_stable_baselines3(tmp_path: Path, kind: Callable[..., VecEnv], fault: bool) -> None:
    def spoil(returned: Any) -> Any:
        returned[0][2, 1] = 0.0
        return returned

    venv: VecEnv = kind(make_all(tmp_path, partial(gym.make, "Pendulum-v1")))
    venv = LedgerVecEnv(FaultyVecEnv(venv, 230 if fault else 0, spoil), tmp_path / "trainer")
    venv.seed(1)
    venv.reset()
    for number in range(420):
        venv.step(np.full((NUM_ENVS, 1), number % 5 - 2, np.float32))
        if number == 300:
            venv.seed(7)
            venv.reset()  # in the middle of an episode
    venv.close()
    found = compare(tmp_path / "trainer", [tmp_path / "envs"])
    if not fault:
        assert (found.env_steps, found.episodes) == (NUM_ENVS * 420, NUM_ENVS * 3)
    assert found.equal is not fault
    if found.first is not None:
        first = found.first
        assert (first.slot.number, first.episode, first.step, first.field, first.cell) == (2, 1, 30, "obs", "obs[1]")
        assert first.cells == 1


class FaultyVectorEnv(gym.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    def __init__(self, env: Any, at: int) -> None:
        super().__init__(env)
        self.left = at

    def step(self, actions: Any) -> Any:
        returned = super().step(actions)
        self.left -= 1
        if not self.left:
            returned[1][1] = 0.25
        return returned


@pytest.mark.parametrize("fault", [False, True], ids=["clean", "fault"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_gymnasium(tmp_path: Path, kind: Callable[..., Any], mode: AutoresetMode, fault: bool) -> None:
    inner = kind(make_all(tmp_path, partial(gym.make, "CartPole-v1")), autoreset_mode=mode)
    env = LedgerVectorEnv(FaultyVectorEnv(inner, 4 if fault else 0), tmp_path / "trainer")
    env.reset(seed=1)
    rng = np.random.default_rng(0)
    resets, steps = NUM_ENVS, 0
    ended = np.zeros(NUM_ENVS, bool)
    for _ in range(100):
        before = ended
        _, _, terminated, truncated, _ = env.step(rng.integers(0, 2, NUM_ENVS))
        ended = terminated | truncated
        steps += NUM_ENVS - int(before.sum()) * (mode is AutoresetMode.NEXT_STEP)
        if mode is AutoresetMode.DISABLED and ended.any():
            env.reset(options={"reset_mask": ended})
        resets += int((before if mode is AutoresetMode.NEXT_STEP else ended).sum())
    env.close()
    found = compare(tmp_path / "trainer", [tmp_path / "envs"])
    if not fault:
        assert (found.env_steps, found.episodes) == (steps, resets)
    assert resets > NUM_ENVS
    assert found.equal is not fault
    if found.first is not None:
        first = found.first
        assert (first.vector_step, first.slot.number, first.field) == (4, 1, "reward")
        assert (first.trainer, first.env) == (0.25, 1.0)


@pytest.mark.parametrize("full", [False, True], ids=["digest", "full"])
def test_spaces_of_all_kinds(tmp_path: Path, full: bool) -> None:
    inner = SyncVectorEnv(make_all(tmp_path, MixedEnv, full=full), autoreset_mode=AutoresetMode.SAME_STEP)
    env = LedgerVectorEnv(inner, tmp_path / "trainer", full=full)
    env.reset(seed=1)
    env.action_space.seed(0)
    for _ in range(10):
        env.step(env.action_space.sample())
    env.close()
    found = compare(tmp_path / "trainer", [tmp_path / "envs"])
    assert (found.equal, found.env_steps, found.episodes) == (True, 30, 9)
    entries = LedgerReader(tmp_path / "trainer").header.observation.all
    assert {entry.name: entry.digested for entry in entries} == {
        "image": not full, "inner/flags": False, "inner/mode": False, "words": False, "x": False,
    }  # fmt: skip


@pytest.mark.parametrize(("full_trainer", "full_env"), [(False, False), (True, True), (True, False), (False, True)])
def test_a_changed_pixel_is_found(tmp_path: Path, full_trainer: bool, full_env: bool) -> None:
    def spoil(returned: Any) -> Any:
        returned[0][1, 5, 6, 2] ^= 1
        return returned

    venv = FaultyVecEnv(DummyVecEnv(make_all(tmp_path, FramesEnv, full=full_env)), 3, spoil)
    env = LedgerVecEnv(venv, tmp_path / "trainer", full=full_trainer)
    env.reset()
    for _ in range(5):
        env.step(np.zeros(NUM_ENVS, np.int64))
    env.close()
    found = compare(tmp_path / "trainer", [tmp_path / "envs"])
    assert found.first is not None
    assert (found.first.vector_step, found.first.slot.number, found.first.field) == (3, 1, "obs")
    assert found.first.cell == ("obs[5,6,2]" if full_trainer and full_env else "digest of obs")
    assert found.first.cells == 1


def test_float64_is_compared_as_the_trainer_sees_it(tmp_path: Path) -> None:
    def narrowed(returned: Any) -> Any:
        return (returned[0].astype(np.float32).astype(np.float64), *returned[1:])

    class ThirdsEnv(CountingEnv):
        def _observe(self) -> Any:
            return super()._observe() / 3

    venv = FaultyVecEnv(DummyVecEnv(make_all(tmp_path, partial(ThirdsEnv, dtype=np.float64))), 2, narrowed)
    env = LedgerVecEnv(venv, tmp_path / "trainer")
    env.reset()
    for _ in range(3):
        env.step(np.zeros((NUM_ENVS, 2), np.float32))
    env.close()
    assert not compare(tmp_path / "trainer", [tmp_path / "envs"]).equal
    assert compare(tmp_path / "trainer", [tmp_path / "envs"], float32=True).equal


def test_one_surfaced_entry_is_compared_with_the_envs(tmp_path: Path) -> None:
    """As with the bridge's image_key and state_key: the trainer sees one entry of what the env gives."""
    env = LedgerEnv(MixedEnv(), tmp_path / "env")
    surfaced = gym.wrappers.TransformObservation(
        env, lambda observation: observation["x"].astype(np.float32), spaces.Box(-1, 1, (2,), np.float32)
    )
    flat = gym.wrappers.TransformAction(
        surfaced, lambda action: {"go": action, "where": np.zeros(2, np.float32)}, spaces.Discrete(2)
    )
    venv = LedgerVecEnv(DummyVecEnv([lambda: flat]), tmp_path / "trainer")
    venv.reset()
    for _ in range(6):
        venv.step(np.array([1]))
    venv.close()
    # The action is a part only, too: which one, its kind says.
    found = compare(tmp_path / "trainer", [tmp_path / "env"])
    assert (found.equal, found.env_steps) == (True, 6)


def test_what_passes_is_passed_as_it_is() -> None:
    inner = CountingEnv()
    seen: list[Any] = []
    inner_step, inner_reset = inner.step, inner.reset

    def step(action: Any) -> Any:
        seen.append(action)
        seen.append(inner_step(action))
        return seen[-1]

    def reset(**asked: Any) -> Any:
        seen.append(asked)
        seen.append(inner_reset(**asked))
        return seen[-1]

    inner.step, inner.reset = step, reset  # type: ignore[method-assign]
    env = LedgerEnv(inner, None, digest=True)
    options = {"a": 1}
    assert env.reset(seed=3, options=options) is seen[1]
    assert seen[0] == {"seed": 3, "options": options}
    assert seen[0]["options"] is options
    action = np.zeros(2, np.float64)
    assert env.step(action) is seen[3]
    assert seen[2] is action
    assert env.digest != 0
    env.close()


def test_digest_is_only_there_when_asked_for() -> None:
    env = LedgerEnv(CountingEnv(), None)
    env.reset()
    with pytest.raises(AttributeError, match="digest=True"):
        _ = env.digest
    env.close()


def test_action_is_recorded_as_it_was_before_the_step(tmp_path: Path) -> None:
    class Spoiler(CountingEnv):
        def step(self, action: Any) -> Any:
            returned = super().step(action)
            action[:] = 9.0
            return returned

    env = LedgerEnv(Spoiler(), tmp_path / "env")
    env.reset()
    env.step(np.ones(2, np.float32))
    env.close()
    reader = LedgerReader(tmp_path / "env")
    [event] = [event for event in reader.records() if not event.is_reset]
    assert reader.header.action.split(event.action)[0].tolist() == [1.0, 1.0]


def test_both_ends_at_once_are_what_stable_baselines3_can_tell(tmp_path: Path) -> None:
    class Both(CountingEnv):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated or truncated, terminated or truncated, info

    env = LedgerVecEnv(DummyVecEnv(make_all(tmp_path, Both)), tmp_path / "trainer")
    env.reset()
    for _ in range(12):
        env.step(np.zeros((NUM_ENVS, 2), np.float32))
    env.close()
    assert compare(tmp_path / "trainer", [tmp_path / "envs"]).equal


def test_space_that_cannot_be_recorded() -> None:
    env = CountingEnv()
    env.observation_space = spaces.Sequence(spaces.Discrete(3))
    with pytest.raises(LedgerError, match="cannot record Sequence"):
        LedgerEnv(env, None)
    with pytest.raises(ValueError, match="rank must be a whole number from 0"):
        LedgerEnv(CountingEnv(), None, rank=-1)


def test_different_spaces_are_not_compared(tmp_path: Path) -> None:
    env = LedgerEnv(gym.make("CartPole-v1"), tmp_path / "env")
    env.reset()
    env.close()
    venv = LedgerVecEnv(DummyVecEnv([partial(gym.make, "Pendulum-v1")]), tmp_path / "trainer")
    venv.reset()
    venv.close()
    with pytest.raises(LedgerError, match=r"different observations: the trainer's has obs \[3\] <f4, the env's has"):
        compare(tmp_path / "trainer", [tmp_path / "env"])


@pytest.mark.parametrize("images", [False, True], ids=["Pendulum", "images"])
def test_weights_are_the_same_with_ledgers(tmp_path: Path, images: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    env = FramesEnv if images else partial(gym.make, "Pendulum-v1")

    def train(venv: VecEnv) -> str:
        settings: dict[str, Any] = {"n_steps": 32, "batch_size": 48, "n_epochs": 2, "seed": 0, "device": "cpu"}
        if images:
            model = PPO("CnnPolicy", VecTransposeImage(venv), **settings).learn(96)
        else:
            model = PPO("MlpPolicy", venv, **settings).learn(NUM_ENVS * 256)
        venv.close()
        return digest(model)

    try:
        plain = train(DummyVecEnv([env] * NUM_ENVS))
        recorded = train(LedgerVecEnv(DummyVecEnv(make_all(tmp_path, env)), tmp_path / "trainer"))
    finally:
        torch.set_num_threads(before)
    assert plain == recorded
    found = compare(tmp_path / "trainer", [tmp_path / "envs"])
    assert found.equal
    assert found.env_steps == (96 if images else NUM_ENVS * 256)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_next_step_in_which_nobody_steps(tmp_path: Path, num_envs: int) -> None:
    """All episodes end at once, so the next vector step is resets alone; entries above 1 KiB are digested."""

    class Large(CountingEnv):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.observation_space = gym.spaces.Box(0, 255, (1025,), np.uint8)

        def _observe(self) -> Any:
            self._seen += 1
            return np.full(1025, self._seen % 255, np.uint8)

    makers = [
        partial(_in_ledger, partial(Large, number), tmp_path / "envs.ledger", number) for number in range(num_envs)
    ]
    env = LedgerVectorEnv(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP), tmp_path / "trainer.ledger")
    env.reset()
    for _ in range(14):
        env.step(np.ones((num_envs, 2), np.float32))
    env.close()
    found = compare(tmp_path / "trainer.ledger", [tmp_path / "envs.ledger"])
    assert found.equal, str(found)
    assert found.env_steps == 12 * num_envs


def _in_ledger(make: Callable[[], gym.Env[Any, Any]], path: Path, number: int) -> LedgerEnv:
    return LedgerEnv(make(), path, env_index=number)
