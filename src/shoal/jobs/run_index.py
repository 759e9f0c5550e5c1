"""Past runs: list them, compare them, find their weights."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint import manifest
from shoal.errors import error
from shoal.events import RunState, RunSummary, SummaryIndex, describe_damage, load_state, load_summary, quick_summary
from shoal.jobs import run_dir
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.receipt import FoldsReceipt, Receipt, read_receipt_file
from shoal.spec.run_paths import RunPaths
from shoal.spec.sources.config import TableConfig

INDEX_FILE = ".index.json"


def list_summaries(runs: Path) -> list[dict[str, Any]]:
    """The rows of `shoal runs`. One unreadable run does not hide the others."""
    found = run_dir.list_runs(runs)
    index = SummaryIndex(runs / INDEX_FILE)
    rows = []
    for paths in found:
        try:
            summary = index.summary(paths.name, f"{paths.root}/events.jsonl", partial(_summary, paths))
            rows.append(_row(paths, summary) | _of_search(paths, summary))
        except OSError as failure:
            rows.append(_unreadable_row(paths, failure))
    index.save_if_useful()
    return rows


def _of_search(paths: RunPaths, found: RunSummary) -> dict[str, Any]:
    """The fields of a search in place of those of a run; nothing for a run."""
    if found.status != "created" or not paths.search_journal.is_file():
        return {}
    from shoal.jobs.search.summary import summary_row  # numpy takes a tenth of a second to import

    return summary_row(paths)


def list_row(paths: RunPaths) -> dict[str, Any]:
    """One row of `shoal runs`, also of a run that cannot be read."""
    try:
        summary = _summary(paths)
        return _row(paths, summary) | _of_search(paths, summary)
    except OSError as failure:
        return _unreadable_row(paths, failure)


def _unreadable_row(paths: RunPaths, failure: OSError) -> dict[str, Any]:
    row = _row(paths, RunSummary.of(RunState(status="unreadable")))
    return row | {"damage": f"the run cannot be read: {failure.strerror}"}


def run_summary(paths: RunPaths) -> dict[str, Any]:
    """One row of `shoal runs`. SH605 if the events cannot be read."""
    with run_dir.readable(paths):
        summary = _summary(paths)
        return _row(paths, summary) | _of_search(paths, summary)


def _summary(paths: RunPaths) -> RunSummary:
    """Reads only the header of the state snapshot if that is up to date, or the stream if that is short."""
    found = load_summary(paths.events, paths.state_snapshot)
    if found is None:
        with contextlib.suppress(FileNotFoundError):
            found = quick_summary(paths.events)
    return RunSummary.of(load_state(paths.events, paths.state_snapshot)) if found is None else found


def _row(paths: RunPaths, found: RunSummary) -> dict[str, Any]:
    started_t = _started_t(paths) if found.started_t is None else found.started_t
    return {
        "run": paths.name,
        "status": run_dir.current_status(found.status, paths),
        "step": found.step,
        "steps": found.steps_total,
        "metrics": found.metrics if found.steps_total else fold_means(paths),  # only the folds make steps
        "started": _format_time(started_t),
        "started_t": started_t,
        "weights_sha256": found.weights_sha256,
        "damage": describe_damage(found.skipped_rows),
    }


def _started_t(paths: RunPaths) -> float | None:
    """When the job was written: a search has no other beginning. None if it was removed meanwhile."""
    try:
        return paths.job.stat().st_mtime
    except OSError:
        return None


def _format_time(t: float | None) -> str:
    try:
        return "–" if t is None else f"{datetime.datetime.fromtimestamp(t):%Y-%m-%d %H:%M}"
    except (OSError, ValueError, OverflowError):  # a forged snapshot with a time of no year
        return "–"


def fold_means(paths: RunPaths) -> dict[str, float]:
    """Means of the metrics over the folds of a finished job with folds."""
    found = read_receipt_file(paths.receipt).found
    return {name: one.mean for name, one in found.metrics.items()} if isinstance(found, FoldsReceipt) else {}


def require_receipt(run: str, runs: Path) -> Receipt:
    """The receipt of a run; an error if it has none."""
    paths = run_dir.find(run, runs)
    stored = read_receipt_file(paths.receipt)
    if stored.damage:
        fix = "Run the job again, or compare with another run."
        raise error("SH606", f"the receipt is damaged: {stored.damage}", where=str(paths.receipt), fix=fix)
    if stored.own is None:
        raise error("SH606", f"'{paths.name}' has no receipt of its own", where=run)
    return stored.own


def comparison_column(paths: RunPaths) -> dict[str, Any]:
    """One column of `shoal compare`: the job's fields, then the results."""
    job = load_run_job(paths.job)
    values: dict[str, Any] = {f"job {k}": v for k, v in flatten(job.dump()).items() if k != "base_dir"}
    row = run_summary(paths)
    values |= {"status": row["status"], "steps": row["step"], **row["metrics"]}
    if row["damage"]:
        values["events"] = row["damage"]
    stored = read_receipt_file(paths.receipt)
    if stored.damage:
        values["receipt"] = f"damaged: {stored.damage}"
    if receipt := stored.own:
        values |= {
            "samples/s": receipt.samples_per_s,
            "total s": receipt.total_s,
            "weights": receipt.weights_sha256[:16],
        }
    return values


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= flatten(item, f"{prefix}{key}.")
        elif item not in ({}, []):
            flat[prefix + key] = item if isinstance(item, str | int | float | bool) else json.dumps(item)
    return flat


