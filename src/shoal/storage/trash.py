"""Deleting with undo: a run, or a part of it, moves to `.trash` beside the runs. Emptying the trash frees the bytes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from shoal.errors import error, is_disk_full
from shoal.events.checks import Count, make_check
from shoal.fleet.orphans import find_orphans
from shoal.jobs import run_dir
from shoal.spec.run_paths import RunPaths
from shoal.storage.disk_usage import directory_bytes
from shoal.storage.tags import change_tags, read_tags

TRASH = ".trash"
ENTRY_FILE = "entry.json"
PARTS = ("", "checkpoints")
_MAKE_ROOM = "Empty the trash: shoal trash --empty; or delete it without undo: shoal trash --delete {name} --for-good."
_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}")


class TrashFields(TypedDict):
    """`part`: '' for a whole run, or `checkpoints`. `tags` are those of a whole run, and come back with it."""

    run: str
    part: str
    t: float
    size_bytes: Count
    tags: list[str]


class TrashEntry(NamedTuple):
    name: str
    fields: TrashFields
    directory: Path


_is_fields: Callable[[Any], bool] = make_check(TrashFields)


def move_to_trash(paths: RunPaths, runs: Path, *, part: str = "") -> TrashEntry:
    """Move a run, or its checkpoints, to the trash. SH602 if a driver or a worker of the run lives. SH510 if the disk
    has no room for the entry: then the trash is as before."""
    with _going(paths, runs, part) as source:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        directory = runs.resolve() / TRASH / name
        fields: TrashFields = {
            "run": paths.name, "part": part, "t": time.time(), "size_bytes": directory_bytes(source).freed_bytes,
            "tags": [] if part else read_tags(runs).get(paths.name, []),
        }  # fmt: skip
        try:
            directory.mkdir(parents=True, mode=0o700)
            (directory / ENTRY_FILE).write_text(json.dumps(fields))
        except OSError as failure:
            _take_back(directory)
            if not is_disk_full(failure):
                raise
            message, where = "the disk is full: the trash has no room for an entry", str(paths.root)
            raise error("SH510", message, where=where, fix=_MAKE_ROOM.format(name=paths.name)) from failure
        os.rename(source, directory / "content")
        _forget_tags(runs, paths.name, fields["tags"])
    return TrashEntry(name, fields, directory)


def delete_for_good(paths: RunPaths, runs: Path, *, part: str = "") -> int:
    """Delete a run, or its checkpoints, without undo. Needs no room on the disk. Returns the bytes that this freed.
    What is cut short is still a run, and can be deleted again: its job goes last."""
    with _going(paths, runs, part) as source:
        freed = directory_bytes(source).freed_bytes
        for one in [one for one in source.iterdir() if one != paths.job]:
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one)
            else:
                one.unlink()
        shutil.rmtree(source)
        _forget_tags(runs, paths.name, [] if part else read_tags(runs).get(paths.name, []))
    return freed


def _forget_tags(runs: Path, name: str, tags: list[str]) -> None:
    """They go with the run, unless the disk is too full for that: then they stay, and the run is gone all the same."""
    try:
        if tags:
            change_tags(runs, name, remove=tags)
    except OSError as failure:
        if not is_disk_full(failure):
            raise


@contextlib.contextmanager
def _going(paths: RunPaths, runs: Path, part: str) -> Iterator[Path]:
    """The directory of a run, or of its part, that nobody uses."""
    if part not in PARTS:
        raise error("SH609", f"'{part}' is no part of a run", fix="Name checkpoints, or nothing for the whole run.")
    _require_inside(paths, runs)
    if left := [one.seat.name for fold in paths.folds or [paths] for one in find_orphans(fold)]:
        raise error("SH602", f"these processes of '{paths.name}' live: {', '.join(left)}", where=str(paths.root))
    with run_dir.driver_lock(paths):
        source = paths.root / part if part else paths.root
        if not source.is_dir() or source.is_symlink():
            raise error("SH606", f"'{paths.name}' has no {part}", where=str(paths.root))
        yield source


def _take_back(directory: Path) -> None:
    """Only what is empty or an entry: never content."""
    with contextlib.suppress(OSError):
        (directory / ENTRY_FILE).unlink(missing_ok=True)
        directory.rmdir()


def _require_inside(paths: RunPaths, runs: Path) -> None:
    if paths.root.parent != runs.resolve() or paths.name.startswith("."):
        fix = "Name a run of the directory; a fold goes with its run."
        raise error("SH609", f"'{paths.name}' does not lie in {runs}", where=str(paths.root), fix=fix)


def list_trash(runs: Path) -> list[TrashEntry]:
    """Newest first. Directories that are not entries are left alone."""
    found = []
    with contextlib.suppress(OSError):
        for directory in sorted((runs.resolve() / TRASH).iterdir(), reverse=True):
            fields = _read_fields(directory)
            if fields is not None:
                found.append(TrashEntry(directory.name, fields, directory))
    return found


def _read_fields(directory: Path) -> TrashFields | None:
    if not _NAME.fullmatch(directory.name) or directory.is_symlink():
        return None
    try:
        fields = json.loads((directory / ENTRY_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if isinstance(fields, dict):
        fields.setdefault("tags", [])  # those of earlier versions have none
    is_name = _is_fields(fields) and fields["part"] in PARTS and Path(fields["run"]).name == fields["run"]
    return fields if is_name and fields["run"] not in ("", ".", "..") else None


def find_entry(runs: Path, name: str) -> TrashEntry:
    """By the entry's name, or the newest of a run."""
    for entry in list_trash(runs):
        if name in (entry.name, entry.fields["run"]):
            return entry
    raise error("SH671", f"the trash has no '{name}'", where=str(runs / TRASH))


def restore(runs: Path, name: str) -> TrashEntry:
    """Undo: put an entry back. SH671 if its place is taken."""
    entry = find_entry(runs, name)
    target = runs.resolve() / entry.fields["run"] / entry.fields["part"]
    if target.exists() or target.is_symlink():
        raise error("SH671", f"{target} exists", where=entry.name, fix="Move it away, then restore.")
    if not target.parent.is_dir():
        raise error("SH671", f"there is no run {target.parent.name}", where=entry.name, fix="Restore the run first.")
    os.rename(entry.directory / "content", target)
    if entry.fields["tags"]:
        change_tags(runs, entry.fields["run"], add=entry.fields["tags"])
    shutil.rmtree(entry.directory)
    return entry


def empty_trash(runs: Path, *, older_than_s: float = 0.0) -> list[TrashEntry]:
    """Delete the entries for good that are older than this."""
    gone = [entry for entry in list_trash(runs) if time.time() - entry.fields["t"] >= older_than_s]
    for entry in gone:
        shutil.rmtree(entry.directory)
    return gone
