"""The live check of C++ clients: silent on clean runs of every space and mode, and loud where something is spoiled."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest

from plugrl_bridges import LedgerMismatch
from plugrl_bridges.gym import AutoresetMode, PlugRLVectorEnv
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from tests.cpp.conftest import STRICT
from tests.support import PATIENCE_S, resync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def spaces(build: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    return build(request.path.parent / "spaces.cpp", "-O1", *STRICT)


@contextlib.contextmanager
def running(program: Path, *arguments: str) -> Iterator[None]:
    with subprocess.Popen([program, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield
            output = process.communicate(timeout=PATIENCE_S)[1]
        finally:
            process.kill()
    assert process.returncode == 0, output


@pytest.mark.parametrize("action", ["box", "wide", "whole", "discrete", "multi_discrete", "multi_binary"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_clean_run_of_every_space_and_mode(spaces: Path, mode: AutoresetMode, action: str) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=3, verify=True, autoreset_mode=mode, timeout=PATIENCE_S)
    processes = 1 if mode is AutoresetMode.SAME_STEP else 3  # the other modes need one env per connection
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(running(spaces, env.url, str(3 // processes), action))
        stack.enter_context(contextlib.closing(env))
        env.reset(seed=0)
        assert isinstance(env.single_observation_space, gym.spaces.Dict)
        assert list(env.single_observation_space)[:2] == ["words", "x"], "the order is that of the client"
        env.action_space.seed(0)
        ended = 0
        signs: set[bool] = set()
        for _ in range(42):
            actions = env.action_space.sample()
            if action == "whole":  # a trainer's floats, of which the whole part counts
                actions = actions + np.linspace(-0.9, 0.9, actions.size, dtype=np.float32).reshape(actions.shape)
            _, rewards, terminated, truncated, _ = env.step(actions)
            signs.update(np.signbit(rewards[rewards == 0]).tolist())
            done = terminated | truncated
            ended += int(done.sum())
            if mode is AutoresetMode.DISABLED and done.any():
                env.reset(options={"reset_mask": done})
        assert ended >= 12
        assert True in signs, "a reward of -0.0 arrived as one"
        verifier = env._lockstep._exchange.verifier
        assert verifier is not None
        # In NEXT_STEP each vector step is, to a slot, either a step or the first observation of an episode.
        assert verifier.compared == 3 + 42 * 3 + (0 if mode is AutoresetMode.NEXT_STEP else ended)


def test_chains_go_on_after_a_drop(pendulum: Path) -> None:
    env = PlugRLVectorEnv(port=0, num_envs=2, verify=True, timeout=PATIENCE_S)
    with running(pendulum, "--url", env.url, "--num-envs", "2", "--quiet"), contextlib.closing(env):
        env.reset(seed=0)
        lost = []
        for number in range(8):
            if number == 3:
                resync(env._lockstep)
            *_, infos = env.step(np.full((2, 1), 0.5, np.float32))
            lost.append("client_lost" in infos)
        assert lost == [number == 3 for number in range(8)]
        verifier = env._lockstep._exchange.verifier
        assert verifier is not None
        assert verifier._steps.tolist() == [4, 4]
        assert verifier.compared == 2 * (1 + 7), "all but the step in which it was lost, and what it came back with"


@pytest.mark.parametrize("what", ["obs", "action", "reward"])
def test_what_the_bridge_gets_wrong_is_named(what: str, pendulum: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = PlugRemoteVecEnv(port=0, num_envs=2, verify=True, timeout=PATIENCE_S)
    with running(pendulum, "--url", env.url, "--num-envs", "2", "--quiet"), contextlib.closing(env):
        env.seed(0)
        env.reset()
        env.step(np.full((2, 1), 0.5, np.float32))
        exchange: Any = env._lockstep._exchange
        finish, sent = exchange.finish_step, exchange.verifier.sent

        def spoiled() -> Any:
            step = finish()
            if what == "obs":
                step.observations[0][1, 2] = 7
            elif what == "reward":
                step.rewards[1] = 7
            return step

        monkeypatch.setattr(exchange, "finish_step", spoiled)
        if what == "action":
            monkeypatch.setattr(
                exchange.verifier, "sent", lambda actions: sent(actions + np.array([[0.0], [1.0]], "f4"))
            )
        with pytest.raises(LedgerMismatch) as caught:
            env.step(np.full((2, 1), 0.5, np.float32))
        assert (caught.value.slots, caught.value.step, caught.value.field) == ((1,), 2, what)
