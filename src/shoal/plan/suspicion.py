"""Who is frozen or hangs, from the signs of life alone: nobody sets a timeout.

A worker says every quarter of a second what it is at, how long its present unit of work (a lane, a batch, a chunk of
an evaluation) takes and how many it has done. How long is too long follows from how long such units took lately.
Whoever waits for others is never to blame.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

OWN_WORK = ("compute", "data", "evaluation")
FOR_OTHERS = ("exchange", "waiting")

SILENT_S = 2.5
SILENT_BUILDING_S = 30.0
"""Imports may hold the interpreter's lock."""
STOPPED_S = 0.5
SILENT_STOPPED_S = 1.0

SHORTEST_HANG_S, HANG_TIMES = 3.0, 8.0
SHORTEST_HANG_ALONE_S, HANG_TIMES_ALONE = 30.0, 10.0
"""Nobody waits for a worker that is alone."""
PATIENT_S = 300.0
"""For what has no usual time: the first unit of a phase, building, saving, the user's watchers."""
SHORTEST_FIRST_S = 30.0
"""For the first unit of a later process: those before it have shown how long that takes."""
STUCK_S = 4.0

HELD_UP_S = 1.0
RECENT_UNITS = 100
ABSENT_S = 60.0


@dataclass(frozen=True)
class Sign:
    """What is known of a member at one moment.

    `heard_s` is the age of its last beat. The rest is from that beat: `units` it has done in all and `units_in_phase`
    in the present phase since its process began, `since_s` for how long it has been at the present one, and where;
    `moved_bytes` changes as long as something gets through to it or from it.
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
class Verdict:
    seat: int
    why: str


class Suspicion:
    """Looks often, at all members at once. Each seat is convicted once.

    `stuck` tells of the last look: all members wait for each other, so a link must be cut and none of them is to
    blame; a new view helps.
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        self._pace = _Pace()
        self._exchanges = _Exchanges()
        self._movement = _Movement()
        self._past = _Past()
        self._convicted: set[int] = set()
        self._stopped_at: dict[int, float] = {}
        self.stuck = False

    def look(self, now_s: float, signs: Sequence[Sign]) -> list[Verdict]:
        """The members that must be replaced, and why. Give a time that only grows, and all members."""
        self._clock.tick(now_s)
        self._stopped_at = {sign.seat: self._stopped_at.get(sign.seat, now_s) for sign in signs if sign.stopped}
        self._pace.learn(now_s, signs)
        self._movement.learn(now_s, signs)
        slowest = self._pace.slowest()
        verdicts = []
        for sign in signs:
            if sign.seat not in self._convicted and (why := self._why(sign, slowest, alone=len(signs) == 1)):
                verdicts.append(Verdict(sign.seat, why))
        self._convicted.update(verdict.seat for verdict in verdicts)
        self.stuck = self._all_stuck(signs)
        return verdicts

    def forgive(self, step: int) -> None:
        """A step is committed: what happened in it and before it counts no more."""
        self._past.forget(step)

    def _why(self, sign: Sign, slowest: dict[str, float], *, alone: bool) -> str:
        return self._frozen(sign) or self._hanging(sign, slowest, alone=alone)

    def _frozen(self, sign: Sign) -> str:
        silent_s = self._clock.elapsed(sign.heard_s)
        stopped_s = self._clock.now_s - self._stopped_at.get(sign.seat, self._clock.now_s)
        if stopped_s > STOPPED_S and silent_s > SILENT_STOPPED_S:
            return f"frozen: stopped, and not heard for {silent_s:.1f} s"
        usual_s = SILENT_BUILDING_S if sign.phase == "building" else SILENT_S
        if self._past.too_long("silent", sign.step, self._clock.now_s, silent_s, limit_s=usual_s):
            return f"frozen: not heard for {silent_s:.1f} s"
        return ""

    def _hanging(self, sign: Sign, slowest: dict[str, float], *, alone: bool) -> str:
        if sign.phase in FOR_OTHERS:
            return ""
        since_s = self._clock.elapsed(sign.since_s)
        limit_s = _limit(sign, slowest.get(sign.phase, 0.0), self._pace.first.get(sign.phase), alone=alone)
        if not self._past.too_long("hanging", sign.step, self._clock.now_s, since_s, limit_s=limit_s):
            return ""
        line = f": {sign.line}" if sign.line else ""
        return f"hangs in {sign.phase} at step {sign.step} for {since_s:.1f} s{line}"

    def _all_stuck(self, signs: Sequence[Sign]) -> bool:
        together_s = self._together(signs)
        step = max((sign.step for sign in signs), default=0)
        limit_s = self._exchanges.limit(step, together_s)
        stuck = self._past.too_long("stuck", step, self._clock.now_s, together_s, limit_s=limit_s)
        if stuck:
            self._exchanges.broken(self._clock.now_s)
        return stuck

    def _together(self, signs: Sequence[Sign]) -> float:
        """For how long all members have been waiting for each other, and nothing has got through; 0 if anybody works,
        is silent or is alone."""
        if len(signs) < 2 or any(sign.phase not in FOR_OTHERS for sign in signs):
            return 0.0
        if any(self._clock.elapsed(sign.heard_s) > SILENT_STOPPED_S for sign in signs):
            return 0.0
        exchanging = [sign.since_s for sign in signs if sign.phase == "exchange"]
        if not exchanging:
            return 0.0
        since_s = self._clock.now_s - max(self._exchanges.broken_at_s, self._movement.at_s)
        return min(self._clock.elapsed(min(exchanging)), since_s)


