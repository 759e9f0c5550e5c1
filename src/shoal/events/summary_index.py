"""An index of the summaries of many runs in one file, so that a list of runs costs one `stat` per run.

The streams are the truth; the index only saves work. An entry counts while its stream has the size, time and inode of
the entry. An index that is damaged, or that another user wrote, is ignored. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from shoal.events.checks import Count, make_check
from shoal.events.packed_file import stat_content
from shoal.events.snapshot import SNAPSHOT_VERSION, RunSummary

MAX_INDEX_BYTES = 1 << 28
MIN_NEW_ENTRIES = 64
"""New entries from which the index is written: a directory with fewer runs needs none."""


class IndexEntry(TypedDict):
    """`stream`: size, time of change in nanoseconds, and inode of the stream that the summary is of."""

    stream: list[Count]
    summary: RunSummary


_is_entry: Callable[[Any], bool] = make_check(IndexEntry)


class SummaryIndex:
    """The index of one directory of runs. Belongs to one thread."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known = _load(file)
        self._seen: dict[str, Any] = {}
        self._new = 0

    def summary(self, run: str, events: str, compute: Callable[[], RunSummary]) -> RunSummary:
        """The summary of the run whose stream is at `events`. `compute` reads it if the index has none."""
        stream = _identity(events)  # before it is read: what is appended meanwhile makes the entry invalid
        entry: Any = self._known.get(run)
        if stream and _is_entry(entry) and entry["stream"] == stream:
            self._seen[run] = entry
            return RunSummary(**entry["summary"])
        found = compute()
        if stream:
            self._seen[run] = {"stream": stream, "summary": asdict(found)}
            self._new += 1
        return found

    def save_if_useful(self) -> None:
        """Write the index if it has many new entries. A directory that cannot be written is not an error."""
        if self._new < MIN_NEW_ENTRIES:
            return
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        with contextlib.suppress(OSError):
            try:
                content = {"version": SNAPSHOT_VERSION, "runs": self._seen}
                temporary.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
                temporary.replace(self._file)
            finally:
                temporary.unlink(missing_ok=True)


def _identity(events: str) -> list[int] | None:
    try:
        found = stat_content(events)
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _load(file: Path) -> dict[str, Any]:
    """The entries by run; each is checked when it is used."""
    try:
        with file.open("rb") as opened:
            mine = os.fstat(opened.fileno()).st_uid == os.geteuid()
            content = json.loads(opened.read(MAX_INDEX_BYTES)) if mine else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("version") != SNAPSHOT_VERSION:
        return {}
    runs = content.get("runs")
    return runs if isinstance(runs, dict) else {}
