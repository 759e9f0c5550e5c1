"""The queue as a person sees it: who runs, who waits and why, and who had how many workers when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.errors import plural
from shoal.jobs.queue.client import QueueView
from shoal.jobs.queue.queue_store import HistoryRow
from shoal.plan.queueing.entry import ENDED, QueueEntry
from shoal.terminal import formatting
from shoal.terminal.reports import MAX_TABLE_ROWS, print_lines

STYLES = {"running": "green", "held": "yellow", "failed": "red", "cancelled": "dim", "finished": "dim"}
MAX_ENDED_SHOWN = 10
MAX_WAITING_SHOWN = 50
TOP_INTERVAL_S = 0.5
TOP_ROWS = 30
LEVELS = " ▁▂▃▄▅▆▇█"


def print_queue(console: Console, view: QueueView, *, everything: bool) -> None:
    rows = shown_entries(view, everything=everything)
    if not rows:
        print_lines(console, "the queue is empty")
    elif len(rows) > MAX_TABLE_ROWS:
        print_lines(console, *("  ".join(_cells(entry, view)) for entry in rows))
    else:
        console.print(queue_table(rows, view))
    hidden = len(view.entries) - len(rows)
    print_lines(console, summary(view) + (f"; {hidden:,} are not shown (--all)" if hidden else ""))


def shown_entries(view: QueueView, *, everything: bool) -> list[QueueEntry]:
    """The last jobs that ended, then those that run or are held, then those that wait; or all of them."""
    ended = sorted((e for e in view.entries.values() if e.has_ended), key=lambda e: e.ended_t)
    waiting = [e for e in view.entries.values() if e.state == "waiting"]
    others = [e for e in view.entries.values() if e.state in ("running", "held")]
    if everything:
        return [*ended, *others, *waiting]
    return [*ended[-MAX_ENDED_SHOWN:], *others, *waiting[:MAX_WAITING_SHOWN]]


def queue_table(rows: Sequence[QueueEntry], view: QueueView) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("id", "job", "user", "priority", "state", "workers", "run", "why"):
        table.add_column(title, overflow="fold")
    for entry in rows:
        cells: list[str | Text] = list(_cells(entry, view))
        cells[4] = Text(entry.state, style=STYLES.get(entry.state, ""))
        table.add_row(*cells)
    return table


def _cells(entry: QueueEntry, view: QueueView) -> tuple[str, ...]:
    needs = entry.needs
    bounds = f"{needs.least}..{needs.most}" if needs.least != needs.most else f"{needs.most}"
    workers = f"{entry.workers} of {bounds}" if entry.state == "running" else bounds
    return (
        str(entry.id), _title(entry), entry.user, str(entry.priority), entry.state, workers, entry.run, view.why(entry)
    )  # fmt: skip


def _title(entry: QueueEntry) -> str:
    return entry.name if entry.kind == "training" else f"{entry.name} ({entry.kind})"


def summary(view: QueueView) -> str:
    states = [entry.state for entry in view.entries.values()]
    counts = [f"{states.count(state)} {state}" for state in ("running", "waiting", "held", *ENDED) if state in states]
    served = f"daemon: process {view.daemon_pid}" if view.daemon_pid else "no daemon"
    return "; ".join([", ".join(counts) or "no jobs", served])


def print_why(console: Console, entry: QueueEntry, view: QueueView, history: Sequence[HistoryRow]) -> None:
    """A job's state and reason, then what happened to it."""
    print_lines(console, f"job {entry.id} ({entry.name}) is {entry.state}" + _and(view.why(entry)))
    if entry.run:
        print_lines(console, f"run {entry.run}, {plural(entry.attempts, 'attempt')}")
    for row in history:
        workers = f", {plural(row.workers, 'worker')}" if row.workers else ""
        print_lines(console, f"  {_clock(row.t)}  {row.state}{workers}{_and(row.reason)}")


def _and(text: str) -> str:
    return f": {text}" if text else ""


def _clock(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def queue_data(view: QueueView, rows: Sequence[QueueEntry]) -> list[dict[str, Any]]:
    return [{**entry.model_dump(mode="json"), "why": view.why(entry)} for entry in rows]


def watch_queue(
    console: Console,
    look: Callable[[], QueueView],
    history: Callable[[], Sequence[HistoryRow]],
    *,
    once: bool = False,
) -> None:
    """Show the queue until Ctrl-C, or once if this is not a terminal."""
    if once or not console.is_terminal:
        console.print(top_panel(look(), history(), width=console.width))
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(top_panel(look(), history(), width=console.width), refresh=True)
            time.sleep(TOP_INTERVAL_S)


def top_panel(view: QueueView, history: Sequence[HistoryRow], *, width: int) -> Group:
    alive = [e for e in view.entries.values() if not e.has_ended]
    alive.sort(key=lambda e: (e.state != "running", e.state != "held", e.id))
    recent = sorted((e for e in view.entries.values() if e.has_ended), key=lambda e: -e.ended_t)[:MAX_ENDED_SHOWN]
    rows = [*alive[:TOP_ROWS], *recent]
    hidden = [f"and {len(alive) - TOP_ROWS} more"] if len(alive) > TOP_ROWS else []
    picture = worker_picture(history, [e.id for e in rows], width=max(width - 24, 16))
    return Group(Text(summary(view)), queue_table(rows, view), *map(Text, hidden), Text(""), *map(Text, picture))


def worker_picture(history: Sequence[HistoryRow], numbers: Sequence[int], *, width: int) -> list[str]:
    """One line per job: how many workers it had over time."""
    if not history:
        return []
    passed = _passed_s([row.t for row in history])
    span = max(passed[-1], 1.0)
    most = max((row.workers for row in history), default=1) or 1
    changes: dict[int, list[tuple[float, int]]] = {}
    for t, row in zip(passed, history, strict=True):
        changes.setdefault(row.id, []).append((t, row.workers))
    lines = [
        f"{number:>6} {''.join(_levels(changes[number], span, width, most))}"
        for number in sorted(numbers)
        if any(workers for _, workers in changes.get(number, ()))
    ]
    title = f"workers over {formatting.seconds(span)} (full height: {most})"
    return [title, *lines] if lines else []


def _passed_s(times: Sequence[float]) -> list[float]:
    """Seconds since the first of them. Where the clock was set back, no time has passed."""
    return [0.0, *accumulate(max(after - before, 0.0) for before, after in pairwise(times))]


def _levels(changes: Sequence[tuple[float, int]], span: float, width: int, most: int) -> list[str]:
    """The most workers within each column of time."""
    columns = [0] * width
    for (t, workers), (end, _) in zip(changes, [*changes[1:], (span, 0)], strict=True):
        start, stop = (min(int(moment / span * width), width - 1) for moment in (t, end))
        for column in range(start, stop + 1):
            columns[column] = max(columns[column], workers)
    return [LEVELS[0] if not n else LEVELS[max(1, round(n / most * (len(LEVELS) - 1)))] for n in columns]


def print_submitted(console: Console, entries: Sequence[QueueEntry]) -> None:
    for entry in entries:
        print_lines(console, f"job {entry.id} ({entry.name}) is {entry.state}{_and(entry.reason)}")
