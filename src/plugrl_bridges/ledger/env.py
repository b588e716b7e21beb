"""Own the ledger at an env: `LedgerEnv`, a wrapper that writes down what the env took and gave.

Works in any process that has the base install; ``vec_env`` and ``vector_env`` keep the ledger on the trainer's side.
"""

from __future__ import annotations

import copy
import struct
import weakref
import zlib
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias

import gymnasium
import numpy as np

from plugrl_bridges.arguments import whole
from plugrl_bridges.digest.digest import EnvDigest
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.columns import Columns
from plugrl_bridges.ledger.format import FRAME, GUARD, HEAD, Dialect, Kind, Side
from plugrl_bridges.ledger.wrapping import expect_env
from plugrl_bridges.ledger.writer import Subject, shared
from plugrl_bridges.place import place_of_new_envs
from plugrl_bridges.traits import env_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from plugrl_bridges.digest.shared import DigestRow
    from plugrl_bridges.ledger.columns import Column
    from plugrl_bridges.ledger.writer import LedgerWriter

__all__ = ["LedgerEnv"]

_LARGEST = (1 << 31) - 1  # of an env or a rank, as the file holds it
_END = struct.Struct("<dB")

Env: TypeAlias = "gymnasium.Env[Any, Any]"


class LedgerEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Write down what an env takes and gives, and pass it through unchanged.

    Put it outermost, so that it stands where the env is handed to whoever steps it. All envs of a process may share one
    path. `close` it, and the file says that nothing is missing; then give it to `compare` together with the trainer's.

    A deep copy, as planners make of an env to look ahead with, has the env copied, writes nothing and keeps no digest.

    Args:
        env: Any env whose spaces are made of Box, Discrete, MultiDiscrete, MultiBinary and Text.
        path: File to write, which must not exist; or a folder, in which each process makes a file of its own. None
            writes nothing, which is of use with ``digest``.
        env_index: Number of the env among those of its rank. None: in the factory of an env client the number that the
            client gives it, elsewhere 0.
        rank: Rank of the env client, None likewise; envs are put in order by rank, then number, and env k is the
            trainer's row k.
        run: Identity of the run; if the trainer's ledger has one too, both must be the same.
        full: Record observations and actions of more than 1 KiB whole, not by their digest.
        digest: Keep `digest`, the chained 64-bit digest of the steps, too; a `DigestRow` shares the work with the other
            envs of the process.

    Raises:
        LedgerError: for a space that cannot be recorded; at the first reset, if the file cannot be made, or another env
            of the process writes the same number there.
        TypeError: for a vector env, which has a wrapper of its own; for a rank or number that is no int.
        ValueError: for a negative rank or number.
    """

    def __init__(
        self,
        env: Env,
        path: str | os.PathLike[str] | None,
        *,
        env_index: int | None = None,
        rank: int | None = None,
        run: str = "",
        full: bool = False,
        digest: bool | DigestRow = False,
    ) -> None:
        expect_env(env, "LedgerEnv")
        super().__init__(env)
        own_rank, own_index = place_of_new_envs()
        rank = own_rank if rank is None else whole("rank", rank, 0, _LARGEST)
        env_index = own_index if env_index is None else whole("env_index", env_index, 0, _LARGEST)
        owner = f"env {env_index} of rank {rank}"
        self._observation = Columns.of(env.observation_space, "obs", full=full, owner=owner)
        self._action = Columns.of(env.action_space, "action", full=full, owner=owner)
        self._env_index = env_index
        self._rank = rank
        self._joined = False
        self._digest: EnvDigest | DigestRow | None = None
        if digest is True:
            self._digest = EnvDigest(*self.entries)
        elif digest:
            self._digest = digest
        self._path = path
        self._subject = Subject(Side.ENV, Dialect.GYMNASIUM, self._observation, self._action, 0, run, env_name(env))
        self._leave: Callable[[], object] = _nothing
        self._write: Callable[[bytes], None] = _nothing
        self._write_through: Callable[[bytes], None] = _nothing
        self._writer: LedgerWriter | None = None
        own = env_index.to_bytes(4, "little")
        self._reset_head = HEAD.pack(Kind.RESET, 0, 0, 1) + own
        self._step_head = HEAD.pack(Kind.STEP, 0, 0, 1) + own
        length = len(self._step_head) + self._action.width + _END.size + self._observation.width
        self._step_frame = FRAME.pack(length, length ^ GUARD, 0)[:8]

    @property
    def entries(self) -> tuple[Sequence[Column], Sequence[Column]]:
        """Entries of the action and of the observation, of which `SharedDigests` is made."""
        return self._action.entries, self._observation.entries

    def keep_digest(self, digest: EnvDigest | DigestRow) -> None:
        """Keep the digest in here from the next reset on, in place of what was kept before.

        Args:
            digest: Made of `entries`.
        """
        self._digest = digest

    @property
    def digest(self) -> int:
        """The chained digest of the env's steps since its last reset.

        Raises:
            AttributeError: if it was not asked for.
        """
        if self._digest is None:
            raise AttributeError("this LedgerEnv keeps no digest: make it with digest=True")
        return self._digest.value

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env, and write down the observation.

        Args:
            seed: Handed on if it is given; likewise the options: not every env takes both.
            options: For the env.

        Raises:
            LedgerError: if the ledger cannot be made or written; what the env raises.
        """
        asked: dict[str, Any] = {}
        if seed is not None:
            asked["seed"] = seed
        if options is not None:
            asked["options"] = options
        returned = self.env.reset(**asked)
        try:
            self._record_reset(returned[0])
        except BaseException:
            self._miss()
            raise
        return returned

    def _record_reset(self, observation: Any) -> None:  # noqa: ANN401 - the env's own
        if self._digest is not None:
            self._digest.reset(self._observation.quick(observation))
        if self._path is not None:
            if not self._joined:
                self._join()
            payload = self._reset_head + self._observation.pack_one(observation)
            self._write_through(FRAME.pack(len(payload), len(payload) ^ GUARD, zlib.crc32(payload)) + payload)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:  # noqa: ANN401 - the env's own
        """Step the env, and write down what it took and gave.

        Raises:
            LedgerError: for an action that does not fit its space, and the env is not stepped then; for a value of
                another shape than its space's; if the ledger cannot be written. What the env raises.
        """
        # Before the step: the env may change the array that it is given.
        taken = self._action.pack_one(action) if self._joined else b""
        digest = self._digest
        if digest is not None:
            digest.take(self._action.quick(action))
        try:
            returned = self.env.step(action)
            observation, reward, terminated, truncated, _ = returned
            number = reward if type(reward) is float else float(np.asarray(reward).reshape(()))
            if self._joined:
                ending = _END.pack(number, (1 if terminated else 0) | (2 if truncated else 0))
                payload = b"".join((self._step_head, taken, ending, self._observation.pack_one(observation)))
                self._write(self._step_frame + zlib.crc32(payload).to_bytes(4, "little") + payload)
            if digest is not None:
                digest.give(number, terminated, truncated, self._observation.quick(observation))
        except BaseException:
            self._miss()
            raise
        return returned

    def _miss(self) -> None:
        """Take note that a step or reset may have happened which is not in the file: then it gets no end mark."""
        if self._writer is not None:
            self._writer.complete = False

    def _join(self) -> None:
        if self._path is None:
            return
        writer = shared(self._path, self._subject, rank=self._rank)
        try:
            writer.begin([(self._rank, self._env_index)])
        except BaseException:
            writer.leave()
            raise
        self._writer, self._write, self._write_through = writer, writer.write, writer.write_through
        self._joined = True
        leave = weakref.finalize(self, writer.leave, self._env_index)
        leave.atexit = False
        self._leave = leave

    def close(self) -> None:
        """Close the env; the last one of a file closes it, with the end mark."""
        super().close()
        self._joined = False
        self._writer, self._write, self._write_through = None, _nothing, _nothing
        self._leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> LedgerEnv:
        """Give a copy around a copy of the env, which writes nothing and keeps no digest: it is no row of a trainer."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        own = {
            "_path": None, "_digest": None, "_joined": False, "_writer": None, "_leave": _nothing, "_write": _nothing,
            "_write_through": _nothing,
        }  # fmt: skip
        for name, value in self.__dict__.items():
            made.__dict__[name] = own[name] if name in own else copy.deepcopy(value, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Give what pickle writes, before the first reset.

        Raises:
            LedgerError: afterwards, and if a digest is kept: both belong to this process.
        """
        if self._joined or self._digest is not None:
            what = f"writes to {self._path}" if self._joined else "keeps a digest"
            raise LedgerError(
                f"this LedgerEnv {what} and cannot be pickled: pickle the env inside it (.env), or make the LedgerEnv "
                "in the process that steps it. copy.deepcopy gives a copy that writes nothing"
            )
        return self.__dict__.copy()


def _nothing(*_: object) -> None:
    """Stand where nothing is to be written."""
