"""What runs occupy on disk, and what deleting them would free."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, fields
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
    """`size_bytes`: lengths of the files; `freed_bytes`: what the disk gets back when they are deleted. A file that
    has another name elsewhere (a hard link) frees nothing."""

    size_bytes: int = 0
    freed_bytes: int = 0
    files: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Usage)))


@dataclass
class RunUsage:
    run: str
    parts: dict[str, Usage]

    @property
    def total(self) -> Usage:
        return sum(self.parts.values(), Usage())


def directory_bytes(root: Path) -> Usage:
    """All files below a directory; links are not followed, and what vanishes meanwhile does not count."""
    found = Usage()
    names: dict[tuple[int, int], list[int]] = {}
    for entry in _files(str(root)):
        found.files += 1
        found.size_bytes += entry.st_size
        if entry.st_nlink == 1:
            found.freed_bytes += entry.st_blocks * BLOCK_BYTES
        else:
            names.setdefault((entry.st_dev, entry.st_ino), [entry.st_nlink, entry.st_blocks, 0])[2] += 1
    for links, blocks, here in names.values():
        found.freed_bytes += blocks * BLOCK_BYTES if here == links else 0
    return found


def _files(root: str) -> Iterator[os.stat_result]:
    try:
        entries = list(os.scandir(root))
    except OSError:
        return
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _files(entry.path)
        elif stat.S_ISREG(status.st_mode):
            yield status


def run_usage(root: Path) -> RunUsage:
    """By part: checkpoints, model, logs, events, other; those of folds and trials are added up."""
    parts: dict[str, Usage] = {}
    try:
        entries = list(os.scandir(root))
    except OSError:
        entries = []
    for entry in entries:
        part = PART_NAMES.get(entry.name, "other")
        if entry.is_dir(follow_symlinks=False) and entry.name.startswith(("fold-", "trial-")):
            for name, found in run_usage(Path(entry.path)).parts.items():
                parts[name] = parts.get(name, Usage()) + found
            continue
        if entry.is_dir(follow_symlinks=False):
            found = directory_bytes(Path(entry.path))
        else:
            found = _file_usage(entry)
        parts[part] = parts.get(part, Usage()) + found
    return RunUsage(root.name, parts)


def _file_usage(entry: os.DirEntry[str]) -> Usage:
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:
        return Usage()
    if not stat.S_ISREG(found.st_mode):
        return Usage()
    return Usage(found.st_size, found.st_blocks * BLOCK_BYTES if found.st_nlink == 1 else 0, 1)


def all_usage(runs: Path) -> list[RunUsage]:
    """Of every run, the largest first."""
    found = [run_usage(paths.root) for paths in run_dir.list_runs(runs)]
    return sorted(found, key=lambda one: -one.total.freed_bytes)
