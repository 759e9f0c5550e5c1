"""Fair comparison on a shared machine: short measurements in turns, medians, ratios within a round."""

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
    """The input of every part: scratch directory, samples, number of rounds, and whether to be quick."""

    scratch: Path
    data: Path
    repeats: int = 7
    quick: bool = False
    say: Callable[[str], None] = field(default=print)


def in_turns(variants: Mapping[str, Callable[[], Numbers]], repeats: int) -> dict[str, list[Numbers]]:
    """A B C, then B C A, and so on, so that a temporary slowdown of the machine affects every variant."""
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
    """Median over the rounds of number / base of the same round."""
    return statistics.median(a[key] / b[key] for a, b in zip(numbers, base, strict=True))
