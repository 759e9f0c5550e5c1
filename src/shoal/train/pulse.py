"""What the training thread is doing right now, for whoever has to tell a worker that hangs from one that waits."""

from __future__ import annotations

import statistics
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

RECENT = 15
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = __file__.rpartition("/train/")[0]


class Pulse:
    """Written by the training thread at each unit of work, read by the thread that sends beats."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._units_in: Counter[str] = Counter()
        self._now = ("building", 0, 0, time.monotonic())
        self._lane_s: deque[float] = deque(maxlen=RECENT)
        self.moved_bytes: Callable[[], int] = lambda: 0

    def enter(self, phase: str, step: int) -> None:
        """A new unit of work begins."""
        before = self._now
        self._units_in[before[0]] += 1
        self._now = (phase, step, before[2] + 1, time.monotonic())

    def lane_took(self, seconds: float) -> None:
        """Own work for one lane of the last step."""
        self._lane_s.append(seconds)

    @property
    def phase(self) -> str:
        return self._now[0]

    def beat(self) -> dict[str, Any]:
        phase, step, units, began = self._now
        since_s = round(time.monotonic() - began, 3)
        row = {
            "phase": phase,
            "step": step,
            "units": units,
            "units_in_phase": self._units_in[phase],
            "since_s": since_s,
            "moved_bytes": self.moved_bytes(),
            "lane_s": statistics.median(recent) if len(recent := list(self._lane_s)) == RECENT else None,
        }
        return row | {"line": self.line()} if since_s > 1 else row

    def line(self) -> str:
        """Where the training thread stands: the innermost line of the user's own code, or else of anybody's."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return ""
        innermost, found = frame, frame
        while found is not None and not _is_users(found):
            found = found.f_back  # type: ignore[assignment]
        shown: FrameType = found or innermost
        return f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}"


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((*_LIBRARIES, _OURS, "<"))
