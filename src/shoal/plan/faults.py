"""Faults as readable lines, and a seeded plan of them over the steps of a job. Nothing is done here.

`worker 2` is the third (counted from 0) of those who train when the step has come, by their seats; if there are fewer,
the count starts again. The same for `server 2` and those who serve. Seats themselves cannot be planned: whoever
replaces a dead one has a new one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from shoal.errors import error

Kind = Literal["kill", "freeze", "slow", "join", "kill server"]
LAST_PART = 0.9
"""Nothing is planned for the rest of the steps: what happens there might come too late."""

_LINE = re.compile(r"(?:(kill|freeze|slow) worker (\d{1,4})|(kill server) (\d{1,4})|(join)) at step (\d{1,12})")


@dataclass(frozen=True)
class Fault:
    kind: Kind
    step: int
    place: int = 0

    def __str__(self) -> str:
        who = {"join": "", "kill server": f" {self.place}"}.get(self.kind, f" worker {self.place}")
        return f"{self.kind}{who} at step {self.step}"

    def chosen(self, seats: Sequence[int]) -> int:
        """Which of those who are there is meant."""
        return sorted(seats)[self.place % len(seats)]


def parse(line: str) -> Fault:
    """The fault that a line tells of; SH617 if it tells of none."""
    found = _LINE.fullmatch(" ".join(line.split()))
    if not found:
        raise error("SH617", f"'{line.strip()}' is no fault")
    harm, worker, server_harm, server, join, step = found.groups()
    return Fault(cast(Kind, harm or server_harm or join), int(step), int(worker or server or 0))


def parse_all(text: str) -> list[Fault]:
    """One fault per line, in the order of steps; empty lines and what follows a # are passed over."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return ordered([parse(line) for line in lines if line])


def read(path: Path) -> list[Fault]:
    try:
        return parse_all(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        raise error("SH617", f"the plan cannot be read: {failure}", where=str(path)) from failure


def ordered(faults: Sequence[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: (fault.step, get_args(Kind).index(fault.kind), fault.place))


def plan(numbers: Mapping[Kind, int], *, steps: int, workers: int, seed: int) -> list[Fault]:
    """So many faults of each kind, at random steps and workers; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311
    last = max(int(steps * LAST_PART), 1)
    faults = [
        Fault(kind, chance.randint(1, last), 0 if kind == "join" else chance.randrange(workers))
        for kind in get_args(Kind)
        for _ in range(numbers.get(kind, 0))
    ]
    return ordered(faults)
