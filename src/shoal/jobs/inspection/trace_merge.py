"""Chrome traces of several workers as one: each worker is a process of the trace, on one clock. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_OPERATORS = 40
OPERATORS = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset")
_IGNORED = ("Spans", "Traces", "")


@dataclass(frozen=True)
class OperatorTime:
    """What one operator took, over all workers. `self_us`: without the operators that it called."""

    name: str
    calls: int
    total_us: float
    self_us: float


def merge_traces(traces: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One trace from those of the workers. Times are of the wall clock, so workers of one machine stand side by side as
    they ran."""
    bases = {who: _base_us(trace) for who, trace in traces.items()}
    first = min(bases.values(), default=0.0)
    numbers: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for order, (who, trace) in enumerate(traces.items()):
        for event in rows_of(trace):
            number = numbers.setdefault((who, str(event.get("pid"))), len(numbers) + 1)
            events.append(_moved(event, who, number, bases[who] - first, order=order))
    return {"displayTimeUnit": "ms", "traceEvents": events, "baseTimeNanoseconds": int(first * 1000)}


def rows_of(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events that belong to a process of the worker."""
    found = trace.get("traceEvents")
    rows = found if isinstance(found, list) else []
    return [row for row in rows if isinstance(row, dict) and row.get("pid") not in _IGNORED]


def _base_us(trace: Mapping[str, Any]) -> float:
    base = trace.get("baseTimeNanoseconds")
    return base / 1000 if isinstance(base, int | float) else 0.0


def _moved(event: Mapping[str, Any], who: str, number: int, shift_us: float, *, order: int) -> dict[str, Any]:
    moved = {**event, "pid": number}
    if isinstance(event.get("ts"), int | float):
        moved["ts"] = event["ts"] + shift_us
    if "id" in event:
        moved["id"] = f"{who}:{event['id']}"  # arrows within a worker
    if event.get("name") == "process_name":
        moved["args"] = {"name": who}
    if event.get("name") == "process_sort_index":
        moved["args"] = {"sort_index": order}
    return moved


def operator_times(events: Iterable[Mapping[str, Any]]) -> list[OperatorTime]:
    """The operators that took longest by themselves."""
    totals: dict[str, list[float]] = {}
    for calls in _by_thread(events).values():
        for name, duration_us, self_us in _self_times(calls):
            entry = totals.setdefault(name, [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += duration_us
            entry[2] += self_us
    ordered = sorted(totals.items(), key=lambda one: (-one[1][2], one[0]))[:MAX_OPERATORS]
    return [OperatorTime(name, int(n), round(total, 3), round(own, 3)) for name, (n, total, own) in ordered]


Operator = tuple[float, float, str]


def _by_thread(events: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, Any], list[Operator]]:
    found: dict[tuple[Any, Any], list[Operator]] = {}
    for event in events:
        start, duration = event.get("ts"), event.get("dur")
        is_timed = isinstance(start, int | float) and isinstance(duration, int | float)
        if is_timed and event.get("ph") == "X" and event.get("cat") in OPERATORS:
            row = (float(start), float(duration), str(event.get("name"))[:200])  # type: ignore[arg-type]
            found.setdefault((event.get("pid"), str(event.get("tid"))), []).append(row)
    return found


def _self_times(calls: Sequence[Operator]) -> Iterable[tuple[str, float, float]]:
    """Name, duration and own time of each call of a thread: calls are nested or apart."""
    stack: list[tuple[float, str, float, list[float]]] = []
    done: list[tuple[str, float, float]] = []

    def close(until: float) -> None:
        while stack and stack[-1][0] <= until:
            _, name, duration, inner = stack.pop()
            done.append((name, duration, max(duration - sum(inner), 0.0)))

    for start, duration, name in sorted(calls, key=lambda one: (one[0], -one[1])):
        close(start)
        if stack:
            stack[-1][3].append(duration)
        stack.append((start + duration, name, duration, []))
    close(float("inf"))
    return done