def find_weights(paths: RunPaths, job: Job, *, best: bool) -> str:
    """The path of a run's weights: the exported model, the newest checkpoint, or the best checkpoint."""
    if paths.folds:
        fix = f"Choose one: {paths.name}/{paths.folds[0].name} to {paths.folds[-1].name}."
        raise error("SH606", f"'{paths.name}' has a model for each of its folds", where=str(paths.root), fix=fix)
    if not job.checkpoint.frozen and (best or not (paths.model / "model.safetensors").is_file()):
        fix = "Use the model of the finished run, or `checkpoint: {frozen: true}`."
        raise error("SH803", "checkpoints of this run have no frozen weights", where=str(paths.root), fix=fix)
    if best:
        return _best_checkpoint(paths, job)
    if (paths.model / "model.safetensors").is_file():
        return str(paths.model)
    newest = manifest.newest_manifest(paths.store(job.checkpoint.path), name=paths.checkpoint_namespace)
    if newest is None:
        raise error("SH606", f"'{paths.name}' has neither a model nor a checkpoint", where=str(paths.root))
    return _manifest_path(paths, job, newest)


def find_checkpoint(paths: RunPaths, job: Job, *, best: bool) -> str:
    """The path of the checkpoint with the rows of sparse tables, which the exported weights lack; '' if it is gone."""
    where = find_weights(paths, job, best=best)
    if where != str(paths.model):
        return where
    step = _exported_step(paths)
    every = manifest.list_manifests(paths.store(job.checkpoint.path), name=paths.checkpoint_namespace)
    return next((_manifest_path(paths, job, found) for found in every if found.step == step), "")


def _exported_step(paths: RunPaths) -> Any:
    """The step of the exported model; None if its description is damaged."""
    try:
        return json.loads((paths.model / "model.json").read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _best_checkpoint(paths: RunPaths, job: Job) -> str:
    every = manifest.list_manifests(paths.store(job.checkpoint.path), name=paths.checkpoint_namespace)
    measured = [(job.best.sign * m.metric, -m.step, m) for m in every if m.metric is not None and m.metric == m.metric]
    if not measured:
        raise error("SH606", f"'{paths.name}' has no checkpoint with a metric", where=str(paths.root))
    return _manifest_path(paths, job, max(measured, key=lambda one: one[:2])[2])  # the first of equals, as in training


def _manifest_path(paths: RunPaths, job: Job, found: manifest.Manifest) -> str:
    directory = manifest.manifest_directory(paths.checkpoint_namespace)
    return f"{paths.store(job.checkpoint.path)}/{manifest.manifest_path(directory, found.step)}"


def source_override(job: Job, data: str, target: str) -> dict[str, Any] | None:
    """The job's source with another path; None if no path is given."""
    if not data:
        return None
    source = job.data.source.model_dump(mode="json", exclude_none=True)
    if "path" not in source:
        raise error("SH609", f"a source of kind '{source['kind']}' has no path to change", where="--data")
    endings = {".csv": "csv", ".parquet": "parquet"}
    kind = endings.get(Path(data).suffix, source["kind"]) if source["kind"] in endings.values() else source["kind"]
    if kind != source["kind"]:
        source = {name: value for name, value in source.items() if name in TableConfig.model_fields}
    local = data if "://" in data else str(Path(data).resolve())
    files = {"target": target if "://" in target else str(Path(target).resolve())} if target else {}
    return {**source, "kind": kind, "path": local, **files}
