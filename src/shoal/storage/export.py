"""A run for other programs: its curves (CSV, Parquet, TensorBoard; every point, not a sample) and its model."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO, TypeVar

from shoal.errors import error
from shoal.jobs import run_dir, run_index
from shoal.jobs.probes import run_probe
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths
from shoal.storage.history import RunHistory

Point = tuple[str, str, int, float, float]
"""Run, series, step, time, value."""
T = TypeVar("T")
COLUMNS = ("run", "series", "step", "t", "value")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def points(paths: RunPaths) -> Iterator[Point]:
    """Every point of every series, with the later value of a step that a resumed run made again."""
    history = RunHistory(paths)
    with run_dir.readable(paths):
        history.catch_up()
    for name, series in sorted(history.series.items()):
        for step, after_s, value in zip(series.steps, series.times, series.values, strict=True):
            yield paths.name, name, step, series.start_t + after_s, value


def export(paths: RunPaths, kind: str, target: Path) -> None:
    """Write the file, or the directory for TensorBoard; completely or not at all. SH609 if the kind is not known."""
    write = WRITERS.get(kind)
    if write is None:
        raise error("SH609", f"'{kind}' is not a format", where="--to", fix=f"Use one of: {', '.join(KINDS)}.")
    check_target(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(paths, temporary)
        temporary.replace(target)
    finally:
        if temporary.is_file():
            temporary.unlink()


def check_target(target: Path) -> None:
    """SH609 unless the file can be made there."""
    if target.exists():
        raise error("SH609", f"{target} exists", where="--out", fix="Name a file that does not exist yet.")
    if not target.parent.is_dir():
        fix = "Make it first, or name a file elsewhere."
        raise error("SH609", f"there is no directory {target.parent}", where="--out", fix=fix)


def _write_csv(paths: RunPaths, target: Path) -> None:
    with target.open("w", newline="", encoding="utf-8") as file:
        write_rows(points(paths), file)


def write_rows(rows: Iterator[Point], file: TextIO) -> None:
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for run, name, step, t, value in rows:
        writer.writerow((safe_cell(run), safe_cell(name), step, f"{t:.3f}", repr(value)))


def safe_cell(text: str) -> str:
    """A text that a spreadsheet shows, and does not compute."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _write_parquet(paths: RunPaths, target: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    types = (arrow.string(), arrow.string(), arrow.int64(), arrow.float64(), arrow.float64())
    schema = arrow.schema(list(zip(COLUMNS, types, strict=True)))
    with parquet.ParquetWriter(target, schema) as writer:
        for batch in batches(points(paths), 100_000):
            columns = list(zip(*batch, strict=True))
            writer.write_table(
                arrow.Table.from_arrays(
                    [arrow.array(one, kind) for one, kind in zip(columns, types, strict=True)], schema=schema
                )
            )


def batches(rows: Iterator[T], size: int) -> Iterator[list[T]]:
    batch: list[T] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _write_tensorboard(paths: RunPaths, target: Path) -> None:
    """Written with TensorBoard's own writer; torch is not needed."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError as failure:
        raise error("SH207", "TensorBoard is not installed", fix="pip install 'shoal[tensorboard]'") from failure
    writer = EventFileWriter(str(target))
    for _, name, step, t, value in points(paths):
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
        writer.add_event(Event(wall_time=t, step=step, summary=summary))
    writer.close()


def _write_model(paths: RunPaths, target: Path) -> None:
    """The exported weights. SH606 before the run has finished."""
    source = paths.model / "model.safetensors"
    if not source.is_file():
        raise error("SH606", f"'{paths.name}' has no model of its own", where=str(paths.root))
    shutil.copyfile(source, target)


def _write_with_torch(kind: str) -> Callable[[RunPaths, Path], None]:
    def write(paths: RunPaths, target: Path) -> None:
        """Another process builds the model: this one never loads torch."""
        job = load_run_job(paths.job)
        weights = run_index.find_weights(paths, job, best=False)
        if weights != str(paths.model):
            raise error("SH606", f"'{paths.name}' has no model of its own yet", where=str(paths.root))
        try:
            example = json.loads((paths.model / "model.json").read_bytes()).get("example")
        except (OSError, ValueError, AttributeError, RecursionError):
            example = None
        run_probe("export", job, weights=weights, example=example, kind=kind, out=str(target.resolve()))

    return write


WRITERS: dict[str, Callable[[RunPaths, Path], None]] = {
    "csv": _write_csv,
    "parquet": _write_parquet,
    "tensorboard": _write_tensorboard,
    "safetensors": _write_model,
    "onnx": _write_with_torch("onnx"),
    "pt2": _write_with_torch("pt2"),
    "hf": _write_with_torch("hf"),
}
KINDS = (*WRITERS, "mlflow", "html")
DIRECTORIES = ("tensorboard", "hf")
"""Kinds that are written as a directory."""
