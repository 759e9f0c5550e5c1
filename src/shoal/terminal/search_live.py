"""The display of a search: a live table of trials in a terminal, plain lines elsewhere, JSON rows for scripts."""

from __future__ import annotations

import json
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.errors import plural
from shoal.jobs.search.driver import SearchProgress
from shoal.jobs.search.journal import AnyRow, DecidedRow, ShapeRow, ToldRow
from shoal.jobs.search.stretches import StretchRun
from shoal.jobs.search.table import Judge, SearchTable, TrialEntry
from shoal.terminal import formatting
from shoal.terminal.console import json_line
from shoal.terminal.fact_table import GAP, fitting, widest
from shoal.terminal.search_report import describe_changes, spent_text

MAX_TRIALS_SHOWN = 12
LEAST_VALUES = 12
"""Columns for the values of a trial, at least."""


class SearchDisplay(Protocol):
    def __enter__(self) -> SearchDisplay: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def on_update(self, progress: SearchProgress) -> None: ...


def make_search_display(console: Console, *, as_json: bool, quiet: bool) -> SearchDisplay:
    if as_json:
        return JsonSearchDisplay()
    if quiet:
        return SilentSearchDisplay()
    return LiveSearchDisplay(console) if console.is_terminal else PlainSearchDisplay(console)


class SilentSearchDisplay:
    """Shows nothing."""

    def __enter__(self) -> SilentSearchDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def on_update(self, progress: SearchProgress) -> None:
        pass


class _NewRows:
    """Yields each row of the journal once."""

    def __init__(self) -> None:
        self._shown: int | None = None

    def take(self, progress: SearchProgress) -> list[AnyRow]:
        """The rows since the last call; none of those that an earlier driver wrote."""
        rows = progress.rows
        start = progress.earlier_rows if self._shown is None else self._shown
        self._shown = len(rows)
        return list(rows[start:])


class JsonSearchDisplay(SilentSearchDisplay):
    """Every row of the journal as a line of JSON on standard output."""

    def __init__(self) -> None:
        self._new = _NewRows()

    def on_update(self, progress: SearchProgress) -> None:
        for row in self._new.take(progress):
            print(json_line({"search": progress.paths.name, **json.loads(row.model_dump_json())}), flush=True)


class PlainSearchDisplay(SilentSearchDisplay):
    """For logs and pipes: a line for each decision and each result."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._new = _NewRows()
        self._then: SearchTable | None = None

    def on_update(self, progress: SearchProgress) -> None:
        """Each row is told with the values of its time: later ones may have been written since the last call."""
        new = self._new.take(progress)
        if self._then is None:
            self._then = SearchTable.of(progress.rows[: len(progress.rows) - len(new)])
        for row in new:
            self._then.apply(row)
            if text := row_line(replace(progress, table=self._then), row):
                self._console.print(f"{progress.paths.name}: {text}", soft_wrap=True)


def row_line(progress: SearchProgress, row: AnyRow) -> str:
    """One line for a row; '' for a row that needs none."""
    if isinstance(row, ShapeRow):
        if row.failure:
            return f"trial {row.trial} cannot be trained: {row.failure}"
        judge, trial = Judge.of(progress.job), progress.table.trials[row.trial]
        refused = f"trial {row.trial} is not trained, it breaks a constraint: {describe_changes(row.changes)}"
        return refused if judge.phase(trial) == "refused" else ""
    if isinstance(row, DecidedRow):
        what = f"goes on from {row.start}"
        if row.copy_of is not None:
            what = f"begins as a copy of trial {row.copy_of[0]} at {row.start}: {describe_changes(row.changes)}"
        elif row.start == 0:
            what = f"begins: {describe_changes(row.changes)}"
        return f"trial {row.trial} {what}; to {row.end} of {progress.table.trials[row.trial].units}"
    if not isinstance(row, ToldRow):
        return ""
    decided = progress.table.decisions[row.number]
    if row.failure:
        return f"trial {decided.trial} failed: {row.failure}"
    judge = Judge.of(progress.job)
    trial, best = progress.table.trials[decided.trial], judge.best(progress.table)
    told = (
        f"trial {trial.number} is at {trial.unit}: {judge.objectives[0].metric} {formatting.number(judge.value(trial))}"
    )
    return f"{told}; best: trial {best.number} {formatting.number(judge.value(best))}" if best else told


class LiveSearchDisplay(SilentSearchDisplay):
    """The best trials and those that run, refreshed in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: SearchProgress | None = None
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveSearchDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_update(self, progress: SearchProgress) -> None:
        self._progress = progress

    def _render(self) -> Group:
        progress = self._progress
        if progress is None:
            return Group()
        return Group(Text(head_line(progress)), trial_table(progress, self._console.width))


def head_line(progress: SearchProgress) -> str:
    table, running = progress.table, progress.runs.active
    failed = sum(trial.state == "failed" for trial in table.trials.values())
    workers = sum(len(run.state.training_workers) for run in running if run.state)
    parts = [
        progress.paths.name,
        plural(len(table.trials), "trial") + (f", {failed} failed" if failed else ""),
        spent_text(table, progress.job),
        f"{workers}/{progress.runs.workers} workers",
        f"{formatting.seconds(progress.elapsed_s)}, ETA {formatting.seconds(progress.eta_s)}",
    ]
    return "  ".join(parts)


def trial_table(progress: SearchProgress, width: int) -> Table:
    """What fits into `width` columns: a line for each trial, with as much of its values as there is room for."""
    rows = _trial_rows(progress)
    shown = fitting(widest([facts for facts, _, _ in rows]), width - LEAST_VALUES, drop=("workers", "step", "state"))
    room = max(LEAST_VALUES, width - sum(len(text) + GAP for text in shown.values()))
    table = Table.grid(padding=(0, GAP))
    for _ in (*shown, "values"):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for facts, values, style in rows:
        cut = f"{values[: room - 1]}…" if len(values) > room else values
        table.add_row(*(facts[name] for name in shown), Text(cut), style=style)
    return table


def _trial_rows(progress: SearchProgress) -> list[tuple[dict[str, str], str, str]]:
    """The facts of each trial that is shown, its values, and its style; first the names of the columns."""
    judge = Judge.of(progress.job)
    names = {
        "trial": "trial",
        "value": judge.objectives[0].metric,
        "step": "step",
        "state": "state",
        "workers": "workers",
    }
    rows = [(names, "values", "dim")]
    runs = {run.stretch.trial: run for run in progress.runs.active}
    ranked = judge.ranked(progress.table)
    shown = {t.number: t for t in [progress.table.trials[n] for n in runs if n in progress.table.trials] + ranked}
    best = judge.best(progress.table)
    for trial in list(shown.values())[:MAX_TRIALS_SHOWN]:
        run = runs.get(trial.number)
        facts = {
            "trial": str(trial.number),
            "value": formatting.number(judge.value(trial)) if trial.rows else "–",
            "step": _step(trial, run),
            "state": "running" if run else trial.state,
            "workers": str(len(run.state.training_workers)) if run and run.state else "",
        }
        style = "bold" if trial is best else "" if run else "dim"
        rows.append((facts, describe_changes(trial.changes), style))
    return rows


def _step(trial: TrialEntry, run: StretchRun | None) -> str:
    if run is not None and run.state is not None and run.shape.boundaries:
        return f"{run.state.step}/{run.shape.boundaries[-1]}"
    return f"{trial.unit}/{trial.units} units"
