"""The live check: silent on every clean run, and a fault stops the run in the very step in which it crossed."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode as Gymnasiums
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecTransposeImage

from benchmarks.faulty_env import FAULTS, First, Plan
from benchmarks.frames_env import FramesEnv
from plugrl_bridges import (
    ClientLost,
    ConnectTimeout,
    EnvPoisoned,
    LedgerMismatch,
    RemoteProtocolError,
    SpaceError,
    UnverifiedClientError,
)
from plugrl_bridges.cleanrl import make_envs
from plugrl_bridges.digest.digest import EnvDigest
from plugrl_bridges.gym import AutoresetMode, PlugRLVectorEnv, RemoteEnv
from plugrl_bridges.ledger import LedgerEnv, LedgerVecEnv, LedgerVectorEnv, compare
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from plugrl_bridges.server.options import BridgeOptions
from plugrl_bridges.spaces import ObservationLayout, space_to_wire
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Metadata, Observation, parse, to_bytes
from plugrl_bridges.wire.session import ENV_SPEC, STEP_DIGEST, ServerSession
from tests.identical.weights import digest
from tests.ledger.envs import CountingEnv, MixedEnv
from tests.support import ClientThread, Puppet, resync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUM_ENVS, AT, LENGTH = 3, 8, 5


class Clients:
    """Start clients that are stopped at the end of the test."""

    def __init__(self) -> None:
        self.all: list[ClientThread] = []

    def __call__(self, make: Callable[..., Any], url: str, **options: Any) -> ClientThread:
        self.all.append(ClientThread(make, url=url, **{"verify": True, **options}))
        return self.all[-1]


@pytest.fixture
def start() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    for client in clients.all:
        client.stop()


class TextEnv(MixedEnv):
    """The observation of `MixedEnv`, and an action that can travel."""

    def __init__(self, action_space: gym.Space[Any]) -> None:
        super().__init__()
        self.action_space = action_space

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return super().step({"go": float(np.sum(action))})


ACTIONS: dict[str, gym.Space[Any]] = {
    "Box": spaces.Box(-1, 1, (2,), np.float32),
    "wide Box": spaces.Box(-1, 1, (2, 2), np.float64),
    "Discrete": spaces.Discrete(5, start=-1),
    "MultiDiscrete": spaces.MultiDiscrete([3, 4]),
    "MultiBinary": spaces.MultiBinary(3),
}


def checked(env: Any) -> tuple[int, int]:
    """Give how many episodes a verifier has seen begin, and how many steps and first observations it compared."""
    verifier = env._lockstep._exchange.verifier
    return int(verifier._episodes.sum()) + len(verifier._episodes), verifier.compared


# Clean runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no-reuse"])
@pytest.mark.parametrize("actions", list(ACTIONS))
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_clean_run_of_every_space_and_mode(start: Clients, mode: AutoresetMode, actions: str, reuse: bool) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, autoreset_mode=mode, verify=True, timeout=20)
    space = ACTIONS[actions]
    for rank in range(2):
        start(partial(TextEnv, space), env.url, rank=rank, group_num_envs=2, reuse=reuse)
    try:
        env.reset(seed=3)
        env.action_space.seed(0)
        ends = 0
        for number in range(14):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = terminated | truncated
            ends += int(ended.sum())
            if mode is AutoresetMode.DISABLED and ended.any():
                env.reset(options={"reset_mask": ended})
            if number == 5:
                env.reset(seed=[7, None])  # in the middle of an episode
            if number == 6:
                env.reset()
        assert ends >= 2
        # In NEXT_STEP each vector step is, to a slot, either a step or the first observation of an episode.
        firsts = 3 * 2 + (0 if mode is AutoresetMode.NEXT_STEP else ends)
        assert checked(env)[1] == 14 * 2 + firsts
    finally:
        env.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_clean_run_of_stable_baselines3_with_several_clients(start: Clients, dtype: Any) -> None:
    env = PlugRemoteVecEnv(port=0, num_envs=5, verify=True, timeout=20)
    start(lambda env_index: CountingEnv(env_index, dtype=dtype), env.url, num_envs=3, rank=0)
    start(lambda env_index: CountingEnv(9 + env_index, dtype=dtype), env.url, num_envs=2, rank=1)
    rng = np.random.default_rng(0)
    try:
        env.reset()
        for number in range(23):
            actions = rng.uniform(-1, 1, (5, 2)).astype([np.float32, np.float64][number % 2])
            env.step_async(actions)
            actions[:] = 9.0  # the trainer's array is its own again
            env.step_wait()
            if number == 12:
                env.seed(5)
                env.reset()
        assert checked(env) == (5 * 6, 5 * (23 + 6)), "at the resets, and after 2 ends each"
    finally:
        env.close()


@pytest.mark.parametrize("mode", [Gymnasiums.SAME_STEP, Gymnasiums.DISABLED], ids=lambda mode: mode.name)
def test_clean_run_of_a_batched_simulator(start: Clients, mode: Gymnasiums) -> None:
    env = make_envs(port=0, verify=True, timeout=20)
    makers = [partial(CountingEnv, number) for number in range(4)]
    start(lambda: gym.vector.SyncVectorEnv(makers, autoreset_mode=mode), env.url)
    try:
        env.reset(seed=1)
        for number in range(22):
            env.step(np.full((4, 2), number / 8, np.float32))
        env.reset(seed=2)
        env.step(np.zeros((4, 2), np.float32))
        assert checked(env) == (4 * 6, 4 * (23 + 6))
    finally:
        env.close()


@pytest.mark.parametrize("batched", [False, True], ids=["envs", "vector env"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_actions_wider_or_narrower_than_their_space(start: Clients, dtype: Any, batched: bool) -> None:
    def make() -> gym.Env[Any, Any]:
        env = CountingEnv()
        env.action_space = spaces.Box(-10, 10, (2,), dtype)
        return env

    def make_batch() -> Any:
        return gym.vector.SyncVectorEnv([make, make], autoreset_mode=Gymnasiums.SAME_STEP)

    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, timeout=20)
    start(make_batch if batched else make, env.url, num_envs=2)
    try:
        env.reset()
        for _ in range(7):
            env.step(np.full((2, 2), 0.3, np.float32))
            env.step(np.full((2, 2), 0.3, np.float64))
        assert checked(env) == (2 * 3, 2 * (14 + 3))
    finally:
        env.close()


def test_clean_run_of_envs_whose_reset_takes_nothing(start: Clients) -> None:
    class Sparing(CountingEnv):
        def reset(self) -> Any:  # type: ignore[override]
            return super().reset()

    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, timeout=20)
    start(Sparing, env.url, num_envs=2)
    try:
        env.reset()
        for _ in range(7):
            env.step(np.ones((2, 2), np.float32))
        assert checked(env) == (2 * 2, 2 * (7 + 2))
    finally:
        env.close()


def test_clean_run_of_a_single_env(start: Clients) -> None:
    env = RemoteEnv(port=0, verify=True, timeout=20)
    start(CountingEnv, env.url)
    try:
        for seed in (1, None, 3):
            env.reset(seed=seed)
            for _ in range(LENGTH if seed is None else 2):
                env.step(np.ones(2, np.float32))
        env.reset(seed=4)
        env.reset()
        assert checked(env) == (5 - 1, 9 + 5 + 1), "a reset right after a reset begins no further episode"
    finally:
        env.close()


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_lost_client_and_its_replacement(start: Clients, mode: AutoresetMode) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, autoreset_mode=mode, verify=True, timeout=20)
    first = start(partial(CountingEnv, 1), env.url, rank=0, group_num_envs=2)
    start(partial(CountingEnv, 2), env.url, rank=1, group_num_envs=2)
    rng = np.random.default_rng(0)
    losses = 0
    try:
        env.reset()
        for number in range(20):
            _, _, terminated, truncated, infos = env.step(rng.uniform(-1, 1, (2, 2)).astype(np.float32))
            losses += int(np.sum(infos.get("client_lost", 0)))
            if mode is AutoresetMode.DISABLED and (terminated | truncated).any():
                env.reset(options={"reset_mask": terminated | truncated})
            if number == 7:
                first.stop()
                start(partial(CountingEnv, 3), env.url, rank=0, group_num_envs=2)
        assert losses == 1
        # All but the step in which slot 0 was lost; what its replacement brought is a first observation like others.
        assert checked(env) == ((8, 2 + 39) if mode is AutoresetMode.NEXT_STEP else (10, 39 + 10))
    finally:
        env.close()


def test_client_that_comes_back_in_the_middle_of_an_episode(start: Clients) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=1, verify=True, timeout=20)
    start(partial(CountingEnv, length=50), env.url, max_backoff=0.05)
    try:
        env.reset()
        for _ in range(3):
            env.step(np.ones((1, 2), np.float32))
        resync(env._lockstep)
        *_, infos = env.step(np.ones((1, 2), np.float32))
        assert infos["client_lost"].tolist() == [True]
        for _ in range(2):
            env.step(np.ones((1, 2), np.float32))
        observation, *_ = env.step(np.ones((1, 2), np.float32))
        assert observation[0, 0] == np.float32(7 * 1.0009765625), "the episode went on"
        assert checked(env) == (2, 1 + 3 + 3), "as the trainer counts; not what it came back with"
    finally:
        env.close()


class NegativeZero(CountingEnv):
    """Pay -0.0, as ``-cost`` does where nothing was done wrong."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, _, terminated, truncated, info = super().step(action)
        return observation, -0.0, terminated, truncated, info


