"""Prints a split: sizes, balance, times, leaks, and what was looked at to find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.errors import plural
from shoal.terminal import formatting

MAX_CLASSES = 12
_LEAK_KINDS = {"duplicates": "rows", "groups": "group", "time order": "time"}


def print_split(console: Console, answer: Mapping[str, Any]) -> None:
    report = answer["report"]
    console.print(f"{report['kind']}: {plural(report['samples'], 'sample')}", highlight=False)
    table = Table("fold", "part", "samples", "share", "what", box=None, pad_edge=False)
    for fold in report["folds"]:
        for name, part in fold["parts"].items():
            table.add_row(
                str(fold["fold"]), name, formatting.count(part["size"]), f"{part['share']:.1%}", Text(_describe(part))
            )
    for name, part in answer["own_sources"].items():
        table.add_row("", name, formatting.count(part["size"]), "", "a source of its own")
    console.print(table)
    if report.get("clusters"):
        _print_clusters(console, report["clusters"])
    leaks = [f"fold {f['fold']}: {leak['text']}" for f in report["folds"] for leak in f["leaks"]]
    for leak in [*leaks, *answer["leaks_between_sources"]]:
        console.print(Text(f"leak: {leak}", style="yellow"), soft_wrap=True)
    found = {leak["kind"] for fold in report["folds"] for leak in fold["leaks"]}
    _print_checks(console, report["checks"], found, own_sources=list(answer["own_sources"]))
    _print_hints(console, report["hints"])
    if answer["exported"]:
        console.print(f"written to {answer['exported']}", highlight=False, soft_wrap=True)


def _print_checks(
    console: Console, checks: Sequence[Mapping[str, Any]], found: Set[str], *, own_sources: Sequence[str]
) -> None:
    """A line for each kind of leak. A kind that was not looked for says so: silence would read as "no leak"."""
    table = Table("looked for", "", box=None, pad_edge=False)
    for check in checks:
        result = "leaks, see above" if _LEAK_KINDS[check["what"]] in found else "no leak"
        line = f"checked {check['how']}: {result}" if check["checked"] else f"NOT checked: {check['how']}"
        table.add_row(check["what"], Text(line))
    if own_sources:
        names = " and ".join(own_sources)
        table.add_row("", Text(f"train against the own source of {names}: duplicates checked, groups and times NOT"))
    console.print(table)


def _print_clusters(console: Console, clusters: Mapping[str, Any]) -> None:
    count = plural(clusters["count"], "cluster")
    console.print(Text(f"{count} of {clusters['smallest']} to {plural(clusters['largest'], 'sample')}"))
    for fold, found in clusters["folds"].items():
        if found["distance"] is None:
            continue
        line = (
            f"fold {fold}: on both sides: {plural(found['on_both_sides'], 'cluster')}; held-out samples are "
            f"{found['distance']:.3g} from the nearest training sample (median), {found['random_distance']:.3g} in a "
            "random split"
        )
        console.print(Text(line), soft_wrap=True)


def _print_hints(console: Console, hints: Sequence[Mapping[str, Any]]) -> None:
    for hint in hints:
        line = f"column '{hint['column']}' looks like {hint['role']} ({hint['reason']})"
        if hint["separated"] is None:
            console.print(Text(f"{line}: this split does not mix them"), soft_wrap=True)
            continue
        console.print(Text(f"{line}: {hint['separated']}", style="yellow"), soft_wrap=True)
        console.print(Text(f"    if so, write under data:  {hint['job_line']}"), soft_wrap=True)


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
        found.append(plural(part["groups"], "group"))
    return "; ".join(found)
