"""Tables of tokens, disk use and trash."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from shoal.errors import plural
from shoal.storage.cleanup import COMPACT
from shoal.storage.compaction import Compaction
from shoal.storage.disk_usage import RunUsage, Usage
from shoal.storage.trash import TrashEntry
from shoal.terminal import formatting
from shoal.terminal.console import json_line, make_console


def print_tokens(tokens: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json_line([{name: value for name, value in one.items() if name != "sha256"} for one in tokens]))
        return
    table = Table("token", "role", "runs", "expires", box=None, pad_edge=False)
    for one in tokens:
        table.add_row(one["name"], one["role"], ", ".join(one["runs"]) or "all", _date(one["expires_t"]))
    make_console().print(table)


def print_usage(rows: Sequence[RunUsage], *, as_json: bool) -> None:
    if as_json:
        print(json_line([{"run": one.run, **asdict(one.total), "parts": _parts(one)} for one in rows]))
        return
    parts = ["checkpoints", "model", "events", "logs", "other"]
    table = Table("run", "frees", "shared", "size", "files", *parts, box=None, pad_edge=False)
    for one in rows:
        cells = (formatting.size(one.parts.get(part, Usage()).freed_bytes) for part in parts)
        table.add_row(one.run, *_sizes(one.total), *cells)
    whole = sum((one.total for one in rows), Usage())
    table.add_row("all", *_sizes(whole), style="bold")
    make_console().print(table)


def _sizes(one: Usage) -> list[str]:
    every = (one.freed_bytes, one.shared_bytes, one.size_bytes)
    return [*map(formatting.size, every), formatting.count(one.files)]


def _parts(one: RunUsage) -> dict[str, Any]:
    return {name: asdict(part) for name, part in one.parts.items()}


def print_trash(entries: Sequence[TrashEntry], *, as_json: bool) -> None:
    if as_json:
        print(json_line([{"entry": one.name, **one.fields} for one in entries]))
        return
    table = Table("entry", "run", "part", "deleted", "frees", box=None, pad_edge=False)
    for one in entries:
        fields = one.fields
        table.add_row(one.name, fields["run"], fields["part"] or "all", _date(fields["t"]),
                      formatting.size(fields["size_bytes"]))  # fmt: skip
    make_console().print(table)


def _date(t: float | None) -> str:
    return "never" if t is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(t))


def print_plan(items: Sequence[Mapping[str, Any]], name: str, *, as_json: bool) -> None:
    if as_json:
        print(json_line({"plan": name, "items": list(items)}))
        return
    table = Table("run", "part", "frees", box=None, pad_edge=False)
    for one in items:
        table.add_row(one["run"], one["part"] or "all", formatting.size(one["freed_bytes"]))
    console = make_console()
    console.print(table)
    whole = formatting.size(sum(one["freed_bytes"] for one in items))
    is_compaction = any(one["part"] == COMPACT for one in items)
    told = f"be compacted, which frees about {whole}" if is_compaction else f"move to the trash, {whole}"
    console.print(f"{len(items)} would {told}." + (f" Apply: shoal gc --apply {name}" if name else ""))


def print_compactions(done: Sequence[Compaction], *, as_json: bool) -> None:
    if as_json:
        print(json_line([asdict(one) for one in done]))
        return
    for one in done:
        sizes = f"{formatting.size(one.before_bytes)} before, {formatting.size(one.after_bytes)} now"
        print(f"{one.run}: {sizes}, {plural(one.files, 'file')} of events and logs changed, nothing is lost")
