"""The parts of a run's state: workers, servers, curves, residuals that were lost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict

from shoal.events.checks import Count, Number

MAX_POINTS = 4096
MIN_PACE_S = 1.0
"""Seconds of steps before a pace is told."""
MIN_MEMORY_S = 60.0
MEMORY_SHARE = 0.25
"""A pace forgets over this share of the time that it has seen, or over a minute."""
RECENT_S, RECENT_STEPS = 60.0, 50
"""After so many seconds and steps the work of a worker counts half."""
MIN_RECENT_STEPS = 20
"""Steps of a worker before it is compared with the others."""
KEPT_PACE_S = 5.0
"""What an earlier pace still weighs after the number of workers has changed."""


@dataclass
class WorkerSummary:
    """The state of one worker."""

    name: str
    host: str = ""
    pid: int = 0
    lanes: list[int] = field(default_factory=list)
    is_saver: bool = True
    step: int = 0
    steps: int = 0
    samples: int = 0
    work_s: float = 0.0
    samples_per_s: float = 0.0
    state: str = "starting"
    first_t: float | None = None
    last_t: float = 0.0
    """The times of its first and last event."""
    has_joined: bool = False
    loading_s: float = 0.0
    """How long it loaded a checkpoint before it joined."""
    usage: dict[str, Number] = field(default_factory=dict)
    """The numbers of its last `usage` event."""
    recent_steps: float = 0.0
    recent_work_s: float = 0.0
    recent_t: float = 0.0
    """Steps and work of late, and the time of the last row; see `add_work`."""

    def add_work(self, t: float, *, steps: int, work_s: float) -> None:
        """A row of steps. What is older counts half after a minute or 50 steps, whichever is longer."""
        age = min(max(t - self.recent_t, 0.0) / RECENT_S, steps / RECENT_STEPS)
        kept = 0.5**age
        self.recent_steps, self.recent_work_s = kept * self.recent_steps + steps, kept * self.recent_work_s + work_s
        self.recent_t = t

    def forget_work(self) -> None:
        """It has other lanes now."""
        self.recent_steps = self.recent_work_s = 0.0

    @property
    def step_work_s(self) -> float | None:
        """Seconds of work for a step of late; None while too few are known."""
        return self.recent_work_s / self.recent_steps if self.recent_steps >= MIN_RECENT_STEPS else None

    @property
    def lifetime_s(self) -> float:
        return 0.0 if self.first_t is None else self.last_t - self.first_t

    def seen_at(self, t: float) -> None:
        if self.first_t is None:
            self.first_t = self.last_t = t
        self.last_t = max(self.last_t, t)


@dataclass
class ServerSummary:
    """The state of one server. `stats` are its last reported numbers: pushes, bytes_in, bytes_out, bytes_plain
    (bytes_in without a codec), staleness_mean, staleness_max."""

    name: str
    host: str = ""
    pid: int = 0
    state: str = "starting"
    primary_bytes: int = 0
    backup_bytes: int = 0
    filling_bytes: int = 0
    stats: dict[str, float] = field(default_factory=dict)

    def set_held_bytes(self, *, primary_bytes: int = 0, backup_bytes: int = 0, filling_bytes: int = 0) -> None:
        self.primary_bytes, self.backup_bytes, self.filling_bytes = primary_bytes, backup_bytes, filling_bytes


@dataclass
class Curve:
    """A series over steps. Its length is bounded: when it is full, every other point is dropped."""

    steps: list[int] = field(default_factory=list)
    values: list[Number] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        while self.steps and self.steps[-1] >= step:  # a resumed run repeats some steps
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MAX_POINTS:
            self.steps, self.values = self.steps[1::2], self.values[1::2]


@dataclass
class Pace:
    """How fast steps follow each other, with evaluations and saves between them: a mean that slowly forgets.

    The time of the first row after a (new) start is not counted: it contains what happens once, such as compiling.
    """

    step: int = 0
    t: float | None = None
    """Step and time of the last row; no time if the next row follows something else than a step."""
    workers: int = 0
    steps: float = 0.0
    seconds: float = 0.0
    """Weighted sums over the rows."""
    seen_s: float = 0.0

    def add(self, step: int, t: float, *, workers: int) -> None:
        """A row of the saver: after this step, at this time, with so many workers."""
        if workers != self.workers:
            self._weigh(min(1.0, KEPT_PACE_S / self.seconds) if self.seconds else 1.0)
        if self.t is not None and step > self.step and t > self.t:
            passed_s = t - self.t
            self.seen_s += passed_s
            self._weigh(math.exp(-passed_s / max(MIN_MEMORY_S, MEMORY_SHARE * self.seen_s)))
            self.steps += step - self.step
            self.seconds += passed_s
        self.step, self.t, self.workers = step, t, workers

    def interrupt(self) -> None:
        """The time until the next row is not that of steps."""
        self.t = None

    def _weigh(self, share: float) -> None:
        self.steps *= share
        self.seconds *= share

    def seconds_for(self, steps: int) -> float | None:
        """None if too little was seen."""
        return steps * self.seconds / self.steps if self.seconds >= MIN_PACE_S and self.steps else None


@dataclass
class LostResidual:
    """A codec's residual that died with a worker ('' if the worker is unknown)."""

    lane: int
    worker: str
    step: int | None


class RunFacts(TypedDict, total=False):
    """The facts that are computed with. Others may occur."""

    steps_per_s: Number
    parameters: Count
