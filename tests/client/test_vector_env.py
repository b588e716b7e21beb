"""A vector env's rows are the envs of the connection, in every autoreset mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from plugrl_bridges.client.vector_env import VectorBatch
from plugrl_bridges.errors import EnvFailed, FactoryError
from plugrl_bridges.wire.info import split_info
from plugrl_bridges.wire.messages import ResetRequest
from tests.client.scripted import ALL_FEATURES, CountEnv, Fleet, Peer, run

if TYPE_CHECKING:
    from plugrl_bridges.wire.codec import Value

# Gymnasium 1.0 knows the mode NEXT_STEP only, and no masked reset: refused with a FactoryError.
pytestmark = pytest.mark.skipif(gymnasium.__version__.startswith("1.0."), reason="no usable autoreset mode")

HAS_MODES = hasattr(gymnasium.vector, "AutoresetMode")
MODES = ["SAME_STEP", "DISABLED", "NEXT_STEP"] if HAS_MODES else ["0.29"]
each_mode = pytest.mark.parametrize("mode", MODES)


def vector(fleet: Value, n: int, mode: str, **options: Any) -> Value:
    if HAS_MODES:
        options["autoreset_mode"] = gymnasium.vector.AutoresetMode[mode]
    return SyncVectorEnv([fleet] * n, **options)


@each_mode
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("reuse", [True, False])
def test_it_says_what_single_envs_would_say(mode: str, copy: bool, reuse: bool) -> None:
    def talk(make: Value, said: list[Any], **options: Any) -> Value:
        def script(peer: Peer) -> None:
            peer.metadata(*ALL_FEATURES)
            infer = peer.infer()
            for at in range(9):
                said.append((infer.observation.states["obs"].tolist(), str(infer.reuse), infer.step_ids.tolist()))
                said.append(split_info(infer.reset_info or {}, 3))
                feedback, infer = peer.exchange(infer, np.full((1, 3, 1), at, np.float32))
                said.append((feedback.observation.states["obs"].tolist(), feedback.rewards.tolist()))
                said.append((feedback.terminated.tolist(), feedback.truncated.tolist()))
                said.append(split_info(feedback.info, 3))
                said.append(str(feedback.info.get("episode")))
            peer.stop()

        return run(make, script, seed=3, reuse=reuse, **options)

    arguments: list[dict[str, Any]] = [
        {"length": 2, "info": [{"x": 1.0}, {"x": 2.0, "is_success": True}]},
        {"length": 3, "truncates": True, "info": [{"x": 1.0}, {"x": 2.0}, {"x": 3.0, "name": "end"}]},
        {"length": 50, "info": [{"x": float(at)} for at in range(50)]},
    ]
    single, together = Fleet(*arguments), Fleet(*arguments)
    said: list[Any] = []
    said_together: list[Any] = []
    summary = talk(single, said, num_envs=3)
    summary_together = talk(lambda: vector(together, 3, mode, copy=copy), said_together)
    assert said_together == said
    assert (summary.returns, summary.lengths) == (summary_together.returns, summary_together.lengths)
    # SAME_STEP lets Gymnasium do the reset, but nobody resets twice.
    assert [env.resets for env in together.envs] == [env.resets for env in single.envs]
    first = [env.calls[0] for env in together.envs]
    assert first == [("reset", (3, None)), ("reset", (4, None)), ("reset", (5, None))]


@each_mode
def test_a_chunk_ends_for_all_rows_at_the_first_end(mode: str) -> None:
    fleet = Fleet({"length": 2}, {"length": 9})

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        feedback, infer = peer.zeros(peer.infer(), 4)
        assert feedback.rewards.tolist() == [3.5, 3.5]
        assert feedback.terminated.tolist() == [True, False]
        assert feedback.info["episode"]["l"].tolist() == [2, 2]
        assert infer.observation.states["obs"].tolist() == [[0, 1]]
        peer.stop()

    run(lambda: vector(fleet, 2, mode), script)


@pytest.mark.skipif(not HAS_MODES, reason="Gymnasium 0.29 resets all rows or none")
@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED", "NEXT_STEP"])
def test_seeded_reset_of_some(mode: str) -> None:
    fleet = Fleet()

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        _, infer = peer.zeros(peer.infer())
        request = ResetRequest(np.array([1]), (7,), ({"goal": 3},))
        feedback, infer = peer.exchange(infer, np.zeros((1, 3, 1), np.float32), request)
        assert feedback.env_indices.tolist() == [0, 2]
        assert feedback.observation.states["obs"].tolist() == [[2, 0], [2, 0]]
        assert infer.reuse is not None
        assert infer.reuse.tolist() == [True, False, True]
        assert infer.observation.states["obs"].tolist() == [[0, 1]]
        peer.stop()

    run(lambda: vector(fleet, 3, mode), script)
    assert fleet.envs[1].calls[-1] == ("reset", (7, {"goal": 3}))
    assert [env.resets for env in fleet.envs] == [1, 2, 1]


@each_mode
def test_seeded_reset_of_all_uses_the_int_form(mode: str) -> None:
    seeds: list[Any] = []

    class Recording(SyncVectorEnv):
        def reset(self, *, seed: Value = None, options: Value = None) -> Value:
            seeds.append((seed, options))
            return super().reset(seed=seed, options=options)

    def make() -> Value:
        options: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode[mode]} if HAS_MODES else {}
        return Recording([CountEnv] * 2, **options)

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        for seed in ((5, 6), (8, 3), (None, None)):
            request = ResetRequest(np.array([0, 1]), seed, (None, None))
            _, infer = peer.exchange(infer, np.zeros((1, 2, 1), np.float32), request)
        peer.stop()

    run(make, script)
    assert seeds == [(None, None), (5, None), ([8, 3], None), (None, None)]


class Simulator(gymnasium.vector.VectorEnv):  # type: ignore[type-arg,unused-ignore] # 0.29 takes none
    """A batched simulator that nobody's class stands behind: Dict observations, no info, SAME_STEP."""

    def __init__(self, mode: Value, n: int = 4) -> None:
        self.num_envs = n
        self.single_observation_space = gymnasium.spaces.Dict(
            {"image": gymnasium.spaces.Box(0, 255, (2, 2, 1), np.uint8), "t": gymnasium.spaces.Discrete(100)}
        )
        self.single_action_space = gymnasium.spaces.Discrete(3)
        self.metadata = {"autoreset_mode": mode}
        self.t = np.zeros(n, np.int64)
        self.actions: list[Any] = []

    def _observe(self) -> Value:
        return {"image": np.tile(self.t.astype(np.uint8)[:, None, None, None], (1, 2, 2, 1)), "t": self.t.copy()}

    def reset(self, *, seed: Value = None, options: Value = None) -> Value:  # noqa: ARG002
        self.t[:] = np.arange(self.num_envs)
        return self._observe(), {}

    def step(self, actions: Value) -> Value:
        self.actions.append(actions)
        self.t += 1
        done = self.t >= 5
        final = self._observe()
        self.t[done] = 0
        infos = {"final_obs": final, "_final_obs": done} if done.any() else {}
        return self._observe(), np.ones(self.num_envs, np.float32), done, np.zeros_like(done), infos


