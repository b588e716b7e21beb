"""Own the pictures of episode logs: return against env steps, every slot faint, the mean bold.

Reads the CSV files that ``server.episode_log`` writes; needs matplotlib (the ``demo`` extra).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.axes import Axes

__all__ = ["Episode", "plot_learning_curves", "read_episodes"]


class Episode:
    """Hold one row of an episode log.

    Attributes:
        slot: The slot it ran in.
        ret: Sum of its rewards.
        length: Env steps.
        end: ``terminated``, ``truncated`` or ``lost``.
        step: Vector steps of the run at its end.
    """

    __slots__ = ("end", "length", "ret", "slot", "step")

    def __init__(self, row: dict[str, str]) -> None:
        self.slot = int(row["slot"])
        self.ret = float(row["return"])
        self.length = int(row["length"])
        self.end = row["end"]
        self.step = int(row["step"])


def read_episodes(path: str | os.PathLike[str]) -> dict[int, list[Episode]]:
    """Read an episode log; give it to `plot_learning_curves`, or use it as it is.

    Args:
        path: A CSV file that the option ``episode_log`` made.

    Returns:
        Slot to its episodes, in order.

    Raises:
        ValueError: naming the file, if it is no episode log.
    """
    episodes: defaultdict[int, list[Episode]] = defaultdict(list)
    with Path(path).open(newline="", encoding="utf-8") as file:
        try:
            for row in csv.DictReader(file):
                episode = Episode(row)
                episodes[episode.slot].append(episode)
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"{path} is no episode log: {exc!r}") from exc
    return dict(sorted(episodes.items()))


def plot_learning_curves(
    logs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, titles: Sequence[str] | None = None
) -> None:
    """Draw the learning curves of runs side by side; look at the file.

    Args:
        logs: Episode logs, one per run.
        out: Picture to write; its suffix chooses the format (``.png``, ``.svg``).
        titles: One per run; the folder and file name by default.

    Raises:
        ValueError: if there is nothing to draw or a file is no episode log.
    """
    # Not at the top: matplotlib is an extra, and reading a log does not need it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    if not logs:
        raise ValueError("logs: expected at least one episode log")
    figure = Figure(figsize=(6.4 * len(logs), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(1, len(logs), sharey=True, squeeze=True))
    names = titles or [f"{Path(log).parent.name}/{Path(log).name}" for log in logs]
    for ax, log, name in zip(axes, logs, names, strict=True):
        _draw(ax, read_episodes(log), name)
    axes[0].set_ylabel("episode return")
    figure.savefig(out, dpi=120)


def _draw(ax: Axes, slots: dict[int, list[Episode]], name: str) -> None:
    if not slots:
        raise ValueError(f"{name} holds no episode")
    num_envs = max(slots) + 1  # a slot may have finished no episode
    for episodes in slots.values():
        ax.plot(
            [e.step * num_envs for e in episodes],
            [e.ret for e in episodes],
            color="tab:blue",
            alpha=0.15,
            linewidth=0.8,
        )
    rounds = min(len(episodes) for episodes in slots.values())
    steps = [np.mean([episodes[k].step for episodes in slots.values()]) * num_envs for k in range(rounds)]
    means = [np.mean([episodes[k].ret for episodes in slots.values()]) for k in range(rounds)]
    ax.plot(steps, means, color="tab:blue", linewidth=2.2, label=f"mean of {len(slots)} slots")
    ax.set_title(name)
    ax.set_xlabel("env steps")
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right")
