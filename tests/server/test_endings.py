"""Connections that end in odd ways and at odd moments, and what a later step must not see of them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pytest

from plugrl_bridges.errors import ClientLost, ConnectionClosed, ConnectTimeout, SpaceError, StepTimeout
from plugrl_bridges.spaces import space_to_wire
from plugrl_bridges.transport import WebSocket, connect
from tests.foreign_client import pack, unpack
from tests.support import ACTIONS, OBSERVATIONS, STOP, Puppet, knows_reset, observe, wait_until

if TYPE_CHECKING:
    from plugrl_bridges.server.lockstep import Lockstep

ZERO = np.zeros((1, 1), np.float32)


def _speak(websocket: WebSocket, message: dict[str, Any]) -> None:
    websocket.send([pack(message)])


def _infer(n: int = 1) -> dict[str, Any]:
    ids = np.arange(n)
    data = {"images": {}, "states": {"obs": observe(range(n), 0, 0)}, "text": ""}
    return {"message_type": "infer", "data": data, "env_indices": ids, "step_ids": ids}


def _close_and_hold_on(lockstep: Lockstep) -> WebSocket:
    """Serve until the first action, send a close frame then, and keep the stream open without a look at it."""
    websocket = connect(lockstep.url)
    assert websocket.receive(20.0) is not None
    websocket.recycle()
    _speak(websocket, _infer())
    lockstep.reset()
    lockstep.send(ZERO)
    action = websocket.receive(20.0)
    assert isinstance(action, memoryview)
    assert unpack(bytes(action))["message_type"] == "action"
    websocket.close(1000)
    return websocket


def test_a_peer_that_closes_in_mid_step_and_keeps_the_stream_open_is_lost_at_once(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1, on_client_loss="raise")
    websocket = _close_and_hold_on(lockstep)
    with pytest.raises(ClientLost, match="1000"):
        lockstep.wait()
    websocket.abort()


def test_the_slot_of_a_peer_that_closes_and_keeps_the_stream_open_goes_to_the_next(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1)
    websocket = _close_and_hold_on(lockstep)
    other = Puppet(lockstep.url, (7.0,)).infer()
    step = lockstep.wait()
    assert step.lost == (0,)
    assert step.standing()[0].tolist() == [[7.0, 0.0, 0.0]]
    websocket.abort()
    other.leave()


def test_a_vacant_slot_of_the_only_connection_still_times_out(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1, timeout=0.3)
    websocket = _close_and_hold_on(lockstep)
    with pytest.raises((ClientLost, StepTimeout)):
        lockstep.wait()
    websocket.abort()


def test_what_a_lost_connection_had_sent_seats_nobody(make_bridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1, timeout=0.5)
    puppet = Puppet(lockstep.url).infer()
    lockstep.reset()
    send = WebSocket.send

    def fail(self: WebSocket, *_: Any, **__: Any) -> None:
        monkeypatch.setattr(WebSocket, "send", send)
        puppet.feed_back().infer()  # before it has its action, as a client that does not read might
        received = self.bytes_received
        wait_until(lambda: self.pump() and self.bytes_received - received > 400)
        raise ConnectionClosed(self.address, 1006, "", "the peer took nothing")

    monkeypatch.setattr(WebSocket, "send", fail)
    lockstep.send(ZERO)
    with pytest.raises(ClientLost, match="the peer took nothing"):
        lockstep.wait()
    puppet.vanish()


def test_the_names_of_envs_outlive_what_comes_after_their_message(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=2)
    puppet = Puppet(lockstep.url, (0.0, 1.0)).infer()
    lockstep.reset()
    for fill in (b"\xff", b"\x7f", b"\x01"):
        assert puppet.websocket.ping(fill * 125).wait(20.0)  # while the trainer learns, over the receive buffer
    lockstep.send(np.array([[0.25], [0.5]], np.float32))
    message = unpack(puppet.websocket.recv(20.0))
    assert message["data"]["env_ids"].tolist() == [0, 1]
    assert message["data"]["action"][0].ravel().tolist() == [0.25, 0.5]
    puppet.leave()


def test_abandoning_a_forked_copy_waits_for_no_lock_of_the_keeper(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge()
    hub = lockstep._hub
    with hub._life_line._done._cond:  # type: ignore[attr-defined] # as if the fork had come while the keeper held it
        thread = threading.Thread(target=hub.abandon, daemon=True)
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("seed", [-5, 1 << 63, 1.5, "1", True], ids=repr)
def test_a_seed_that_no_env_takes_is_refused_before_anything_is_sent(make_bridge: Any, seed: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=2)
    puppet = Puppet(lockstep.url, (0.0, 1.0)).infer(env_spec=knows_reset())
    lockstep.reset()
    with pytest.raises(ValueError, match=r"^seeds: slot 1 must have an int"):
        lockstep.reset(seeds=[None, seed])
    lockstep.send(np.zeros((2, *ACTIONS.shape), np.float32))  # the env is as it was
    puppet.step()
    assert lockstep.wait().rewards.tolist() == [1.0, 1.0]
    puppet.leave()


def test_options_that_cannot_travel_are_refused_before_anything_is_sent(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1)
    puppet = Puppet(lockstep.url).infer(env_spec=knows_reset())
    lockstep.reset()
    with pytest.raises(ValueError, match=r"^options: those of slot 0 cannot travel"):
        lockstep.reset(options=[{"callback": print}])
    lockstep.send(ZERO)
    puppet.step()
    assert lockstep.wait().rewards.tolist() == [1.0]
    puppet.leave()


def test_waiting_for_clients_in_vain_can_be_tried_again(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1, connect_timeout=0.1)
    with pytest.raises(ConnectTimeout):
        lockstep.connect()
    puppet = Puppet(lockstep.url).infer()
    wait_until(lambda: lockstep._roster.filled)
    assert lockstep.reset().observations[0].tolist() == [[0.0, 0.0, 0.0]]
    puppet.leave()


def test_a_warning_is_given_once_however_often_clients_come_back(make_bridge: Any, caplog: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1)
    for _ in range(3):
        puppet = Puppet(lockstep.url).infer()
        lockstep.reset(seeds=[1])
        puppet.vanish()
        wait_until(lambda: lockstep._roster.losses)
    assert caplog.text.count("cannot reach its envs") == 1


@pytest.mark.parametrize("announces", [False, True], ids=["announces nothing", "announces its space"])
def test_a_client_of_another_observation_space_is_an_error_at_once(make_bridge: Any, announces: bool) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1, observation_space=gym.spaces.Box(-1, 1, (4,), np.float32))
    spec = knows_reset(observation_space=space_to_wire(OBSERVATIONS)) if announces else None
    puppet = Puppet(lockstep.url).infer(**({"env_spec": spec} if spec else {}))
    with pytest.raises(SpaceError, match="does not fit"):
        lockstep.connect()
    assert puppet.close_seen() == STOP
    puppet.leave()


@pytest.mark.parametrize(
    "options",
    [
        {"observation_space": gym.spaces.Graph(gym.spaces.Discrete(2), None)},
        {"action_space": gym.spaces.Text(3)},
        {"action_space": gym.spaces.Discrete(2), "action_horizon": 4},
    ],
    ids=["observation_space", "action_space", "action_horizon"],
)
def test_a_space_that_cannot_travel_is_told_when_it_is_given(make_bridge: Any, options: dict[str, Any]) -> None:
    with pytest.raises(SpaceError):
        make_bridge(**options)


def test_what_the_trainer_writes_into_an_observation_stays_with_the_trainer(make_bridge: Any) -> None:
    lockstep: Lockstep = make_bridge(num_envs=1)
    puppet = Puppet(lockstep.url).infer()
    lockstep.reset().observations[0][:] = 777
    assert lockstep.reset().observations[0].tolist() == [[0.0, 0.0, 0.0]]
    puppet.vanish()
    other = Puppet(lockstep.url, (5.0,)).infer()
    wait_until(lambda: lockstep.client_losses)
    lockstep.send(ZERO)
    step = lockstep.wait()
    assert step.observations[0].tolist() == [[0.0, 0.0, 0.0]]
    assert step.standing()[0].tolist() == [[5.0, 0.0, 0.0]]
    other.leave()
