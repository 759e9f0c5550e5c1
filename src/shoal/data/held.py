"""Data that a fork server holds, so that the workers that it forks need not open it again.

Only sources are held that this project reads by itself and in one thread, from files that have not changed since.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from shoal.data.files import absolute_path, is_url
from shoal.spec.data import DataConfig
from shoal.spec.sources.config import SourceConfig

if TYPE_CHECKING:
    from shoal.data.datasets import OpenedData

MAX_HELD = 8
"""Data sections that one fork server holds."""
MAX_FILE_BYTES = 512 << 20
"""Size of all files of a data section that is held."""
_FIELDS = {"source", "validation", "test", "split", "on_bad_row", "leaks"}

HELD: dict[str, OpenedData] = {}
"""By `key_of`. The fork server fills it before it forks the workers that read it; nobody else writes."""


def key_of(data: DataConfig, *, seed: int, base_dir: str) -> str:
    """Equal for what opens the same, with size and time of every file. '' if it may not be held."""
    if data.clusters is not None or data.weight is not None:  # the user's code, or a file that is not in `stamps`
        return ""
    stamps: list[tuple[str, int, int]] = []
    for source in (data.source, data.validation, data.test):
        names = [] if source is None else _file_names(source)
        if names is None:
            return ""
        for name in names:
            place = absolute_path(name, base_dir)
            if is_url(name) or not os.path.isfile(place):
                return ""
            status = os.stat(place)
            stamps.append((place, status.st_size, status.st_mtime_ns))
    if sum(size for _, size, _ in stamps) > MAX_FILE_BYTES:
        return ""
    return json.dumps([data.model_dump(mode="json", include=_FIELDS), seed, stamps], sort_keys=True)


def _file_names(source: SourceConfig) -> list[str] | None:
    """The files of a source; None if a source of this kind is not held."""
    match source.kind:
        case "sklearn":
            return []
        case "npz":
            return [source.path]
        case "npy" | "idx":
            return [source.path, *([source.target] if source.target else [])]
    return None
