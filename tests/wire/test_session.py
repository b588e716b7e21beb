from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plugrl_bridges.errors import EncodeError, LocalProtocolError, RemoteProtocolError
from plugrl_bridges.wire.codec import encode
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Message, Metadata, Observation
from plugrl_bridges.wire.session import TRANSITIONS, ClientSession, Due, Role, ServerSession
from tests.wire.strategies import FEATURES, action_for, actions, feedbacks, ids, infers, metadata, sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVERYTHING = Metadata({"features": FEATURES})


def observation(n: int) -> Observation:
    return Observation({}, {"s": np.zeros((n, 1))})


def infer(*names: int, reuse: list[bool] | None = None, **extra: Any) -> Infer:
    marks = None if reuse is None else np.array(reuse)
    rows = len(names) - sum(reuse or [])
    return Infer(observation(rows), ids(list(names)), ids([0] * len(names)), marks, **extra)


def feedback(*names: int, ended: tuple[int, ...] = (), info: dict[str, Any] | None = None) -> Feedback:
    m = len(names)
    terminated = np.array([name in ended for name in names], dtype=np.bool_)
    no = np.zeros(m, np.bool_)
    return Feedback(observation(m), ids(list(names)), ids([0] * m), np.zeros(m), terminated, no, info or {})


MESSAGES: dict[str, Message] = {
    "metadata": EVERYTHING,
    "infer": infer(0, 1),
    "action": action_for([0, 1]),
    "feedback": feedback(0, 1),
}


def advance(session: ServerSession | ClientSession, state: Due, *steps: Callable[[], object]) -> None:
    """Take the steps from the beginning of a connection until a state is reached."""
    for after, step in zip((Due.INFER, Due.ACTION, Due.FEEDBACK), steps, strict=True):
        if session.state is state:
            break
        step()
        assert session.state is after
    assert session.state is state


def server_in(state: Due, opening: Metadata = EVERYTHING) -> ServerSession:
    session = ServerSession()
    advance(
        session,
        state,
        lambda: session.open(opening),
        lambda: session.receive(sent(infer(0, 1))),
        lambda: session.answer(action_for([0, 1])),
    )
    return session


def client_in(state: Due, opening: Metadata = EVERYTHING) -> ClientSession:
    session = ClientSession()
    advance(
        session,
        state,
        lambda: session.receive(sent(opening)),
        lambda: session.infer(infer(0, 1)),
        lambda: session.receive(sent(action_for([0, 1]))),
    )
    return session


@contextmanager
def refused(clause: str, match: str | None = None) -> Iterator[None]:
    """Expect a message to be refused for a clause."""
    with pytest.raises(RemoteProtocolError, match=match) as caught:
        yield
    assert caught.value.clause == clause


def test_the_table_is_a_ring_of_all_states_and_messages() -> None:
    assert set(TRANSITIONS) == set(Due)
    assert {after for _, _, after in TRANSITIONS.values()} == set(Due) - {Due.METADATA}
    for state, (due, _, _) in TRANSITIONS.items():
        assert due.message_type == state.value


each_pair = pytest.mark.parametrize("kind", MESSAGES)
each_state = pytest.mark.parametrize("state", Due)


@each_state
@each_pair
def test_server_receives_only_what_is_due(state: Due, kind: str) -> None:
    session, message = server_in(state), MESSAGES[kind]
    due, sender, after = TRANSITIONS[state]
    if type(message) is due and sender is Role.CLIENT:
        found, dropped = session.receive(sent(message))
        assert (type(found), dropped, session.state) == (due, (), after)
    else:
        with refused("4.2", kind):
            session.receive(sent(message))


@each_state
@each_pair
def test_client_receives_only_what_is_due(state: Due, kind: str) -> None:
    session, message = client_in(state), MESSAGES[kind]
    due, sender, after = TRANSITIONS[state]
    if type(message) is due and sender is Role.SERVER:
        assert (type(session.receive(sent(message))), session.state) == (due, after)
    else:
        with refused("4.2", kind):
            session.receive(sent(message))


