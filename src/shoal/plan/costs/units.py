"""Parse speeds and durations as users write them (`100mbit`, `1.5 GB/s`, `2ms`), and format numbers for reasons."""

from __future__ import annotations

import re

from shoal.errors import error

_SPEEDS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9}
_DURATIONS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bytes_per_s(text: str, *, where: str) -> float:
    fix = "Write a speed such as 100mbit, 10gbit or 50MB/s."
    value = _parse_with_unit(text, _SPEEDS, where, fix)
    if not value:
        raise error("SH106", "the speed must be above 0", where=where, fix=fix)
    return value


def parse_seconds(text: str, *, where: str) -> float:
    return _parse_with_unit(text, _DURATIONS, where, "Write a duration such as 200us, 1ms or 0.1s.")


def parse_speeds(text: str, *, where: str, hosts: int | None = None) -> tuple[float, ...]:
    """The speed of each host relative to this one: `1,0.25`."""
    fix = "Write a number for each host, this one first: 1,0.25 means one other host, four times as slow."
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d+)?", word) and float(word) > 0 for word in words):
        raise error("SH106", f"'{text}' is not a list of speeds above 0", where=where, fix=fix)
    if hosts and len(words) != hosts:
        raise error("SH106", f"{hosts} hosts, but {len(words)} speeds", where=where, fix=fix)
    return tuple(map(float, words))


def _parse_with_unit(text: str, units: dict[str, float], where: str, fix: str) -> float:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zµ/]+)\s*", text.lower())
    if not found or found[2] not in units:
        raise error("SH106", f"'{text}' is not a number with a unit", where=where, fix=fix)
    return float(found[1]) * units[found[2]]


def format_milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.2g} ms" if value < 10 else f"{value:,.0f} ms"


def format_gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e9:.2g} GB"


def format_percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def format_times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"
