"""The exchange of messages on one connection [4]: infer, action, step, feedback, for as long as it lasts.

Joins a `ClientSession` (what may be said), a `KeptConnection` (who carries it), an `EnvBatch` (who does it) and an
`EpisodeBook` (who counts). ``env_client`` makes one per connection and deals with its end.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, Final, NoReturn, cast

import numpy as np

from plugrl_bridges.errors import RemoteProtocolError
from plugrl_bridges.wire.messages import Action, Feedback, Infer, Metadata, Observation, ResetRequest
from plugrl_bridges.wire.session import ENV_SPEC, LATE_RESET, STEP_DIGEST, ClientSession

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plugrl_bridges.client.batch import EnvBatch, Options
    from plugrl_bridges.client.keeper import KeptConnection
    from plugrl_bridges.client.record import Watch
    from plugrl_bridges.digest.digest import StepDigests
    from plugrl_bridges.digest.shared import SharedDigests
    from plugrl_bridges.wire.codec import Buffer, Value

__all__ = ["Conversation"]

logger = logging.getLogger(__name__)

_METADATA_TIMEOUT_S: Final = 30.0


class Conversation:
    """What is said on one connection: ``line``, on which nothing was sent or received yet.

    The env-spec map ``spec`` goes to servers that know it. The envs are reset here, with ``first_seeds``, unless that
    was done or the trainer is to do it (feature ``late-reset``). Without ``reuse``, observations that the server has
    are sent again; without ``send_info``, of all infos only the ``episode`` record is sent.
    """

    def __init__(
        self,
        line: KeptConnection,
        batch: EnvBatch,
        watch: Watch,
        *,
        spec: Mapping[str, Value],
        first_seeds: Sequence[int | None],
        reuse: bool,
        send_info: bool,
    ) -> None:
        self.connected_at: float | None = None
        """When the metadata came, by the monotonic clock."""
        self._line = line
        self._batch = batch
        self._watch = watch
        self._book = watch.book
        self._spec = spec
        self._first_seeds = first_seeds
        self._reuse = reuse
        self._send_info = send_info
        self._session = ClientSession()
        self._rows = list(range(batch.num_envs))
        self._indices = np.arange(batch.num_envs, dtype=np.int64)
        self._digests: SharedDigests | StepDigests | None = None  # if the server takes them
        self._probe = Infer(Observation(), self._indices, self._indices)
        self._nothing = batch.layout.write(batch.observations, self._indices[:0])
        self._knows_spec = False

    def run(self, *, remaining_s: float) -> NoReturn:
        """Receive the metadata, within the remaining time, then go on until an error of `ending_of` ends it all."""
        line, session = self._line, self._session
        # The casts say what the session guarantees: metadata first, then actions only.
        metadata = cast("Metadata", session.receive(line.receive(min(_METADATA_TIMEOUT_S, remaining_s))))
        self.connected_at = time.monotonic()
        line.recycle()
        self._knows_spec = ENV_SPEC in session.features
        if self._batch.digests is not None:
            if self._knows_spec and STEP_DIGEST in session.features:
                self._digests = self._batch.digests
            else:
                logger.warning(
                    "verify is on here, but the server at %s does not list %s: nothing is checked",
                    line.address, STEP_DIGEST,
                )  # fmt: skip
        logger.info(
            "connected to %s: server %s, algorithm %s, features: %s",
            line.address,
            metadata.data.get("server", "unknown"),
            metadata.data.get("algorithm", "unknown"),
            ", ".join(sorted(session.features)) or "none",
        )
        infer = self._first_infer()
        self._watch.check()
        line.send(infer)
        while True:
            feedback = self._step(cast("Action", session.receive(line.receive())))
            infer = self._infer()
            self._watch.check()
            line.send(feedback, infer)
            self._watch.report("stepping")

    def _first_infer(self) -> list[Buffer]:
        """Introduce the envs, with their first observations, or as ones that the trainer is to reset first."""
        spec = self._spec if self._knows_spec else None
        if not self._batch.began:
            if spec is not None and LATE_RESET in self._session.features:
                for array in self._batch.observations:
                    array[...] = np.zeros((), array.dtype)
                return self._infer(spec={**spec, "unreset": True})
            self._reset(self._rows, self._first_seeds)
        return self._infer(spec=spec)

    def _reset(self, rows: Sequence[int], seeds: Sequence[int | None], options: Options = None) -> None:
        """Reset envs; where the first reset, which is one of all, has no seed for an env, it gets the client's own."""
        if not self._batch.began:
            seeds = [own if seed is None else seed for seed, own in zip(seeds, self._first_seeds, strict=True)]
        self._batch.reset(rows, seeds, options)
        self._batch.began = True

    def _step(self, message: Action) -> list[Buffer]:
        """Carry an action out and return the feedback; the batch then holds what the next infer sends."""
        batch = self._batch
        actions = batch.action_layout.from_wire(message.action)
        batch.reset_infos.clear()
        request, rows = message.reset, self._rows
        if request is not None:
            request = copy.deepcopy(request)  # options may hold views of the message
            asked = set(request.env_ids.tolist())
            rows = [row for row in rows if row not in asked]
        if rows:
            if not batch.began:
                raise RemoteProtocolError(f"action: envs {rows[:8]} were never reset", clause="late-reset")
            batch.step(actions, rows)
        self._line.recycle()
        feedback = self._feedback(rows)
        if request is not None:
            self._obey(request)
        return feedback

    def _feedback(self, rows: Sequence[int]) -> list[Buffer]:
        """Report the rows' last steps, then begin the next episodes of those that ended."""
        batch, book = self._batch, self._book
        picked = None if len(rows) == batch.num_envs else np.array(rows, np.int64)  # None: nothing need be copied
        at = slice(None) if picked is None else picked
        terminated, truncated = batch.terminated[at], batch.truncated[at]
        book.add(at, batch.rewards[at], batch.lengths[at], batch.steps if rows else 0)
        step_ids = book.chunks[at].copy()
        info: dict[str, Value] = batch.step_infos(rows) if self._send_info and rows else {}
        ended = None
        if rows and batch.any_ended:
            ended = np.zeros(batch.num_envs, np.bool_)
            ended[at] = terminated | truncated
            record = book.finish(ended, batch.successes(ended), time.time())
            info["episode"] = {key: column[at] for key, column in record.items()}
        buffers = self._session.feedback(
            Feedback(
                observation=batch.layout.write(batch.observations, picked),
                env_indices=self._indices[at],
                step_ids=step_ids,
                rewards=batch.rewards[at] if self._knows_spec else batch.rewards[at].astype(np.float32),
                terminated=terminated,
                truncated=truncated,
                info=info,
                digest=None if self._digests is None else self._digests.values[at],
            )
        )
        if ended is not None:
            batch.renew(ended)
        return buffers

    def _obey(self, request: ResetRequest) -> None:
        """Reset what the trainer wants reset; those running episodes have no end and no record."""
        order = np.argsort(request.env_ids).tolist()
        rows = request.env_ids[order]
        self._reset(rows.tolist(), [request.seeds[at] for at in order], [request.options[at] for at in order])
        self._book.drop(rows)

    def _infer(self, spec: Mapping[str, Value] | None = None) -> list[Buffer]:
        """Ask for everyone's next chunk, leaving out the observations that the server has [10.1]."""
        batch = self._batch
        marks = self._session.marks(self._probe) if self._reuse else None
        if marks is None:
            observation = batch.layout.write(batch.observations)
        elif b"\x00" not in marks.tobytes():  # all of them; numpy's own all() takes ten times as long
            observation = self._nothing
        else:
            observation = batch.layout.write(batch.observations, ~marks)
        reset_info: dict[str, Value] | None = None
        if batch.reset_infos and self._knows_spec and self._send_info:
            reset_info = batch.take_reset_infos()
        return self._session.infer(
            Infer(
                observation=observation,
                env_indices=self._indices,
                step_ids=self._book.chunks.copy(),
                reuse=marks,
                env_spec=spec,
                reset_info=reset_info,
                digest=None if self._digests is None else self._digests.values,
            )
        )
