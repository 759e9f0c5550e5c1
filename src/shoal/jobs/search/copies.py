"""Copies of checkpoints, for populations: a trial begins with the state of another one, and with values of its own.

The tensors are not copied: the two stores share their files. Numbers of the optimizer stand in the manifest, where they
are replaced by those of the new trial.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import CheckpointFiles, open_files
from shoal.checkpoint.manifest import Manifest, blob_path, manifest_directory, manifest_path, read_manifest
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths

RATES = {"lr", "initial_lr", "max_lr", "min_lr"}
"""Numbers of a parameter group that follow the learning rate. Schedules have moved them, so they are scaled."""
SCHEDULE_RATES = {"base_lrs", "_last_lr"}


def copy_checkpoint(job: Job, paths: RunPaths, *, source: RunPaths, step: int) -> None:
    """Write the checkpoint of `source` at this step as one of the new run `paths`. May be repeated. SH501 if there is
    none."""
    source_job = load_run_job(source.job)
    from_store, to_store = source.store(source_job.checkpoint.path), paths.store(job.checkpoint.path)
    from_files, to_files = open_files(from_store), open_files(to_store)
    found = read_manifest(from_files, manifest_path(manifest_directory(source.checkpoint_namespace), step))
    for digest in found.blobs:
        _link(from_files, to_files, blob_path(digest))
    changed = with_values(found, source_job, job)
    written = replace(changed, job_sha256=job.resume_compatibility_sha256()).dump()
    to_files.write(manifest_path(manifest_directory(paths.checkpoint_namespace), step), [written])


def _link(source: CheckpointFiles, target: CheckpointFiles, path: str) -> None:
    """Share the file, or copy it where files cannot be shared."""
    here, there = Path(source.where) / path, Path(target.where) / path
    if here.is_file() and "://" not in target.where:
        with contextlib.suppress(OSError):
            there.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(here, there)
            return
    with source.open(path) as file:
        target.write(path, [file.read()])


def with_values(found: Manifest, old: Job, new: Job) -> Manifest:
    """The manifest with the new job's arguments of the optimizer, for each of its groups."""

    def change(key: Any, value: Any) -> Any:
        if key == "param_groups" and isinstance(value, list):
            return [_change_group(group, *changed) for group, changed in zip(value, changes(len(value)), strict=True)]
        if key in SCHEDULE_RATES and isinstance(value, list):
            rates = zip(value, changes(len(value)), strict=True)
            return [rate * ratio if isinstance(rate, float) else rate for rate, (_, ratio) in rates]
        return _map_pairs(value, change)

    def changes(groups: int) -> list[tuple[dict[str, Any], float]]:
        """What differs in each group, and the ratio of its learning rates."""
        return [_difference(*args) for args in zip(_group_args(old, groups), _group_args(new, groups), strict=True)]

    return replace(found, tree=_map_pairs(found.tree, change))


def _group_args(job: Job, count: int) -> list[dict[str, Any]]:
    """The arguments of each of so many groups: parameters that no group of the job matches come first, if there are
    any."""
    own = [group.args for group in job.optimizer.groups]
    return [{**job.optimizer.args, **args} for args in [*[{}] * (count - len(own)), *own][:count]]


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    return changed, _ratio(old.get("lr"), changed.get("lr"))


def _ratio(old: Any, new: Any) -> float:
    return new / old if isinstance(old, int | float) and isinstance(new, int | float) and old else 1.0


def _change_group(group: Any, changed: Mapping[str, Any], ratio: float) -> Any:
    """A parameter group with new values. A list, as betas, stays the tuple that it was."""

    def change(key: Any, value: Any) -> Any:
        if key in RATES:
            return value * ratio if isinstance(value, int | float) and ratio != 1.0 else value
        if key not in changed:
            return value
        return {"tuple": changed[key]} if isinstance(changed[key], list) else changed[key]

    return _map_pairs(group, change)


def _map_pairs(node: Any, change: Callable[[Any, Any], Any]) -> Any:
    """The skeleton with `change(key, value)` in place of the values of dicts; see `checkpoint.state_tree`."""
    if isinstance(node, list):
        return [_map_pairs(item, change) for item in node]
    if isinstance(node, dict) and isinstance(pairs := node.get("dict"), list):
        return {"dict": [[key, change(key, value)] for key, value in pairs]}
    if isinstance(node, dict) and "tuple" in node:
        return {"tuple": _map_pairs(node["tuple"], change)}
    return node
