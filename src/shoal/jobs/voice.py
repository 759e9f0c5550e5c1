"""A worker or server as its driver hears it, and its signs of life."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.fleet.control import Control
from shoal.plan.suspicion import Sign

CALL_BACK_S = 5.0
"""How long one that outlived its driver has to find the new one."""


def _building() -> Mapping[str, Any]:
    return {"phase": "building", "since_s": 0.0}


@dataclass
class Voice:
    """One that is heard; or was, until its connection was lost. `parted`: it said that it would go."""

    caller: int
    pid: int
    host: str
    local: bool
    beat: Mapping[str, Any] = field(default_factory=_building)
    lost_s: float | None = None
    parted: bool = False

    def sign(self, seat: int, control: Control) -> Sign:
        beat = self.beat
        return Sign(
            seat=seat,
            heard_s=control.heard_s(self.caller) if self.lost_s is None else time.monotonic() - self.lost_s,
            stopped=self.local and process_state(self.pid) == "T",
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
