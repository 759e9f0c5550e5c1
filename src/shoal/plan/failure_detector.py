"""Detect frozen and hanging workers from their heartbeats. There is no timeout to configure.

Each worker sends a heartbeat four times a second with its phase, the time spent on its present unit of work (a lane, a
batch, a chunk of an evaluation) and the number of finished units. The limit for a unit follows from recent units of the
same phase. Waiting for other workers never counts against a worker.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

WORKING_PHASES = ("compute", "data", "evaluation")
WAITING_PHASES = ("exchange", "waiting")

SILENT_S = 2.5
SILENT_BUILDING_S = 30.0
"""Longer while building, because imports may hold the GIL."""
STOPPED_S = 0.5
SILENT_STOPPED_S = 1.0

SHORTEST_HANG_S, HANG_FACTOR = 3.0, 8.0
SHORTEST_HANG_ALONE_S, HANG_FACTOR_ALONE = 30.0, 10.0
"""Longer for a single worker, because no other worker waits for it."""
NO_BASELINE_LIMIT_S = 300.0
"""Limit for work without a usual time: the first unit of a phase, building, saving, the user's watchers."""
SHORTEST_FIRST_S = 30.0
"""Minimum limit for the first unit of a later process: earlier processes have shown how long it takes."""
SHORTEST_STALL_S = 4.0

OBSERVER_PAUSE_S = 1.0
RECENT_UNITS = 100
FORGET_AFTER_S = 60.0


@dataclass(frozen=True)
class Heartbeat:
    """The state of a worker at one moment.

    `heard_s` is the age of its last heartbeat. The other fields come from that heartbeat: finished `units` in total,
    finished `units_in_phase` in the present phase since the process started, seconds on the present unit (`since_s`),
    and its step and source line. `moved_bytes` changes while the worker sends or receives.
    """

    seat: int
    heard_s: float
    stopped: bool
    phase: str
    units: int
    since_s: float
    step: int
    line: str = ""
    units_in_phase: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True)
class DetectedFailure:
    seat: int
    why: str