@each_state
@pytest.mark.parametrize("kind", ["metadata", "action"])
def test_server_sends_only_what_is_due(state: Due, kind: str) -> None:
    session, message = server_in(state), MESSAGES[kind]
    send: Any = session.open if kind == "metadata" else session.answer
    if type(message) is TRANSITIONS[state][0]:
        assert b"".join(send(message)) == sent(message)
        assert session.state is TRANSITIONS[state][2]
    else:
        with pytest.raises(LocalProtocolError):
            send(message)
        assert session.state is state


@each_state
@pytest.mark.parametrize("kind", ["infer", "feedback"])
def test_client_sends_only_what_is_due(state: Due, kind: str) -> None:
    session, message = client_in(state), MESSAGES[kind]
    send: Any = session.infer if kind == "infer" else session.feedback
    if type(message) is TRANSITIONS[state][0]:
        assert b"".join(send(message)) == sent(message)
        assert session.state is TRANSITIONS[state][2]
    else:
        with pytest.raises(LocalProtocolError, match=r"\[4\.2\] the client may not send"):
            send(message)
        assert session.state is state


@pytest.mark.parametrize("make", [server_in, client_in])
def test_garbage_and_text_frames_are_refused_in_every_state(
    make: Callable[[Due], ServerSession | ClientSession],
) -> None:
    for state in Due:
        for data, clause in ((b"\xc1", "3"), (b"\x80", "2"), ("{}", "1")):
            with refused(clause):
                make(state).receive(data)


def test_an_unencodable_message_changes_nothing() -> None:
    server, client = server_in(Due.METADATA), client_in(Due.INFER)
    with pytest.raises(EncodeError):
        server.open(Metadata({"policy": object()}))
    assert server.state is Due.METADATA
    with pytest.raises(EncodeError):
        client.infer(infer(0, env_spec={"env_id": 2**70}))
    assert client.state is Due.INFER
    client.infer(infer(0))


