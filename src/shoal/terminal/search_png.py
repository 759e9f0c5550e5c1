"""Draws a search as PNG: history, importance of the values, parallel coordinates. The only module with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import error, from_os_error
from shoal.jobs.search.summary import StoredSearch
from shoal.jobs.search.table import TrialEntry
from shoal.terminal.search_report import places, short_name, short_value, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 100
"""Trials that are drawn, the best ones."""


def draw_search(found: StoredSearch, file: Path) -> None:
    """Write the drawing. SH635 without matplotlib, SH609 if the file cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise error("SH635", "matplotlib is not installed", where="--png") from None
    figure = Figure(figsize=(11, 9), layout="constrained")
    history, importance, lines = figure.subplot_mosaic("AB;CC").values()
    figure.suptitle(f"{found.paths.name}: {len(found.table.trials)} trials, {found.status}")
    _draw_history(history, found)
    _draw_importance(importance, found)
    _draw_coordinates(lines, found)
    try:
        figure.savefig(file, format="png", dpi=110)
    except OSError as failure:
        fix = "Give the name of a file in a directory that is there, where you may write."
        told = error("SH609", f"the drawing could not be written: {failure}", where=str(file), fix=fix)
        raise from_os_error(failure, where=str(file)) or told from failure


def _draw_history(axes: Axes, found: StoredSearch) -> None:
    """The best value over trainings."""
    metric = found.judge.objectives[0].metric
    axes.set(title=f"best {metric} over trainings", xlabel="trainings", ylabel=metric)
    history = [] if found.summary is None else list(found.summary.history)
    if history:
        spent = [one.trainings for one in history] + [max(found.table.spent, history[-1].trainings)]
        axes.step(spent, [one.value for one in history] + [history[-1].value], where="post", marker=".")


def _draw_importance(axes: Axes, found: StoredSearch) -> None:
    axes.set(title="importance", xlabel="share")
    shares = dict(reversed(found.importance.items()))
    if shares:
        axes.barh([short_name(name) for name in shares], list(shares.values()))
    else:
        axes.text(0.5, 0.5, "too few trials", ha="center", va="center", transform=axes.transAxes)


def _draw_coordinates(axes: Axes, found: StoredSearch) -> None:
    """A line per trial through its values; the better, the darker."""
    ranked = found.ranked[:MAX_LINES]
    axes.set(title="parallel coordinates (the best trial is thick)", yticks=[], ylim=(-0.08, 1.12))
    if not ranked:
        return
    paths = [path for path in ranked[0].changes if all(path in trial.changes for trial in ranked)]
    columns: list[list[Any]] = [[trial.changes[path] for trial in ranked] for path in paths]
    columns.append([value_of(found, trial) for trial in ranked])
    heights = [places(column) for column in columns]
    for i, trial in reversed(list(enumerate(ranked))):
        _draw_line(axes, found, trial, [column[i] for column in heights], part=i / len(ranked))
    for x, (column, height) in enumerate(zip(columns, heights, strict=True)):
        axes.axvline(x, color="0.7", linewidth=0.8)
        for at in {height.index(min(height)), height.index(max(height))}:
            axes.text(x, height[at] + 0.03, short_value(column[at]), ha="center", fontsize=8)
    axes.set_xticks(range(len(columns)), [*map(short_name, paths), found.judge.objectives[0].metric])


def _draw_line(axes: Axes, found: StoredSearch, trial: TrialEntry, heights: list[float], *, part: float) -> None:
    best = found.best is not None and trial.number == found.best.number
    axes.plot(heights, color=str(0.1 + 0.7 * part), linewidth=2.5 if best else 0.9, label=f"trial {trial.number}")
