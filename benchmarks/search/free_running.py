"""Workers of other tools: each asks for a trial when it is free, and reports every epoch."""

from __future__ import annotations

import heapq
import time
from typing import Any

import numpy as np

from benchmarks.search.rivals import Rival
from benchmarks.search.tables import CurveTable, TableSpace
from benchmarks.search.workers import SPEED_NOISE, Observations


def run_rival(table: CurveTable, rival: Rival, *, workers: int, horizon: float, seed: int) -> Observations:
    """Simulate up to the horizon, or until every row was used."""
    space, found, taken = TableSpace(table), Observations(), set[str]()
    queue: list[tuple[float, int, int, int, Any]] = []  # when, order, row, epoch, trial
    count = 0

    def begin(now: float) -> None:
        nonlocal count
        started = time.process_time()
        trial, place = rival.ask()
        found.decisions_s.append(time.process_time() - started)
        point = space.settle(place, taken)
        if point is None:
            return
        taken.add(point.key)
        count += 1
        push(now, int(point.changes["row"]), 0, trial, count)

    def push(now: float, row: int, epoch: int, trial: Any, number: int) -> None:
        before = table.time[row, epoch - 1] if epoch else 0.0
        speed = np.exp(np.random.default_rng([seed, number]).normal() * SPEED_NOISE)
        heapq.heappush(queue, (now + (table.time[row, epoch] - before) * speed, number, row, epoch, trial))

    for _ in range(workers):
        begin(0.0)
    while queue and queue[0][0] <= horizon:
        now, number, row, epoch, trial = heapq.heappop(queue)
        error = float(table.error[row, epoch])
        if np.isfinite(error):
            found.seen.append((now, error))
        goes_on = bool(np.isfinite(error)) and rival.report(trial, epoch + 1, error)
        if goes_on and epoch + 1 < table.error.shape[1]:
            push(now, row, epoch + 1, trial, number)
        else:
            rival.end(trial, error, stopped=epoch + 1 < table.error.shape[1])
            begin(now)
    found.ended = horizon
    return found