class TestServer:
    def test_knows_who_asked_and_who_holds_an_action(self) -> None:
        server = server_in(Due.INFER)
        assert (server.asked, server.holding) == (None, frozenset())
        server.receive(sent(infer(4, 2)))
        assert server.asked is not None
        assert server.asked.env_indices.tolist() == [4, 2]
        server.answer(action_for([4, 2]))
        assert server.holding == {2, 4}
        server.receive(sent(feedback(2)))
        assert server.holding == {4}

    @pytest.mark.parametrize(
        "action", [action_for([1, 0]), action_for([0]), action_for([0, 1, 2]), Action(None, np.zeros((1, 2)))]
    )
    def test_answers_exactly_the_envs_that_asked(self, action: Action) -> None:
        server = server_in(Due.ACTION)
        with pytest.raises(LocalProtocolError, match=r"\[5\.3\]"):
            server.answer(action)
        server.answer(action_for([0, 1]))

    @pytest.mark.parametrize("shape", [(1, 3, 2), (2,), (2, 1)])
    def test_answers_with_one_row_per_env(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(LocalProtocolError, match=r"\[5\.3\] an action for 2 envs"):
            server_in(Due.ACTION).answer(Action(ids([0, 1]), np.zeros(shape)))

    def test_feedback_may_name_other_envs_than_the_infer(self) -> None:
        server = server_in(Due.FEEDBACK)
        server.receive(sent(feedback(1)))
        server.receive(sent(infer(1)))
        server.answer(action_for([1]))
        message, dropped = server.receive(sent(feedback(0)))
        assert (message.env_indices.tolist(), dropped) == ([0], ())

    def test_an_env_that_holds_an_action_may_not_ask_again(self) -> None:
        server = server_in(Due.FEEDBACK)
        server.receive(sent(feedback(1)))
        with refused("4.3", "env 0 asks for a chunk"):
            server.receive(sent(infer(1, 0)))

    def test_rows_of_envs_without_an_action_are_dropped_with_their_info(self) -> None:
        server = server_in(Due.FEEDBACK)
        full = replace(
            feedback(7, 1, 8, ended=(8,), info={"k": np.arange(3)}),
            observation=Observation(
                {"i": np.arange(3, dtype=np.uint8).reshape(3, 1, 1, 1)},
                {"s": np.arange(3.0)},
                np.array(["a", "b", "c"]),
            ),
            rewards=np.array([1.0, 2.0, 3.0]),
            step_ids=ids([4, 5, 6]),
        )
        message, dropped = server.receive(sent(full))
        assert isinstance(message, Feedback)
        assert dropped == (7, 8)
        assert message.observation.text is not None
        assert message.info == {}
        rows = (
            message.env_indices,
            message.step_ids,
            message.rewards,
            message.observation.states["s"],
            message.observation.text,
        )
        assert [each.tolist() for each in rows] == [[1], [5], [2.0], [1.0], ["b"]]
        assert message.observation.images["i"].shape == (1, 1, 1, 1)
        assert server.holding == {0}

    def test_dropped_rows_may_not_be_reused(self) -> None:
        server = server_in(Due.FEEDBACK)
        server.receive(sent(feedback(0, 7)))
        with pytest.raises(RemoteProtocolError, match="env 7 is marked reuse, but it has no feedback"):
            server.receive(sent(infer(7, reuse=[True])))

    def test_a_feedback_of_none_but_strangers_is_an_empty_one(self) -> None:
        message, dropped = server_in(Due.FEEDBACK).receive(sent(feedback(8, 9)))
        assert (len(message.env_indices), dropped) == (0, (8, 9))

    def test_many_strangers_take_no_quadratic_time(self) -> None:
        names = list(range(20_000))
        server = server_in(Due.FEEDBACK)
        message, dropped = server.receive(sent(feedback(*names)))
        assert (message.env_indices.tolist(), dropped) == ([0, 1], tuple(names[2:]))

    def test_an_empty_feedback_needs_an_action_that_reset_every_env(self) -> None:
        with refused("5.4", "names no env"):
            server_in(Due.FEEDBACK).receive(sent(feedback()))
        server = server_in(Due.ACTION)
        server.answer(action_for([0, 1], reset=[0]))
        with pytest.raises(RemoteProtocolError, match="names no env"):
            server.receive(sent(feedback()))
        server = server_in(Due.ACTION)
        server.answer(action_for([0, 1], reset=[0, 1]))
        assert server.holding == frozenset()
        assert len(server.receive(sent(feedback()))[0].env_indices) == 0
        server.receive(sent(infer(0, 1)))

    def test_an_empty_feedback_after_a_reset_is_legal_while_others_hold_actions(self) -> None:
        server = server_in(Due.FEEDBACK)
        server.receive(sent(feedback(1)))
        server.receive(sent(infer(1)))
        server.answer(action_for([1], reset=[1]))
        server.receive(sent(feedback()))
        server.receive(sent(infer(1)))
        assert server.holding == {0}

    @pytest.mark.parametrize("reset", [[7], [0, 7]])
    def test_resets_only_envs_of_the_action(self, reset: list[int]) -> None:
        server = server_in(Due.ACTION)
        with pytest.raises(LocalProtocolError, match="seeded-reset"):
            server.answer(action_for([0, 1], reset=reset))
        server.answer(action_for([0, 1]))

    def test_resets_only_if_the_metadata_lists_it(self) -> None:
        with pytest.raises(LocalProtocolError, match="seeded-reset"):
            server_in(Due.ACTION, Metadata({})).answer(action_for([0, 1], reset=[0]))

    def test_reuse_only_if_the_metadata_lists_it(self) -> None:
        server = server_in(Due.FEEDBACK, Metadata({"features": ["env-spec"]}))
        server.receive(sent(feedback(0, 1)))
        with refused("10.1", "does not list"):
            server.receive(sent(infer(0, reuse=[True])))

    def test_reuse_survives_infers_and_ends_with_the_episode(self) -> None:
        server = server_in(Due.FEEDBACK)
        server.receive(sent(feedback(0, 1)))
        server.receive(sent(infer(0, 1, reuse=[True, False])))
        server.answer(action_for([0, 1]))
        server.receive(sent(feedback(0, 1, ended=(1,))))
        with pytest.raises(RemoteProtocolError, match="env 1 is marked reuse, but its episode ended"):
            server.receive(sent(infer(0, 1, reuse=[True, True])))

    def test_reuse_ends_with_a_reset(self) -> None:
        server = server_in(Due.FEEDBACK)
        server.receive(sent(feedback(0, 1)))
        server.receive(sent(infer(0, 1)))
        server.answer(action_for([0, 1], reset=[1]))
        server.receive(sent(feedback(0)))
        with pytest.raises(RemoteProtocolError, match="env 1 is marked reuse, but its episode ended or it was reset"):
            server.receive(sent(infer(0, 1, reuse=[False, True])))


class TestClient:
    def test_learns_metadata_and_features(self) -> None:
        client = client_in(Due.INFER, Metadata({"features": ["env-spec"], "server": "x"}))
        assert client.features == {"env-spec"}
        assert client.metadata.data["server"] == "x"

    def test_fills_in_the_env_ids_that_a_server_left_out(self) -> None:
        client = client_in(Due.INFER)
        client.infer(infer(5, 3))
        found = client.receive(sent(Action(None, np.zeros((1, 2, 1)))))
        assert isinstance(found, Action)
        assert found.env_ids is not None
        assert found.env_ids.tolist() == [5, 3]

    @pytest.mark.parametrize(
        "action",
        [
            action_for([1, 0]),
            action_for([0]),
            action_for([0, 2]),
            Action(None, np.zeros((1, 3, 1))),
            Action(None, np.zeros((2, 1))),
        ],
    )
    def test_refuses_an_action_for_other_envs(self, action: Action) -> None:
        with refused("5.3", "in this order"):
            client_in(Due.ACTION).receive(sent(action))

    @pytest.mark.parametrize(("horizon", "legal"), [(1, True), (3, True), (4, False)])
    def test_refuses_more_steps_than_announced(self, horizon: int, legal: bool) -> None:
        client = client_in(Due.ACTION, Metadata({"action_horizon": 3}))
        action = sent(action_for([0, 1], horizon))
        if legal:
            client.receive(action)
        else:
            with refused("5.1", "4 steps"):
                client.receive(action)

    @pytest.mark.parametrize("announced", [None, "3", 2.5])
    def test_takes_a_horizon_that_is_no_int_as_not_known(self, announced: object) -> None:
        client_in(Due.ACTION, Metadata({"action_horizon": announced})).receive(sent(action_for([0, 1], 9)))

    def test_refuses_a_reset_that_the_metadata_does_not_list(self) -> None:
        with refused("seeded-reset", "does not list"):
            client_in(Due.ACTION, Metadata({})).receive(sent(action_for([0, 1], reset=[0])))

    def test_refuses_a_reset_of_an_env_that_did_not_ask(self) -> None:
        wire = action_for([0, 1], reset=[7]).to_wire()
        del wire["data"]["env_ids"]
        with refused("seeded-reset", "names an env that the infer does not"):
            client_in(Due.ACTION).receive(b"".join(encode(wire)))

    def test_uses_only_what_is_listed(self) -> None:
        client = client_in(Due.INFER, Metadata({}))
        for message in (infer(0, reuse=[False]), infer(0, env_spec={}), infer(0, reset_info={"k": ids([1])})):
            with pytest.raises(LocalProtocolError, match="does not list"):
                client.infer(message)
        assert client.marks(infer(0)) is None
        client.infer(infer(0))

    def test_marks_what_may_be_reused_and_nothing_else(self) -> None:
        client = client_in(Due.FEEDBACK)
        assert client.marks(infer(0, 1)) is None
        client.feedback(feedback(0, 1, ended=(1,)))
        marks = client.marks(infer(0, 1))
        assert marks is not None
        assert marks.tolist() == [True, False]
        assert client.marks(infer(1)) is None
        with pytest.raises(LocalProtocolError, match=r"\[10\.1\] infer: env 1 is marked reuse"):
            client.infer(infer(0, 1, reuse=[True, True]))
        client.infer(infer(0, 1, reuse=[True, False]))

    def test_forgets_an_env_that_was_reset(self) -> None:
        client = client_in(Due.FEEDBACK)
        client.feedback(feedback(0, 1))
        client.infer(infer(0, 1, reuse=[True, True]))
        client.receive(sent(action_for([0, 1], reset=[1])))
        client.feedback(feedback(0))
        marks = client.marks(infer(0, 1))
        assert marks is not None
        assert marks.tolist() == [True, False]


few = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)