@pytest.mark.skipif(not HAS_MODES, reason="this Gymnasium has no autoreset modes")
@pytest.mark.parametrize("as_text", [True, False])
def test_a_simulator_with_batched_terminal_observations(as_text: bool) -> None:
    mode: Value = "SameStep" if as_text else gymnasium.vector.AutoresetMode.SAME_STEP
    simulator = Simulator(mode)

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        assert infer.observation.states["t"].tolist() == [0, 1, 2, 3]
        _, infer = peer.exchange(infer, np.full((1, 4, 1), 1, np.int64))
        feedback, infer = peer.exchange(infer, np.full((1, 4, 1), 2, np.int64))
        assert feedback.observation.states["t"].tolist() == [2, 3, 4, 5]
        assert feedback.observation.images["image"][:, 0, 0, 0].tolist() == [2, 3, 4, 5]
        assert feedback.terminated.tolist() == [False, False, False, True]
        assert infer.observation.states["t"].tolist() == [0]
        assert infer.observation.images["image"].max() == 0
        peer.stop()

    run(lambda: simulator, script)
    assert [actions.tolist() for actions in simulator.actions] == [[1] * 4, [2] * 4]
    assert simulator.actions[0].dtype == np.int64


class Telling(Simulator):
    """Give the infos that the test says; never end an episode but in step ``ends_at``."""

    def __init__(self, *, reset: Value, step: Value, ends_at: int = 0) -> None:
        super().__init__("SameStep", 2)
        self.told = reset, step
        self.ends_at = ends_at

    def reset(self, *, seed: Value = None, options: Value = None) -> Value:
        return super().reset(seed=seed, options=options)[0], self.told[0]

    def step(self, actions: Value) -> Value:
        self.actions.append(actions)
        self.t += 1
        ended = np.full(2, len(self.actions) == self.ends_at)
        infos = (
            {**self.told[1], "final_info": self.told[1], "final_obs": self._observe()} if self.ends_at else self.told[1]
        )
        return self._observe(), np.ones(2, np.float32), ended, np.zeros(2, bool), infos


