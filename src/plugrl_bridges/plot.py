"""The pictures of episode logs: return against env steps, every slot faint, the mean bold.

Reads the CSV files that ``server.episodes`` writes; drawing needs matplotlib (the ``plot`` extra). ``cli`` makes a
command of it, ``demo`` draws with it.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["FORMATS", "LoggedEpisode", "find_episode_logs", "plot_learning_curves", "read_episodes"]

FORMATS = (".png", ".svg")
"""Suffixes of the pictures that `plot_learning_curves` writes."""
_NEEDED = ("slot", "return", "length", "end", "step")
_COLUMNS = 3  # of panels, before a row is full
_POINTS = 500  # of a mean; more would not show

Curve: TypeAlias = "tuple[NDArray[np.float64], NDArray[np.float64]]"


class LoggedEpisode:
    """One row of an episode log.

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


def read_episodes(path: str | os.PathLike[str]) -> dict[int, list[LoggedEpisode]]:
    """Read an episode log; give it to `plot_learning_curves`, or use it as it is.

    Args:
        path: A CSV file that the option ``episode_log`` made.

    Returns:
        Slot to its episodes, in order. Empty for a run that has finished none.

    Raises:
        OSError: if it cannot be read.
        ValueError: naming the file and the line, if it is not an episode log.
    """
    episodes: defaultdict[int, list[LoggedEpisode]] = defaultdict(list)
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path} is not an episode log: it has no column {', '.join(missing)}")
            for row in reader:
                try:
                    episode = LoggedEpisode(row)
                except (TypeError, ValueError) as exc:  # None stands for what a line is too short for
                    raise ValueError(f"{path} is not an episode log: line {reader.line_num}: {exc}") from exc
                episodes[episode.slot].append(episode)
        except (UnicodeDecodeError, csv.Error) as exc:
            raise ValueError(f"{path} is not an episode log: it is not text of comma-separated values") from exc
    return dict(sorted(episodes.items()))


def find_episode_logs(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Find the episode logs among files and in folders; give them to `plot_learning_curves`.

    Args:
        paths: A file is taken as it is. In a folder, at any depth, every CSV file with the columns of an episode log
            and an episode in it is taken, in the order of the names.

    Returns:
        The logs, each once.

    Raises:
        FileNotFoundError: naming the path that is not there.
        ValueError: naming the folder without an episode log.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_dir():
            logs = [each for each in sorted(path.rglob("*.csv")) if each.is_file() and _has_episodes(each)]
            if not logs:
                raise ValueError(f"{path} has no episode log in it: expected a CSV file with the columns "
                                 f"{', '.join(_NEEDED)} and at least one episode")  # fmt: skip
        elif path.exists():
            logs = [path]
        else:
            raise FileNotFoundError(f"{path} does not exist: expected an episode log or a folder with one")
        for log in logs:
            found.setdefault(log.resolve(), log)
    return list(found.values())


def _has_episodes(path: Path) -> bool:
    """Return whether a file begins as an episode log with an episode does; a trainer's own CSV files lie beside it."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        header, row = file.readline(), file.readline()
    return set(_NEEDED) <= set(header.strip().split(",")) and bool(row.strip())


def plot_learning_curves(
    logs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, titles: Sequence[str] | None = None
) -> None:
    """Draw the learning curves of runs side by side; look at the file.

    Args:
        logs: Episode logs, one per run.
        out: Picture to write; its suffix chooses the format, ``.png`` or ``.svg``.
        titles: One per run; the folder and file name by default.

    Raises:
        ImportError: naming the extra, if matplotlib is missing.
        OSError: if a log cannot be read, or the picture not be written.
        ValueError: if there is nothing to draw, a file is not an episode log, or ``titles`` or ``out`` do not fit.
    """
    # Not at the top: matplotlib is an extra, and reading a log does not need it.
    try:
        import matplotlib as mpl  # noqa: PLC0415
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as exc:
        raise ImportError("drawing learning curves needs matplotlib: pip install 'plugrl-bridges[plot]'") from exc

    if not logs:
        raise ValueError("logs: expected at least one episode log")
    if Path(out).suffix.lower() not in FORMATS:
        raise ValueError(f"{out}: expected a picture's name that ends in {' or '.join(FORMATS)}")
    names = [f"{Path(log).absolute().parent.name}/{Path(log).name}" for log in logs] if titles is None else titles
    if len(names) != len(logs):
        raise ValueError(f"titles: expected one for each of {len(logs)} logs, got {len(names)}")
    runs = [read_episodes(log) for log in logs]  # all of them before anything is drawn
    for log, slots in zip(logs, runs, strict=True):
        if not slots:
            raise ValueError(f"{log} holds no episode: nothing has finished in this run")

    columns = min(len(logs), _COLUMNS)
    rows = math.ceil(len(logs) / columns)
    figure = Figure(figsize=(6.4 * columns, 4.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for ax, slots, name in zip(panels.flat, runs, names, strict=False):
        _draw(ax, slots, name)
    for ax in panels.flat[len(logs) :]:
        ax.remove()
    for ax in panels[:, 0]:
        ax.set_ylabel("episode return")
    # Neither the date nor a random number goes into the file: the same logs make the same picture.
    plain: dict[str, Any] = {"metadata": {"Date": None}} if Path(out).suffix.lower() == ".svg" else {}
    with mpl.rc_context({"svg.hashsalt": "plugrl-bridges"}):
        figure.savefig(out, dpi=120, **plain)


def _draw(ax: Axes, slots: dict[int, list[LoggedEpisode]], name: str) -> None:
    num_envs = max(slots) + 1  # a slot may have finished no episode
    curves = [_curve(episodes, num_envs) for episodes in slots.values()]
    for steps, returns in curves:
        ax.plot(steps, returns, color="tab:blue", alpha=0.15, linewidth=0.8)
    steps, means = _mean(curves)
    few = len(steps) == 1  # a line of one point does not show
    ax.plot(
        steps, means, color="tab:blue", linewidth=2.2, marker="o" if few else None, label=f"mean of {len(slots)} slots"
    )
    ax.set_title(name)
    ax.set_xlabel("env steps")
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right")


def _curve(episodes: Sequence[LoggedEpisode], num_envs: int) -> Curve:
    """Return the env steps of the whole run at which a slot's episodes ended, and their returns."""
    # A vector step is one env step per slot. With action chunks it is several, and the lengths tell how many.
    taken = accumulate(episode.length for episode in episodes)
    steps = [max(episode.step, length) * num_envs for episode, length in zip(episodes, taken, strict=True)]
    return np.array(steps, np.float64), np.array([episode.ret for episode in episodes], np.float64)


def _mean(curves: Sequence[Curve]) -> Curve:
    """Return the mean over slots, from where the last of them has a return to where the first has no more.

    Where all episodes are of one length this is the mean of the slots' first episodes, of their second, and so on.
    Otherwise a slot's return is interpolated between the ends of two episodes, so that every slot weighs the same.
    """
    starts, ends = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    low, high = min(starts, ends), max(starts, ends)  # a slot may have ended before another one's first episode
    points = np.unique(np.concatenate([steps for steps, _ in curves]))
    points = points[(low <= points) & (points <= high)]
    if len(points) > _POINTS:
        points = np.linspace(low, high, _POINTS)
    with np.errstate(invalid="ignore"):  # a return may be infinite; such a mean is a gap in the line
        return points, np.mean([np.interp(points, steps, returns) for steps, returns in curves], axis=0)
