"""When lanes move to faster workers: only if the gain is certain, and larger than what a move costs. No I/O.

Machines are noisy. A move must therefore pass three tests:
- the gain is beyond the spread of the measurements, over some window that ends now;
- the time that it saves is larger than the time that a move takes, if the difference lasts as long as it has lasted;
- the pause after the last move is over. A move that did not pay doubles the pause, one that did halves it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from shoal.plan.lane_assignment import LaneAssignment, assign_by_speed, step_s

BLOCK_S = 1.0
"""Seconds of measurements that make one block. Longer steps make longer blocks."""
WINDOWS = (3, 5, 8, 13, 21, 34)
"""The windows that are tried, in blocks. Short ones find a sudden change, long ones a small difference."""
MAX_BLOCKS = 68
MIN_GAIN = 1.15
"""A move makes a step this many times as fast, at least."""
CERTAINTY = 2.5
"""Standard errors by which the gain must be beyond chance."""
GROUP_BLOCKS, MIN_GROUPS = 5, 3
"""A busy machine stays busy for a while. How much the means of so many blocks differed before the window says what is
usual there, and is no reason to move."""
MIN_SPREAD, MAX_JUMP = 0.02, 1.5
"""Limits of the logarithm: no speed is known better than this, and a single jump counts as no larger than that."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 4.0, 120.0
FIRST_COST_S = 0.5
COST_FACTOR = 2.0
"""How many times its cost a move must save."""


@dataclass
class LaneSpeed:
    """The time of one worker's lanes, in blocks. Blocks hold the logarithm of seconds per lane."""

    blocks: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_BLOCKS))
    _began_s: float | None = None
    _count: int = 0
    _total_s: float = 0.0

    def observe(self, now_s: float, count: int, total_s: float) -> bool:
        """`count` lanes took `total_s` together, both since the worker started. Returns whether a block is complete."""
        lanes, spent_s = count - self._count, total_s - self._total_s
        if self._began_s is None or lanes < 0 or spent_s < 0:
            self._began_s, self._count, self._total_s = now_s, count, total_s
            return False
        if lanes == 0 or spent_s == 0 or now_s - self._began_s < BLOCK_S:
            return False
        self.blocks.append(math.log(spent_s / lanes))
        self._began_s, self._count, self._total_s = now_s, count, total_s
        return True

    def estimate(self, window: int) -> tuple[float, float] | None:
        """The logarithm of seconds per lane over the last blocks, and its standard error. None if there are fewer."""
        if len(self.blocks) < window:
            return None
        known = list(self.blocks)
        recent, before = known[-window:], known[:-window]
        jumps = [min(abs(b - a), MAX_JUMP) for a, b in pairwise(known)]
        # Of neighbours, so that a lasting change of speed does not count as noise; 1.25: the error of a median.
        noise = math.sqrt(statistics.fmean(jump * jump for jump in jumps) / 2) if jumps else MIN_SPREAD
        error = 1.25 * max(noise, MIN_SPREAD) / math.sqrt(window)
        if len(usual := _group_means(before)) >= MIN_GROUPS:
            error = max(error, _standard_deviation(usual) / math.sqrt(max(window / GROUP_BLOCKS, 1.0)))
        return statistics.median(recent), error


def _group_means(blocks: Sequence[float]) -> list[float]:
    first = len(blocks) % GROUP_BLOCKS
    return [statistics.fmean(blocks[at : at + GROUP_BLOCKS]) for at in range(first, len(blocks), GROUP_BLOCKS)]


def _standard_deviation(values: Sequence[float]) -> float:
    """As `statistics.pstdev`, which is a hundred times slower."""
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))


@dataclass(frozen=True)
class Move:
    """A move that was made: the assignments before and after it."""

    before: Mapping[int, Sequence[int]]
    after: Mapping[int, Sequence[int]]
    at_s: float


