"""Prints what was found in a live run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.errors import plural
from shoal.jobs.inspection.profiles import ProfileSummary
from shoal.terminal import formatting
from shoal.terminal.reports import print_lines

SHOWN_OPERATORS = 15


def print_profile(console: Console, made: ProfileSummary, where: Path) -> None:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("operator", "calls", "by itself", "in all"):
        table.add_column(name, justify="left" if name == "operator" else "right")
    for one in made.operators[:SHOWN_OPERATORS]:
        own, total = (formatting.seconds(us / 1e6) for us in (one.self_us, one.total_us))
        table.add_row(one.name, str(one.calls), own, total)
    console.print(table)
    told = f"{plural(made.steps, 'step')} from step {made.first_step} on, of {', '.join(made.workers)}"
    print_lines(console, told, *(f"{who} is missing: {why}" for who, why in made.missing.items()))
    print_lines(console, f"{where}", "Open it in chrome://tracing, or at ui.perfetto.dev.")