class FailureDetector:
    """Checks all members together, several times a second. Each seat is reported once.

    `stuck` is set if in the last check all members waited for each other: then a link is broken, no worker is at
    fault, and a new view helps.
    """

    def __init__(self) -> None:
        self._clock = _ObserverClock()
        self._unit_times = _UnitTimes()
        self._exchange_times = _ExchangeTimes()
        self._last_transfer = _LastTransfer()
        self._backoff = _TimeoutBackoff()
        self._reported: set[int] = set()
        self._stopped_since_s: dict[int, float] = {}
        self.stalled = False

    def check(self, now_s: float, heartbeats: Sequence[Heartbeat]) -> list[DetectedFailure]:
        """The members that must be replaced, with reasons. `now_s` must not decrease; pass all members."""
        self._clock.tick(now_s)
        self._stopped_since_s = {
            sign.seat: self._stopped_since_s.get(sign.seat, now_s) for sign in heartbeats if sign.stopped
        }
        self._unit_times.observe(now_s, heartbeats)
        self._last_transfer.observe(now_s, heartbeats)
        slowest = self._unit_times.slowest()
        failures = []
        for sign in heartbeats:
            if sign.seat not in self._reported and (
                why := self._failure_reason(sign, slowest, alone=len(heartbeats) == 1)
            ):
                failures.append(DetectedFailure(sign.seat, why))
        self._reported.update(verdict.seat for verdict in failures)
        self.stalled = self._detect_stall(heartbeats)
        return failures

    def reset_before(self, step: int) -> None:
        """The step is committed: forget timeouts of it and of earlier steps."""
        self._backoff.reset_before(step)

    def _failure_reason(self, heartbeat: Heartbeat, slowest: dict[str, float], *, alone: bool) -> str:
        return self._frozen_reason(heartbeat) or self._hanging_reason(heartbeat, slowest, alone=alone)

    def _frozen_reason(self, heartbeat: Heartbeat) -> str:
        silent_s = self._clock.elapsed(heartbeat.heard_s)
        stopped_s = self._clock.now_s - self._stopped_since_s.get(heartbeat.seat, self._clock.now_s)
        if stopped_s > STOPPED_S and silent_s > SILENT_STOPPED_S:
            return f"frozen: stopped, and not heard for {silent_s:.1f} s"
        usual_s = SILENT_BUILDING_S if heartbeat.phase == "building" else SILENT_S
        if self._backoff.exceeded("silent", heartbeat.step, self._clock.now_s, silent_s, limit_s=usual_s):
            return f"frozen: not heard for {silent_s:.1f} s"
        return ""

    def _hanging_reason(self, heartbeat: Heartbeat, slowest: dict[str, float], *, alone: bool) -> str:
        if heartbeat.phase in WAITING_PHASES:
            return ""
        since_s = self._clock.elapsed(heartbeat.since_s)
        limit_s = _unit_limit_s(
            heartbeat,
            slowest.get(heartbeat.phase, 0.0),
            self._unit_times.slowest_first_s.get(heartbeat.phase),
            alone=alone,
        )
        if not self._backoff.exceeded("hanging", heartbeat.step, self._clock.now_s, since_s, limit_s=limit_s):
            return ""
        line = f": {heartbeat.line}" if heartbeat.line else ""
        return f"hangs in {heartbeat.phase} at step {heartbeat.step} for {since_s:.1f} s{line}"

    def _detect_stall(self, heartbeats: Sequence[Heartbeat]) -> bool:
        together_s = self._all_waiting_s(heartbeats)
        step = max((sign.step for sign in heartbeats), default=0)
        limit_s = self._exchange_times.limit_s(step, together_s)
        stuck = self._backoff.exceeded("stuck", step, self._clock.now_s, together_s, limit_s=limit_s)
        if stuck:
            self._exchange_times.mark_stalled(self._clock.now_s)
        return stuck

    def _all_waiting_s(self, heartbeats: Sequence[Heartbeat]) -> float:
        """Seconds for which all members have waited for each other without any transfer; 0 if a member works, is
        silent or is alone."""
        if len(heartbeats) < 2 or any(sign.phase not in WAITING_PHASES for sign in heartbeats):
            return 0.0
        if any(self._clock.elapsed(sign.heard_s) > SILENT_STOPPED_S for sign in heartbeats):
            return 0.0
        exchanging = [sign.since_s for sign in heartbeats if sign.phase == "exchange"]
        if not exchanging:
            return 0.0
        since_s = self._clock.now_s - max(self._exchange_times.stalled_at_s, self._last_transfer.at_s)
        return min(self._clock.elapsed(min(exchanging)), since_s)


def _unit_limit_s(heartbeat: Heartbeat, slowest_s: float, first_s: float | None, *, alone: bool) -> float:
    """The limit for one unit. `first_s` is the slowest first unit of any process so far."""
    if heartbeat.phase not in WORKING_PHASES:
        return NO_BASELINE_LIMIT_S
    if heartbeat.units_in_phase == 0:
        return NO_BASELINE_LIMIT_S if first_s is None else max(SHORTEST_FIRST_S, HANG_FACTOR * first_s)
    if alone:
        return max(SHORTEST_HANG_ALONE_S, HANG_FACTOR_ALONE * slowest_s)
    return max(SHORTEST_HANG_S, HANG_FACTOR * slowest_s)


class _ObserverClock:
    """Detects that the driver itself was paused. All workers look silent then, so all timers restart."""

    def __init__(self) -> None:
        self.now_s = float("-inf")
        self._restarted_at_s = 0.0

    def tick(self, now_s: float) -> None:
        if now_s - self.now_s > OBSERVER_PAUSE_S:
            self._restarted_at_s = now_s
        self.now_s = now_s

    def elapsed(self, seconds: float) -> float:
        """The part of a duration since the last restart."""
        return min(seconds, self.now_s - self._restarted_at_s)