@pytest.mark.skipif(not HAS_MODES, reason="this Gymnasium has no autoreset modes")
@pytest.mark.parametrize("ends_at", [0, 1])
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"x": np.array([1.0, 2.0]), "zero_d": np.array(3.5), "n": 2}, [{"x": 1.0}, {"x": 2.0}]),
        ({"x": np.array([1.0, 2.0]), "_x": np.array(True)}, [{"x": 1.0}, {"x": 2.0}]),
        ({3: np.zeros(2)}, [{}, {}]),
        pytest.param(
            {"long": np.zeros(2, np.longdouble)},
            [{}, {}],
            marks=pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="a long double is a double here"),
        ),
    ],
    ids=["zero_d", "zero_d_mask", "no_str", "long_double"],
)
def test_infos_that_are_no_rows_or_cannot_travel_are_left_out(told: Value, expected: Value, ends_at: int) -> None:
    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        assert split_info(infer.reset_info or {}, 2) == expected
        feedback, _ = peer.exchange(infer, np.zeros((1, 2, 1), np.int64))
        info = {key: value for key, value in feedback.info.items() if key != "episode"}
        assert split_info(info, 2) == expected
        peer.stop()

    run(lambda: Telling(reset=told, step=told, ends_at=ends_at), script)


@pytest.mark.skipif(not HAS_MODES, reason="this Gymnasium has no autoreset modes")
@pytest.mark.parametrize(
    ("step", "ends_at"),
    [
        ([1, 2], 0),
        ({"x": np.zeros(2), "_x": [np.zeros(2)] * 2}, 0),
        ({"success": [[[1], 2]] * 2}, 1),
    ],
)
def test_infos_that_cannot_be_read_are_the_envs_fault(step: Value, ends_at: int) -> None:
    codes: list[int] = []

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        peer.act(peer.infer(), np.zeros((1, 2, 1), np.int64))
        codes.append(peer.close_code())

    with pytest.raises(EnvFailed, match=r"env Telling failed in step\(\): "):
        run(lambda: Telling(reset={}, step=step, ends_at=ends_at), script)
    assert codes == [1011]


@pytest.mark.skipif(not HAS_MODES, reason="this Gymnasium has no autoreset modes")
def test_reset_infos_that_cannot_be_read_are_the_envs_fault() -> None:
    with pytest.raises(EnvFailed, match=r"env Telling failed in reset\(\): "):
        run(lambda: Telling(reset=None, step={}), lambda peer: peer.metadata(*ALL_FEATURES))


@pytest.mark.skipif(not HAS_MODES, reason="this Gymnasium has no autoreset modes")
@pytest.mark.parametrize(("mode", "text"), [("NEXT_STEP", "SAME_STEP"), (None, "SAME_STEP"), ("whenever", "unknown")])
def test_a_simulator_that_resets_in_the_next_step_is_refused(mode: Value, text: str) -> None:
    with pytest.raises(FactoryError, match=text):
        VectorBatch(Simulator(mode))
