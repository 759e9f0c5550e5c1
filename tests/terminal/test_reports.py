"""Lists of runs, short and long."""

import io

from shoal.terminal import reports
from shoal.terminal.console import make_console


def row(number):
    return {
        "run": f"mlp-{number}",
        "status": "finished",
        "step": 9,
        "steps": 9 * (number % 2),
        "metrics": {"loss": 0.5},
        "started": "2026-01-01 10:00",
        "weights_sha256": "ab" * 32,
        "damage": "",
    }


def shown(rows):
    console = make_console(file=io.StringIO(), width=120)
    reports.print_runs(console, rows)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_long_list_looks_like_a_short_one(monkeypatch):
    rows = [row(number) for number in range(1, 12)]
    short = shown(rows)
    monkeypatch.setattr(reports, "MAX_TABLE_ROWS", 10)
    assert shown(rows) == short
    assert len(short) == 12
    assert short[1].split() == ["mlp-1", "finished", "9/9", "loss", "0.5000", "2026-01-01", "10:00", "ab" * 6]
    assert short[2].split()[2] == "–"