class _UnitTimes:
    """Durations of recent units by worker and phase, so that one slow worker counts as much as many fast ones."""

    def __init__(self) -> None:
        self._last_heartbeats: dict[int, tuple[float, Heartbeat]] = {}
        self._durations_s: defaultdict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_UNITS))
        self._first_only: set[tuple[int, str]] = set()
        self.slowest_first_s: dict[str, float] = {}

    def observe(self, now_s: float, heartbeats: Sequence[Heartbeat]) -> None:
        for sign in heartbeats:
            _, last = self._last_heartbeats.get(sign.seat, (now_s, sign))
            if sign.units > last.units:
                self._unit_finished(last)
            self._last_heartbeats[sign.seat] = (now_s, sign)
        self._forget({seat for seat, (seen_s, _) in self._last_heartbeats.items() if now_s - seen_s > FORGET_AFTER_S})

    def _unit_finished(self, unit: Heartbeat) -> None:
        """The first unit of a process (it compiles, opens files) counts only until another unit has finished."""
        key = (unit.seat, unit.phase)
        if key in self._first_only:
            self._durations_s[key].clear()
            self._first_only.discard(key)
        if unit.units_in_phase == 0:
            self._first_only.add(key)
            self.slowest_first_s[unit.phase] = max(self.slowest_first_s.get(unit.phase, 0.0), unit.since_s)
        self._durations_s[key].append(unit.since_s)

    def _forget(self, seats: Collection[int]) -> None:
        for key in [key for key in self._durations_s if key[0] in seats]:
            del self._durations_s[key]
            self._first_only.discard(key)
        for seat in seats:
            del self._last_heartbeats[seat]

    def slowest(self) -> dict[str, float]:
        """The slowest recent unit of each phase, over all workers."""
        slowest: dict[str, float] = {}
        for (_, phase), took in self._durations_s.items():
            slowest[phase] = max(slowest.get(phase, 0.0), *took)
        return slowest


class _ExchangeTimes:
    """Durations of recent exchanges, from the moment when all workers had joined: links may be slow."""

    def __init__(self) -> None:
        self._durations_s: deque[float] = deque([0.0], maxlen=RECENT_UNITS)
        self._step = 0
        self._waiting_s = 0.0
        self.stalled_at_s = float("-inf")

    def limit_s(self, step: int, waiting_s: float) -> float:
        """Limit in seconds for the present exchange."""
        if step > self._step:
            self._durations_s.append(self._waiting_s)
            self._step, self._waiting_s = step, 0.0
        self._waiting_s = max(self._waiting_s, waiting_s)
        return max(SHORTEST_STALL_S, HANG_FACTOR * max(self._durations_s))

    def mark_stalled(self, now_s: float) -> None:
        self.stalled_at_s, self._waiting_s = now_s, 0.0


class _LastTransfer:
    """Time of the last transfer between any two workers."""

    def __init__(self) -> None:
        self._moved_bytes: dict[int, int] = {}
        self.at_s = float("-inf")

    def observe(self, now_s: float, heartbeats: Sequence[Heartbeat]) -> None:
        moved = {sign.seat: sign.moved_bytes for sign in heartbeats}
        if moved != self._moved_bytes:
            self._moved_bytes, self.at_s = moved, now_s


class _TimeoutBackoff:
    """Timeouts per step. If a timeout occurs again at the same step, the step is slow: its limit doubles each time."""

    def __init__(self) -> None:
        self._exceeded_at_s: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def exceeded(
        self, kind: Literal["silent", "hanging", "stuck"], step: int, now_s: float, took_s: float, *, limit_s: float
    ) -> bool:
        """Whether the limit is exceeded. Only timeouts that ended before this one began double the limit: two workers
        that hang at the same time count once."""
        times = self._exceeded_at_s.get((kind, step), [])
        began_s = now_s - took_s
        if took_s <= limit_s * 2 ** sum(time_s <= began_s for time_s in times):
            return False
        if not times or began_s >= times[-1]:
            self._exceeded_at_s[kind, step].append(now_s)
        return True

    def reset_before(self, step: int) -> None:
        for key in [key for key in self._exceeded_at_s if key[1] <= step]:
            del self._exceeded_at_s[key]
