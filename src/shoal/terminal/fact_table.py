"""Lines of facts side by side, for terminals of any width: what does not fit is left out, and no line wraps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

GAP = 2
"""Columns between two facts."""


def fitting(facts: Mapping[str, str], width: int, *, drop: tuple[str, ...]) -> dict[str, str]:
    """The facts that fit into `width` columns side by side, without those of `drop` that do not, in this order."""
    shown = dict(facts)
    for name in drop:
        if sum(len(text) + GAP for text in shown.values()) <= width:
            break
        shown.pop(name, None)
    return shown


def widest(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The longest text of each fact."""
    return {name: max((row[name] for row in rows), key=len) for name in (rows[0] if rows else {})}


def fact_table(rows: Sequence[Mapping[str, str]], width: int, *, drop: tuple[str, ...], more: str = "") -> Table:
    """A line for each row, and one for `more`: the facts that fit into `width` columns. No line wraps."""
    names = fitting(widest(rows), width - GAP, drop=drop)
    table = Table.grid(padding=(0, GAP), pad_edge=True)
    for _ in names:
        table.add_column(no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[name] for name in names), style="dim")
    if more:
        table.add_row(more, style="dim")
    return table