@pytest.mark.parametrize("batched", [False, True], ids=["envs", "vector env"])
def test_reward_of_negative_zero_stays_one(start: Clients, batched: bool) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, timeout=20)
    if batched:
        start(lambda: gym.vector.SyncVectorEnv([NegativeZero] * 2), env.url)
    else:
        start(NegativeZero, env.url, num_envs=2)
    try:
        env.reset()
        for _ in range(7):
            _, rewards, *_ = env.step(np.ones((2, 2), np.float32))
            assert np.signbit(rewards).tolist() == [True, True]
        assert env.verified == 2 * (7 + 2), "steps, and the first observations of two episodes"
    finally:
        env.close()


class Ordered(gym.Env[Any, Any]):
    """Have two entries, in a given order."""

    def __init__(self, names: str) -> None:
        entries = {"a": spaces.Box(-9, 9, (2,), np.float32), "b": spaces.Discrete(9)}
        self.observation_space = spaces.Dict([(name, entries[name]) for name in names])
        self.action_space = spaces.Discrete(3)
        self._t = 0
        self._taken: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return {"b": np.int64(1), "a": np.array([1, 2], np.float32)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        self._taken = action
        return (
            {"a": np.array([self._t % 9, 2], np.float32), "b": np.int64(self._t % 9)},
            1.0,
            self._t % 5 == 0,
            False,
            {},
        )


@pytest.mark.parametrize("own", ["ab", "ba", None])
def test_order_of_a_dict_does_not_matter(start: Clients, own: str | None) -> None:
    options: dict[str, Any] = {"observation_space": Ordered(own).observation_space} if own else {}
    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, timeout=20, **options)
    for rank, names in enumerate(("ab", "ba")):
        start(partial(Ordered, names), env.url, rank=rank, group_num_envs=2)
    try:
        env.reset(seed=0)
        for _ in range(12):
            env.step(np.array([1, 2]))
    finally:
        env.close()


