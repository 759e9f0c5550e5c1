"""Which worker will run out of memory, and when. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

WINDOW = 10
MIN_SAMPLES = 4
SOON_S = 60.0
"""A worker is named so long before its memory will be used up."""
LEAST_SHARE = 0.05
"""A worker that has less than this share of its memory left is named at once."""


@dataclass
class MemoryWatch:
    """The last samples of each worker. A worker is named once; again after its danger was over."""

    _samples: dict[str, deque[tuple[float, int, int]]] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    def observe(self, worker: str, t: float, *, rss_bytes: int, room_bytes: int) -> str:
        """Returns a sentence if the worker is in danger and was not named for it; else ''."""
        samples = self._samples.setdefault(worker, deque(maxlen=WINDOW))
        samples.append((t, rss_bytes, room_bytes))
        why = judge_memory(list(samples))
        if not why:
            self._named.discard(worker)
        if not why or worker in self._named:
            return ""
        self._named.add(worker)
        return f"{worker} is about to run out of memory: {why}"

    def forget(self, worker: str) -> str:
        """The worker has ended. Returns what it used last, for the sentence about its death; '' if it is not known."""
        samples = self._samples.pop(worker, None)
        self._named.discard(worker)
        return f"it used {size(samples[-1][1])} and {size(samples[-1][2])} were left" if samples else ""


def judge_memory(samples: list[tuple[float, int, int]]) -> str:
    """Why the memory runs out, from (time, resident bytes, room): '' if it does not."""
    _, used, room = samples[-1]
    if used and room < LEAST_SHARE * (used + room):
        return f"it uses {size(used)} and {size(room)} are left"
    rate = growth_bytes_s(samples)
    if rate > 0 and room / rate < SOON_S:
        left = f"{size(room)} are left, enough for {room / rate:.0f} s"
        return f"it uses {size(used)}, grows by {size(rate)}/s, and {left}"
    return ""


def growth_bytes_s(samples: list[tuple[float, int, int]]) -> float:
    """How fast the worker's memory grows: the slope of the line through the samples; 0 if there are too few, or if it
    did not grow in most of them."""
    if len(samples) < MIN_SAMPLES:
        return 0.0
    grown = sum(later[1] > earlier[1] for earlier, later in pairwise(samples))
    if grown < (len(samples) - 1) * 0.7:
        return 0.0
    mean_t = sum(t for t, _, _ in samples) / len(samples)
    mean_used = sum(used for _, used, _ in samples) / len(samples)
    spread = sum((t - mean_t) ** 2 for t, _, _ in samples)
    return sum((t - mean_t) * (used - mean_used) for t, used, _ in samples) / spread if spread else 0.0


def size(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
