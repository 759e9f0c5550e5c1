"""What the training thread is doing right now. The driver uses it to tell a worker that hangs from one that waits."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from shoal.spec.resolve import is_user_file

RECENT_LANES = 15


class Activity:
    """The training thread writes it at each unit of work. The thread that sends heartbeats reads it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._units_by_phase: Counter[str] = Counter()
        self._current = ("building", 0, 0, time.monotonic())
        self._lane_s: deque[float] = deque(maxlen=RECENT_LANES)
        self._lanes_timed = (0, 0.0)
        self.moved_bytes: Callable[[], int] = lambda: 0

    def begin(self, phase: str, step: int) -> None:
        """Start a new unit of work."""
        before = self._current
        self._units_by_phase[before[0]] += 1
        self._current = (phase, step, before[2] + 1, time.monotonic())

    def record_lane_time(self, seconds: float) -> None:
        """Record how long this worker computed one lane of the last step."""
        self._lane_s.append(seconds)
        count, total_s = self._lanes_timed
        self._lanes_timed = (count + 1, total_s + seconds)  # one assignment: the heartbeat never sees half of it

    @property
    def phase(self) -> str:
        return self._current[0]

    def heartbeat(self) -> dict[str, Any]:
        phase, step, units, began = self._current
        since_s = round(time.monotonic() - began, 3)
        lanes_timed, lanes_timed_s = self._lanes_timed
        row = {
            "phase": phase,
            "step": step,
            "units": units,
            "units_in_phase": self._units_by_phase[phase],
            "since_s": since_s,
            "moved_bytes": self.moved_bytes(),
            "lanes_timed": lanes_timed,
            "lanes_timed_s": lanes_timed_s,
            "lane_s": statistics.median(recent) if len(recent := list(self._lane_s)) == RECENT_LANES else None,
        }
        return row | {"line": self.current_line()} if since_s > 1 else row

    def current_line(self) -> str:
        """The training thread's current line: the innermost one of the user's own code, else of any code."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return ""
        innermost, found = frame, frame
        while found is not None and not is_user_file(found.f_code.co_filename):
            found = found.f_back  # type: ignore[assignment]
        shown: FrameType = found or innermost
        return f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"
