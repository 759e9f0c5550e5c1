"""How fast a run goes with each number of workers, measured while it trains."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_STEPS, MIN_SECONDS = 3, 0.5
"""A speed is known once so many steps and seconds were seen with a number of workers."""


@dataclass(frozen=True)
class Measured:
    """Steps in seconds, with one number of workers."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def steps_per_s(self) -> float | None:
        known = self.steps >= MIN_STEPS and self.seconds >= MIN_SECONDS
        return self.steps / self.seconds if known else None


@dataclass
class SpeedMeter:
    """Counts the steps of one run. The time from a new view to its first step is not counted: it is that of the change,
    not of a number of workers. `now_s` is a monotonic clock."""

    by_workers: dict[int, Measured] = field(default_factory=dict)
    _workers: int = 0
    _last: tuple[int, float] | None = None

    def change_view(self, workers: int) -> None:
        self._workers, self._last = workers, None

    def reach_step(self, step: int, now_s: float) -> None:
        if self._last is not None and self._workers and step > self._last[0]:
            known = self.by_workers.get(self._workers, Measured())
            self.by_workers[self._workers] = Measured(
                known.steps + step - self._last[0], known.seconds + now_s - self._last[1]
            )
        if self._last is None or step > self._last[0]:
            self._last = step, now_s

    def speeds(self) -> dict[int, float]:
        """Steps per second by number of workers, where known."""
        return known_speeds(self.by_workers)


def speeds_with_plan(measured: Mapping[int, float], planned: Mapping[int, float]) -> dict[int, float]:
    """Steps per second by number of workers: the measured ones, and for other numbers those that a plan predicted,
    scaled by how far the plan was off where both are known."""
    off = [speed / planned[workers] for workers, speed in measured.items() if workers in planned]
    scale = statistics.median(off) if off else 1.0
    return dict(sorted(({workers: scale * speed for workers, speed in planned.items()} | dict(measured)).items()))


def known_speeds(measured: Mapping[int, Measured]) -> dict[int, float]:
    found = {workers: one.steps_per_s for workers, one in measured.items()}
    return {workers: speed for workers, speed in sorted(found.items()) if speed}