def test_what_a_masked_reset_hands_over_once_more_is_checked(start: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, timeout=20, autoreset_mode=AutoresetMode.DISABLED)
    for rank, length in enumerate((3, 5)):
        start(partial(CountingEnv, rank, length), env.url, rank=rank, group_num_envs=2)

    def next_end() -> np.ndarray[Any, Any]:
        while True:
            *_, terminated, truncated, _ = env.step(np.ones((2, 2), np.float32))
            if (terminated | truncated).any():
                return np.asarray(terminated | truncated)

    try:
        env.reset()
        mask = next_end()
        assert mask.tolist() == [True, False]
        env.reset(options={"reset_mask": mask})
        mask = next_end()
        exchange: Any = env._lockstep._exchange
        finish = exchange.finish_reset

        def spoiled(*args: Any, **kwargs: Any) -> Any:
            step = finish(*args, **kwargs)
            step.observations[0][~mask, 1] = -77
            return step

        monkeypatch.setattr(exchange, "finish_reset", spoiled)
        with pytest.raises(LedgerMismatch, match="its env was not reset, and what the trainer gets is not") as caught:
            env.reset(options={"reset_mask": mask})
        assert caught.value.slots == (0,)
        assert caught.value.field == ""
    finally:
        env.close()


# Faults --------------------------------------------------------------------------------------------------------------


