"""The order of messages on one connection [4]: the server's and the client's state machine, as one table.

Bytes go in, events (validated messages) come out; messages go in, buffers come out. A session holds no socket, thread
or clock. ``server.hub`` and ``client`` drive it. An illegal message from the peer raises `RemoteProtocolError`, after
which the connection must be closed with ``plugrl-server-resync`` [7.2]; an illegal call of ours raises
`LocalProtocolError` and changes nothing.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from plugrl_bridges.errors import LocalProtocolError, RemoteProtocolError
from plugrl_bridges.wire.learned import LearnedParser
from plugrl_bridges.wire.learned_writer import LearnedWriter
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Message, Metadata, Observation
from plugrl_bridges.wire.reuse import ReuseRule, same_envs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plugrl_bridges.wire.arrays import Array, Buffer

__all__ = [
    "ENV_SPEC",
    "LATE_RESET",
    "REUSE_FEEDBACK_OBS",
    "SEEDED_RESET",
    "STEP_DIGEST",
    "TRANSITIONS",
    "ClientSession",
    "Due",
    "Role",
    "ServerSession",
]

REUSE_FEEDBACK_OBS = "reuse-feedback-obs"
ENV_SPEC = "env-spec"
SEEDED_RESET = "seeded-reset"
LATE_RESET = "late-reset"
STEP_DIGEST = "step-digest"


class Role(enum.Enum):
    """Which end of a connection a session stands for."""

    SERVER = "server"
    CLIENT = "client"


class Due(enum.Enum):
    """Which message is due next, seen from either end."""

    METADATA = "metadata"
    INFER = "infer"
    ACTION = "action"
    FEEDBACK = "feedback"


TRANSITIONS: Mapping[Due, tuple[type[Message], Role, Due]] = {
    # due             the only legal message, who sends it, what is due then
    Due.METADATA: (Metadata, Role.SERVER, Due.INFER),
    Due.INFER: (Infer, Role.CLIENT, Due.ACTION),
    Due.ACTION: (Action, Role.SERVER, Due.FEEDBACK),
    Due.FEEDBACK: (Feedback, Role.CLIENT, Due.INFER),
}
"""The whole of [4]: strict alternation. Whatever is not in here is illegal."""


class _Session:
    """What both ends keep: the state, the envs of the open chunk, the reuse rule."""

    role: Role

    def __init__(self) -> None:
        self.state = Due.METADATA
        self._parse = LearnedParser()
        self._encode = LearnedWriter()
        self._reuse = ReuseRule()
        self._asked: Infer | None = None

    def _receive(self, data: Buffer | str) -> Message:
        message = self._parse(data)
        due, sender, after = TRANSITIONS[self.state]
        if sender is self.role:
            raise RemoteProtocolError(
                f"{message.message_type} came while this side's {self.state.value} was due", clause="4.2"
            )
        if type(message) is not due:
            raise RemoteProtocolError(f"expected {self.state.value}, got {message.message_type}", clause="4.2")
        self.state = after
        return message

    def _send(self, message: Message) -> list[Buffer]:
        due, sender, after = TRANSITIONS[self.state]
        if sender is not self.role or type(message) is not due:
            raise LocalProtocolError(
                f"[4.2] the {self.role.value} may not send {message.message_type}: {self.state.value} is due"
            )
        buffers = self._encode(message)
        self.state = after
        return buffers


class ServerSession(_Session):
    """The training server's end of one connection.

    Call `open` for the first buffers to send, then `receive` for each message and `answer` for each infer.
    """

    role = Role.SERVER

    def __init__(self) -> None:
        super().__init__()
        self._features: frozenset[str] = frozenset()
        self._introduced = False  # whether its first infer came
        self._digested = False  # whether this client has announced there that it sends digests
        self._holding: set[int] = set()
        self._whole: Array | None = None  # in place of that set, if the envs of one whole infer hold actions
        self._all_reset = False  # every env of the last action was reset, so that its feedback may be empty

    def open(self, metadata: Metadata) -> list[Buffer]:
        """Return the buffers of the metadata; send them first [5.1]."""
        buffers = self._send(metadata)
        self._features = metadata.features
        return buffers

    @property
    def asked(self) -> Infer | None:
        """The infer that has no answer yet, if any."""
        return self._asked

    @property
    def holding(self) -> frozenset[int]:
        """Envs that hold an action and have not fed back."""
        return frozenset(self._holders())

    def receive(self, data: Buffer | str) -> tuple[Infer | Feedback, tuple[int, ...]]:
        """Accept one message of the client.

        Args:
            data: Payload of one binary frame, or the str of a text frame.

        Returns:
            The message, and the envs whose rows were dropped from a feedback since they hold no action here [7.6].

        Raises:
            RemoteProtocolError: close the connection with ``plugrl-server-resync``.
        """
        message = self._receive(data)
        if isinstance(message, Infer):
            self._check_infer(message)
            self._asked = message
            return message, ()
        feedback = cast("Feedback", message)  # the table admits nothing else
        self._check_digest(feedback)
        if not len(feedback.env_indices) and not self._all_reset:
            raise RemoteProtocolError("feedback: env_indices names no env, but actions are held", clause="5.4")
        if self._whole is not None and same_envs(self._whole, feedback.env_indices):
            self._whole = None
            self._reuse.note_feedback(feedback.env_indices, feedback.terminated, feedback.truncated)
            return feedback, ()
        names = feedback.env_indices.tolist()
        self._holders()
        strangers = () if self._holding.issuperset(names) else tuple(e for e in names if e not in self._holding)
        if strangers:
            feedback = _rows_of(feedback, np.array([env in self._holding for env in names], dtype=np.bool_))
        self._holding.difference_update(names)
        self._reuse.note_feedback(feedback.env_indices, feedback.terminated, feedback.truncated)
        return feedback, strangers

    def _holders(self) -> set[int]:
        """Return the set of the envs that hold an action, which is only made where it is needed."""
        if self._whole is not None:
            self._holding.update(self._whole.tolist())
            self._whole = None
        return self._holding

    def _check_digest(self, message: Infer | Feedback) -> None:
        if (message.digest is not None) is not self._digested:
            what, why = ("no digest", "this client announced") if self._digested else ("a digest", "was not agreed on")
            raise RemoteProtocolError(
                f"{message.message_type}: {what}, but the feature {why}: a client that sends digests has it among the "
                "features of its env_spec, and sends them with each infer and feedback if the metadata lists it",
                clause="step-digest",
            )

    def _check_infer(self, infer: Infer) -> None:
        if not self._introduced:  # what a later env_spec says does not count: nobody gets out of the check by it
            self._introduced = True
            announced = (infer.env_spec or {}).get("features")
            self._digested = STEP_DIGEST in self._features and isinstance(announced, list) and STEP_DIGEST in announced
        self._check_digest(infer)
        if infer.reuse is not None:
            if REUSE_FEEDBACK_OBS not in self._features:
                raise RemoteProtocolError("infer: reuse, but the metadata does not list the feature", clause="10.1")
            self._reuse.check(infer.env_indices, infer.reuse)
        holders = self._holders()
        holding = holders.intersection(infer.env_indices.tolist()) if holders else ()
        if holding:
            raise RemoteProtocolError(
                f"infer: env {min(holding)} asks for a chunk, but has fed nothing back for the one it holds",
                clause="4.3",
            )

    def answer(self, action: Action) -> list[Buffer]:
        """Return the buffers of the answer to the open infer.

        Raises:
            LocalProtocolError: if no infer is open; if ``env_ids`` is not the infer's ``env_indices`` in order, or the
                array has another number of envs [5.3]; or if it resets what it may not.
        """
        asked, names = self._asked, action.env_ids
        if asked is None or names is None or not same_envs(names, asked.env_indices):
            raise LocalProtocolError("[5.3] an action answers the open infer's envs, in its order")
        if action.action.ndim < 2 or action.action.shape[1] != len(names):
            raise LocalProtocolError(
                f"[5.3] an action for {len(names)} envs has the shape [H, {len(names)}, *da], got "
                f"{list(action.action.shape)}"
            )
        reset: set[int] = set()
        if action.reset is not None:
            reset.update(action.reset.env_ids.tolist())
            if SEEDED_RESET not in self._features or not reset.issubset(names.tolist()):
                raise LocalProtocolError("[seeded-reset] only the action's envs, and only if the metadata lists it")
        buffers = self._send(action)
        self._asked = None
        self._reuse.forget(reset)
        self._all_reset = len(reset) == len(names)
        if not reset and not self._holders():
            self._whole = asked.env_indices
        else:
            self._holding.update(set(names.tolist()) - reset)
        return buffers


def _rows_of(feedback: Feedback, keep: Array) -> Feedback:
    """Keep the marked rows. The info goes when a row does: it is batched to the rows that were sent."""
    observation = feedback.observation
    return replace(
        feedback,
        observation=Observation(
            {name: array[keep] for name, array in observation.images.items()},
            {name: array[keep] for name, array in observation.states.items()},
            None if observation.text is None else observation.text[keep],
        ),
        env_indices=feedback.env_indices[keep],
        step_ids=feedback.step_ids[keep],
        rewards=feedback.rewards[keep],
        terminated=feedback.terminated[keep],
        truncated=feedback.truncated[keep],
        info={},
        digest=None if feedback.digest is None else feedback.digest[keep],
    )


class ClientSession(_Session):
    """An env client's end of one connection.

    Call `receive` for the metadata, then alternate `infer`, `receive` (the action) and `feedback`. After a reconnect
    make a new session and drop any feedback that is still held [7.6].
    """

    role = Role.CLIENT

    def __init__(self) -> None:
        super().__init__()
        self.features: frozenset[str] = frozenset()
        self.metadata = Metadata({})

    def receive(self, data: Buffer | str) -> Metadata | Action:
        """Accept one message of the server; an action always has its ``env_ids`` afterwards.

        Raises:
            RemoteProtocolError: close the connection and reconnect; after a text frame, give up [7.4].
        """
        message = self._receive(data)
        if isinstance(message, Metadata):
            self.metadata = message
            self.features = message.features
            return message
        action = cast("Action", message)  # the table admits nothing else
        asked = cast("Infer", self._asked).env_indices  # an action is due only after an infer
        names = asked if action.env_ids is None else action.env_ids
        if action.action.shape[1] != len(asked) or not same_envs(names, asked):
            raise RemoteProtocolError(
                f"action: {action.action.shape[1]} rows for envs {names.tolist()[:8]}, expected {len(asked)} for "
                f"{asked.tolist()[:8]} in this order",
                clause="5.3",
            )
        horizon = self.metadata.data.get("action_horizon")
        if isinstance(horizon, int) and action.action.shape[0] > horizon:
            raise RemoteProtocolError(
                f"action: {action.action.shape[0]} steps, the metadata announced a horizon of {horizon}", clause="5.1"
            )
        if action.reset is not None:
            if SEEDED_RESET not in self.features:
                raise RemoteProtocolError(
                    "action: reset, but the metadata does not list seeded-reset", clause="seeded-reset"
                )
            reset = action.reset.env_ids.tolist()
            if not set(reset).issubset(asked.tolist()):
                raise RemoteProtocolError("action: reset names an env that the infer does not", clause="seeded-reset")
            self._reuse.forget(reset)
        self._asked = None
        return replace(action, env_ids=names) if action.env_ids is None else action

    def marks(self, infer: Infer) -> Array | None:
        """Return the rows of an infer that may be left out [10.1]; None if the server does not offer it or none may."""
        if REUSE_FEEDBACK_OBS not in self.features:
            return None
        marks = self._reuse.marks(infer.env_indices)
        return marks if b"\x01" in marks.tobytes() else None

    def infer(self, infer: Infer) -> list[Buffer]:
        """Return the buffers of an infer.

        Raises:
            LocalProtocolError: if an infer is not due, carries what the server did not offer, or marks a row that may
                not be marked [10.1].
        """
        if infer.reuse is not None:
            if REUSE_FEEDBACK_OBS not in self.features:
                raise LocalProtocolError("[10.1] reuse, but the metadata does not list reuse-feedback-obs")
            fault = self._reuse.fault(infer.env_indices, infer.reuse)
            if fault is not None:
                raise LocalProtocolError(f"[10.1] {fault}")
        if (infer.env_spec is not None or infer.reset_info) and ENV_SPEC not in self.features:
            raise LocalProtocolError("[env-spec] env_spec or reset_info, but the metadata does not list env-spec")
        self._check_digest(infer)
        buffers = self._send(infer)
        self._asked = infer
        return buffers

    def feedback(self, feedback: Feedback) -> list[Buffer]:
        """Return the buffers of a feedback; send them together with the next infer's, in one send.

        Raises:
            LocalProtocolError: if a feedback is not due, or carries what the server did not offer.
        """
        self._check_digest(feedback)
        buffers = self._send(feedback)
        self._reuse.note_feedback(feedback.env_indices, feedback.terminated, feedback.truncated)
        return buffers

    def _check_digest(self, message: Infer | Feedback) -> None:
        if message.digest is not None and STEP_DIGEST not in self.features:
            raise LocalProtocolError("[step-digest] digest, but the metadata does not list step-digest")
