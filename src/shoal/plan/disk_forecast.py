"""When a disk will be full. Pure: samples of its free bytes come in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 120
SAMPLE_EVERY_S = 30.0
"""So the window is an hour long, which holds many saves of most runs."""
MIN_SPAN_S = 60.0
MIN_SAMPLES = 3


@dataclass
class DiskForecast:
    """The free bytes of the last hour. Times are of a clock that cannot be set. `every_s`: a sample that comes sooner
    after the one before is not kept."""

    every_s: float = SAMPLE_EVERY_S
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, now_s: float, free_bytes: int) -> None:
        if not self._samples or now_s - self._samples[-1][0] >= self.every_s:
            self._samples.append((now_s, free_bytes))

    def full_in_s(self) -> float | None:
        return seconds_until_full(list(self._samples))


def seconds_until_full(samples: list[tuple[float, int]]) -> float | None:
    """From (time, free bytes): how long the free bytes last at the rate of the line through the samples. None if they
    do not become fewer, or if the samples are too few or too close to tell."""
    if len(samples) < MIN_SAMPLES or samples[-1][0] - samples[0][0] < MIN_SPAN_S:
        return None
    mean_t = sum(t for t, _ in samples) / len(samples)
    mean_free = sum(free for _, free in samples) / len(samples)
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    rate = sum((t - mean_t) * (free - mean_free) for t, free in samples) / spread
    return None if rate >= 0 else samples[-1][1] / -rate


def duration(seconds: float) -> str:
    """3 h 10 min, 25 min or 40 s."""
    minutes = round(seconds / 60)
    if minutes >= 60 * 48:
        return f"{minutes // (60 * 24)} days"
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
