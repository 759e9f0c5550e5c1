"""Prints a split: sizes, balance, times, leaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.terminal import formatting

MAX_CLASSES = 12


def print_split(console: Console, answer: Mapping[str, Any]) -> None:
    report = answer["report"]
    console.print(f"{report['kind']}: {formatting.count(report['samples'])} samples", highlight=False)
    table = Table("fold", "part", "samples", "share", "what", box=None, pad_edge=False)
    for fold in report["folds"]:
        for name, part in fold["parts"].items():
            table.add_row(
                str(fold["fold"]), name, formatting.count(part["size"]), f"{part['share']:.1%}", Text(_describe(part))
            )
    for name, part in answer["own_sources"].items():
        table.add_row("", name, formatting.count(part["size"]), "", "a source of its own")
    console.print(table)
    leaks = [f"fold {f['fold']}: {leak['text']}" for f in report["folds"] for leak in f["leaks"]]
    _print_leaks(console, leaks + list(answer["leaks_between_sources"]))
    if answer["exported"]:
        console.print(f"written to {answer['exported']}", highlight=False, soft_wrap=True)


def _print_leaks(console: Console, leaks: list[str]) -> None:
    for leak in leaks:
        console.print(Text(f"leak: {leak}", style="yellow"), soft_wrap=True)
    if not leaks:
        console.print("no leaks: no row, group or time stands on both sides")


def _describe(part: Mapping[str, Any]) -> str:
    found = []
    if "classes" in part:
        shares = [f"{name} {c['share']:.1%}" for name, c in part["classes"].items()]
        more = f", … ({len(shares)} classes)" if len(shares) > MAX_CLASSES else ""
        found.append(", ".join(shares[:MAX_CLASSES]) + more)
    if "target" in part:
        target = part["target"]
        found.append(f"target {formatting.number(target['mean'])} ± {formatting.number(target['std'])}")
    if "time" in part:
        found.append(f"from {part['time'][0]} to {part['time'][1]}")
    if "groups" in part:
        found.append(f"{formatting.count(part['groups'])} groups")
    return "; ".join(found)
