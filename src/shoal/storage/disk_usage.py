"""What runs occupy on disk, and what deleting them would free."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

from shoal.jobs import run_dir

PART_NAMES = {
    "checkpoints": "checkpoints",
    "model": "model",
    "logs": "logs",
    "events.jsonl": "events",
    "events.jsonl.gz": "events",
}
BLOCK_BYTES = 512


@dataclass
class Usage:
    """`size_bytes`: lengths of the files; `freed_bytes`: what the disk gets back when they are deleted;
    `shared_bytes`: what it does not get back, because a file has another name elsewhere (a hard link)."""

    size_bytes: int = 0
    freed_bytes: int = 0
    shared_bytes: int = 0
    files: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Usage)))


@dataclass
class RunUsage:
    """`total` frees more than all `parts` do if files of one part are those of another one, as in a search."""

    run: str
    parts: dict[str, Usage]
    total: Usage


def directory_bytes(root: Path) -> Usage:
    """All files below a directory; links are not followed, and what vanishes meanwhile does not count."""
    return _sum(_files(str(root)))


def _sum(files: Iterable[os.stat_result]) -> Usage:
    found = Usage()
    names: dict[tuple[int, int], list[int]] = {}
    for one in files:
        found.files += 1
        found.size_bytes += one.st_size
        if one.st_nlink == 1:
            found.freed_bytes += one.st_blocks * BLOCK_BYTES
        else:
            names.setdefault((one.st_dev, one.st_ino), [one.st_nlink, one.st_blocks, 0])[2] += 1
    for links, blocks, here in names.values():
        if here == links:
            found.freed_bytes += blocks * BLOCK_BYTES
        else:
            found.shared_bytes += blocks * BLOCK_BYTES
    return found


def _files(root: str) -> Iterator[os.stat_result]:
    for entry in _entries(root):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _files(entry.path)
        elif stat.S_ISREG(status.st_mode):
            yield status


def _entries(root: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(root))
    except OSError:
        return []


def run_usage(root: Path) -> RunUsage:
    """By part: checkpoints, model, logs, events, other; those of folds and trials are added up."""
    parts: dict[str, list[os.stat_result]] = {}
    _sort_files(str(root), parts)
    every = chain.from_iterable(parts.values())
    return RunUsage(root.name, {name: _sum(files) for name, files in parts.items()}, _sum(every))


def _sort_files(root: str, parts: dict[str, list[os.stat_result]]) -> None:
    for entry in _entries(root):
        if entry.name.startswith(("fold-", "trial-")) and entry.is_dir(follow_symlinks=False):
            _sort_files(entry.path, parts)
            continue
        files = parts.setdefault(PART_NAMES.get(entry.name, "other"), [])
        if entry.is_dir(follow_symlinks=False):
            files += _files(entry.path)
            continue
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            files += [status] if stat.S_ISREG(status.st_mode) else []


def all_usage(runs: Path) -> list[RunUsage]:
    """Of every run, the largest first."""
    found = [run_usage(paths.root) for paths in run_dir.list_runs(runs)]
    return sorted(found, key=lambda one: -one.total.freed_bytes)