def _limit(sign: Sign, slowest_s: float, first_s: float | None, *, alone: bool) -> float:
    """`first_s`: the slowest first unit of any process so far."""
    if sign.phase not in OWN_WORK:
        return PATIENT_S
    if sign.units_in_phase == 0:
        return PATIENT_S if first_s is None else max(SHORTEST_FIRST_S, HANG_TIMES * first_s)
    if alone:
        return max(SHORTEST_HANG_ALONE_S, HANG_TIMES_ALONE * slowest_s)
    return max(SHORTEST_HANG_S, HANG_TIMES * slowest_s)


class _Clock:
    """Whoever looks may be held up himself; then all the others look silent, and every clock starts anew."""

    def __init__(self) -> None:
        self.now_s = float("-inf")
        self._anew_s = 0.0

    def tick(self, now_s: float) -> None:
        if now_s - self.now_s > HELD_UP_S:
            self._anew_s = now_s
        self.now_s = now_s

    def elapsed(self, seconds: float) -> float:
        """As much of a time as lies after the clocks' start."""
        return min(seconds, self.now_s - self._anew_s)


class _Pace:
    """How long units took lately, by worker and phase: a slow worker counts as much as many fast ones."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, Sign]] = {}
        self._took: defaultdict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_UNITS))
        self._warming: set[tuple[int, str]] = set()
        self.first: dict[str, float] = {}

    def learn(self, now_s: float, signs: Sequence[Sign]) -> None:
        for sign in signs:
            _, last = self._last.get(sign.seat, (now_s, sign))
            if sign.units > last.units:
                self._finished(last)
            self._last[sign.seat] = (now_s, sign)
        self._forget({seat for seat, (seen_s, _) in self._last.items() if now_s - seen_s > ABSENT_S})

    def _finished(self, unit: Sign) -> None:
        """The first unit of a process (it compiles, opens files) counts only as long as there is no other."""
        key = (unit.seat, unit.phase)
        if key in self._warming:
            self._took[key].clear()
            self._warming.discard(key)
        if unit.units_in_phase == 0:
            self._warming.add(key)
            self.first[unit.phase] = max(self.first.get(unit.phase, 0.0), unit.since_s)
        self._took[key].append(unit.since_s)

    def _forget(self, seats: Collection[int]) -> None:
        for key in [key for key in self._took if key[0] in seats]:
            del self._took[key]
            self._warming.discard(key)
        for seat in seats:
            del self._last[seat]

    def slowest(self) -> dict[str, float]:
        """By phase, over all workers."""
        slowest: dict[str, float] = {}
        for (_, phase), took in self._took.items():
            slowest[phase] = max(slowest.get(phase, 0.0), *took)
        return slowest


class _Exchanges:
    """How long exchanges took lately from the moment when everybody was there: links may be slow."""

    def __init__(self) -> None:
        self._took: deque[float] = deque([0.0], maxlen=RECENT_UNITS)
        self._step = 0
        self._together_s = 0.0
        self.broken_at_s = float("-inf")

    def limit(self, step: int, together_s: float) -> float:
        """How long the present one may take."""
        if step > self._step:
            self._took.append(self._together_s)
            self._step, self._together_s = step, 0.0
        self._together_s = max(self._together_s, together_s)
        return max(STUCK_S, HANG_TIMES * max(self._took))

    def broken(self, now_s: float) -> None:
        self.broken_at_s, self._together_s = now_s, 0.0


class _Movement:
    """When something last got through, between any two."""

    def __init__(self) -> None:
        self._moved_bytes: dict[int, int] = {}
        self.at_s = float("-inf")

    def learn(self, now_s: float, signs: Sequence[Sign]) -> None:
        moved = {sign.seat: sign.moved_bytes for sign in signs}
        if moved != self._moved_bytes:
            self._moved_bytes, self.at_s = moved, now_s


class _Past:
    """What was too long at a step before. If it comes again the step is slow, and gets twice the time each time."""

    def __init__(self) -> None:
        self._times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def too_long(
        self, kind: Literal["silent", "hanging", "stuck"], step: int, now_s: float, took_s: float, *, limit_s: float
    ) -> bool:
        """Only what ended before this began counts: two that hang at once are not one after the other."""
        times = self._times.get((kind, step), [])
        began_s = now_s - took_s
        if took_s <= limit_s * 2 ** sum(time_s <= began_s for time_s in times):
            return False
        if not times or began_s >= times[-1]:
            self._times[kind, step].append(now_s)
        return True

    def forget(self, step: int) -> None:
        for key in [key for key in self._times if key[1] <= step]:
            del self._times[key]
