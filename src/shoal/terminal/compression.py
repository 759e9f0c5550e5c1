"""The report of a compression: a table with every rung, and what speaks for the result."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from shoal.spec.compression.measured import CompressionReport, Quality, RungReport
from shoal.spec.compression.steps import CutStep, LowRankStep
from shoal.terminal import formatting

WIDE = 110
"""Columns of a terminal from which on a rung takes one line."""


def print_report(console: Console, report: CompressionReport) -> None:
    table = Table(box=None, pad_edge=False)
    gap = " " if console.width >= WIDE else "\n"
    for name in ("rung", "size", "batch 1", "batch 64", "quality", "drop"):
        table.add_column(name, justify="right" if table.columns else "left")
    table.add_column("", overflow="fold")
    for one in report.rungs:
        style = "bold" if one.name == report.chosen else "" if one.kept else "dim"
        table.add_row(*_cells(one, gap), style=style)
    console.print(table)
    console.print(
        f"Latency is CPU time per call with {report.threads} thread, as a ratio to the parent in the same runtime: "
        "median and quartiles. The drop is on the validation part, with its 95 % bound."
    )
    for line in _verdict(report):
        console.print(line)


def _cells(one: RungReport, gap: str) -> list[str]:
    size = formatting.size(one.artefact.size_bytes) if one.artefact else ""
    size += f"{gap}{one.size_ratio:.1%}" if one.size_ratio is not None else ""
    quality, drop = "", ""
    if one.quality:
        quality = f"{one.quality.value:.4f}"
        drop = f"{one.quality.drop:+.2%}{gap}{_at_most(one.quality)}"
    said = ("kept: " if one.kept else "") + one.why
    return [one.name, size, _latency(one, 1, gap), _latency(one, 64, gap), quality, drop, said]


def _at_most(quality: Quality) -> str:
    return f"≤ {quality.drop_bound:.2%}" if math.isfinite(quality.drop_bound) else "no bound"


def _latency(one: RungReport, batch: int, gap: str) -> str:
    ratio = one.latency.ratios.get(batch) if one.latency else None
    return f"{ratio.median:.2f}{gap}({ratio.low:.2f}–{ratio.high:.2f})" if ratio else ""


def _verdict(report: CompressionReport) -> list[str]:
    lines = [f"The result is '{report.chosen}'." + ("" if report.targets_met else " It does not meet the targets.")]
    chosen = next((one for one in report.rungs if one.name == report.chosen), None)
    if chosen and (found := chosen.certificate):
        where = "for every input from the smallest to the largest value of the training samples"
        what = where if found.claim == "proven" else "on the training samples"
        lines.append(
            f"Equal {what}, in exact arithmetic. Largest measured difference of an output: "
            f"{found.difference_float64:.1e} in float64 and {found.difference_float32:.1e} in float32 on "
            f"{found.samples} samples, {found.difference_points:.1e} in float64 on {found.points} random inputs."
        )
    if report.test:
        test = report.test
        lines.append(
            f"Test part, looked at once: {test.metric} {test.value:.4f}, the parent {test.parent:.4f} "
            f"(drop {test.drop:+.2%}, {_at_most(test)}, {test.samples} samples)."
        )
    return lines + [f"Note: {note}" for note in report.notes] + _refused(report)


def _refused(report: CompressionReport) -> list[str]:
    """The layers that no rung could make smaller, a line for each reason."""
    made = (step for one in report.rungs for step in one.steps if isinstance(step, CutStep | LowRankStep))
    smaller = {name for step in made for name in step.layers}
    layers: dict[str, list[str]] = {}
    for name, why in {name: why for one in report.rungs for name, why in one.refused.items()}.items():
        if name not in smaller:
            layers.setdefault(why, []).append(name)
    more = {why: f" and {len(names) - 3} more" if len(names) > 3 else "" for why, names in layers.items()}
    return [f"Left whole: {', '.join(names[:3])}{more[why]}: {why}" for why, names in layers.items()]
