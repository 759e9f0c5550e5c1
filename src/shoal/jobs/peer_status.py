"""A worker or server as its driver hears it, and its signs of life."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.fleet.control_server import ControlServer
from shoal.plan.failure_detector import Heartbeat

RECONNECT_TIMEOUT_S = 5.0
"""How long one that outlived its driver has to find the new one."""


def _initial_heartbeat() -> Mapping[str, Any]:
    return {"phase": "building", "since_s": 0.0}


@dataclass
class PeerStatus:
    """A worker or server whose driver hears it, or heard it until its connection was lost. `same_host`: the driver can
    read its state in /proc. `said_bye`: it announced that it leaves."""

    connection: int
    pid: int
    host: str
    managed: bool
    same_host: bool
    last_heartbeat: Mapping[str, Any] = field(default_factory=_initial_heartbeat)
    disconnected_at_s: float | None = None
    said_bye: bool = False

    def heartbeat(self, seat: int, control: ControlServer) -> Heartbeat:
        beat = self.last_heartbeat
        return Heartbeat(
            seat=seat,
            heard_s=control.silence_s(self.connection)
            if self.disconnected_at_s is None
            else time.monotonic() - self.disconnected_at_s,
            stopped=self.same_host and process_state(self.pid) == "T",
            phase=str(beat.get("phase", "")),
            units=int(beat.get("units", 0)),
            units_in_phase=int(beat.get("units_in_phase", 0)),
            since_s=float(beat.get("since_s", 0.0)),
            step=int(beat.get("step", 0)),
            line=str(beat.get("line", "")),
            moved_bytes=int(beat.get("moved_bytes", 0)),
        )


def process_state(pid: int) -> str:
    """The kernel's letter: R runs, S sleeps, T is stopped; '' if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
