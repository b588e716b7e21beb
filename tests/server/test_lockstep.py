"""Vector steps and resets over real sockets: results, refusals, poison, close."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges.errors import (
    ConnectTimeout,
    EnvPoisoned,
    RaggedClientError,
    SpaceError,
    StepTimeout,
)
from plugrl_bridges.server.episodes import EpisodeLog
from tests.support import RESYNC, STOP, Puppet, knows_reset, observe, peers, wait_for_log, wait_until
from tests.transport.ends import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_bridges.server.lockstep import Lockstep
    from plugrl_bridges.server.result import StepResult

    MakeBridge = Callable[..., Lockstep]


def actions(env: Lockstep, value: float = 0.5) -> Any:
    return np.full((env.num_envs, 1), value, np.float32)


def stepping(env: Lockstep, value: float = 0.5) -> Task[StepResult]:
    """Send a step here, and wait for it in a thread."""
    env.send(actions(env, value))
    return Task(env.wait)


# Connecting ---------------------------------------------------------------------------------------------------------


def test_the_first_observations_are_those_of_the_first_infers(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=3)
    first, second = Puppet(env.url, (1, 2)).infer(), Puppet(env.url, (7,)).infer()
    began = env.reset()
    assert began.observations[0].tolist() in ([[1, 0, 0], [2, 0, 0], [7, 0, 0]], [[7, 0, 0], [1, 0, 0], [2, 0, 0]])
    assert (began.reset_parts, began.lost) == ([], ())
    first.leave()
    second.leave()


def test_ranked_clients_have_the_same_slots_in_every_order_of_arrival(make_bridge: MakeBridge) -> None:
    for ranks in ([0, 1, 2], [2, 0, 1]):
        env = make_bridge(num_envs=3)
        for rank in ranks:
            Puppet(env.url, (rank,)).infer(env_spec={"rank": rank})
        assert env.reset().observations[0][:, 0].tolist() == [0, 1, 2]


def test_without_a_number_the_envs_of_the_first_client_are_taken(make_bridge: MakeBridge) -> None:
    env = make_bridge()
    Puppet(env.url, (1, 2, 3)).infer()
    env.connect()
    assert env.num_envs == 3


def test_too_few_clients_in_time_are_a_connect_timeout_that_says_how_to_start_one(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=4, connect_timeout=0.3)
    puppet = Puppet(env.url, (1,)).infer()
    with pytest.raises(ConnectTimeout) as raised:
        env.connect()
    for part in (
        env.url,
        "1 of 4 envs are here",
        puppet.address,
        f"plugrl-env-client --env-id <id> --num-envs 3 --url {env.url}",
    ):
        assert part in str(raised.value)


def test_a_client_whose_spaces_do_not_fit_is_an_error_while_slots_are_open(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, action_space=None)
    puppet = Puppet(env.url).infer()
    with pytest.raises(SpaceError, match=r"does not fit.*pass action_space="):
        env.connect()
    assert puppet.close_seen() == STOP


def test_a_later_client_whose_spaces_do_not_fit_is_sent_away_alone(
    make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    spec = {"action_space": {"type": "Discrete", "n": 3, "start": 0, "dtype": "<i8"}}
    stranger = Puppet(env.url).infer(env_spec=spec)
    assert stranger.close_seen() == STOP  # to come back would not help it
    wait_for_log(caplog, "does not fit: its action space is Discrete(3)")
    task = stepping(env)
    puppet.step()
    assert task.result().rewards.tolist() == [1]


def test_clients_that_left_before_the_run_decide_nothing(make_bridge: MakeBridge) -> None:
    env = make_bridge(observation_space=None)
    data = {"images": {}, "states": {"x": np.zeros((2, 9))}, "text": ""}
    leftover = Puppet(env.url, (1, 2)).infer(env_spec={"group_num_envs": 4}, data=data)
    wait_until(lambda: env._roster.num_envs == 4)
    leftover.leave()
    wait_until(lambda: env._roster.num_envs is None)
    Puppet(env.url, (5,)).infer()
    assert env.reset().observations[0].tolist() == [[5, 0, 0]]


# Steps --------------------------------------------------------------------------------------------------------------


def test_every_env_gets_its_own_action_and_every_slot_its_own_result(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=3)
    puppets = [Puppet(env.url, (1, 2)).infer(env_spec={"rank": 0}), Puppet(env.url, (3,)).infer(env_spec={"rank": 1})]
    env.reset()
    env.send(np.array([[0.1], [0.2], [0.3]], np.float32))
    task = Task(env.wait)
    got = [puppets[0].step(2.0), puppets[1].step(3.0)]
    assert [action.tolist() for action in got] == [[[[np.float32(0.1)], [np.float32(0.2)]]], [[[np.float32(0.3)]]]]
    step = task.result()
    assert step.standing()[0].tolist() == observe((1, 2, 3), 0, 1).tolist()
    assert step.rewards.tolist() == [2, 2, 3]
    assert not step.terminated.any()
    assert not step.truncated.any()
    assert not step.begun.any()
    assert step.infos == [{}, {}, {}]


def test_the_end_of_an_episode_gives_both_observations(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    task = stepping(env)
    puppet.action()
    puppet.t = 1
    puppet.feed_back(terminated=np.array([False, True]), info={"x": np.array([5, 6])})
    data = puppet.observation()
    data["states"]["obs"][1] = [2, 1, 0]
    puppet.infer(data=data)
    step = task.result()
    assert step.standing()[0].tolist() == [[1, 0, 1], [2, 1, 0]]
    assert step.terminated.tolist() == [False, True]
    assert step.begun.tolist() == [False, True]
    assert step.observations[0].tolist() == [[1, 0, 1], [2, 0, 1]]
    assert step.infos == [{"x": 5}, {"x": 6}]
    assert step.lost == ()


def test_results_are_the_callers_and_never_written_again(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    kept = [env.reset().observations[0]]
    for _ in range(6):
        task = stepping(env)
        puppet.step()
        step = task.result()
        kept.append(step.observations[0])
        step.rewards += 100
    assert [array[0, 2] for array in kept] == [0, 1, 2, 3, 4, 5, 6]
    assert all(array.flags.writeable for array in kept)


@pytest.mark.parametrize("wrong", [np.zeros((2, 1)), np.zeros(1), np.array([[np.nan]]), np.array([["a"]])], ids=str)
def test_a_wrong_action_is_refused_and_nothing_is_sent(make_bridge: MakeBridge, wrong: Any) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    with pytest.raises(ValueError, match="action"):
        env.send(wrong)
    task = stepping(env, 0.25)
    assert puppet.step().tolist() == [[[0.25]]]
    task.result()


def test_a_step_before_the_first_reset_is_refused(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    Puppet(env.url).infer()
    env.connect()
    with pytest.raises(EnvPoisoned, match="reset"):
        env.send(actions(env))
    with pytest.raises(EnvPoisoned, match="no step is in flight"):
        env.wait()


def test_two_sends_in_a_row_are_refused_and_the_first_goes_on(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    task = stepping(env)
    with pytest.raises(EnvPoisoned, match="in flight already"):
        env.send(actions(env))
    puppet.step()
    assert task.result().rewards.tolist() == [1]


def test_a_chunk_travels_time_first_and_its_length_is_the_clients(make_bridge: MakeBridge, tmp_path: Any) -> None:
    env = make_bridge(num_envs=2, action_horizon=3, episode_log=tmp_path / "episodes.csv")
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    assert puppet.metadata["data"]["action_horizon"] == 3
    chunk = np.arange(6, dtype=np.float32).reshape(2, 3, 1)  # [slots, H, 1]
    env.send(chunk)
    task = Task(env.wait)
    ended = np.array([True, False])
    record = {"r": np.array([9.0, 0]), "l": np.array([2, 0]), "s": ended, "mask": ended}
    got = puppet.action()
    puppet.feed_back(4.0, terminated=ended, info={"episode": record})
    puppet.infer()
    assert got[..., 0].tolist() == [[0, 3], [1, 4], [2, 5]]  # [H, n]
    assert task.result().lengths == {0: 2}
    assert (tmp_path / "episodes.csv").read_text().splitlines()[1].split(",")[:5] == [
        "0",
        "0",
        "4.0",
        "2",
        "terminated",
    ]


def test_a_client_with_ragged_chunks_is_refused_at_once_with_what_to_do(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2, action_horizon=4, timeout=1000)
    puppet = Puppet(env.url, (1, 2)).infer()
    env.reset()
    env.send(np.zeros((2, 4, 1), np.float32))
    task = Task(env.wait)
    puppet.action()
    only: dict[str, Any] = {"env_indices": np.array([0]), "step_ids": np.array([0])}
    puppet.feed_back(
        **only, obs=puppet.observation(slice(1)), rewards=np.ones(1, np.float32), terminated=np.zeros(1, bool),
        truncated=np.zeros(1, bool),
    )  # fmt: skip
    puppet.infer(**only, data=puppet.observation(slice(1)))
    with pytest.raises(RaggedClientError) as raised:
        task.result()  # which does not wait for the timeout
    for part in (
        "[4.3]",
        puppet.address,
        "envs [0] alone",
        "one env per connection",
        "action_horizon=1",
    ):
        assert part in str(raised.value)
    assert puppet.close_seen() == STOP
    with pytest.raises(EnvPoisoned):
        env.send(np.zeros((2, 4, 1), np.float32))


def test_feedback_for_an_env_that_holds_no_action_is_dropped_with_a_warning(
    make_bridge: MakeBridge, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    task = stepping(env)
    puppet.action()
    two: dict[str, Any] = {"env_indices": np.array([0, 9]), "step_ids": np.array([0, 0])}
    states = np.array([[0, 0, 1], [9, 9, 9]], np.float32)
    puppet.feed_back(
        **two, obs={"images": {}, "states": {"obs": states}, "text": ""}, rewards=np.array([1, 99], np.float32),
        terminated=np.array([False, True]), truncated=np.zeros(2, bool),
    )  # fmt: skip
    puppet.t = 1
    puppet.infer()
    step = task.result()
    assert step.rewards.tolist() == [1]
    assert step.standing()[0].tolist() == [[0, 0, 1]]
    assert not step.terminated.any()
    assert f"[7.6] dropped feedback of {puppet.address} for envs [9]" in caplog.text


# Resets -------------------------------------------------------------------------------------------------------------


def test_a_seeded_reset_reaches_every_env_once_with_its_options(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=3)
    puppets = [
        Puppet(env.url, (1, 2)).infer(env_spec=knows_reset(rank=0)),
        Puppet(env.url, (3,)).infer(env_spec=knows_reset(rank=1)),
    ]
    options = [{"a": 1}, None, {"b": [1, 2]}]
    task = Task(lambda: env.reset([5, None, 7], options))
    first, second = puppets[0].obey_reset(), puppets[1].obey_reset()
    assert (first["seed"], first["options"]) == ([5, None], [{"a": 1}, None])
    assert (second["seed"], second["options"]) == ([7], [{"b": [1, 2]}])
    assert task.result().standing()[0].tolist() == observe((1, 2, 3), 1, 0).tolist()
    step = stepping(env)
    for puppet in puppets:
        puppet.step()
        assert puppet.reset is None
    step.result()


def test_a_reset_in_mid_episode_is_a_real_one_where_the_client_knows_it(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer(env_spec=knows_reset())
    env.reset()
    task = stepping(env)
    puppet.step()
    task.result()
    reset = Task(env.reset)
    assert puppet.obey_reset()["seed"] == [None]
    assert reset.result().standing()[0].tolist() == [[0, 1, 0]]


def test_a_reset_that_a_client_cannot_do_is_said_once_and_its_episode_goes_on(
    make_bridge: MakeBridge,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Any,
) -> None:
    env = make_bridge(num_envs=1, episode_log=tmp_path / "episodes.csv")
    puppet = Puppet(env.url).infer()
    env.reset([3])
    task = stepping(env)
    puppet.step(2.0)
    task.result()
    for _ in range(3):
        [observations] = env.reset(None, [{"x": 1}]).observations
        assert observations.tolist() == [[0, 0, 1]]
    assert caplog.text.count("the seed of reset() cannot reach its envs") == 1
    assert caplog.text.count("the options of reset() cannot reach its envs") == 1
    assert caplog.text.count("reset() lets its running episodes go on") == 1
    task = stepping(env)
    puppet.step(3.0, terminated=True)
    task.result()
    assert (tmp_path / "episodes.csv").read_text().splitlines()[1].split(",")[2:4] == ["5.0", "2"]  # all of it


def test_a_reset_with_a_step_in_flight_drops_its_result(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer(env_spec=knows_reset())
    env.reset()
    env.send(actions(env))
    task = Task(env.reset)
    puppet.step(7.0)
    puppet.obey_reset()
    assert task.result().standing()[0].tolist() == [[0, 1, 0]]
    step = stepping(env)
    puppet.step(1.0)
    assert step.result().rewards.tolist() == [1]


def test_seeds_and_options_are_one_per_slot(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=2)
    Puppet(env.url, (1, 2)).infer()
    with pytest.raises(ValueError, match="seeds: expected one per slot, 2, got 1"):
        env.reset([1])
    with pytest.raises(ValueError, match="options: expected one per slot, 2, got 3"):
        env.reset(None, [None] * 3)
    env.reset()


# Failures and their poison ------------------------------------------------------------------------------------------


def test_a_silent_client_is_a_timeout_that_tells_everything_and_hears_feedback_timeout(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=3, timeout=0.4)
    good, silent = (
        Puppet(env.url, (1,)).infer(env_spec={"rank": 0}),
        Puppet(env.url, (2, 3)).infer(env_spec={"rank": 1}),
    )
    env.reset()
    env.send(actions(env))
    good.step()
    silent.action()
    with pytest.raises(StepTimeout) as raised:
        env.wait()
    for part in (silent.address, "1 of 3 envs", "slots 1-2", "last message: infer", "Feedback timeout", env.url):
        assert part in str(raised.value)
    assert silent.close_seen() == (1001, "Feedback timeout")
    with pytest.raises(EnvPoisoned, match="StepTimeout"):
        env.send(actions(env))


def test_with_raise_a_timeout_is_raised_at_once_and_a_late_reply_never_answers(
    make_bridge: MakeBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_bridge(num_envs=1, timeout=0.3, on_client_loss="raise")
    puppet = Puppet(env.url).infer()
    env.reset()
    task = stepping(env)
    puppet.action()
    end = env._hub.end

    def reply_then_end(*args: Any) -> None:
        puppet.feed_back(99.0).infer()  # it is on its way when the server gives up
        end(*args)

    monkeypatch.setattr(env._hub, "end", reply_then_end)
    with pytest.raises(StepTimeout, match=r"took longer than 0\.3 s: 0 of 1 envs answered; missing: slots 0 at"):
        task.result()
    assert puppet.close_seen() == (1001, "Feedback timeout")
    for call in (lambda: env.send(actions(env)), env.wait, env.reset, env.connect):
        with pytest.raises(EnvPoisoned, match="make a new one"):
            call()


def test_with_truncate_a_silent_client_is_replaced_and_its_late_reply_is_not_used(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, timeout=0.5)
    silent = Puppet(env.url, (1,)).infer()
    env.reset()
    other = Puppet(env.url, (2,)).infer()  # a spare, since the slot may not stay vacant for longer than the timeout
    wait_until(lambda: len(peers(env)) == 2)
    task = stepping(env)
    silent.action()
    assert silent.close_seen() == (1001, "Feedback timeout")
    step = task.result()
    assert (step.rewards.tolist(), step.truncated.tolist(), step.lost) == ([0], [True], (0,))
    assert step.standing()[0].tolist() == [[2, 0, 0]]
    task = stepping(env)
    other.step(4.0)
    assert task.result().rewards.tolist() == [4]


def test_an_interrupted_wait_poisons(make_bridge: MakeBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_bridge(num_envs=1)
    puppet = Puppet(env.url).infer()
    env.reset()
    env.send(actions(env))

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(env._hub, "poll_peer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            env.wait()
    with pytest.raises(EnvPoisoned, match="KeyboardInterrupt"):
        env.wait()
    env.close()
    assert puppet.close_seen() == STOP


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_send_that_fails_half_way_poisons(
    make_bridge: MakeBridge, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    env = make_bridge(num_envs=2)
    puppets = [Puppet(env.url, (tag,)).infer() for tag in (1, 2)]
    env.reset()
    send = env._hub.send
    calls: list[int] = []

    def fail_second(*args: Any) -> bool:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return send(*args)

    monkeypatch.setattr(env._hub, "send", fail_second)
    with pytest.raises(error):
        env.send(actions(env))
    with pytest.raises(EnvPoisoned, match=error.__name__):  # half of the envs have no action: no result may come of it
        env.wait()
    env.close()
    assert [puppet.close_seen() for puppet in puppets] == [STOP, STOP]


def test_an_episode_log_that_cannot_be_written_is_raised_and_poisons(
    make_bridge: MakeBridge,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    env = make_bridge(num_envs=1, episode_log=tmp_path / "episodes.csv")
    puppet = Puppet(env.url).infer()
    env.reset()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EpisodeLog, "add", full)
    task = stepping(env)
    puppet.step(terminated=True)
    with pytest.raises(OSError, match="No space left"):
        task.result()
    with pytest.raises(EnvPoisoned, match="No space left"):
        env.send(actions(env))


def test_a_long_step_is_a_warning_that_says_who_is_missing(
    make_bridge: MakeBridge, timing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    timing(first_report_s=0.1)
    env = make_bridge(num_envs=2)
    slow, quick = Puppet(env.url, (1,)).infer(env_spec={"rank": 0}), Puppet(env.url, (2,)).infer(env_spec={"rank": 1})
    env.reset()
    task = stepping(env)
    quick.step()
    wait_for_log(caplog, "still waiting")
    slow.step()
    assert task.result().rewards.tolist() == [1, 1]
    assert f"slots 0 at {slow.address}" in caplog.text


# Close --------------------------------------------------------------------------------------------------------------


def test_close_says_stop_to_every_client_and_is_idempotent(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1)
    seated, spare = Puppet(env.url).infer(), None
    env.reset()
    spare = Puppet(env.url).infer()
    newcomer = Puppet(env.url)
    task = Task(env.close)
    assert [seated.close_seen(), spare.close_seen(), newcomer.close_seen()] == [STOP, STOP, STOP]
    task.result()
    env.close()
    with pytest.raises(EnvPoisoned, match="closed"):
        env.reset()


def test_close_in_the_middle_of_a_step_of_another_thread_is_heard_on_both_sides(make_bridge: MakeBridge) -> None:
    env = make_bridge(num_envs=1, timeout=1000)
    puppet = Puppet(env.url).infer()
    env.reset()
    task = stepping(env)
    puppet.action()
    closing = Task(env.close)
    assert puppet.close_seen() == STOP
    closing.result()
    with pytest.raises(EnvPoisoned, match="closed"):
        task.result()


def test_a_wait_for_clients_is_told_at_growing_intervals_and_ended_by_close(
    make_bridge: MakeBridge, timing: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    timing(first_report_s=0.01)
    env = make_bridge(num_envs=1, connect_timeout=None)
    started = time.monotonic()
    task = Task(env.connect)
    wait_until(lambda: caplog.text.count("waiting for env clients at") >= 4)
    env.close()
    with pytest.raises(EnvPoisoned, match="closed"):
        task.result()
    # One report at 0.01, 0.02, 0.04 s and so on.
    assert caplog.text.count("waiting for env clients at") <= 2 + math.log2((time.monotonic() - started) / 0.01)


def test_close_inside_a_wait_of_the_same_thread_ends_it(
    make_bridge: MakeBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler does that calls ``close``."""
    env = make_bridge(num_envs=2)
    puppets = [Puppet(env.url, (tag,)).infer() for tag in (1, 2)]
    env.reset()
    env.send(actions(env))
    poll = env._hub.poll

    def handler_runs(timeout_s: float) -> bool:
        monkeypatch.setattr(env._hub, "poll", poll)
        closing = threading.Thread(target=lambda: [puppet.close_seen() for puppet in puppets])
        closing.start()
        env.close()
        closing.join()
        return poll(timeout_s)

    monkeypatch.setattr(env._hub, "poll", handler_runs)
    with pytest.raises(EnvPoisoned, match="closed"):
        env.wait()


