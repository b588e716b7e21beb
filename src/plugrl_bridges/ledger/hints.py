"""Own what is said of files that do not seem to belong together: of an earlier run, or of envs that share a number.

``comparing`` asks when a comparison found a difference, or could not be made. Nothing is refused for it: a client that
takes a lost one's place adds files to the folder of its run, too. ``rows`` owns the hints that need observations.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.ledger.reader import LedgerReader
    from plugrl_bridges.ledger.streams import EnvEvents

__all__ = ["ONE_FOLDER_PER_RUN", "of_earlier_runs", "of_one_sided_run", "of_shared_numbers"]

ONE_FOLDER_PER_RUN = "take a new folder for each run, or give run= on both sides"
_SHOWN_FILES = 8


def of_earlier_runs(streams: Sequence[EnvEvents], losses: Sequence[int]) -> str | None:
    """Name the files of an env that wrote more of them than one run explains; None if there is none.

    Args:
        streams: The envs.
        losses: How often a client of each was lost, as the trainer saw it: each replacement wrote a file.
    """
    for stream, lost in zip(streams, losses, strict=True):
        if len(stream.readers) > 1 + lost:
            slot = stream.slot
            explained = "one" if not lost else f"{1 + lost} ({lost} lost clients)"
            return (
                f"files of an earlier run seem to be among these: env {slot.env_index} of rank {slot.rank} wrote "
                f"{len(stream.readers)} ledgers, and the trainer's explains {explained}: {_named(stream.readers)}; "
                f"{ONE_FOLDER_PER_RUN}"
            )
    return None


def of_shared_numbers(streams: Sequence[EnvEvents]) -> str | None:
    """Name the files of an env that several processes seem to have been at once; None if there is none.

    Args:
        streams: Of fewer envs than the trainer has rows.
    """
    for stream in streams:
        began = [reader.header.started_ns for reader in stream.readers]
        if len(began) > 1:
            slot = stream.slot
            return (
                f"{len(began)} processes wrote env {slot.env_index} of rank {slot.rank}, and began within "
                f"{(max(began) - min(began)) / 1e9:.3g} s: {_named(stream.readers)}; envs that run at the same time "
                "need an env_index of their own each (or their clients a rank)"
            )
    return None


def of_one_sided_run(trainer: LedgerReader, envs: Sequence[LedgerReader]) -> list[str]:
    """Note that ``run=`` was given on one side alone, so that nothing tells whether both are of one run.

    Args:
        trainer: The trainer's ledger.
        envs: Those of the envs that were compared with it.

    Returns:
        No note, or one.
    """
    run = trainer.header.run
    others = [reader for reader in envs if bool(reader.header.run) is not bool(run)]
    if not others:
        return []
    if run:
        said = (
            f"the trainer's ledger has run {run!r}, and {len(others)} of its envs' have none, such as {others[0].path}"
        )
    else:
        said = f"{others[0].path} has run {others[0].header.run!r}, and the trainer's ledger has none"
    return [f"{said}: nothing tells whether they are of one run; give run= on both sides"]


def _named(readers: Sequence[LedgerReader]) -> str:
    names = []
    for reader in readers[:_SHOWN_FILES]:
        began = datetime.fromtimestamp(reader.header.started_ns / 1e9, timezone.utc)
        names.append(f"{reader.path} (began {began:%Y-%m-%d %H:%M:%S} UTC)")
    more = len(readers) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