def run_faulty(start: Clients, plan: Plan, kind: Callable[..., Any], **options: Any) -> None:
    """Step a faulty client until the bridge refuses to."""
    env = kind(port=0, num_envs=NUM_ENVS, timeout=20, **{"verify": True, **options})
    start(lambda env_index: plan.wrap(LedgerEnv(CountingEnv(env_index, LENGTH), None)), env.url, num_envs=NUM_ENVS)
    rng = np.random.default_rng(0)
    try:
        env.reset()
        for _ in range(20):
            env.step(rng.uniform(-9, 9, (NUM_ENVS, 2)).astype(np.float32))
    finally:
        env.close()


@pytest.mark.parametrize("kind", [PlugRemoteVecEnv, PlugRLVectorEnv], ids=["sb3", "gymnasium"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_stops_the_run_in_the_step_in_which_it_crosses(
    start: Clients, fault: str, kind: Callable[..., Any]
) -> None:
    # "stale" and "swap" need a value that was there before; the end of an episode is at steps 5, 10, …
    plan = Plan(fault, "one", at=AT, env=1)
    with pytest.raises(LedgerMismatch, match=r"slot 1 \(client 127.0.0.1:\d+\), episode \d, step \d") as caught:
        run_faulty(start, plan, kind)
    error, first = caught.value, plan.first
    assert isinstance(first, First)
    assert plan.changed == 1
    assert (error.slot, error.slots, error.episode, error.step) == (1, (1,), first.episode, first.step)
    assert error.vector_step == first.vector_step >= AT
    if fault == "skipped step":
        assert "its env took no step" in str(error)
    else:
        assert error.field == first.field
        assert f"{first.field}: {error.cell} is " in str(error)
    assert "stepledger compare" in str(error)


@pytest.mark.parametrize("dose", ["percent", "every"])
@pytest.mark.parametrize("fault", FAULTS)
def test_larger_dose_is_stopped_at_its_first_cell(start: Clients, fault: str, dose: str) -> None:
    plan = Plan(fault, dose, at=AT, env=1)
    with pytest.raises(LedgerMismatch) as caught:
        run_faulty(start, plan, PlugRemoteVecEnv)
    error, first = caught.value, plan.first
    assert first is not None
    assert (error.vector_step, error.slot, error.step) == (first.vector_step, first.env, first.step)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED], ids=lambda mode: mode.name)
@pytest.mark.parametrize(("fault", "next_episode"), [("final_obs zero", 0), ("reset_obs zero", 1)])
def test_observations_are_checked_as_soon_as_they_are_here(
    start: Clients, fault: str, next_episode: int, mode: AutoresetMode
) -> None:
    plan = Plan(fault, "one", at=1)
    env = PlugRLVectorEnv(port=0, num_envs=1, autoreset_mode=mode, verify=True, timeout=20)
    start(lambda: plan.wrap(LedgerEnv(CountingEnv(), None)), env.url)
    action = np.ones((1, 2), np.float32)
    try:
        env.reset()
        for _ in range(LENGTH - 1):
            env.step(action)
        with pytest.raises(LedgerMismatch) as caught:
            env.step(action)
        assert (caught.value.episode, caught.value.step) == (next_episode, 0 if next_episode else LENGTH)
        assert caught.value.field == ("reset_obs" if next_episode else "terminal_obs")
    finally:
        env.close()


def test_very_first_observation_is_checked(start: Clients) -> None:
    plan = Plan("reset_obs zero", "every")
    with pytest.raises(LedgerMismatch, match=r"episode 0, step 0 \(vector step 0\)") as caught:
        run_faulty(start, plan, PlugRemoteVecEnv)
    assert caught.value.slots == (0, 1, 2)
    assert "several values differ; likewise slots 1-2" in str(caught.value)