def test_a_garbage_client_never_changes_what_another_sees(make_bridge: MakeBridge) -> None:
    """Two connections, one breaks the protocol in mid-run and comes back: the other's rows are as if it had not."""

    def run(*, disturbed: bool) -> list[Any]:
        env = make_bridge(num_envs=2)
        good, other = (
            Puppet(env.url, (1,)).infer(env_spec={"rank": 0}),
            Puppet(env.url, (2,)).infer(env_spec={"rank": 1}),
        )
        rows = [env.reset().observations[0][0].copy()]
        for number in range(8):
            task = stepping(env, 0.1 * number)
            rows.append(good.step(float(number), terminated=number % 3 == 2))
            if disturbed and number == 4:
                other.action()
                other.feed_back(info={"task": "pick"}, rewards=np.zeros(3, np.float32))
                assert other.close_seen() == RESYNC
                other = Puppet(env.url, (2,)).infer(env_spec={"rank": 1})
            else:
                other.step()
            step = task.result()
            assert step.lost == ((1,) if disturbed and number == 4 else ())
            rows += [step.standing()[0][0].copy(), step.rewards[0], step.terminated[0], step.truncated[0]]
        env.close()
        return [np.asarray(row).tolist() for row in rows]

    assert run(disturbed=True) == run(disturbed=False)
