"""Assign chunks to servers, the primary first: evenly by bytes, and with as few bytes to move as possible.

Holders are chosen first, then the primaries among them. If all servers hold the same number of bytes and every chunk
has the same number of holders, an even choice of primaries always exists: the chunks that are held only within a group
of servers are never more than the group's share of all bytes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

VIRTUAL_NODES = 256

ChunkHolders = list[list[int]]
"""For each chunk the seats that hold it, the primary first."""


def assign_chunks(
    sizes: Sequence[int], seats: Sequence[int], *, copies: int, preferred: ChunkHolders, held: ChunkHolders
) -> ChunkHolders:
    """The new holders of each chunk, from `preferred` holders (seats that are gone are skipped, the first ones count)
    and the chunks that seats have `held` so far.

    No chunk is on a seat twice. Without preferences every seat is primary of one range. Backups follow the primary in
    cyclic order of seats, so that neighbouring chunks with the same holders are sent together.
    """
    here = set(seats)
    kept = [[seat for seat in order if seat in here][:copies] for order in preferred]
    if not any(kept):
        kept = _contiguous_ranges(sizes, sorted(seats), copies)
    load = dict.fromkeys(sorted(seats), 0)
    for order, size in zip(kept, sizes, strict=True):
        for seat in order:
            load[seat] += size
    _add_missing_holders(kept, sizes, load, copies)
    _balance_holders(kept, sizes, load, [set(order) for order in held])
    _balance_primaries(kept, sizes, sorted(seats))
    return [[first, *sorted(rest, key=lambda seat: (seat < first, seat))] for first, *rest in kept]


def assign_by_consistent_hashing(chunks: int, seats: Sequence[int], *, copies: int) -> ChunkHolders:
    """Consistent hashing: each chunk goes to the next seats on a ring. Ignores sizes."""
    circle = sorted((_ring_hash(f"seat {seat} {i}"), seat) for seat in seats for i in range(VIRTUAL_NODES))
    angles = [angle for angle, _ in circle]
    found: ChunkHolders = [[] for _ in range(chunks)]
    for chunk, order in enumerate(found):
        place = bisect(angles, _ring_hash(f"chunk {chunk}"))
        while len(order) < copies:
            seat = circle[place % len(circle)][1]
            if seat not in order:
                order.append(seat)
            place += 1
    return found


def _ring_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _contiguous_ranges(sizes: Sequence[int], seats: Sequence[int], copies: int) -> ChunkHolders:
    starts = accumulate(sizes[:-1], initial=0)
    total, count = sum(sizes), len(seats)
    return [[seats[(start * count // total + i) % count] for i in range(copies)] for start in starts]


# ---- holders ----


def _add_missing_holders(orders: ChunkHolders, sizes: Sequence[int], load: dict[int, int], copies: int) -> None:
    """Add the missing holders. Neighbouring chunks go to the same seat as long as it has less than its share."""
    mean = copies * sum(sizes) / len(load)
    last = None
    for order, size in zip(orders, sizes, strict=True):
        while len(order) < copies:
            if last is None or last in order or load[last] + size > mean:
                last = min((seat for seat in load if seat not in order), key=lambda seat: (load[seat], seat))
            order.append(last)
            load[last] += size


def _balance_holders(
    orders: ChunkHolders, sizes: Sequence[int], load: dict[int, int], held: Sequence[Collection[int]]
) -> None:
    """Move chunks from the fullest seat to the emptiest, until that no longer improves the balance."""
    mean = sum(load.values()) / len(load)
    moved = True
    while moved:
        moved = False
        full, empty = max(load, key=load.__getitem__), min(load, key=load.__getitem__)
        cost = {
            i: (empty not in held[i]) - (full not in held[i])  # chunks that are not sent yet can move at no cost
            for i, order in enumerate(orders)
            if full in order and empty not in order
        }
        for i in sorted(cost, key=cost.__getitem__):
            if load[full] > mean > load[empty] and sizes[i] < load[full] - load[empty]:
                orders[i][orders[i].index(full)] = empty
                load[full] -= sizes[i]
                load[empty] += sizes[i]
                moved = True


# ---- primaries ----


def _balance_primaries(orders: ChunkHolders, sizes: Sequence[int], seats: Sequence[int]) -> None:
    """Make other holders primary where one seat is primary of too many bytes. No bytes move.

    A chunk may pass to a seat that then has too many itself and passes another chunk on, and so on: a path to the seat
    with the fewest bytes as primary is searched over all seats.
    """
    load = dict.fromkeys(seats, 0)
    can_take_over: dict[int, dict[int, set[int]]] = {seat: defaultdict(set) for seat in seats}
    """For each pair of seats, the chunks of which the first is primary and the second is a backup."""
    for i, order in enumerate(orders):
        load[order[0]] += sizes[i]
        for other in order[1:]:
            can_take_over[order[0]][other].add(i)

    def hand_over(i: int, to: int) -> None:
        order = orders[i]
        for other in order[1:]:
            can_take_over[order[0]][other].discard(i)
        load[order[0]] -= sizes[i]
        order.insert(0, order.pop(order.index(to)))
        load[to] += sizes[i]
        for other in order[1:]:
            can_take_over[to][other].add(i)

    settled: set[int] = set()
    while len(settled) < len(seats):
        full = max((seat for seat in seats if seat not in settled), key=load.__getitem__)
        handed = _handover_path(full, can_take_over, load, sizes)
        if not handed:
            settled.add(full)
        for i, to in handed:
            hand_over(i, to)
            settled.clear()


def _handover_path(
    full: int, can_take_over: Mapping[int, Mapping[int, set[int]]], load: Mapping[int, int], sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """The chunks to pass on and their new primaries, starting at the fullest; [] if that does not improve the
    balance."""
    before = {full: full}
    queue = deque([full])
    while queue:
        seat = queue.popleft()
        for other, chunks in can_take_over[seat].items():
            if chunks and other not in before:
                before[other] = seat
                queue.append(other)
    seat = min(before, key=lambda seat: (load[seat], seat))
    after = dict(load)
    handed: list[tuple[int, int]] = []
    while seat != full:
        chunk = max(can_take_over[before[seat]][seat])  # the last chunk first, so that neighbours take the same path
        handed.append((chunk, seat))
        after[seat] += sizes[chunk]
        after[before[seat]] -= sizes[chunk]
        seat = before[seat]
    better = sum(n * n for n in after.values()) < sum(n * n for n in load.values())
    return handed if better else []
