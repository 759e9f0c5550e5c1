"""Measure the speed of a side on a link. It starts on a fast link, because the start is not measured."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.links.hosts import Hosts
from benchmarks.links.quality import SMOOTH_STEPS, smooth
from benchmarks.links.sides import TIME_FIELDS, RunningSide, Start, StepRow
from benchmarks.overhead.side_by_side import Numbers

MIN_ROWS = 2
IDLE = 10
"""A worker has no lanes if it reports nothing while others report this many times."""
MAX_S = 300.0
_places = itertools.count()


def speed(
    start: Start,
    hosts: Hosts,
    scratch: Path,
    *,
    mbit: float,
    window_s: float,
    batch: int,
    period: int = 1,
    settled: Callable[[RunningSide, float], bool] | None = None,
) -> Numbers:
    """Steps per second, from the samples of all workers. If workers synchronise every `period` steps, whole periods are
    counted, the first without its first few steps. Counting starts when `settled(side, time of shaping)` is true."""
    least, begin = (MIN_ROWS, 1) if period == 1 else (0, 0)
    with _running(start, hosts, scratch) as going:
        shaped_t = since_t = _shape(going, hosts, mbit)
        if settled:
            _until(going, lambda: settled(going, shaped_t))
            since_t = time.time()
        _until(
            going, lambda: _periods_reported(going, since_t, period) >= begin
        )  # the step that was under way does not count
        before, cpu_s, began_t = hosts.moved_bytes(), _cpu_s(going), time.time()
        _until(going, lambda: _periods_reported(going, since_t, period) > least and time.time() > began_t + window_s)
        moved = max(now - then for then, now in zip(before, hosts.moved_bytes(), strict=True))
        cpu_s, wall_s = _cpu_s(going) - cpu_s, time.time() - began_t
        counted = [
            whole_periods(rows, since_t, period, first=not begin)
            for rows in going.rows.values()
            if _ends(rows, since_t, period)
        ]
    rate = sum(map(_samples_per_s, counted)) / batch
    steps = rate * wall_s
    return {"steps/s": rate, "MB": moved / steps / 1e6, "cpu_s": cpu_s / steps, **_spent(counted)}


def seconds_to(
    loss: float, start: Start, hosts: Hosts, scratch: Path, *, mbit: float, most_s: float, batch: int
) -> float | None:
    """Seconds from the first step until the mean loss of all workers reaches `loss`; None if that takes too long. For
    sides whose bits depend on the link."""
    with _running(start, hosts, scratch) as going:
        began_t = _shape(going, hosts, mbit)
        while time.time() < began_t + most_s:
            going.tick()
            told = sorted((row.t, row.loss, row.samples) for rows in going.rows.values() for row in rows)
            if found := next((t for t, value in smooth(told, SMOOTH_STEPS * batch) if value <= loss), None):
                return float(found - told[0][0])
    return None


@contextlib.contextmanager
def _running(start: Start, hosts: Hosts, scratch: Path) -> Iterator[RunningSide]:
    place = scratch / f"side-{next(_places)}"
    place.mkdir(parents=True)
    hosts.unshape()
    going = start(place)
    try:
        yield going
    finally:
        going.close()


def _shape(going: RunningSide, hosts: Hosts, mbit: float) -> float:
    """Shape the wire as soon as both workers train. Returns the time."""
    _until(going, lambda: len(going.rows) == going.workers and all(going.rows.values()))
    hosts.shape(mbit) if math.isfinite(mbit) else hosts.unshape()
    return time.time()


def _until(going: RunningSide, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no such progress in {MAX_S:g} s")
        going.tick()


def _periods_reported(going: RunningSide, since_t: float, period: int) -> int:
    """Number of period ends that every worker with lanes has reported. The faster worker may have all lanes."""
    found = going.rows
    if len(found) < going.workers:
        return 0
    return fewest_reported([len(_ends(rows, since_t, period)) for rows in found.values()])


def fewest_reported(counts: Sequence[int]) -> int:
    return min(n for n in counts if n or max(counts) < IDLE)


def _ends(rows: list[StepRow], since_t: float, period: int) -> list[int]:
    """Indices of the rows that end a period."""
    return [i for i, row in enumerate(rows) if row.t > since_t and row.step % period == 0 and not row.inner]


def whole_periods(rows: list[StepRow], since_t: float, period: int, *, first: bool = False) -> list[StepRow]:
    """The rows between the ends of two periods or, with `first`, from the first row on."""
    ends = _ends(rows, since_t, period)
    begin = next(i for i, row in enumerate(rows) if row.t > since_t) if first else ends[0]
    return rows[begin : ends[-1] + 1]


def _cpu_s(going: RunningSide) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in going.pids()]
    return float(sum(one.user + one.system for one in times))


def _samples_per_s(rows: list[StepRow]) -> float:
    return sum(row.samples for row in rows[1:]) / (rows[-1].t - rows[0].t)


def _spent(counted: list[list[StepRow]]) -> dict[str, float]:
    """Milliseconds per step, mean over the workers."""
    steps = sum(rows[-1].step - rows[0].step for rows in counted)
    if not steps:
        return {}
    return {
        name: 1000 * sum(r.spent.get(name, 0.0) for rows in counted for r in rows[1:]) / steps for name in TIME_FIELDS
    }
