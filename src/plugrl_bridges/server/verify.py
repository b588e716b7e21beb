"""The live check: whether each env took what the trainer sent, and gave what the trainer gets.

With feature ``step-digest`` a client sends a digest of every step, made at the env. `Verifier` makes the same of the
actions as the trainer sent them and of the result as the trainer gets it, in the very step, and compares. All slots are
digested at once. ``server.exchange`` hands it what clients say, ``server.lockstep`` has it check.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_bridges.digest.digest import RESET, TRUNCATED, StepDigests
from plugrl_bridges.digest.locating import locate
from plugrl_bridges.errors import LedgerMismatch, SpaceError
from plugrl_bridges.server import report
from plugrl_bridges.spaces import ObservationLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plugrl_bridges.digest.locating import Located
    from plugrl_bridges.server.announced import Announced
    from plugrl_bridges.server.options import BridgeOptions
    from plugrl_bridges.server.result import StepResult
    from plugrl_bridges.spaces import ActionLayout, Leaf
    from plugrl_bridges.wire.codec import Array

__all__ = ["Verifier", "check_spaces"]

logger = logging.getLogger(__name__)

_SEVERAL = "several values differ"
_HINT = (
    'run again with verify="warn" and a ledger on both sides (LedgerEnv and LedgerVecEnv or LedgerVectorEnv of '
    "plugrl_bridges.ledger): `stepledger compare` then names the first value that differs"
)


def check_spaces(announced: Announced, observations: ObservationLayout, actions: ActionLayout) -> None:
    """See to it that the digests of a client can be made here: they are of values in the dtypes of its own spaces.

    Raises:
        SpaceError: naming the entry whose dtype in use is another.
    """
    for name, own, used in (
        ("observation", announced.observation_space, observations.leaves),
        ("action", announced.action_space, ObservationLayout(actions.space).leaves),
    ):
        if own is None:
            raise SpaceError(f"it announces no {name} space, which verify needs")
        in_use = {leaf.name: leaf for leaf in used}
        for theirs in ObservationLayout(own).leaves:
            ours = in_use[theirs.name]
            if theirs.dtype != ours.dtype and not (_wide_float(theirs.dtype) and _wide_float(ours.dtype)):
                raise SpaceError(
                    f"its {name} entry {theirs.name!r} is {theirs.dtype.str}, in use is {ours.dtype.str}: with verify "
                    "both must be the same, or floats of 32 or 64 bits"
                )


def _wide_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" and dtype.itemsize >= 4


class Verifier:
    """Compare the digests that clients send with those of what the trainer sent and gets.

    Per vector step: `sent`, then what clients say (`fed_back`, `asked`, `seated`), then `check`. A slot whose client
    sends no digests is left out; so is what a reconnected client's envs did before.

    Args:
        options: Say the autoreset mode, and whether a mismatch is an error.
        num_envs: Number of slots.
        observations: Layout of one env's observation.
        actions: Layout of one env's action.
        who: Gives the address of a slot's client.
    """

    def __init__(
        self,
        options: BridgeOptions,
        num_envs: int,
        observations: ObservationLayout,
        actions: ActionLayout,
        who: Callable[[int], str],
    ) -> None:
        self.mismatches = 0
        """Steps and first observations of single slots that differed; more than one only if that is no error."""
        self.compared = 0
        """Steps and first observations of single slots that were held to what their clients said."""
        self._warn = options.verify == "warn"
        self._who = who
        self._observation_leaves = observations.leaves
        self._action_leaves = ObservationLayout(actions.space).leaves
        self._digests = StepDigests(num_envs, self._action_leaves, self._observation_leaves)
        self._actions: Array = np.zeros((num_envs, *actions.shape), actions.dtype)
        self._fed = np.zeros(num_envs, np.bool_)  # whose step's digest has come
        self._fed_digests = np.zeros(num_envs, np.uint64)
        self._stands = np.zeros(num_envs, np.uint64)  # what each client said last of where its env stands
        self._fresh = np.zeros(num_envs, np.bool_)  # that is of a first observation which the trainer has not got yet
        self._from_reset = np.zeros(num_envs, np.bool_)  # and surely of a reset, not of an episode that goes on
        self._episodes = np.full(num_envs, -1)
        self._steps = np.zeros(num_envs, np.int64)
        self._vector_step = 0
        self._warned: set[int] = set()
        self._closed = False
        # Where the envs stood, for modes in which an observation may be handed over later, or once more.
        self._stood: list[Array] | None = None
        self._late = options.autoreset_mode.sits_out or options.autoreset_mode.hands_again

    # What is said ---------------------------------------------------------------------------------------------------

    def sent(self, actions: object) -> None:
        """Record what the trainer sends, ``[num_envs, *shape]``; copied, since the trainer may change it."""
        with np.errstate(over="ignore", invalid="ignore"):
            self._actions = np.array(actions, self._action_leaves[0].dtype)
        self._vector_step += 1

    def fed_back(self, rows: slice | Array, digest: Array) -> None:
        """Record the digests of a feedback.

        Args:
            rows: Slots of the message's envs.
            digest: uint64 ``[m]``.
        """
        self._fed[rows] = True
        self._fed_digests[rows] = self._stands[rows] = digest

    def asked(self, rows: slice | Array, digest: Array, begun: Array) -> None:
        """Record the digests of an infer.

        Args:
            rows: Slots of the message's envs.
            digest: uint64 ``[n]``.
            begun: Whose observation is the first of an episode, bool ``[num_envs]``.
        """
        self._stands[rows] = digest
        if b"\x01" in begun.tobytes():
            self._fresh[rows] |= begun[rows]
            self._from_reset[rows] |= begun[rows]

    def seated(self, slots: Sequence[int], digest: Array | None, *, from_reset: Array) -> None:
        """Record the digests of a client whose envs' first observations are being handed over.

        Args:
            slots: Slots of its envs.
            digest: uint64 ``[n]``; None if it sends none.
            from_reset: Which of its envs stand where a reset left them, bool ``[n]``. Else an episode has gone on from
                an earlier connection, and is taken over as it is.
        """
        rows = list(slots)
        self._fresh[rows] = digest is not None
        self._from_reset[rows] = from_reset
        if digest is not None:
            self._stands[rows] = digest

    # What is checked --------------------------------------------------------------------------------------------------

    def check(self, step: StepResult, *, reset: bool = False) -> None:
        """Compare what the trainer gets with what the clients said.

        Args:
            step: The finished result.
            reset: Whether it is the result of a reset, in which nobody stepped.

        Raises:
            LedgerMismatch: if a slot differs, unless that is to be a warning.
        """
        if not reset:
            self._check_steps(step)
        if self._stood is not None:
            self._check_kept(step.observations, self._stood, ~(step.stepped | step.begun | step.over))
        if b"\x01" in self._fresh.tobytes():
            self._check_first(step.first, self._fresh.copy())
        if self._late:
            self._stood = [array.copy() for array in step.standing()]

    def _check_steps(self, step: StepResult) -> None:
        stepped, digests = self._fed, self._digests
        observations = step.observations
        flags = step.truncated * np.uint8(TRUNCATED) + step.terminated  # TERMINATED is 1
        if step.cut_short:  # that end is made up here
            flags[list(step.cut_short)] = 0
        before = digests.values
        chains = digests.step_with_flags([self._actions], step.rewards, flags, observations)
        said = chains.tobytes()
        if b"\x00" not in stepped.tobytes() and self._fed_digests.tobytes() == said == self._stands.tobytes():
            self._steps += 1  # as nearly always: everybody stepped, nobody's episode ended, and all is well
            self.compared += len(stepped)
            stepped.fill(False)
            return
        self._steps += stepped
        self.compared += int(stepped.sum())
        wrong = stepped & ((self._fed_digests != chains) | ((self._stands != chains) & ~self._fresh))
        if b"\x00" in stepped.tobytes():
            digests.values = np.where(stepped, chains, before)
        self._fed = np.zeros_like(stepped)
        if b"\x01" not in wrong.tobytes():
            return
        slot = int(wrong.argmax())
        theirs = int(self._fed_digests[slot])
        located, what = None, _SEVERAL
        if theirs == int(before[slot]):
            what = "its env took no step"
        elif theirs == int(chains[slot]):
            what = "its env was reset, or stepped again, after this step"
        else:
            located = locate(
                theirs - int(chains[slot]),
                flags=int(flags[slot]),
                reward=float(step.rewards[slot]),
                actions=[("action", self._action_leaves[0], self._actions[slot, ...])],
                observations=self._named(observations, slot),
            )
        self._report(wrong, located, what, "terminal_obs" if flags[slot] else "obs")
        digests.values = np.where(wrong, self._stands, digests.values)

    def _check_first(self, observations: Sequence[Array], handed: Array) -> None:
        rows = np.flatnonzero(handed)
        chains = self._digests.reset(observations, rows)
        known = handed & self._from_reset
        self.compared += int(known.sum())
        wrong = known & (self._stands != chains)
        self._episodes += handed & ((self._steps > 0) | (self._episodes < 0))
        self._steps[handed] = 0
        self._fresh[handed] = self._from_reset[handed] = False
        if b"\x01" in wrong.tobytes():
            slot = int(wrong.argmax())
            zeros = [("action", leaf, np.zeros(leaf.shape, leaf.dtype)) for leaf in self._action_leaves]
            located = locate(
                int(self._stands[slot]) - int(chains[slot]),
                flags=RESET,
                reward=0.0,
                actions=zeros,
                observations=self._named(observations, slot),
            )
            self._report(wrong, located, _SEVERAL, "reset_obs")
        # Of a mismatch that is no error, and of an episode that goes on, the client's word is what follows builds on.
        self._digests.values = np.where(handed, self._stands, chains)

    def _check_kept(self, observations: Sequence[Array], stood: Sequence[Array], kept: Array) -> None:
        wrong = np.zeros_like(kept)
        for now, before in zip(observations, stood, strict=True):
            n = len(now)
            same = now.reshape(n, -1).view(np.uint8) == before.reshape(n, -1).view(np.uint8)
            wrong |= kept & ~same.all(axis=1)
        if b"\x01" in wrong.tobytes():
            self._report(
                wrong, None, "its env was not reset, and what the trainer gets is not what it got before", "obs"
            )

    def _named(self, observations: Sequence[Array], slot: int) -> list[tuple[str, Leaf, Array]]:
        leaves = zip(self._observation_leaves, observations, strict=True)
        return [(leaf.name, leaf, array[slot, ...]) for leaf, array in leaves]

    def _report(self, wrong: Array, located: Located | None, what: str, observation: str) -> None:
        slots = tuple(np.flatnonzero(wrong).tolist())
        slot = slots[0]
        field, cell = "", ""
        if located is not None:
            field = observation if located.field == "obs" else located.field
            cell = located.cell
            what = f"{field}: {cell} is {located.ours} at the trainer and {located.theirs} at the env"
        episode, at = int(self._episodes[slot]), int(self._steps[slot])
        more = f"; likewise slots {report.slots_text(slots[1:])}" if len(slots) > 1 else ""
        text = (
            f"slot {slot} (client {self._who(slot)}), episode {episode}, step {at} (vector step {self._vector_step}): "
            f"what its env took and gave is not what the trainer sent and got: {what}{more}. To find out more, {_HINT}"
        )
        if not self._warn:
            raise LedgerMismatch(
                text, slot=slot, slots=slots, episode=episode, step=at, vector_step=self._vector_step, field=field,
                cell=cell,
            )  # fmt: skip
        self.mismatches += len(slots)
        if not self._warned.issuperset(slots):
            self._warned.update(slots)
            logger.warning("%s. Further ones of these slots are only counted", text)

    def close(self) -> None:
        """Log what was compared, and how many mismatches there were, if they were no errors."""
        if not self._closed:
            level = logging.WARNING if self.mismatches else logging.INFO
            logger.log(
                level, "verify: %d mismatches in %d vector steps; %d env steps and first observations were compared",
                self.mismatches, self._vector_step, self.compared,
            )  # fmt: skip
        self._closed = True