@settings(deadline=None, max_examples=200)
@given(metadata, st.lists(st.integers(0, 9), max_size=12), st.data())
def test_a_server_accepts_exactly_the_legal_sequences(opening: Metadata, story: list[int], data: st.DataObject) -> None:
    """Hold a session to the clauses themselves, said here a second time."""
    server = ServerSession()
    server.open(opening)
    due, holding, last = "infer", set[int](), dict.fromkeys(range(3), "nothing")
    for dice in story:
        either: st.SearchStrategy[Any] = infers(few) if (due == "infer") != (dice == 9) else feedbacks(few)
        message: Infer | Feedback = data.draw(either)
        if isinstance(message, Infer) and message.reuse is not None and dice < 5:
            n = len(message.env_indices)
            message = replace(message, observation=observation(n), reuse=None)
        clause: str | None = None
        names = message.env_indices.tolist()
        if message.message_type != due:
            clause = "4.2"
        elif isinstance(message, Infer):
            marked = [] if message.reuse is None else message.env_indices[message.reuse].tolist()
            unlisted = message.reuse is not None and "reuse-feedback-obs" not in opening.features
            if unlisted or any(last[name] != "goes on" for name in marked):
                clause = "10.1"
            elif holding.intersection(names):
                clause = "4.3"
        if clause is not None:
            with refused(clause):
                server.receive(sent(message))
            return
        found, dropped = server.receive(sent(message))
        if isinstance(message, Infer):
            server.answer(action_for(names, data.draw(st.integers(1, 3))))
            holding.update(names)
            due = "feedback"
        else:
            assert isinstance(message, Feedback)
            assert dropped == tuple(name for name in names if name not in holding)
            assert found.env_indices.tolist() == [name for name in names if name in holding]
            ended = message.terminated | message.truncated
            after = dict(zip(names, np.where(ended, "ended", "goes on").tolist(), strict=True))
            last |= {name: after[name] for name in holding.intersection(names)}
            holding.difference_update(names)
            due = "infer"
        assert server.holding == holding


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 9), max_size=10), st.data())
def test_a_client_accepts_exactly_the_legal_sequences(story: list[int], data: st.DataObject) -> None:
    client = ClientSession()
    due, features, horizon = "metadata", frozenset[str](), None
    for dice in story:
        either: st.SearchStrategy[Any] = metadata if (due == "metadata") != (dice == 9) else actions(few)
        message: Metadata | Action = data.draw(either)
        asked: list[int] = []
        if due == "action":
            own = message.env_ids.tolist() if isinstance(message, Action) and message.env_ids is not None else []
            asked = own if own and dice < 8 else data.draw(few)
            client.infer(infer(*asked))
        clause: str | None = None
        if message.message_type != due:
            clause = "4.2"
        elif isinstance(message, Action) and message.env_ids is not None:
            if message.env_ids.tolist() != asked:
                clause = "5.3"
            elif horizon is not None and message.action.shape[0] > horizon:
                clause = "5.1"
            elif message.reset is not None and "seeded-reset" not in features:
                clause = "seeded-reset"
        if clause is not None:
            with refused(clause):
                client.receive(sent(message))
            return
        client.receive(sent(message))
        if isinstance(message, Metadata):
            due, features, horizon = "action", message.features, message.data.get("action_horizon")
        else:
            client.feedback(feedback(*asked))


