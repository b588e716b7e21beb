"""Own the ledger at an env: `LedgerEnv`, a wrapper that writes down what the env took and gave.

Works in any process that has the base install; ``vec_env`` and ``vector_env`` keep the ledger on the trainer's side.
"""

from __future__ import annotations

import struct
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from plugrl_bridges.arguments import whole
from plugrl_bridges.digest.digest import EnvDigest
from plugrl_bridges.digest.env import DigestEnv
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.columns import Columns
from plugrl_bridges.ledger.format import HEAD, Dialect, Kind, Side, frame
from plugrl_bridges.ledger.wrapping import expect_env
from plugrl_bridges.ledger.writer import Subject, shared
from plugrl_bridges.place import place_of_new_envs
from plugrl_bridges.traits import env_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import gymnasium

    from plugrl_bridges.digest.shared import DigestRow
    from plugrl_bridges.ledger.writer import LedgerWriter

__all__ = ["LedgerEnv"]

_LARGEST = (1 << 31) - 1  # of an env or a rank, as the file holds it
_END = struct.Struct("<dB")

Env: TypeAlias = "gymnasium.Env[Any, Any]"


class LedgerEnv(DigestEnv):
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

    _not_copied: ClassVar[dict[str, Any]] = {
        "_path": None,
        "_digest": None,
        "_joined": False,
        "_writer": None,
        "_leave": lambda: None,
    }

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
        own_rank, own_index = place_of_new_envs()
        rank = own_rank if rank is None else whole("rank", rank, 0, _LARGEST)
        env_index = own_index if env_index is None else whole("env_index", env_index, 0, _LARGEST)
        owner = f"env {env_index} of rank {rank}"
        super().__init__(env, owner=owner)
        if digest:
            self._digest = EnvDigest(*self.entries) if digest is True else digest
        self._observation_columns = Columns.of(env.observation_space, "obs", full=full, owner=owner)
        self._action_columns = Columns.of(env.action_space, "action", full=full, owner=owner)
        self._env_index = env_index
        self._rank = rank
        self._joined = False
        self._path = path
        self._subject = Subject(
            Side.ENV, Dialect.GYMNASIUM, self._observation_columns, self._action_columns, 0, run, env_name(env)
        )
        self._leave: Callable[[], object] = _nothing
        self._writer: LedgerWriter | None = None
        own = env_index.to_bytes(4, "little")
        self._reset_head = HEAD.pack(Kind.RESET, 0, 0, 1) + own
        self._step_head = HEAD.pack(Kind.STEP, 0, 0, 1) + own
        self._taken = b""

    @property
    def digest(self) -> int:
        """The chained digest of the env's steps since its last reset.

        Raises:
            AttributeError: if it was not asked for.
        """
        if self._digest is None:
            raise AttributeError("this LedgerEnv keeps no digest: make it with digest=True")
        return self._digest.value

    def _record_reset(self, observation: Any) -> None:  # noqa: ANN401 - the env's own
        super()._record_reset(observation)
        if self._path is not None:
            writer = self._writer or self._join(self._path)
            writer.write_through(frame(self._reset_head + self._observation_columns.pack_one(observation)))

    def _record_action(self, action: Any) -> None:  # noqa: ANN401 - the env's own
        super()._record_action(action)
        if self._joined:
            self._taken = self._action_columns.pack_one(action)

    def _record_step(self, reward: float, terminated: bool, truncated: bool, observation: Any) -> None:  # noqa: ANN401
        super()._record_step(reward, terminated, truncated, observation)
        if self._writer is not None:
            ending = _END.pack(reward, (1 if terminated else 0) | (2 if truncated else 0))
            pieces = (self._step_head, self._taken, ending, self._observation_columns.pack_one(observation))
            self._writer.write(frame(b"".join(pieces)))

    def _miss(self) -> None:
        """Note that a step or reset may have happened which is not in the file: then it gets no end mark."""
        if self._writer is not None:
            self._writer.complete = False

    def _join(self, path: str | os.PathLike[str]) -> LedgerWriter:
        writer = shared(path, self._subject, rank=self._rank)
        try:
            writer.begin([(self._rank, self._env_index)])
        except BaseException:
            writer.leave()
            raise
        self._writer = writer
        self._joined = True
        leave = weakref.finalize(self, writer.leave, self._env_index)
        leave.atexit = False
        self._leave = leave
        return writer

    def close(self) -> None:
        """Close the env; the last one of a file closes it, with the end mark."""
        super().close()
        self._joined = False
        self._writer = None
        self._leave()

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
