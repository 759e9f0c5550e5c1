"""`shoal logs`: the last lines of logs, lines that contain a text, and lines as they come."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.jobs import run_dir
from shoal.spec.run_paths import RunPaths
from shoal.storage import logs

POLL_S = 0.2


def print_logs(
    paths: RunPaths, who: str, *, text: str, lines: int, follow: bool, write: Callable[[str], object]
) -> None:
    names = logs.names_of(paths, who)
    offsets: dict[str, int] = {}
    for name in names:
        prefix = f"{name}: " if len(names) > 1 or follow else ""
        offsets[name] = _print_present(paths, name, prefix, text=text, lines=lines, write=write)
    if follow:
        _follow(paths, who, offsets, text=text, write=write)


def _print_present(
    paths: RunPaths, name: str, prefix: str, *, text: str, lines: int, write: Callable[[str], object]
) -> int:
    """Print what is there; returns the position after it."""
    if text:
        with logs.open_log(paths, name) as file:
            end = file.seek(0, 2)
        for match in logs.search(paths, [name], text=text, at_most=-1):
            write(prefix + match.line)
        return end
    piece = logs.read_tail(paths, name, lines=lines)
    for line in piece.lines:
        write(prefix + line)
    return piece.end


def _follow(paths: RunPaths, who: str, offsets: dict[str, int], *, text: str, write: Callable[[str], object]) -> None:
    """Until the run's driver is done. Logs of workers that start meanwhile are followed too."""
    while True:
        driven = run_dir.is_driven(paths.parent_run)
        for name in logs.names_of(paths, who):
            while (piece := logs.read_after(paths, name, offset=offsets.get(name, 0))).lines:
                offsets[name] = piece.end
                for line in piece.lines:
                    if text in line:
                        write(f"{name}: {line}")
        if not driven:
            return
        time.sleep(POLL_S)
