"""A client whose server is to make the first reset: what it says, and what its envs see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plugrl_bridges.wire.messages import Infer, ResetRequest
from tests.client.scripted import ALL_FEATURES, Fleet, Peer, run

FEATURES = (*ALL_FEATURES, "late-reset")


def request(infer: Infer, *seeds: int | None, **options: Any) -> ResetRequest:
    given = tuple(dict(options) or None for _ in seeds)
    return ResetRequest(infer.env_indices[: len(seeds)], seeds, given)


def test_the_envs_see_one_reset_and_it_is_the_trainers() -> None:
    fleet = Fleet()

    def script(peer: Peer) -> None:
        peer.metadata(*FEATURES)
        infer = peer.infer()
        assert (infer.env_spec or {})["unreset"] is True
        assert infer.observation.states["obs"].tolist() == [[0, 0], [0, 0]]
        assert infer.reset_info is None
        assert not fleet.envs or all(env.resets == 0 for env in fleet.envs)
        feedback, infer = peer.exchange(infer, np.zeros((1, 2, 1), np.float32), request(infer, 7, 8, level=3))
        assert len(feedback.env_indices) == 0
        assert infer.reset_info is not None
        _, infer = peer.zeros(infer)
        peer.stop()

    run(fleet, script, num_envs=2)
    assert [env.resets for env in fleet.envs] == [1, 1]


@pytest.mark.parametrize(("given", "seeds"), [((None, None), [40, 41]), ((7, None), [7, 41])])
def test_the_clients_own_seed_stands_in_where_the_trainer_gives_none(
    given: tuple[int | None, int | None], seeds: list[int]
) -> None:
    fleet = Fleet()

    def script(peer: Peer) -> None:
        peer.metadata(*FEATURES)
        infer = peer.infer()
        peer.exchange(infer, np.zeros((1, 2, 1), np.float32), request(infer, *given))
        peer.stop()

    run(fleet, script, num_envs=2, seed=40)
    assert [env.calls for env in fleet.envs] == [[("reset", (seed, None))] for seed in seeds]


def test_a_server_that_does_not_offer_it_gets_real_first_observations() -> None:
    fleet = Fleet()

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        assert "unreset" not in (peer.infer().env_spec or {})
        assert [env.resets for env in fleet.envs] == [1, 1]
        peer.stop()

    run(fleet, script, num_envs=2)


@pytest.mark.parametrize("some", [False, True], ids=["none is reset", "one of two is reset"])
def test_an_action_for_envs_that_were_never_reset_breaks_the_protocol(
    some: bool, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []

    def hasty(peer: Peer) -> None:
        peer.metadata(*FEATURES)
        infer = peer.infer()
        peer.act(infer, np.zeros((1, 2, 1), np.float32), request(infer, 7) if some else None)
        codes.append(peer.close_code())

    def patient(peer: Peer) -> None:
        peer.metadata(*FEATURES)
        assert (peer.infer().env_spec or {})["unreset"] is True
        peer.stop()

    run(Fleet(), hasty, patient, num_envs=2)
    assert codes == [1002]
    assert "[late-reset] action: envs" in caplog.text


def test_after_a_reconnect_the_running_episodes_go_on() -> None:
    fleet = Fleet()

    def first(peer: Peer) -> None:
        peer.metadata(*FEATURES)
        infer = peer.infer()
        _, infer = peer.exchange(infer, np.zeros((1, 1, 1), np.float32), request(infer, 7))
        peer.zeros(infer)
        peer.drop()

    def second(peer: Peer) -> None:
        peer.metadata(*FEATURES)
        infer = peer.infer()
        assert "unreset" not in (infer.env_spec or {})
        assert infer.observation.states["obs"].tolist() == [[1, 0]]
        peer.stop()

    run(fleet, first, second)
    assert [env.resets for env in fleet.envs] == [1]
