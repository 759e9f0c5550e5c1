"""Finished runs in less space, without losing anything: events and logs are packed, and read as before.

Receipt, job, model, checkpoints and traces stay as they are. The cache of curves goes; a page that shows them makes it
again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import error, from_os_error
from shoal.events.packed_file import (
    BLOCK_BYTES,
    SUFFIX,
    begins_with_packed,
    pack_block,
    pack_file,
    packed_path,
    unpack_file,
)
from shoal.fleet.orphans import find_orphans
from shoal.jobs import run_dir
from shoal.jobs.resume import has_finished
from shoal.jobs.search.search_dir import SearchPaths
from shoal.spec.run_paths import RunPaths
from shoal.storage.disk_usage import directory_bytes

MIN_BYTES = 4096
"""Smaller files occupy a block of the disk anyway."""


@dataclass(frozen=True)
class Compaction:
    """What was done to a run: how many files were packed or unpacked, and what the run occupies on disk."""

    run: str
    files: int
    before_bytes: int
    after_bytes: int


def compact_run(paths: RunPaths) -> Compaction:
    """Pack events and logs of a finished run, of its folds and of its trials. SH682 if it has not finished, SH602 if
    something of it lives. May be killed at any time: what is left is complete, and the next call goes on."""
    with _nobody_else(paths):
        if not is_over(paths):
            raise error("SH682", f"'{paths.name}' has not finished", where=str(paths.root))
        before, files = directory_bytes(paths.root), 0
        try:
            for one in _parts(paths):
                _remove_leftovers(one)
                for file in plain_files(one):
                    pack_file(file)
                    files += 1
                one.history.unlink(missing_ok=True)
        except OSError as failure:
            raise from_os_error(failure) or _failed(paths, failure) from failure
        return Compaction(paths.name, files, before.freed_bytes, directory_bytes(paths.root).freed_bytes)


def is_over(paths: RunPaths) -> bool:
    """Whether a run, a run with folds or a search has its receipt."""
    if not paths.search_journal.is_file():
        return has_finished(paths)
    return SearchPaths(paths).receipt.is_file()


def expand_run(paths: RunPaths) -> Compaction:
    """Undo `compact_run`: the files are as they were, byte for byte. SH682 if one of them is damaged."""
    with _nobody_else(paths):
        before, files = directory_bytes(paths.root), 0
        try:
            for one in _parts(paths):
                files += _remove_leftovers(one)
                for file in _packed_files(one):
                    unpack_file(file)
                    files += 1
        except OSError as failure:
            raise from_os_error(failure) or _failed(paths, failure) from failure
        return Compaction(paths.name, files, before.freed_bytes, directory_bytes(paths.root).freed_bytes)


def estimate_freed_bytes(paths: RunPaths) -> int:
    """About what `compact_run` would free: the first block of each file tells how well it packs."""
    freed = 0
    for one in _parts(paths):
        for path in plain_files(one):
            with path.open("rb") as file:
                block = file.read(BLOCK_BYTES)
            if block:
                freed += int(path.stat().st_size * max(0.0, 1 - len(pack_block(block)) / len(block)))
        freed += one.history.stat().st_size if one.history.is_file() else 0
    return freed


def _nobody_else(paths: RunPaths) -> contextlib.AbstractContextManager[None]:
    """The lock of the run's driver. SH602 if a driver or a worker of the run lives. SH609 for a fold or a trial: only
    the whole has a driver."""
    if (paths.root.parent / "job.yaml").is_file():
        whole = paths.root.parent.name
        raise error("SH609", f"'{paths.name}' is a part of '{whole}'", where=paths.name, fix=f"Name {whole}.")
    if left := [one.seat.name for part in _parts(paths) for one in find_orphans(part)]:
        raise error("SH602", f"these processes of '{paths.name}' live: {', '.join(left)}", where=str(paths.root))
    return run_dir.driver_lock(paths)


def _remove_leftovers(paths: RunPaths) -> int:
    """What a call that was killed left: files that it had begun, and packed files whose plain ones are there. Returns
    how many of the second kind. OSError (EEXIST), and both stay, if the plain file lacks what the packed one has."""
    for folder, pattern in ((paths.root, f".{paths.events.name}*.tmp"), (paths.logs, ".*.tmp")):
        for part in folder.glob(pattern):
            part.unlink()
    both = [file for file in _packed_files(paths) if file.exists()]
    for file in both:
        if not begins_with_packed(file):
            raise OSError(errno.EEXIST, f"{file.name} and {packed_path(file).name} have different content")
        packed_path(file).unlink()
    return len(both)


def _failed(paths: RunPaths, failure: OSError) -> Exception:
    return error("SH682", str(failure), where=str(paths.root))


def _parts(paths: RunPaths) -> Iterator[RunPaths]:
    """The run, its folds, and its trials with their folds."""
    trials = (RunPaths(path) for path in sorted(paths.root.glob("trial-*")) if path.is_dir() and not path.is_symlink())
    yield paths
    for one in (paths, *trials):
        if one is not paths:
            yield one
        yield from one.folds


def _files(paths: RunPaths) -> list[Path]:
    return [paths.events, *sorted(paths.logs.glob("worker-*")), *sorted(paths.logs.glob("server-*"))]


def plain_files(paths: RunPaths) -> list[Path]:
    """What is packed. A link is left alone."""
    found = (path for path in _files(paths) if path.suffix in (".jsonl", ".log", ".err"))
    return [path for path in found if path.is_file() and not path.is_symlink() and _is_worth_it(path)]


def _is_worth_it(path: Path) -> bool:
    """Not if it is small, or its middle is not kept: that occupies nothing, and would be packed as zeros."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size >= MIN_BYTES and os.lseek(file.fileno(), 0, os.SEEK_HOLE) >= size


def _packed_files(paths: RunPaths) -> list[Path]:
    """The plain names of packed files."""
    plain = [path.with_name(path.name.removesuffix(SUFFIX)) for path in _files(paths) if path.suffix == SUFFIX]
    return [path for path in (paths.events, *plain) if packed_path(path).is_file()]
