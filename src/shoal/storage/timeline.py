"""Where each worker's time went, in bins of equal length over the whole run. Memory is bounded: when there are too
many bins, each two become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from shoal.events.run_state import TIME_FIELDS

MAX_BINS = 2048
FIRST_WIDTH_S = 0.25


class TimelineFields(TypedDict):
    """`workers`: by worker and kind of time, the seconds in each bin that has some."""

    start_t: float | None
    width_s: float
    workers: dict[str, dict[str, dict[str, float]]]


class WorkerTimeline:
    def __init__(self) -> None:
        self.start_t: float | None = None
        self.width_s = FIRST_WIDTH_S
        self._spent: dict[str, dict[str, dict[int, float]]] = {}

    def add(self, worker: str, t: float, fields: Mapping[str, float]) -> None:
        """The times of a row that was written at `t`. Time before the first row, as after a jump of the clock, counts
        as the first bin."""
        if self.start_t is None:
            self.start_t = t
        while t - self.start_t >= self.width_s * MAX_BINS:
            self._halve()
        index = max(int((t - self.start_t) / self.width_s), 0)
        kinds = self._spent.setdefault(worker, {})
        for name in TIME_FIELDS:
            spent_s = fields.get(name)
            if spent_s:
                column = kinds.get(name)
                if column is None:
                    column = kinds.setdefault(name, {})
                column[index] = column.get(index, 0.0) + spent_s

    def _halve(self) -> None:
        self.width_s *= 2
        for kinds in self._spent.values():
            for name, column in kinds.items():
                merged: dict[int, float] = {}
                for index, spent_s in column.items():
                    merged[index // 2] = merged.get(index // 2, 0.0) + spent_s
                kinds[name] = merged

    def to_fields(self) -> TimelineFields:
        workers = {
            who: {name: {str(k): v for k, v in column.items()} for name, column in kinds.items()}
            for who, kinds in self._spent.items()
        }
        return {"start_t": self.start_t, "width_s": self.width_s, "workers": workers}

    @classmethod
    def from_fields(cls, fields: TimelineFields) -> WorkerTimeline:
        """ValueError if a bin has no number."""
        made = cls()
        made.start_t, made.width_s = fields["start_t"], fields["width_s"]
        made._spent = {
            who: {name: {int(k): v for k, v in column.items()} for name, column in kinds.items()}
            for who, kinds in fields["workers"].items()
        }
        return made

    def columns(self, *, bins: int) -> tuple[float, dict[str, dict[str, list[float]]]]:
        """The length of a part in seconds; by worker and kind, the seconds in each of at most `bins` parts."""
        used = 1 + max((b for kinds in self._spent.values() for c in kinds.values() for b in c), default=-1)
        per = max(-(-used // max(bins, 1)), 1)
        size = -(-used // per)
        columns = {
            who: {name: _binned(column, per, size) for name, column in kinds.items()}
            for who, kinds in self._spent.items()
        }
        return self.width_s * per, columns


def _binned(column: Mapping[int, float], per: int, size: int) -> list[float]:
    found = [0.0] * size
    for index, spent_s in column.items():
        found[index // per] += spent_s
    return [round(one, 4) for one in found]
