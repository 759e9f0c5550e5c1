"""Equal tensors of several trials, such as the frozen layers of one pretrained net, are stored once.

Every trial has a store of its own, which any run can read and delete. Files with equal content are links to one file.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections.abc import Iterable
from pathlib import Path

from shoal.checkpoint.files import atomic_replace
from shoal.spec.run_paths import RunPaths

FileSizes = dict[tuple[int, int], int]
"""Bytes of files by device and inode: links to one file count once."""


class SharedFiles:
    """The tensors of the trials of one search, by content. Belongs to the search's thread."""

    def __init__(self) -> None:
        self._owners: dict[str, Path] = {}

    def share(self, paths: RunPaths) -> None:
        """Replace files that another trial has too by links to its file. Nobody may be saving into this store."""
        for file in (paths.checkpoints / "blobs").rglob("*"):
            if file.is_file():
                owner = self._owners.setdefault(file.name, file)
                if owner != file and not _link(owner, file):
                    self._owners[file.name] = file


def _link(owner: Path, file: Path) -> bool:
    """Make `file` a link to `owner`. False if that is gone, differs because it is damaged, or cannot be linked."""
    with contextlib.suppress(OSError):
        if owner.samefile(file):
            return True
        if filecmp.cmp(owner, file, shallow=False):
            with atomic_replace(file) as temp:
                os.link(owner, temp)
            return True
    return False


def file_sizes(paths: RunPaths) -> FileSizes:
    """The files of a trial's checkpoints in its own directory."""
    found = (file.stat() for file in paths.checkpoints.rglob("*") if file.is_file())
    return {(one.st_dev, one.st_ino): one.st_size for one in found}


def total_bytes(trials: Iterable[FileSizes]) -> int:
    return sum({key: size for sizes in trials for key, size in sizes.items()}.values())
