"""Fair comparison on a machine that others use too: short measurements in turns, medians, ratios of neighbours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Numbers = Mapping[str, float]
Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What every part is given: where it may write, the samples, how often to repeat, and whether to hurry."""

    scratch: Path
    data: Path
    repeats: int = 7
    quick: bool = False
    say: Callable[[str], None] = field(default=print)


def in_turns(variants: Mapping[str, Callable[[], Numbers]], repeats: int) -> dict[str, list[Numbers]]:
    """A B C, then B C A, and so on: what slows the machine for a while slows every variant."""
    found: dict[str, list[Numbers]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(repeats):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            found[name].append(variants[name]())
    return found


def median(numbers: list[Numbers], key: str) -> float:
    return statistics.median(one[key] for one in numbers)


def ratio(numbers: list[Numbers], base: list[Numbers], key: str) -> float:
    """The median over the turns of number / base of the same turn."""
    return statistics.median(a[key] / b[key] for a, b in zip(numbers, base, strict=True))
