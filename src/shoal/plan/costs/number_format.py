"""Numbers as they stand in reasons."""

from __future__ import annotations


def format_milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.2g} ms" if value < 10 else f"{value:,.0f} ms"


def format_gigabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e9:.2g} GB"


def format_percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def format_times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"
