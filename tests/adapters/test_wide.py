"""A batched simulator of thousands of envs on one connection is stepped without a loop over envs, on either side."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.wide_env import WIDTH, WideEnv
from plugrl_bridges.gym import PlugRLVectorEnv
from tests.adapters.equality import assert_same
from tests.support import ClientThread

if TYPE_CHECKING:
    from collections.abc import Iterator


class LineCount:
    """Count the lines of this library that run, in all threads that start while it watches, and in this one."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.watching = False

    def trace(self, frame: Any, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        if "plugrl_bridges" not in path:
            return None
        if event == "line" and self.watching:
            where = f"{path.rpartition('plugrl_bridges')[2]}:{frame.f_lineno}"
            self.counts[where] = self.counts.get(where, 0) + 1
        return self.trace

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before = sys.gettrace()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(None)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage run has the trace function")
def test_no_line_runs_once_per_env() -> None:
    num_envs, steps = 512, 8
    lines = LineCount()
    with lines.installed(), contextlib.closing(PlugRLVectorEnv(port=0, num_envs=num_envs)) as env:
        client = ClientThread(lambda: WideEnv(num_envs), url=env.url)
        env.reset(seed=0)
        actions = np.zeros((num_envs, 4), np.float32)
        for _ in range(250):  # until episodes end, here and there one
            env.step(actions)
        lines.watching = True
        ends = sum(int(env.step(actions)[3].sum()) for _ in range(steps))
        lines.watching = False
        client.stop()
    assert ends == steps  # one env ends in each of these steps
    assert len(lines.counts) > 100  # it did watch, both sides
    busy = {where: count for where, count in lines.counts.items() if count >= num_envs}
    assert not busy, busy


def test_thousands_of_envs_give_what_the_simulator_gives() -> None:
    num_envs = 4096
    local = WideEnv(num_envs)
    with contextlib.closing(PlugRLVectorEnv(port=0, num_envs=num_envs)) as env:
        client = ClientThread(lambda: WideEnv(num_envs), url=env.url)
        assert_same(env.reset(seed=0), local.reset(seed=0), "reset")
        rng = np.random.default_rng(0)
        for t in range(230):
            actions = rng.normal(size=(num_envs, 4)).astype(np.float32)
            mine, here = env.step(actions), local.step(actions)
            infos, expected = mine[4], here[4]
            assert_same(mine[:4], here[:4], f"step {t}")
            assert mine[0].shape == (num_envs, WIDTH)
            over = here[3]
            assert ("final_obs" in infos) == over.any()
            if over.any():
                for row in np.flatnonzero(over):
                    assert infos["final_obs"][row].tobytes() == expected["final_obs"][row].tobytes()
                    assert infos["final_info"]["t"][row] == expected["final_info"]["t"][row]
                assert infos["_final_obs"].tolist() == infos["_final_info"].tolist() == over.tolist()
            assert infos["t"][~over].tolist() == expected["t"][~over].tolist()
        client.stop()
