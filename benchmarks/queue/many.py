"""A queue with 10,000 jobs: what a submission, a look, a change and a decision take."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.queue.six import make
from shoal.jobs.queue.client import look
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.plan.queueing import order, transitions
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.shares import CoreCapacity, JobFacts
from shoal.terminal import queue_tables
from shoal.terminal.console import make_console

TURNS = 5


def many_jobs(runs: Path, *, count: int) -> dict[str, Any]:
    job = make("made", steps=10, hidden=8)
    paths = QueuePaths.of(runs)
    with QueueStore(paths) as store:
        rows = [timed("submit all in one transaction", lambda: store.submit([job] * count, user="ann"))]
        rows.append(timed("submit one more", lambda: store.submit([job], user="ann"), turns=TURNS))
        entries = {entry.id: entry for entry in store.entries()}
        rows.append(timed("read all", store.entries, turns=TURNS))
        last = max(entry.change for entry in entries.values())
        rows.append(timed("read what changed", lambda: store.entries(since_change=last), turns=TURNS))
        rows.append(timed("order all", lambda: order.runnable(entries), turns=TURNS))
        rows.append(timed("decide for the first 12", lambda: decide(entries), turns=TURNS))
        rows.append(timed("cancel one", lambda: store.apply(next(numbers), transitions.request_cancel), turns=TURNS))
    rows.append(timed("shoal queue", lambda: print_queue(runs), turns=TURNS))
    return {"what": f"a queue of {count:,} jobs", "size_bytes": paths.file.stat().st_size, "rows": rows}


numbers = iter(range(1, 1000))


def decide(entries: dict[int, Any]) -> None:
    window = order.runnable(entries)[:12]
    facts = {entry.id: JobFacts() for entry in window}
    ElasticShares().divide(0.0, [], window, cluster=CoreCapacity({"here": 2}), facts=facts)


def print_queue(runs: Path) -> None:
    queue_tables.print_queue(make_console(file=io.StringIO(), width=140), look(runs), everything=False)


def timed(name: str, act: Callable[[], object], *, turns: int = 1) -> dict[str, Any]:
    """The median of the turns, in seconds."""
    wall, processor = [], []
    for _ in range(turns):
        wall_s, processor_s = time.perf_counter(), time.process_time()
        act()
        wall.append(time.perf_counter() - wall_s)
        processor.append(time.process_time() - processor_s)
    return {"act": name, "s": round(statistics.median(wall), 4), "cpu s": round(statistics.median(processor), 4)}
