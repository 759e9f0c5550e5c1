"""A curve drawn with braille dots: eight dots in each character."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shoal.terminal.formatting import number

MAX_SHOWN = 1e300
"""Limit of values that are drawn: the difference of two larger ones may be infinite. NaN is never below it."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def draw(steps: Sequence[float], values: Sequence[float], *, width: int = 64, height: int = 10) -> list[str]:
    """Lines of text; the axis on the left shows the largest and the smallest value."""
    points = [(s, v) for s, v in zip(steps, values, strict=True) if abs(v) < MAX_SHOWN]
    if not points:
        return []
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]
    canvas = [[0] * width for _ in range(height)]
    for column, value in _columns(points, first, last, width * 2):
        row = round((high - value) / (high - low) * (height * 4 - 1)) if high > low else height * 2
        canvas[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    labels = [number(high), *[""] * (height - 2), number(low)] if height > 1 else [number(high)]
    margin = max(len(label) for label in labels)
    lines = [
        f"{label:>{margin}} │{''.join(chr(0x2800 + c) for c in row)}" for label, row in zip(labels, canvas, strict=True)
    ]
    axis = f"{first:.0f}".ljust(width - len(f"{last:.0f}")) + f"{last:.0f}"
    return [*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {axis}"]


def _columns(points: Sequence[tuple[float, float]], first: float, last: float, width: int) -> list[tuple[int, float]]:
    """The mean value of each column of dots; empty columns are interpolated linearly."""
    sums: dict[int, list[float]] = {}
    for step, value in points:
        column = round((step - first) / (last - first) * (width - 1)) if last > first else 0
        sums.setdefault(column, []).append(value)
    known = sorted((column, sum(v) / len(v)) for column, v in sums.items())
    filled = known[:1]
    for (c0, v0), (c1, v1) in itertools.pairwise(known):
        filled += [(c, v0 + (v1 - v0) * (c - c0) / (c1 - c0)) for c in range(c0 + 1, c1 + 1)]
    return filled
