"""Prints searches: their trials, history, importance of the values, and receipts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.errors import plural
from shoal.jobs.search.receipt import SearchReceipt
from shoal.jobs.search.summary import SearchComparison, StoredSearch
from shoal.jobs.search.table import Judge, SearchTable, TrialEntry
from shoal.spec.job import Job
from shoal.terminal import formatting
from shoal.terminal.curve import draw
from shoal.terminal.reports import print_lines

MAX_TRIALS = 40
MAX_LINES = 12
_EXACT = {True: "yes", False: "no", None: "not checked"}
_BAR = 24


def describe_changes(changes: Mapping[str, Any]) -> str:
    """`lr 0.001, batch_size 32`: the last part of each path, and its value."""
    return ", ".join(f"{short_name(path)} {short_value(value)}" for path, value in changes.items())


def short_name(path: str) -> str:
    return path.rpartition(".")[2]


def short_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict) and "name" in value:
        inner = describe_changes(value.get("args", {}))
        return f"{value['name']}({inner})" if inner else str(value["name"])
    return value if isinstance(value, str) else json.dumps(value)


def spent_text(table: SearchTable, job: Job) -> str:
    """How much of the budget is used."""
    assert job.search is not None
    budget, spent = job.search.budget, f"{table.spent:.1f}"
    if budget.trainings is not None:
        return f"{spent}/{budget.trainings:g} trainings"
    if budget.trials is not None:
        return f"{len(Judge.of(job).begun(table))}/{budget.trials} trials, {spent} trainings"
    return f"{spent} trainings"


# ---- one search ----


def print_search(console: Console, found: StoredSearch) -> None:
    print_lines(console, f"{found.paths.name}: {found.status}, {spent_text(found.table, found.job)}")
    print_trials(console, found)
    _print_history(console, found)
    _print_front(console, found)
    _print_importance(console, found)
    _print_coordinates(console, found)
    if found.receipt is not None:
        console.print()
        print_search_receipt(console, found.receipt)


def print_trials(console: Console, found: StoredSearch) -> None:
    """The best first, then those without a value."""
    ranked = found.ranked
    listed = [*ranked, *(t for t in found.table.trials.values() if t not in ranked)]
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("trial", *(o.metric for o in found.judge.objectives), "done", "state", "values"):
        table.add_column(name)
    best = found.best.number if found.best else None
    for trial in listed[:MAX_TRIALS]:
        values = [_value_text(found, trial, i) for i in range(len(found.judge.objectives))]
        told = trial.failure or describe_changes(trial.changes)
        style = "bold" if trial.number == best else ""
        table.add_row(
            str(trial.number), *values, f"{trial.unit}/{trial.units}", found.judge.phase(trial), told, style=style
        )
    console.print(table)
    if len(listed) > MAX_TRIALS:
        print_lines(console, f"and {len(listed) - MAX_TRIALS} more: --json has all of them")


def _value_text(found: StoredSearch, trial: TrialEntry, objective: int) -> str:
    """The value, with its standard error if it is a mean."""
    errors = trial.standard_errors if found.job.averages_runs else {}
    error = errors.get(found.judge.objectives[objective].metric)
    text = formatting.number(value_of(found, trial, objective)).replace("nan", "–")
    return text if error is None else f"{text} ± {formatting.number(error)}"


def value_of(found: StoredSearch, trial: TrialEntry, objective: int = 0) -> float:
    return found.judge.value(trial, objective)


def _print_history(console: Console, found: StoredSearch) -> None:
    """The best value over the trainings that were done."""
    history = [] if found.summary is None else list(found.summary.history)
    if history:
        spent = [one.trainings for one in history] + [max(found.table.spent, history[-1].trainings)]
        best = [one.value for one in history] + [history[-1].value]
        lines = draw(spent, best, width=min(console.width - 16, 64), height=8)
        print_lines(console, "", f"best {found.judge.objectives[0].metric} over trainings", *lines)


def _print_front(console: Console, found: StoredSearch) -> None:
    """The trials that no other one dominates, if there are several metrics."""
    if found.summary is not None and found.summary.volume is not None:
        numbers = ", ".join(map(str, found.summary.front))
        print_lines(console, "", f"Pareto front: trials {numbers}; hypervolume {found.summary.volume:.4g}")


def _print_importance(console: Console, found: StoredSearch) -> None:
    shares = found.importance
    if not shares:
        return
    width = max(map(len, shares))
    lines = [f"{name:<{width}}  {'█' * round(share * _BAR):<{_BAR}} {share:.0%}" for name, share in shares.items()]
    print_lines(console, "", "importance", *lines)


def _print_coordinates(console: Console, found: StoredSearch) -> None:
    """Parallel coordinates: a row per trial, a column per value, and a mark where the trial stands in it."""
    ranked = found.ranked[:MAX_LINES]
    if len(ranked) < 2:
        return
    paths = [path for path in ranked[0].changes if all(path in trial.changes for trial in ranked)]
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("trial", *map(short_name, paths), found.judge.objectives[0].metric):
        table.add_column(name)
    columns = [coordinates([trial.changes[path] for trial in ranked]) for path in paths]
    columns.append(coordinates([value_of(found, trial) for trial in ranked]))
    for i, trial in enumerate(ranked):
        table.add_row(str(trial.number), *(column[i] for column in columns))
    print_lines(console, "", "parallel coordinates (lowest left, highest right; the best trials first)")
    console.print(table)


def coordinates(values: Sequence[Any], *, width: int = 12) -> list[str]:
    """Each value as a mark on a line."""
    marks = [round(place * (width - 1)) for place in places(values)]
    return ["·" * mark + "●" + "·" * (width - 1 - mark) for mark in marks]


def places(values: Sequence[Any]) -> list[float]:
    """Each value as a place from 0 to 1: numbers by size, or by their logarithm if they differ much, others by name."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        names = sorted({short_value(value) for value in values})
        return [names.index(short_value(value)) / max(len(names) - 1, 1) for value in values]
    low, high = min(numbers), max(numbers)
    log = low > 0 and high / low >= 100
    scaled = [math.log(v) if log else float(v) for v in numbers]
    low, high = min(scaled), max(scaled)
    return [(v - low) / (high - low) if high > low else 0.5 for v in scaled]