class Pair(RuleBasedStateMachine):
    """Let a client step four counting envs for a server, over nothing but bytes; a wrong observation would be seen.

    An env's observation is a number that no other observation of the run has. The client leaves out what it may; the
    server puts the observations together again, and they must be those that the envs stand at.
    """

    ENVS = range(4)

    @initialize()
    def open(self) -> None:
        self.server, self.client = ServerSession(), ClientSession()
        self.now = 0
        self.standing = {env: self.fresh() for env in self.ENVS}
        self.held: dict[int, float] = {}
        self.stepping: set[int] = set()
        self.all_reset = False
        self.deliver(self.client, self.server.open(EVERYTHING))

    def fresh(self) -> float:
        self.now += 1
        return float(self.now)

    @staticmethod
    def deliver(to: ServerSession | ClientSession, buffers: list[Any]) -> Any:
        return to.receive(b"".join(buffers))

    def observe(self, names: list[int]) -> Observation:
        return Observation({}, {"s": np.array([self.standing[env] for env in names])})

    @precondition(lambda self: self.client.state is Due.INFER and len(self.stepping) < 4)
    @rule(data=st.data(), lean=st.booleans())
    def ask(self, data: st.DataObject, lean: bool) -> None:
        idle = sorted(set(self.ENVS) - self.stepping)
        names = data.draw(st.lists(st.sampled_from(idle), min_size=1, unique=True))
        whole = Infer(self.observe(names), ids(names), ids([0] * len(names)))
        marks = self.client.marks(whole) if lean else None
        if marks is not None:
            kept = [env for env, marked in zip(names, marks, strict=True) if not marked]
            whole = replace(whole, observation=self.observe(kept), reuse=marks)
        received, dropped = self.deliver(self.server, self.client.infer(whole))
        assert dropped == ()
        rows = iter(received.observation.states["s"].tolist())
        reuse = [False] * len(names) if received.reuse is None else received.reuse.tolist()
        seen = [self.held[env] if again else next(rows) for env, again in zip(names, reuse, strict=True)]
        assert seen == [self.standing[env] for env in names]

    @precondition(lambda self: self.server.state is Due.ACTION)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        assert self.server.asked is not None
        names = self.server.asked.env_indices.tolist()
        reset = data.draw(st.none() | st.lists(st.sampled_from(names), unique=True))
        found = self.deliver(self.client, self.server.answer(action_for(names, reset=reset)))
        again = [] if found.reset is None else found.reset.env_ids.tolist()
        self.standing |= {env: self.fresh() for env in again}
        self.stepping |= set(names) - set(again)
        self.all_reset = set(again) == set(names)

    @precondition(lambda self: self.client.state is Due.FEEDBACK)
    @rule(data=st.data())
    def feed_back(self, data: st.DataObject) -> None:
        least = 0 if self.all_reset else 1
        done = st.lists(st.sampled_from(sorted(self.stepping)), min_size=least, unique=True) if self.stepping else None
        names = [] if done is None else data.draw(done)
        self.standing |= {env: self.fresh() for env in names}
        ended = tuple(env for env in names if data.draw(st.booleans()))
        message = replace(feedback(*names, ended=ended), observation=self.observe(names))
        received, dropped = self.deliver(self.server, self.client.feedback(message))
        assert dropped == ()
        self.held |= dict(zip(received.env_indices.tolist(), received.observation.states["s"].tolist(), strict=True))
        self.standing |= {env: self.fresh() for env in ended}
        self.stepping -= set(names)

    @invariant()
    def ends_agree(self) -> None:
        assert self.server.state is self.client.state
        assert self.server.holding == self.stepping


TestPair = Pair.TestCase
TestPair.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
