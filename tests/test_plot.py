"""Learning curves of episode logs: what is read, what is drawn, and what is said of files that are none."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from plugrl_bridges.cli import main
from plugrl_bridges.plot import find_episode_logs, plot_learning_curves, read_episodes
from plugrl_bridges.server.episodes import COLUMNS, EpisodeLog

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

PNG = b"\x89PNG\r\n\x1a\n"


def write_log(path: Path, rows: Sequence[tuple[int, float, int, int]]) -> Path:
    """Write a log of rows (slot, return, length, step)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = EpisodeLog(path)
    for slot, ret, length, step in rows:
        log.add(episode=0, slot=slot, ret=ret, length=length, end="truncated", step=step)
    log.close()
    return path


def a_run(path: Path, gain: float = 1.0) -> Path:
    """Write the log of two slots whose episodes of 10 steps all end together."""
    rows = [(slot, gain * k + slot, 10, 10 * (k + 1)) for k in range(4) for slot in (0, 1)]
    return write_log(path, rows)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """Collect the panels of the pictures that are saved."""
    panels: list[Axes] = []
    save = Figure.savefig

    def saved(self: Figure, *args: Any, **kwargs: Any) -> None:
        panels.extend(self.axes)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", saved)
    return panels


def lines(panel: Axes) -> list[list[tuple[float, float]]]:
    """Give the points of each line."""
    return [
        list(zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist(), strict=True))
        for line in panel.lines
    ]


def test_every_slot_is_drawn_faint_and_the_mean_bold(tmp_path: Path, drawn: list[Axes]) -> None:
    plot_learning_curves([a_run(tmp_path / "run" / "episodes.csv")], tmp_path / "out.png")
    [panel] = drawn
    ends = [20.0, 40.0, 60.0, 80.0]  # env steps: two envs
    assert lines(panel) == [
        list(zip(ends, [0.0, 1.0, 2.0, 3.0], strict=True)),
        list(zip(ends, [1.0, 2.0, 3.0, 4.0], strict=True)),
        list(zip(ends, [0.5, 1.5, 2.5, 3.5], strict=True)),
    ]
    *slots, mean = panel.lines
    assert all((slot.get_alpha() or 1) < 0.5 and slot.get_linewidth() < mean.get_linewidth() for slot in slots)
    assert mean.get_alpha() is None
    assert panel.get_title() == "run/episodes.csv"
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("env steps", "episode return")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_runs_stand_side_by_side_on_one_scale(tmp_path: Path, drawn: list[Axes], count: int) -> None:
    logs = [a_run(tmp_path / f"{k}.csv", gain=10.0 * k) for k in range(count)]
    plot_learning_curves(logs, tmp_path / "out.png", titles=[f"run {k}" for k in range(count)])
    assert [panel.get_title() for panel in drawn] == [f"run {k}" for k in range(count)]
    assert len({panel.get_ylim() for panel in drawn}) == 1
    assert len({round(panel.get_position().y0, 3) for panel in drawn}) == (2 if count > 3 else 1)


def test_the_mean_of_slots_with_episodes_of_different_lengths_weighs_them_the_same(
    tmp_path: Path, drawn: list[Axes]
) -> None:
    rows = [(0, 0.0, 10, 10), (1, 100.0, 20, 20), (0, 10.0, 10, 20), (0, 20.0, 10, 30), (1, 200.0, 20, 40)]
    plot_learning_curves([write_log(tmp_path / "log.csv", rows)], tmp_path / "out.png")
    # From the first end of slot 1 to the last end of slot 0; slot 1 is half way from 100 to 200 there.
    assert lines(drawn[0])[-1] == [(40.0, 55.0), (60.0, 85.0)]


def test_steps_are_env_steps_with_action_chunks_too(tmp_path: Path, drawn: list[Axes]) -> None:
    rows = [(0, 1.0, 40, 10), (0, 2.0, 40, 20)]  # 4 actions in each vector step
    plot_learning_curves([write_log(tmp_path / "log.csv", rows)], tmp_path / "out.png")
    assert lines(drawn[0])[0] == [(40.0, 1.0), (80.0, 2.0)]


@pytest.mark.parametrize(
    "rows",
    [
        [(3, 1.0, 5, 5)],
        [(0, 1.0, 5, 5), (0, 2.0, 5, 10), (1, 7.0, 30, 30)],  # the first ends before the other begins
        [(0, float("nan"), 5, 5), (1, float("inf"), 5, 5), (0, float("-inf"), 5, 10), (1, 1.0, 5, 10)],
    ],
    ids=["a single episode", "no overlap", "not finite"],
)
def test_odd_logs_are_drawn(tmp_path: Path, rows: list[tuple[int, float, int, int]], drawn: list[Axes]) -> None:
    plot_learning_curves([write_log(tmp_path / "log.csv", rows)], tmp_path / "out.png")
    assert lines(drawn[0])[-1]


def test_long_logs_have_a_mean_of_bounded_length(tmp_path: Path, drawn: list[Axes]) -> None:
    rows = [(slot, float(k), 1 + slot, k * (1 + slot) + 1) for slot in (0, 1) for k in range(2_000)]
    plot_learning_curves([write_log(tmp_path / "log.csv", rows)], tmp_path / "out.png")
    assert len(lines(drawn[0])[-1]) == 500


