"""Own the picture of a comparison: a heat map of env and vector step. Needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from plugrl_bridges.ledger.outcome import Comparison

__all__ = ["plot_differences"]

_MAX_HEIGHT = 40.0  # inches


def plot_differences(found: Comparison, out: str | os.PathLike[str]) -> Path:
    """Draw how many cells differ, per env and vector step; look at the file.

    Args:
        found: From `compare`.
        out: Picture to write; its suffix chooses the format, without one it is ``.png``.

    Returns:
        The picture that was written.

    Raises:
        ValueError: for a format that matplotlib does not know.
        OSError: if the file cannot be written.
    """
    name = os.fspath(out)
    path = Path(out) if os.path.splitext(name)[1].strip(".") else Path(name.rstrip(".") + ".png")  # noqa: PTH122
    cells = found.heat.cells
    figure = Figure(figsize=(9.0, min(1.6 + 0.22 * len(cells), _MAX_HEIGHT)), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    steps = cells.shape[1] * found.heat.steps_per_bin
    image = ax.imshow(
        np.ma.masked_equal(cells, 0),
        norm=LogNorm(1, max(int(cells.max()), 10)),
        cmap="inferno_r",
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, steps - 0.5, len(cells) - 0.5, -0.5),
    )
    figure.colorbar(image, ax=ax, label="differing cells")
    ax.set_xlabel("vector step")
    ax.set_ylabel("env")
    ax.set_title("equal" if found.first is None else f"first: {found.first.field} of env {found.first.slot.number}")
    figure.savefig(path, dpi=120)
    return path
