"""Every space reaches the other side as what it is [rows 22, 24, 25 of the field]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from plugrl_bridges.spaces import ActionLayout, ObservationLayout, space_from_wire
from tests.client.scripted import ALL_FEATURES, CountEnv, Peer, run

if TYPE_CHECKING:
    from plugrl_bridges.wire.codec import Value

ACTIONS: list[tuple[spaces.Space[Any], Any, type[Any], str]] = [
    (spaces.Box(-1, 1, (3,), np.float32), np.array([0.5, -1, 1], np.float32), np.ndarray, "float32"),
    (spaces.Box(-1, 1, (3,), np.float32), np.array([0.5, -1, 1], np.float64), np.ndarray, "float64"),
    (spaces.Box(-1, 1, (), np.float32), np.float32(0.5), np.ndarray, "float32"),
    (spaces.Box(-1, 1, (2, 2), np.float64), np.eye(2), np.ndarray, "float64"),
    (spaces.Box(0, 9, (2,), np.int32), np.array([3, 4], np.int32), np.ndarray, "int32"),
    (spaces.Discrete(4), np.int64(3), np.int64, "int64"),
    (spaces.Discrete(4, start=-2), np.int64(-1), np.int64, "int64"),
    (spaces.MultiDiscrete([3, 4]), np.array([2, 1]), np.ndarray, "int64"),
    (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), np.ndarray, "int8"),
]


class Taking(gymnasium.Env[Any, Any]):
    observation_space: spaces.Space[Any] = spaces.Box(0, 1, (1,), np.float32)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.action_space = space
        self.got: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Value = None) -> Value:  # noqa: ARG002
        return np.zeros(1, np.float32), {}

    def step(self, action: Value) -> Value:
        self.got.append(action)
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(("space", "action", "kind", "dtype"), ACTIONS, ids=[f"{row[0]}-{row[3]}" for row in ACTIONS])
def test_actions(space: spaces.Space[Any], action: Value, kind: type[Any], dtype: str) -> None:
    envs: list[Taking] = []

    def make() -> Taking:
        envs.append(Taking(space))
        return envs[-1]

    def script(peer: Peer) -> None:
        peer.metadata()
        infer = peer.infer()
        wire = ActionLayout(space).to_wire(np.stack([action] * 2), 2)
        for _ in range(3):
            _, infer = peer.exchange(infer, wire)
        peer.stop()

    run(make, script, num_envs=2)
    for env in envs:
        assert len(env.got) == 3
        for got in env.got:
            assert got.__class__ is kind
            assert got.dtype == dtype
            assert np.array_equal(got, action)
            if dtype == str(space.dtype):
                assert space.contains(got)
            if kind is np.ndarray:
                assert got.flags.writeable
                assert not any(np.shares_memory(got, other) for other in env.got if other is not got)


OBSERVATIONS: list[spaces.Space[Any]] = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(-1, 1, (), np.float64),
    spaces.Box(0, 255, (6, 5, 3), np.uint8),
    spaces.Box(0, 255, (3, 6, 5), np.uint8),
    spaces.Discrete(5, start=2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary((2, 2)),
    spaces.Text(8),
    spaces.Dict(
        {"pixels": spaces.Box(0, 255, (4, 4, 1), np.uint8), "pos": spaces.Box(-1, 1, (2,)), "say": spaces.Text(5)}
    ),
    spaces.Tuple([spaces.Discrete(3), spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float64)})]),
]


class Giving(CountEnv):
    def __init__(self, space: spaces.Space[Any], seed: int) -> None:
        super().__init__(length=3)
        self.observation_space = space
        space.seed(seed)
        self.given: list[Any] = []

    def _observe(self) -> Value:
        self.given.append(self.observation_space.sample())
        return self.given[-1]


@pytest.mark.parametrize("space", OBSERVATIONS, ids=str)
@pytest.mark.parametrize("reuse", [True, False])
def test_observations(space: spaces.Space[Any], reuse: bool) -> None:
    import copy  # noqa: PLC0415

    envs: list[Giving] = []

    def make() -> Giving:
        envs.append(Giving(copy.deepcopy(space), len(envs)))
        return envs[-1]

    layout = ObservationLayout(space)

    def check(observation: Value, rows: list[int], at: list[int]) -> None:
        arrays = layout.allocate(len(rows))
        layout.read(observation, arrays, slice(None))
        wanted = layout.allocate(len(rows))
        for row, (env, index) in enumerate(zip(rows, at, strict=True)):
            layout.store(wanted, row, envs[env].given[index])
        for got, want in zip(arrays, wanted, strict=True):
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        assert infer.env_spec is not None
        assert space_from_wire(infer.env_spec["observation_space"]) == space
        check(infer.observation, [0, 1], [0, 0])
        for at in (1, 2, 3):
            feedback, infer = peer.zeros(infer)
            check(feedback.observation, [0, 1], [at, at])
            if infer.reuse is None or not infer.reuse.any():
                last = at + 1 if at == 3 else at
                check(infer.observation, [0, 1], [last, last])
        peer.stop()

    run(make, script, num_envs=2, reuse=reuse)


def test_large_frames_pass() -> None:
    class Camera(CountEnv):
        observation_space: spaces.Space[Any] = spaces.Box(0, 255, (480, 640, 3), np.uint8)

        def _observe(self) -> Value:
            return np.full((480, 640, 3), self.t, np.uint8)

    def script(peer: Peer) -> None:
        peer.metadata()
        infer = peer.infer()
        for at in (1, 2):
            feedback, infer = peer.zeros(infer)
            for observation in (feedback.observation, infer.observation):
                assert (observation.images["obs"] == at).all()
        peer.stop()

    run(Camera, script, num_envs=16)