def test_pictures_are_png_or_svg_and_the_same_each_time(tmp_path: Path) -> None:
    log = a_run(tmp_path / "run.csv")
    for name in ("one.png", "two.png", "one.svg", "two.svg"):
        plot_learning_curves([log], tmp_path / name)
    assert (tmp_path / "one.png").read_bytes().startswith(PNG)
    assert ET.parse(tmp_path / "one.svg").getroot().tag.endswith("}svg")  # noqa: S314 - written right above
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_titles_must_be_as_many_as_the_runs(tmp_path: Path) -> None:
    log = a_run(tmp_path / "run.csv")
    with pytest.raises(ValueError, match="expected one for each of 1 logs, got 2"):
        plot_learning_curves([log], tmp_path / "out.png", titles=["a", "b"])
    with pytest.raises(ValueError, match="at least one"):
        plot_learning_curves([], tmp_path / "out.png")


def test_logs_are_found_among_other_files_and_each_once(tmp_path: Path) -> None:
    second, first = a_run(tmp_path / "runs" / "b" / "deep" / "episodes.csv"), a_run(tmp_path / "runs" / "a.csv")
    (tmp_path / "runs" / "monitor.csv").write_text('#{"t_start": 0.0}\nr,l,t\n1.0,5,0.1\n', encoding="utf-8")
    (tmp_path / "runs" / "broken.csv").write_bytes(b"\xff\xfe\x00")
    write_log(tmp_path / "runs" / "begun.csv", [])
    assert find_episode_logs([tmp_path / "runs"]) == [first, second]
    assert find_episode_logs([second, tmp_path / "runs", first]) == [second, first]
    assert find_episode_logs([tmp_path / "runs" / "monitor.csv"]) == [tmp_path / "runs" / "monitor.csv"]


def test_episodes_are_read_by_slot(tmp_path: Path) -> None:
    slots = read_episodes(write_log(tmp_path / "log.csv", [(2, 0.1 + 0.2, 7, 9), (0, 1.0, 3, 4), (2, 5.0, 8, 17)]))
    assert list(slots) == [0, 2]
    assert [(e.slot, e.ret, e.length, e.end, e.step) for e in slots[2]] == [
        (2, 0.1 + 0.2, 7, "truncated", 9),
        (2, 5.0, 8, "truncated", 17),
    ]


# The command ----------------------------------------------------------------------------------------------------------


def command(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["plot", *map(str, args)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_draws_files_and_folders(tmp_path: Path, drawn: list[Axes]) -> None:
    one, two = a_run(tmp_path / "runs" / "one.csv"), a_run(tmp_path / "two.csv")
    out = tmp_path / "both.svg"
    code, said, error = command(tmp_path / "runs", two, "--out", out, "--title", "first", "--title", "second")
    assert (code, said, error) == (0, f"{out}: {one}, {two}\n", "")
    assert [panel.get_title() for panel in drawn] == ["first", "second"]
    assert out.is_file()


BAD = {
    "nothing there": (None, "does not exist"),
    "empty file": (b"", "has no column slot, return, length, end, step"),
    "another table": (b"r,l,t\n1.0,5,0.1\n", "has no column slot, return"),
    "no text": (PNG + bytes(range(256)), "is not text of comma-separated values"),
    "no episode": (",".join(COLUMNS).encode() + b"\n", "holds no episode"),
    "half a line": (",".join(COLUMNS).encode() + b"\n0,0,1.0\n", "line 2: "),
    "no number": (",".join(COLUMNS).encode() + b"\n0,0,1.0,5,lost,3,0.1\n0,0,x,5,lost,9,0.2\n", "line 3: "),
}


@pytest.mark.parametrize("case", list(BAD))
def test_files_that_are_no_log_are_told_of_in_one_line(tmp_path: Path, case: str) -> None:
    content, text = BAD[case]
    path = tmp_path / "log.csv"
    if content is not None:
        path.write_bytes(content)
    out = tmp_path / "out.png"
    code, said, error = command(a_run(tmp_path / "good.csv"), path, "--out", out)
    assert (code, said) == (2, "")
    assert error.count("\n") == 1
    assert error.startswith(f"plugrl-bridges: {path} ")
    assert text in error
    assert not out.exists()


def test_other_faults_are_told_of_in_one_line(tmp_path: Path) -> None:
    log, empty = a_run(tmp_path / "run.csv"), tmp_path / "empty"
    empty.mkdir()
    for args, text in (
        ((empty,), f"{empty} has no episode log in it"),
        ((log, "--out", tmp_path / "out.pdf"), "out.pdf: expected a picture's name that ends in .png or .svg"),
        ((log, "--out", tmp_path / "no" / "out.png"), "the folder does not exist"),
        ((log, "--title", "a", "--title", "b", "--out", tmp_path / "out.png"), "titles: expected one for each of 1"),
    ):
        code, said, error = command(*args)
        assert (code, said, error.count("\n")) == (2, "", 1)
        assert text in error
    assert command()[0] == 2


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = a_run(tmp_path / "run.csv")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert len(read_episodes(log)) == 2  # reading needs none
    code, said, error = command(log, "--out", tmp_path / "out.png")
    assert (code, said) == (1, "")
    assert error == "plugrl-bridges: drawing learning curves needs matplotlib: pip install 'plugrl-bridges[plot]'\n"
