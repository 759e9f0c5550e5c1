"""Renamed fields of a job. A run keeps its job file, and later versions may resume it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

RENAMED_FIELDS: Mapping[str, str] = {
    "engine.restarts": "elastic.restarts",
    "engine.patience_s": "elastic.patience_s",
    "engine.balance": "elastic.balance",
    "engine.listen": "network.listen",
    "engine.tls": "network.tls",
    "shard.ways": "shard.size",
    "sync.settle": "sync.rounds_per_sync",
    "data.deal": "data.sampler",
    "watch": "watchers",
}
"""The present name of every renamed field. Users get an error that names it; see `explain`."""


def migrate_job(data: Mapping[str, Any]) -> dict[str, Any]:
    """The job of a run with present field names. Data that is up to date is returned unchanged."""
    migrated = copy.deepcopy(dict(data))
    for old, new in RENAMED_FIELDS.items():
        _move(migrated, old.split("."), new.split("."))
    return migrated


def _move(data: dict[str, Any], old: list[str], new: list[str]) -> None:
    source: Any = data
    for key in old[:-1]:
        source = source.get(key) if isinstance(source, dict) else None
    if not isinstance(source, dict) or old[-1] not in source:
        return
    target = data
    for key in new[:-1]:
        target = target.setdefault(key, {})
    target[new[-1]] = source.pop(old[-1])
