"""Liveness of the members of a roster: finds members that are frozen, hang or did not connect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from shoal.fleet.messages import MAX_LINE_CHARACTERS, printable
from shoal.fleet.roster import Roster
from shoal.plan.failure_detector import DetectedFailure, FailureDetector, Heartbeat

CHECK_INTERVAL_S = 0.1
NOT_BACK = "it outlived its driver and did not call back"
NOT_CONNECTED = "it was started and did not connect"


class LivenessCheck:
    """Checks a roster every `CHECK_INTERVAL_S`. Belongs to the driver's thread.

    Training members must send heartbeats and make progress; idle members must only send heartbeats.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._training_detector = FailureDetector()
        self._idle_detector = FailureDetector()
        self._next_check_s = 0.0
        self._step = 0

    def is_due(self, now_s: float) -> bool:
        if now_s < self._next_check_s:
            return False
        self._next_check_s = now_s + CHECK_INTERVAL_S
        return True

    def find_failures(
        self, now_s: float, *, training: Iterable[int] = (), idle: Iterable[int]
    ) -> list[DetectedFailure]:
        beats = [read_heartbeat(self._roster, seat) for seat in training]
        step = max((beat.step for beat in beats), default=0)
        if step > self._step:
            self._training_detector.reset_before(step - 1)
            self._step = step
        idle_beats = [replace(read_heartbeat(self._roster, seat), since_s=0.0) for seat in idle]
        return [
            *(DetectedFailure(seat, NOT_BACK) for seat in self._roster.take_overdue(now_s)),
            *(DetectedFailure(seat, NOT_CONNECTED) for seat in self._roster.take_late_starts(now_s)),
            *self._training_detector.check(now_s, beats),
            *self._idle_detector.check(now_s, idle_beats),
        ]

    @property
    def stalled(self) -> bool:
        """All training members wait for each other, and none of them is the cause."""
        return self._training_detector.stalled


def read_heartbeat(roster: Roster, seat: int) -> Heartbeat:
    peer = roster[seat]
    beat = peer.last_heartbeat
    return Heartbeat(
        seat=seat,
        heard_s=roster.silence_s(seat),
        stopped=peer.same_host and process_state(peer.pid) == "T",
        phase=beat.phase,
        units=beat.units,
        units_in_phase=beat.units_in_phase,
        since_s=beat.since_s,
        step=beat.step,
        line=printable(beat.line, limit=MAX_LINE_CHARACTERS),
        moved_bytes=beat.moved_bytes,
    )


def process_state(pid: int) -> str:
    """The kernel's state letter of a process: R running, S sleeping, T stopped; '' if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