@dataclass
class LaneBalance:
    """The measured speeds, and the paces by which lanes are assigned. `paces` changes only when lanes move; a seat that
    it lacks counts as average."""

    paces: dict[int, float] = field(default_factory=dict)
    _speeds: dict[int, LaneSpeed] = field(default_factory=dict)
    _pause_s: float = FIRST_PAUSE_S
    _cost_s: float = FIRST_COST_S
    _last_move: Move | None = None
    _judged: bool = True
    _decided_s: float | None = None
    _has_news: bool = False
    """Whether a block was measured since the last look: a look takes a while."""

    def observe(self, seat: int, now_s: float, *, count: int, total_s: float) -> None:
        if self._speeds.setdefault(seat, LaneSpeed()).observe(now_s, count, total_s):
            self._has_news = True

    def forget(self, seat: int) -> None:
        """The seat is gone."""
        self._speeds.pop(seat, None)
        self.paces.pop(seat, None)

    def should_move(self, carries: Mapping[int, Sequence[int]], now_s: float, *, needed: Collection[int] = ()) -> bool:
        """Whether lanes should move now. If so, `paces` has the speeds for the next assignment."""
        if self._last_move is not None:
            self._judge_last_move(now_s)
            if now_s - self._last_move.at_s < self._pause_s:
                return False
        if not self._has_news:
            return False
        self._has_news = False
        for paces, better in self._certain_gains(carries, needed):
            self.paces |= paces
            self._last_move, self._judged = Move(dict(carries), better, now_s), False
            self._decided_s = now_s
            return True
        return False

    def moved(self, now_s: float) -> None:
        """The view after a move is entered: what the move has cost is known."""
        if self._decided_s is not None:
            self._cost_s = (self._cost_s + max(now_s - self._decided_s, 0.0)) / 2
            self._decided_s = None

    def _certain_gains(
        self, carries: Mapping[int, Sequence[int]], needed: Collection[int]
    ) -> Iterator[tuple[dict[int, float], LaneAssignment]]:
        lanes = sum(map(len, carries.values()))
        shorter: list[dict[int, float]] = []
        for window in WINDOWS:
            found = {seat: self._speeds[seat].estimate(window) for seat in carries if seat in self._speeds}
            known = {seat: one for seat, one in found.items() if one is not None}
            if len(known) < len(carries):
                return
            paces = {seat: math.exp(place) for seat, (place, _) in known.items()}
            better = assign_by_speed(lanes, paces, needed=needed)
            errors = {seat: error for seat, (_, error) in known.items()}
            certain = _certain_log_gain(carries, better, paces, errors)
            saved_s = (1 - math.exp(-certain)) * window * BLOCK_S
            is_gain = step_s(carries, paces) >= MIN_GAIN * step_s(better, paces) > 0
            is_still_so = all(step_s(carries, latest) > step_s(better, latest) for latest in shorter)
            if is_gain and is_still_so and certain > 0 and saved_s >= COST_FACTOR * self._cost_s:
                yield paces, better
            shorter.append(paces)

    def _judge_last_move(self, now_s: float) -> None:
        """Once, when the pause is over: would the step be as fast if the lanes had stayed?"""
        move = self._last_move
        assert move is not None
        if self._judged or now_s - move.at_s < self._pause_s:
            return
        self._judged = True
        blocks = max(WINDOWS[0], min(int(self._pause_s / BLOCK_S) - 1, WINDOWS[-1]))
        recent = {seat: self._latest(seat, blocks) for seat in move.after}
        paces = {seat: self.paces.get(seat, 1.0) if pace is None else pace for seat, pace in recent.items()}
        if step_s(move.before, paces) < MIN_GAIN * step_s(move.after, paces):
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        else:
            self._pause_s = max(self._pause_s / 2, FIRST_PAUSE_S)

    def _latest(self, seat: int, blocks: int) -> float | None:
        speed = self._speeds.get(seat)
        found = speed.estimate(min(blocks, len(speed.blocks))) if speed and speed.blocks else None
        return None if found is None else math.exp(found[0])


def _certain_log_gain(
    current: Mapping[int, Sequence[int]],
    better: Mapping[int, Sequence[int]],
    paces: Mapping[int, float],
    errors: Mapping[int, float],
) -> float:
    """The logarithm of the gain that is beyond chance: the worker that is slowest now, against every worker then."""
    slowest = max(current, key=lambda seat: len(current[seat]) * paces[seat])
    now = math.log(len(current[slowest]) * paces[slowest])
    return min(
        now
        - math.log(len(mine) * paces[seat])
        - (0.0 if seat == slowest else CERTAINTY * math.hypot(errors[slowest], errors[seat]))
        for seat, mine in better.items()
        if mine
    )