@pytest.mark.parametrize("taken", [0, 3], ids=["fresh", "in an episode"])
@pytest.mark.parametrize("right", [True, False])
def test_first_observation_of_a_client_that_reset_by_itself(right: bool, taken: int) -> None:
    """A step id of 0 tells that the digest is that of a reset; otherwise it is the client's word that counts."""
    observations, actions = spaces.Box(-9, 9, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
    spec = {
        "features": [STEP_DIGEST],
        "observation_space": space_to_wire(observations),
        "action_space": space_to_wire(actions),
    }
    env = PlugRLVectorEnv(port=0, num_envs=1, verify=True, timeout=20)
    puppet = Puppet(env.url)
    chain = EnvDigest(ObservationLayout(actions).leaves, ObservationLayout(observations).leaves)
    chain.reset([puppet.observation()["states"]["obs"][0]])
    try:
        digest = np.array([chain.value + (not right)], np.uint64)
        puppet.infer(env_spec=spec, digest=digest, step_ids=np.array([taken]))
        if right or taken:
            env.reset()
        else:
            with pytest.raises(LedgerMismatch, match=r"episode 0, step 0 \(vector step 0\)"):
                env.reset()
    finally:
        env.close()


def test_env_is_poisoned_by_a_mismatch(start: Clients) -> None:
    plan = Plan("reward zero", "one", at=2)
    env = PlugRLVectorEnv(port=0, verify=True, timeout=20)
    start(lambda: plan.wrap(LedgerEnv(CountingEnv(), None)), env.url)
    try:
        env.reset()
        action = np.ones((1, 2), np.float32)
        env.step(action)
        with pytest.raises(LedgerMismatch, match=r"reward: reward is 0\.0 at the trainer and 1\.10") as caught:
            env.step(action)
        assert (caught.value.episode, caught.value.step, caught.value.vector_step) == (0, 2, 2)
        with pytest.raises(EnvPoisoned, match="LedgerMismatch"):
            env.step(action)
    finally:
        env.close()


def test_wrong_values_that_the_bridge_makes_are_seen(start: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, timeout=20)
    start(CountingEnv, env.url, num_envs=2)
    try:
        env.reset()
        exchange = env._lockstep._exchange
        finish = exchange.finish_step

        def spoiled() -> Any:
            step = finish()
            step.observations[0][[0, 1]] = step.observations[0][[1, 0]]
            step.observations[0][1, 2] = 7
            return step

        monkeypatch.setattr(exchange, "finish_step", spoiled)
        with pytest.raises(LedgerMismatch, match=r"obs: obs\[2\] is 7\.0 at the trainer and 0\.5 at the env") as caught:
            env.step(np.ones((2, 2), np.float32))
        assert caught.value.slots == (1,), "both envs show the same numbers"
    finally:
        env.close()


def test_each_slot_is_warned_of_once_and_the_run_goes_on(start: Clients, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_faulty(start, Plan("reward zero", "every"), PlugRemoteVecEnv, verify="warn")
    [told] = [record.getMessage() for record in caplog.records if "stepledger compare" in record.getMessage()]
    assert "slot 0" in told
    assert "likewise slots 1-2" in told
    assert f"verify: {20 * NUM_ENVS} mismatches in 20 vector steps" in caplog.text


# Who can be verified -------------------------------------------------------------------------------------------------


def test_command_that_is_suggested_starts_a_client_that_can_be_verified() -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, connect_timeout=0.2)
    try:
        with pytest.raises(ConnectTimeout, match=r"--num-envs 2 --url ws://127\.0\.0\.1:\d+ --verify$"):
            env.reset()
    finally:
        env.close()


def test_replacement_that_was_refused_is_named(start: Clients, caplog: pytest.LogCaptureFixture) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=1, verify=True, timeout=20)
    first = start(CountingEnv, env.url)
    action = np.ones((1, 2), np.float32)
    try:
        env.reset()
        env.step(action)
        first.stop()
        with caplog.at_level(logging.WARNING):
            start(CountingEnv, env.url, verify=False).join()
        assert "stopped this client before it took a step" in caplog.text
        assert "the reason is in the server's log" in caplog.text
        env.step_async(action)
        text = (
            r"no client took the vacant slots .*; the client at 127\.0\.0\.1:\d+ was sent away: \[step-digest\] verify "
            r"is on, .* start it with --verify .* \(\d+\.\d s ago\)\. Start a client with: .* --verify$"
        )
        with pytest.raises(ClientLost, match=text):
            env.step_wait(timeout=0.2)
    finally:
        env.close()


