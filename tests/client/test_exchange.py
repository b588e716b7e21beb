"""What is said on one connection, message by message [4], [5], [10]."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest

from plugrl_bridges import __version__
from plugrl_bridges.spaces import space_from_wire
from plugrl_bridges.wire.info import episode_records, split_info
from plugrl_bridges.wire.messages import ResetRequest
from tests.client.scripted import ALL_FEATURES, CountEnv, Fleet, Peer, run, serve_steps

if TYPE_CHECKING:
    from plugrl_bridges.wire.codec import Value


def plain(raw: bytes) -> Value:
    """Decode with the msgpack library alone: arrays are maps of their parts."""
    return msgpack.unpackb(raw, strict_map_key=False)


def array(value: np.ndarray[Any, Any]) -> dict[bytes, Any]:
    return {
        b"__ndarray__": True,
        b"data": value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": list(value.shape),
    }


def test_a_server_without_features_gets_plain_version_1() -> None:
    seen: list[Any] = []

    def script(peer: Peer) -> None:
        peer.metadata(protocol_version=1)
        seen.append(plain(peer.raw()))
        peer.act(_infer(2), np.zeros((1, 2, 1), np.float32))
        seen.extend([plain(peer.raw()), plain(peer.raw())])
        peer.stop()

    summary = run(Fleet(), script, num_envs=2)
    text = array(np.array(["", ""], "<U1"))

    def message(t: float) -> dict[str, Any]:
        states = {"obs": array(np.array([[t, 0], [t, 0]], np.float32))}
        return {"images": {}, "states": states, "text": text}

    names = array(np.array([0, 1]))
    assert seen[0] == {
        "message_type": "infer", "data": message(0), "env_indices": names, "step_ids": array(np.array([0, 0]))
    }  # fmt: skip
    assert seen[1] == {
        "message_type": "feedback",
        "env_indices": names,
        "step_ids": array(np.array([1, 1])),
        "data": {
            "obs": message(1),
            "rewards": array(np.array([1.25, 1.25], np.float32)),
            "terminated": array(np.array([False, False])),
            "truncated": array(np.array([False, False])),
            "info": {},
        },
    }
    assert seen[2] == {
        "message_type": "infer", "data": message(1), "env_indices": names, "step_ids": array(np.array([1, 1]))
    }  # fmt: skip
    assert (summary.episodes, summary.steps, summary.reason) == (0, 2, "server stop")


def _infer(n: int) -> Value:
    class _Named:
        env_indices = np.arange(n)

    return _Named()


def test_env_spec_says_what_is_known() -> None:
    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        spec = dict(infer.env_spec or {})
        assert space_from_wire(spec.pop("observation_space")) == CountEnv.observation_space
        assert space_from_wire(spec.pop("action_space")) == CountEnv.action_space
        assert spec == {
            "num_envs": 3, "group_num_envs": 12, "rank": 2, "client": "plugrl-bridges", "client_version": __version__,
            "features": [*ALL_FEATURES, "late-reset"],
        }  # fmt: skip
        assert split_info(infer.reset_info or {}, 3) == [{"reset_of": 0}] * 3
        _, infer = peer.zeros(infer)
        assert infer.env_spec is None
        assert infer.reset_info is None
        peer.stop()

    run(Fleet(), script, num_envs=3, rank=2, group_num_envs=12)


@pytest.mark.parametrize(("features", "dtype"), [((), "<f4"), (("env-spec",), "<f8")])
def test_rewards_are_float64_only_where_the_server_knows_them(features: tuple[str, ...], dtype: str) -> None:
    def script(peer: Peer) -> None:
        peer.metadata(*features)
        feedback, _ = peer.zeros(peer.infer())
        assert feedback.rewards.dtype.str == dtype
        peer.stop()

    run(Fleet(), script)


@pytest.mark.parametrize("truncates", [False, True])
def test_an_episodes_end(truncates: bool) -> None:
    fleet = Fleet({"length": 2, "truncates": truncates, "info": [{}, {"is_success": True}]}, {"length": 3})

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        feedback, infer = peer.zeros(peer.infer())
        assert infer.reuse is not None
        assert infer.reuse.tolist() == [True, True]
        assert "episode" not in feedback.info
        feedback, infer = peer.zeros(infer)
        # The terminal observation here, the reset observation in the infer [5.4].
        assert feedback.observation.states["obs"].tolist() == [[2, 0], [2, 0]]
        ended = [True, False]
        assert feedback.terminated.tolist() == ([False, False] if truncates else ended)
        assert feedback.truncated.tolist() == (ended if truncates else [False, False])
        record, other = episode_records(feedback.info, 2)
        assert record is not None
        assert (record.ret, record.length, record.success) == (3.5, 2, True)
        assert other is None
        assert {key: value.dtype.str for key, value in feedback.info["episode"].items()} == {
            "r": "<f8", "l": "<i8", "s": "|b1", "mask": "|b1"
        }  # fmt: skip
        assert infer.reuse is not None
        assert infer.reuse.tolist() == [False, True]
        assert infer.observation.states["obs"].tolist() == [[0, 1]]
        assert infer.step_ids.tolist() == [0, 2]
        assert split_info(infer.reset_info or {}, 2) == [{"reset_of": 1}, {}]
        feedback, infer = peer.zeros(infer)
        assert feedback.observation.states["obs"].tolist() == [[1, 1], [3, 0]]
        peer.stop()

    summary = run(fleet, script, num_envs=2)
    assert [env.resets for env in fleet.envs] == [2, 2]
    assert (summary.returns, summary.lengths) == ([3.5, 6.75], [2, 3])
    assert summary.mean_return == pytest.approx(5.125)


def test_without_reuse_every_observation_is_sent() -> None:
    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        for _ in range(3):
            feedback, infer = peer.zeros(infer)
            assert infer.reuse is None
            ended = feedback.terminated
            expected = np.where(ended[:, None], infer.observation.states["obs"], feedback.observation.states["obs"])
            assert np.array_equal(infer.observation.states["obs"], expected)
            assert infer.observation.states["obs"][ended, 0].tolist() == [0] * ended.sum()
        peer.stop()

    run(Fleet({"length": 2}), script, num_envs=2, reuse=False)


def test_a_chunk_ends_early_for_the_env_whose_episode_ends() -> None:
    fleet = Fleet({"length": 2}, {"length": 50})

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES, action_horizon=4)
        chunk = np.arange(8, dtype=np.float64).reshape(4, 2, 1)
        feedback, infer = peer.exchange(peer.infer(), chunk)
        assert feedback.rewards.tolist() == [1.25 + 2.25, 1.25 + 2.25 + 3.25 + 4.25]
        assert feedback.observation.states["obs"].tolist() == [[2, 0], [4, 0]]
        assert feedback.terminated.tolist() == [True, False]
        assert feedback.step_ids.tolist() == [1, 1]
        assert infer.step_ids.tolist() == [0, 1]
        assert feedback.info["episode"]["l"].tolist() == [2, 4]
        # A shorter chunk than the horizon is as good.
        feedback, infer = peer.exchange(infer, chunk[:1])
        assert feedback.rewards.tolist() == [1.25, 5.25]
        peer.stop()

    run(fleet, script, num_envs=2)
    assert [float(action[0]) for action in fleet.envs[0].actions] == [0, 2, 0]
    assert [float(action[0]) for action in fleet.envs[1].actions] == [1, 3, 5, 7, 1]


def test_seeds_at_the_first_reset_only() -> None:
    fleet = Fleet(*[{"length": 1}] * 2)
    run(fleet, serve_steps(1, features=()), num_envs=2, seed=100, rank=3)
    assert [value for env in fleet.envs for kind, value in env.calls if kind == "reset"] == [
        (106, None), (None, None), (107, None), (None, None)
    ]  # fmt: skip


def test_seeded_reset_of_some() -> None:
    fleet = Fleet()

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        _, infer = peer.zeros(peer.infer())
        request = ResetRequest(np.array([2, 0]), (7, None), ({"goal": 3}, None))
        feedback, infer = peer.exchange(infer, np.full((1, 3, 1), 9, np.float32), request)
        assert feedback.env_indices.tolist() == [1]
        assert feedback.rewards.tolist() == [2.25]
        assert feedback.observation.states["obs"].tolist() == [[2, 0]]
        assert infer.reuse is not None
        assert infer.reuse.tolist() == [False, True, False]
        assert infer.observation.states["obs"].tolist() == [[0, 1], [0, 1]]
        assert split_info(infer.reset_info or {}, 3) == [{"reset_of": 1}, {}, {"reset_of": 1}]
        assert infer.step_ids.tolist() == [0, 2, 0]
        peer.stop()

    summary = run(fleet, script, num_envs=3)
    assert fleet.envs[0].calls[-1] == ("reset", (None, None))
    assert fleet.envs[2].calls[-1] == ("reset", (7, {"goal": 3}))
    assert len(fleet.envs[0].actions) == 1
    assert (summary.episodes, summary.steps) == (0, 4)


def test_seeded_reset_of_all_reports_no_transition() -> None:
    fleet = Fleet()

    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        request = ResetRequest(np.array([0, 1]), (5, 6), (None, None))
        feedback, infer = peer.exchange(peer.infer(), np.zeros((1, 2, 1), np.float32), request)
        assert len(feedback.env_indices) == 0
        assert feedback.observation.states["obs"].shape == (0, 2)
        assert (feedback.rewards.shape, feedback.info) == ((0,), {})
        assert infer.reuse is None
        assert infer.observation.states["obs"].tolist() == [[0, 1], [0, 1]]
        _, infer = peer.zeros(infer)
        assert infer.reuse is not None
        peer.stop()

    run(fleet, script, num_envs=2)
    assert [env.calls[1] for env in fleet.envs] == [("reset", (5, None)), ("reset", (6, None))]
    assert [env.resets for env in fleet.envs] == [2, 2]


def test_infos_are_batched_and_what_cannot_travel_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    info = {"x": 1.5, "name": "pick", "nested": {"y": np.arange(2)}, "episode": {"r": 3.0}, "bad": object()}
    fleet = Fleet({"info": [info]}, {"info": [{"x": 2.5}]})

    def script(peer: Peer) -> None:
        peer.metadata()
        infer = peer.infer()
        for _ in range(3):
            feedback, infer = peer.zeros(infer)
            first, second = split_info(feedback.info, 2)
            assert first.pop("nested")["y"].tolist() == [0, 1]
            assert first == {"x": 1.5, "name": "pick", "episode": {"r": 3.0}}
            assert second == {"x": 2.5}
        peer.stop()

    with caplog.at_level(logging.WARNING):
        run(fleet, script, num_envs=2)
    assert [record.getMessage().split(" cannot")[0] for record in caplog.records] == ["info key 'bad'"]


def test_without_infos_only_the_episode_record_travels() -> None:
    def script(peer: Peer) -> None:
        peer.metadata(*ALL_FEATURES)
        infer = peer.infer()
        assert infer.reset_info is None
        feedback, infer = peer.zeros(infer)
        assert feedback.info == {}
        feedback, infer = peer.zeros(infer)
        assert list(feedback.info) == ["episode"]
        assert infer.reset_info is None
        peer.stop()

    run(Fleet({"length": 2, "info": [{"x": 1}]}), script, send_info=False)


def test_nothing_is_sent_before_the_metadata() -> None:
    def script(peer: Peer) -> None:
        with pytest.raises(TimeoutError):
            peer.ws.recv(timeout=0.3)
        peer.metadata()
        peer.infer()
        peer.stop()

    run(Fleet(), script)


def test_an_action_without_env_ids_is_in_the_infers_order() -> None:
    fleet = Fleet()

    def script(peer: Peer) -> None:
        from plugrl_bridges.wire.messages import Action  # noqa: PLC0415

        peer.metadata()
        peer.infer()
        peer.send(Action(None, np.array([[[3.0], [4.0]]])))
        peer.feedback()
        peer.stop()

    run(fleet, script, num_envs=2)
    assert [float(env.actions[0][0]) for env in fleet.envs] == [3, 4]


def test_feedback_and_infer_leave_in_one_send(monkeypatch: pytest.MonkeyPatch) -> None:
    from plugrl_bridges.transport import WebSocket  # noqa: PLC0415

    counts: list[int] = []
    send = WebSocket.send

    def counting(self: WebSocket, *messages: Value, **options: Any) -> None:
        counts.append(len(messages))
        send(self, *messages, **options)

    monkeypatch.setattr(WebSocket, "send", counting)
    run(Fleet(), serve_steps(2))
    assert counts == [1, 2, 2]
