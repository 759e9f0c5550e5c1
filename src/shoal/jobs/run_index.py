"""Past runs: list them, compare them, find their weights."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint import manifest
from shoal.errors import error
from shoal.events import RunSummary, load_state, load_summary
from shoal.jobs import run_dir
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.receipt import Receipt
from shoal.spec.run_paths import RunPaths


def run_summary(paths: RunPaths) -> dict[str, Any]:
    """One row of `shoal runs`. Reads only the header of the state snapshot if that is up to date."""
    found = load_summary(paths.events, paths.state_snapshot)
    if found is None:
        found = RunSummary.of(load_state(paths.events, paths.state_snapshot))
    started_t = paths.job.stat().st_mtime if found.started_t is None else found.started_t
    return {
        "run": paths.name,
        "status": run_dir.current_status(found.status, paths),
        "step": found.step,
        "steps": found.steps_total,
        "metrics": found.metrics if found.steps_total else fold_means(paths),  # only the folds make steps
        "started": f"{datetime.datetime.fromtimestamp(started_t):%Y-%m-%d %H:%M}",
        "weights_sha256": found.weights_sha256,
    }


def fold_means(paths: RunPaths) -> dict[str, float]:
    """Means of the metrics over the folds of a finished job with folds."""
    if not paths.receipt.is_file():
        return {}
    content = json.loads(paths.receipt.read_text(encoding="utf-8"))
    return {n: v["mean"] for n, v in content["metrics"].items()} if "folds" in content else {}


def read_receipt(paths: RunPaths) -> Receipt | None:
    """The receipt of a finished run; None for a run with folds or one that has not finished."""
    if not paths.receipt.is_file() or fold_means(paths):
        return None
    return Receipt.model_validate_json(paths.receipt.read_text(encoding="utf-8"))


def require_receipt(run: str, runs: Path) -> Receipt:
    """The receipt of a run; an error if it has none."""
    paths = run_dir.find(run, runs)
    found = read_receipt(paths)
    if found is None:
        raise error("SH606", f"'{paths.name}' has no receipt of its own", where=run)
    return found


def list_summaries(runs: Path) -> list[dict[str, Any]]:
    return [run_summary(paths) for paths in run_dir.list_runs(runs)]


def comparison_column(paths: RunPaths) -> dict[str, Any]:
    """One column of `shoal compare`: the job's fields, then the results."""
    job = load_run_job(paths.job)
    values: dict[str, Any] = {f"job {k}": v for k, v in flatten(job.dump()).items() if k != "base_dir"}
    row = run_summary(paths)
    values |= {"status": row["status"], "steps": row["step"], **row["metrics"]}
    receipt = read_receipt(paths)
    if receipt:
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
    step = json.loads((paths.model / "model.json").read_text())["step"]
    every = manifest.list_manifests(paths.store(job.checkpoint.path), name=paths.checkpoint_namespace)
    return next((_manifest_path(paths, job, found) for found in every if found.step == step), "")


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
        source.pop("delimiter", None)
    local = data if "://" in data else str(Path(data).resolve())
    files = {"target": target if "://" in target else str(Path(target).resolve())} if target else {}
    return {**source, "kind": kind, "path": local, **files}
