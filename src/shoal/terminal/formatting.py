"""Numbers as text: short, aligned, and the same everywhere."""

from __future__ import annotations

import math


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def remaining(value: float | None) -> str:
    """A time to come: whole seconds, as it changes all the time."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{max(value, 0):.0f} s" if value < 100 else seconds(value)


def size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(value: float) -> str:
    return f"{value:,.0f}"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4f}"


def metrics(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())
