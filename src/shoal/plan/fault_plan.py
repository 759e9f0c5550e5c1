"""Faults as readable lines, and a seeded plan of faults over the steps of a job. No I/O except reading a plan.

`worker 2` is the third worker (counted from 0, ordered by seat) that trains at that step, modulo the number of workers.
The same holds for `server 2`. A plan cannot name seats, because a replacement gets a new seat.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from shoal.errors import error

FaultKind = Literal["kill", "freeze", "slow", "join", "kill server"]
LAST_FRACTION = 0.9
"""Faults are planned only in this fraction of the steps: later faults might come too late."""

_LINE = re.compile(r"(?:(kill|freeze|slow) worker (\d{1,4})|(kill server) (\d{1,4})|(join)) at step (\d{1,12})")


@dataclass(frozen=True)
class Fault:
    kind: FaultKind
    step: int
    target_index: int = 0

    def __str__(self) -> str:
        who = {"join": "", "kill server": f" {self.target_index}"}.get(self.kind, f" worker {self.target_index}")
        return f"{self.kind}{who} at step {self.step}"

    def target_seat(self, seats: Sequence[int]) -> int:
        """The seat that the fault hits, out of the present seats."""
        return sorted(seats)[self.target_index % len(seats)]


def parse_fault(line: str) -> Fault:
    """Parse one line. SH617 if it is not a fault."""
    found = _LINE.fullmatch(" ".join(line.split()))
    if not found:
        raise error("SH617", f"'{line.strip()}' is not a fault")
    harm, worker, server_harm, server, join, step = found.groups()
    return Fault(cast(FaultKind, harm or server_harm or join), int(step), int(worker or server or 0))


def parse_faults(text: str) -> list[Fault]:
    """One fault per line, sorted by step. Empty lines and comments (#) are skipped."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return sort_faults([parse_fault(line) for line in lines if line])


def read_fault_plan(path: Path) -> list[Fault]:
    try:
        return parse_faults(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        raise error("SH617", f"the plan cannot be read: {failure}", where=str(path)) from failure


def sort_faults(faults: Sequence[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: (fault.step, get_args(FaultKind).index(fault.kind), fault.target_index))


def random_fault_plan(counts: Mapping[FaultKind, int], *, steps: int, workers: int, seed: int) -> list[Fault]:
    """`counts` faults of each kind, at random steps and workers. The same seed gives the same plan."""
    rng = random.Random(seed)  # noqa: S311
    last = max(int(steps * LAST_FRACTION), 1)
    faults = [
        Fault(kind, rng.randint(1, last), 0 if kind == "join" else rng.randrange(workers))
        for kind in get_args(FaultKind)
        for _ in range(counts.get(kind, 0))
    ]
    return sort_faults(faults)