def test_refusal_is_forgotten_when_the_slots_are_taken(start: Clients, caplog: pytest.LogCaptureFixture) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=1, verify=True, timeout=20)
    first = start(CountingEnv, env.url)
    action = np.ones((1, 2), np.float32)
    try:
        env.reset()
        start(CountingEnv, env.url, verify=False).join()
        first.stop()
        second = start(CountingEnv, env.url)
        env.step(action)
        env.step(action)
        second.stop()
        env.step_async(action)
        with pytest.raises(ClientLost, match="no client took the vacant slots") as caught:
            env.step_wait(timeout=0.2)
        assert "sent away" not in str(caught.value)
        assert "cannot be served" in caplog.text
    finally:
        env.close()


def test_client_without_digests_is_an_error(start: Clients) -> None:
    env = PlugRLVectorEnv(port=0, verify=True, timeout=20)
    start(CountingEnv, env.url, verify=False)
    try:
        with pytest.raises(UnverifiedClientError, match=r"the client at 127.0.0.1:\d+ sends no digests .* --verify"):
            env.reset()
    finally:
        env.close()


def test_client_without_digests_may_be_let_in(start: Clients, caplog: pytest.LogCaptureFixture) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, verify="warn", timeout=20)
    start(CountingEnv, env.url, verify=False, rank=0)
    start(partial(CountingEnv, 4), env.url, rank=1)
    try:
        with caplog.at_level(logging.WARNING):
            env.reset()
            for _ in range(12):
                env.step(np.ones((2, 2), np.float32))
        assert "its slots are not checked" in caplog.text
        assert checked(env) == (3, 12 + 3), "those of the other"
    finally:
        env.close()


def test_server_that_does_not_check_is_told(start: Clients, caplog: pytest.LogCaptureFixture) -> None:
    env = PlugRLVectorEnv(port=0, timeout=20)
    with caplog.at_level(logging.WARNING):
        start(CountingEnv, env.url)
        env.reset()
    env.close()
    assert "does not list step-digest: nothing is checked" in caplog.text


