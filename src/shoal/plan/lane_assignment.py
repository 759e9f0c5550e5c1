"""Assign lanes to workers so that a step is as fast as possible. The assignment changes speed, never the result.

Every worker gets one range of neighbouring lanes. The fewer nodes of the reduction tree a range consists of, the fewer
partial sums the worker has to send.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

EXCLUDE_GAIN = 1.3
"""A worker gets no lanes only if the step is this many times as fast without it."""

LaneAssignment = dict[int, list[int]]


def assign_evenly(lanes: int, seats: Sequence[int]) -> LaneAssignment:
    """Ranges in the order of seats, whose lengths differ by at most one. Surplus seats get no lanes."""
    working = seats[:lanes]
    blocks = _equal_blocks(lanes, len(working)) if working else []
    return _assign_blocks(seats, zip(working, blocks, strict=True))


def assign_by_speed(lanes: int, lane_s: Mapping[int, float | None], *, needed: Collection[int] = ()) -> LaneAssignment:
    """Ranges that minimise the time of the slowest worker, from each seat's seconds per lane.

    None means not measured, and counts as the median of the others. Every seat gets a lane if there are enough lanes,
    except very slow seats; with more seats than lanes the fastest seats get one. Seats in `needed` always get a lane.
    """
    pace = _seconds_per_lane(lane_s)
    if len(set(pace.values())) <= 1:
        return assign_evenly(
            lanes, sorted(pace, key=lambda seat: seat not in needed) if len(pace) > lanes else list(pace)
        )
    counts = _lane_counts(lanes, pace, needed)
    in_order = [seat for seat in pace if seat in counts]
    by_size = sorted(in_order, key=lambda seat: -counts[seat])
    best = min((in_order, by_size), key=lambda order: _total_partial_sums(lanes, [counts[seat] for seat in order]))
    return _assign_blocks(list(pace), zip(best, (counts[seat] for seat in best), strict=True))


def step_s(carries: Mapping[int, Sequence[int]], pace: Mapping[int, float]) -> float:
    """Time of the slowest worker, from each seat's seconds per lane."""
    return max((len(mine) * pace[seat] for seat, mine in carries.items()), default=0.0)


def partial_sum_count(first: int, end: int, lanes: int) -> int:
    """Number of nodes of the reduction tree that make up the lanes [first, end)."""
    limit = end if end < lanes else 1 << lanes.bit_length()  # nodes may extend beyond the last lane
    count = 0
    while first < end:
        room = 1 << (limit - first).bit_length() - 1
        first += min(first & -first or room, room)
        count += 1
    return count


# ---- lengths of ranges ----


def _equal_blocks(lanes: int, count: int) -> list[int]:
    """The order of long and short blocks with the fewest partial sums; for equal counts long blocks come first."""
    short, long_ones = divmod(lanes, count)
    fewest: list[dict[int, float]] = [{} for _ in range(count)] + [{long_ones: 0}]

    def cost(done: int, longs: int, extra: int) -> float:
        """Partial sums of the next block and all later ones, after `done` blocks of which `longs` are long."""
        begin = done * short + longs
        return partial_sum_count(begin, begin + short + extra, lanes) + fewest[done + 1].get(longs + extra, math.inf)

    for done in reversed(range(count)):
        for longs in range(max(0, long_ones - count + done), min(done, long_ones) + 1):
            fewest[done][longs] = min(cost(done, longs, 0), cost(done, longs, 1))
    blocks: list[int] = []
    longs = 0
    for done in range(count):
        extra = int(cost(done, longs, 1) <= cost(done, longs, 0))
        blocks.append(short + extra)
        longs += extra
    return blocks


def _lane_counts(lanes: int, pace: Mapping[int, float], needed: Collection[int]) -> dict[int, int]:
    """Number of lanes of each seat; seats that are missing get none."""
    in_turn = sorted(pace, key=lambda seat: (seat not in needed, pace[seat], seat))
    best = candidate = _greedy_lane_counts(lanes, pace, in_turn[:lanes])
    # Only a worker that delays all others with a single lane can be worth leaving out.
    while 0 < len(others := _faster_than_step(candidate, pace)) < len(candidate) and all(s in others for s in needed):
        candidate = _greedy_lane_counts(lanes, pace, others)
        if _slowest_s(best, pace) >= EXCLUDE_GAIN * _slowest_s(candidate, pace):
            best = candidate
    return best


def _faster_than_step(counts: Mapping[int, int], pace: Mapping[int, float]) -> list[int]:
    """The seats that compute one lane in less than the time of the step."""
    return [seat for seat in counts if pace[seat] < _slowest_s(counts, pace)]


def _greedy_lane_counts(lanes: int, pace: Mapping[int, float], seats: Sequence[int]) -> dict[int, int]:
    """One lane for each seat, then each further lane to the seat that finishes it first. This is optimal."""
    counts = dict.fromkeys(seats, 1)
    ready = [(2 * pace[seat], seat) for seat in seats]
    heapq.heapify(ready)
    for _ in range(lanes - len(counts)):
        _, seat = ready[0]
        counts[seat] += 1
        heapq.heapreplace(ready, ((counts[seat] + 1) * pace[seat], seat))
    return counts


def _slowest_s(counts: Mapping[int, int], pace: Mapping[int, float]) -> float:
    return max((count * pace[seat] for seat, count in counts.items()), default=0.0)


def _seconds_per_lane(lane_s: Mapping[int, float | None]) -> dict[int, float]:
    """Seconds per lane of every seat. Invalid values count as not measured."""
    known = {seat: pace for seat, pace in lane_s.items() if pace is not None and math.isfinite(pace) and pace > 0}
    usual = median(known.values()) if known else 1.0
    return {seat: known.get(seat, usual) for seat in lane_s}


def _total_partial_sums(lanes: int, blocks: Iterable[int]) -> int:
    begin = total = 0
    for size in blocks:
        total += partial_sum_count(begin, begin + size, lanes)
        begin += size
    return total


def _assign_blocks(seats: Iterable[int], blocks: Iterable[tuple[int, int]]) -> LaneAssignment:
    """Assign lanes from 0 on to the (seat, count) blocks in order; no lanes to the other seats."""
    carries: LaneAssignment = {seat: [] for seat in seats}
    begin = 0
    for seat, size in blocks:
        carries[seat] = list(range(begin, begin + size))
        begin += size
    return carries
