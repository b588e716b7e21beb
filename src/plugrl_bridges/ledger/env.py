"""The ledger at an env: `LedgerEnv`, a wrapper that writes down what the env took and gave.

Works in any process that has the base install; ``vec_env`` and ``vector_env`` keep the ledger on the trainer's side.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from plugrl_bridges.arguments import whole
from plugrl_bridges.digest.digest import EnvDigest
from plugrl_bridges.digest.env import DigestEnv
from plugrl_bridges.errors import LedgerError
from plugrl_bridges.ledger.columns import Columns
from plugrl_bridges.ledger.schema import Dialect, Flag, Header, Side, stored
from plugrl_bridges.ledger.wrapping import expect_env
from plugrl_bridges.ledger.writer import shared
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

Env: TypeAlias = "gymnasium.Env[Any, Any]"


class LedgerEnv(DigestEnv):
    """Wrapper that writes down what an env takes and gives, and passes it through unchanged.

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

    _not_copied: ClassVar[dict[str, Any]] = {"_path": None, "_digest": None, "_writer": None, "_leave": lambda: None}

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
        self._observation_columns = Columns.of(self._observation.all, full=full)
        self._action_columns = Columns.of(self._action.all, full=full)
        self._header = Header(Side.ENV, Dialect.GYMNASIUM, self._observation_columns, self._action_columns, run)
        self._env_index = env_index
        self._rank = rank
        self._path = path
        self._writer: LedgerWriter | None = None
        self._leave: Callable[[], object] = _nothing
        self._episode, self._step = -1, 1
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
            if self._step:  # a reset behind a reset begins no other episode
                self._episode += 1
                self._step = 0
            shown = self._observation_columns.pack_one(self._observation.values(observation))
            writer.write([(self._env_index, self._episode, 0, None, Flag.RESET, None, None, shown)], through=True)

    def _record_action(self, action: Any) -> None:  # noqa: ANN401 - the env's own
        super()._record_action(action)
        if self._writer is not None:
            self._taken = self._action_columns.pack_one(self._action.values(action))

    def _record_step(self, reward: float, terminated: bool, truncated: bool, observation: Any) -> None:  # noqa: ANN401
        super()._record_step(reward, terminated, truncated, observation)
        if self._writer is not None:
            self._step += 1
            flags = (1 if terminated else 0) | (2 if truncated else 0)
            shown = self._observation_columns.pack_one(self._observation.values(observation))
            row = (self._env_index, self._episode, self._step, None, flags, stored(reward), self._taken, shown)
            self._writer.write([row])

    def _miss(self) -> None:
        """Note that a step or reset may have happened which is not in the file: then it is not marked as closed."""
        if self._writer is not None:
            self._writer.complete = False

    def _join(self, path: str | os.PathLike[str]) -> LedgerWriter:
        writer = shared(path, self._header, env_name(self.env), rank=self._rank)
        try:
            writer.begin([(self._rank, self._env_index)])
        except BaseException:
            writer.leave()
            raise
        self._writer = writer
        leave = weakref.finalize(self, writer.leave, self._env_index)
        leave.atexit = False
        self._leave = leave
        return writer

    def close(self) -> None:
        """Close the env; the last one of a file closes it, and marks it as closed."""
        super().close()
        self._writer = None
        self._leave()

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle writes, before the first reset.

        Raises:
            LedgerError: afterwards, and if a digest is kept: both belong to this process.
        """
        if self._writer is not None or self._digest is not None:
            what = f"writes to {self._path}" if self._writer is not None else "keeps a digest"
            raise LedgerError(
                f"this LedgerEnv {what} and cannot be pickled: pickle the env inside it (.env), or make the LedgerEnv "
                "in the process that steps it. copy.deepcopy gives a copy that writes nothing"
            )
        return self.__dict__.copy()


def _nothing(*_: object) -> None:
    """Stand where nothing is to be written."""