def test_space_in_another_integer_dtype_is_refused(start: Clients) -> None:
    class Counting(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.MultiDiscrete([3, 3], dtype=np.int32)

    action_space = spaces.MultiDiscrete([3, 3])
    env = PlugRLVectorEnv(port=0, verify=True, timeout=20, action_space=action_space)
    start(Counting, env.url)
    try:
        with pytest.raises(SpaceError, match=r"action entry 'obs' is <i4, in use is <i8"):
            env.reset()
    finally:
        env.close()


def test_digest_that_was_not_agreed_on_is_refused() -> None:
    indices = np.arange(2)
    observation = Observation({}, {"obs": np.zeros((2, 3), np.float32)})
    chains = np.array([1, 1 << 63], np.uint64)
    spec = {"features": [STEP_DIGEST]}
    infer = Infer(observation, indices, indices, None, spec, None, chains)
    offered = Metadata({"features": [ENV_SPEC, STEP_DIGEST]})

    def received(metadata: Metadata, message: Infer | Feedback) -> Any:
        session = ServerSession()
        session.open(metadata)
        return session.receive(b"".join(to_bytes(message)))[0]

    assert received(offered, infer).digest.tolist() == chains.tolist()
    for metadata, message in (
        (Metadata({"features": [ENV_SPEC]}), infer),
        (offered, Infer(observation, indices, indices, None, {}, None, chains)),
        (offered, Infer(observation, indices, indices, None, spec)),
    ):
        with pytest.raises(RemoteProtocolError, match=r"\[step-digest\]"):
            received(metadata, message)
    wire = infer.to_wire()
    for wrong in (chains.astype(np.int64), chains[:1], 7):
        with pytest.raises(RemoteProtocolError, match=r"\[step-digest\] infer: digest must be a <u8 array of length 2"):
            parse({**wire, "digest": wrong})


def test_later_env_spec_does_not_end_the_check() -> None:
    indices, chains = np.arange(2), np.array([1, 2], np.uint64)
    observation = Observation({}, {"obs": np.zeros((2, 3), np.float32)})
    flags = np.zeros(2, np.bool_)
    session = ServerSession()
    session.open(Metadata({"features": [ENV_SPEC, STEP_DIGEST]}))

    def receive(message: Infer | Feedback) -> None:
        session.receive(b"".join(to_bytes(message)))

    receive(Infer(observation, indices, indices, None, {"features": [STEP_DIGEST]}, None, chains))
    session.answer(Action(indices, np.zeros((1, 2, 2), np.float32)))
    receive(Feedback(observation, indices, indices, np.zeros(2), flags, flags, {}, chains))
    with pytest.raises(RemoteProtocolError, match=r"\[step-digest\] infer: no digest"):
        receive(Infer(observation, indices, indices, None, {"features": []}))


def test_client_that_stops_sending_digests_is_sent_away() -> None:
    env = PlugRLVectorEnv(
        port=0, num_envs=1, verify="warn", timeout=20, observation_space=spaces.Box(-9, 9, (3,), np.float32),
        action_space=spaces.Box(-1, 1, (2,), np.float32),
    )  # fmt: skip
    try:
        puppet = Puppet(env.url)
        puppet.infer(env_spec={"features": [STEP_DIGEST]})
        assert puppet.close_seen() == (1001, "plugrl-server-resync")
    finally:
        env.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"verify": "loudly"}, "verify must be False, True, 'raise' or 'warn'"),
        ({"verify": True, "action_horizon": 4}, "verify=True .* action_horizon=4"),
        ({"verify": "warn", "image_key": "camera"}, "verify='warn' .* image_key='camera'"),
        ({"verify": True, "state_key": "joints"}, "verify=True .* state_key='joints'"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        BridgeOptions(**options)


# Nothing else changes ------------------------------------------------------------------------------------------------


def _frames(env: Any) -> str:
    model = PPO("CnnPolicy", VecTransposeImage(env), n_steps=16, batch_size=32, n_epochs=1, seed=0, device="cpu")
    return digest(model.learn(64))


def _pendulum(env: Any) -> str:
    model = PPO("MlpPolicy", env, n_steps=64, n_epochs=2, seed=0, device="cpu", use_sde=True)
    return digest(model.learn(1024))


@pytest.mark.parametrize(
    ("train", "make"),
    [(_pendulum, partial(gym.make, "Pendulum-v1")), (_frames, FramesEnv)],
    ids=["Pendulum", "images"],
)
def test_final_weights_are_those_without(start: Clients, train: Callable[[Any], str], make: Callable[..., Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weights = []
        for verify in (False, True):
            env = PlugRemoteVecEnv(port=0, num_envs=2, verify=verify, timeout=60)
            start(make, env.url, num_envs=2, verify=verify)
            weights.append(train(env))
            env.close()
    finally:
        torch.set_num_threads(before)
    assert weights[0] == weights[1]


# With ledgers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["obs stale", "final_obs zero", "reset_obs zero", "skipped step", "action swap"])
@pytest.mark.parametrize("kind", ["sb3", "gymnasium"])
def test_ledgers_locate_what_the_live_check_warned_of(
    start: Clients, tmp_path: Path, kind: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan(fault, "every")
    options: dict[str, Any] = {"port": 0, "num_envs": NUM_ENVS, "verify": "warn", "timeout": 20}
    trainer, envs = tmp_path / "trainer.ledger", tmp_path / "envs"
    remote: Any = (PlugRemoteVecEnv if kind == "sb3" else PlugRLVectorEnv)(**options)

    def make(env_index: int) -> Any:
        return plan.wrap(LedgerEnv(CountingEnv(env_index, LENGTH), f"{envs}/", env_index=env_index))

    client = start(make, remote.url, num_envs=NUM_ENVS)
    env: Any = (LedgerVecEnv if kind == "sb3" else LedgerVectorEnv)(remote, trainer)

    def run() -> None:
        rng = np.random.default_rng(0)
        env.reset()
        for _ in range(20):
            env.step(rng.uniform(-9, 9, (NUM_ENVS, 2)).astype(np.float32))

    with caplog.at_level(logging.WARNING):
        run()
    env.close()
    client.stop()
    first = compare(trainer, [envs]).first
    assert first is not None
    assert plan.first is not None
    assert (first.slot.number, first.episode, first.step) == (
        plan.first.env, plan.first.episode, plan.first.step
    )  # fmt: skip
    assert first.field == plan.first.field
    told = next(text for text in caplog.messages if "stepledger compare" in text)
    assert f"episode {first.episode}, step {first.step} (vector step {first.vector_step})" in told