# ---- receipts and comparisons ----


def print_search_receipt(console: Console, r: SearchReceipt) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("search", Text(r.search, style="bold") + f" ({r.ended})")
    table.add_row("exact", f"{_EXACT[r.exact]} ({r.why})")
    table.add_row("decided", f"{plural(r.trials, 'trial')}, {r.failed} failed, {plural(r.decisions, 'decision')}")
    table.add_row("sha256", f"{r.decisions_sha256} (all decisions and values)")
    if r.winner is not None:
        table.add_row("winner", f"trial {r.winner}: {describe_changes(r.changes)}")
        table.add_row("", formatting.metrics(r.values))
        table.add_row("weights", r.weights_sha256)
    table.add_row("carried by", f"{plural(r.workers, 'worker')}, {plural(r.starts, 'start')}")
    if r.forgotten or r.interventions:
        told = [
            *([f"checkpoints of {plural(r.forgotten, 'trial')} forgotten"] if r.forgotten else []),
            *r.interventions,
        ]
        table.add_row("interventions", "; ".join(told))
    table.add_row("time", formatting.seconds(r.total_s))
    console.print(table)


def print_search_comparison(console: Console, compared: SearchComparison) -> None:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    both = (compared.first, compared.second)
    for name in ("", *(found.paths.name for found in both)):
        table.add_column(name)
    rows: dict[str, list[str]] = {
        "status": [found.status for found in both],
        "trials": [str(len(found.table.trials)) for found in both],
        "decisions": [str(len(found.table.decisions)) for found in both],
        "trainings": [f"{found.table.spent:.1f}" for found in both],
        "best": ["–" if found.best is None else _best_text(found, found.best) for found in both],
        "weights": [found.table.ended.weights_sha256[:16] if found.table.ended else "–" for found in both],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    same = "The two searches decided and found the same."
    print_lines(console, same if compared.same else f"They differ first in the {compared.difference}.")


def _best_text(found: StoredSearch, best: TrialEntry) -> str:
    return f"trial {best.number}: {formatting.number(value_of(found, best))}"
