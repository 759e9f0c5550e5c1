"""`shoal predict`: the predictions of a finished run for new data, on several processes, in the order of the rows."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import RunError, error
from shoal.events import Event
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_index
from shoal.jobs.coroutines import Steps, all_steps, run_steps
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.probes import probe_steps
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_GROUP = 65_536
"""Rows of a row group of the Parquet file: fixed, so that the number of workers changes no byte."""
RESTARTS = 3
"""How often the share of a process that died is predicted again."""


@dataclass(frozen=True)
class Predicted:
    """What `predict` wrote."""

    out: Path
    samples: int
    deaths_survived: int


def predict(
    paths: RunPaths,
    *,
    data: str,
    out: Path,
    workers: int = 1,
    best: bool = False,
    on_event: Callable[[Event], None] | None = None,
    fork_server: ForkServer | None = None,
) -> Predicted:
    """Predict every row of `data` and write a Parquet or CSV file, completely or not at all."""
    job = load_run_job(paths.job)
    weights, rows = (find(paths, job, best=best) for find in (run_index.find_weights, run_index.find_checkpoint))
    arguments = {
        "weights": weights,
        "rows": rows,
        "source": unlabelled_source(job, data),
        "fitted": _fitted(paths),
    }
    _check_out(out)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        pool = stack.enter_context(ForkServerPool(fork_server))
        shares = [
            _share_steps(job, pool, scratch / f"{number}.arrow", (number, workers), arguments, on_event)
            for number in range(workers)
        ]
        answers = run_steps(all_steps(shares))
        parts = [scratch / f"{number}.arrow" for number in range(workers)]
        _write(_in_order(parts, int(answers[0][0]["chunks"])), out)
    return Predicted(out, int(answers[0][0]["samples"]), sum(deaths for _, deaths in answers))


def unlabelled_source(job: Job, data: str) -> dict[str, Any]:
    """The job's source with other data, without its target. For a `python` source, `data` names another dataset, or the
    job's own, which then gets the arguments that it has in the job."""
    if not data:
        raise error("SH812", "no data is given", where="--data")
    if job.data.source.kind == "python":
        own = job.data.source.model_dump(mode="json", exclude_none=True)
        if own["factory"]["name"] == data:
            return own
        own.pop("length", None)
        return {**own, "factory": {"name": data}}
    source = run_index.source_override(job, data, "")
    assert source is not None
    dropped = ("target", "target_as") if source["kind"] == "huggingface" else ("target", "target_as", "labels")
    for field in dropped:
        source.pop(field, None)
    return {**source, "target": None} if source["kind"] == "npz" else source


def _share_steps(
    job: Job,
    pool: ForkServerPool,
    part: Path,
    share: tuple[int, int],
    arguments: Mapping[str, Any],
    on_event: Callable[[Event], None] | None,
) -> Steps[tuple[Mapping[str, Any], int]]:
    """The answer of the process that predicts this share, and how many died before it."""
    for deaths in range(RESTARTS + 1):
        try:
            steps = probe_steps(
                "predict", job, pool.for_job(job), on_event=on_event, out=str(part), share=share, **arguments
            )
            return (yield from steps), deaths
        except RunError as failure:
            if failure.code != "SH603" or deaths == RESTARTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def _fitted(paths: RunPaths) -> dict[str, Any] | None:
    """What model.json says of the training data; None if the run has none yet: then it is fitted again."""
    try:
        found = json.loads((paths.model / "model.json").read_bytes())
        return {name: found[name] for name in ("classes", "encoders", "input_columns")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _check_out(out: Path) -> None:
    if out.suffix not in (".parquet", ".csv"):
        raise error(
            "SH609", f"'{out.suffix}' is not a format of predictions", where="--out", fix="Use .parquet or .csv."
        )
    if out.exists():
        raise error("SH609", f"{out} exists", where="--out", fix="Name a file that does not exist yet.")
    if not out.parent.is_dir():
        raise error("SH609", f"there is no directory {out.parent}", where="--out", fix="Make it first.")


def _in_order(parts: list[Path], chunks: int) -> Iterator[pa.RecordBatch]:
    """The record batches of all parts: chunk c is number c // n of part c % n."""
    import pyarrow as pa

    with ExitStack() as stack:
        files = [stack.enter_context(pa.memory_map(str(part))) if part.stat().st_size else None for part in parts]
        readers = [pa.ipc.open_file(file) if file else None for file in files]
        for chunk in range(chunks):
            reader = readers[chunk % len(parts)]
            assert reader is not None
            yield reader.get_batch(chunk // len(parts))


def _write(batches: Iterator[pa.RecordBatch], out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        table = pa.Table.from_batches(list(batches))
        if out.suffix == ".csv":
            _write_csv(table, temporary)
        else:
            parquet.write_table(table.combine_chunks(), temporary, row_group_size=ROWS_PER_GROUP)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _write_csv(table: pa.Table, target: Path) -> None:
    """Lists become columns with numbers: probabilities_0, probabilities_1."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.csv as pa_csv

    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name)
        if not pa.types.is_list(column.type):
            columns[name] = column
            continue
        if pa.types.is_list(column.type.value_type):
            raise error(
                "SH609", f"'{name}' has lists of lists, which CSV cannot hold", where="--out", fix="Use .parquet."
            )
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        if len(lengths) > 1:
            message = (
                f"'{name}' has lists of {min(lengths)} to {max(lengths)} numbers, and CSV the same columns in each row"
            )
            raise error("SH609", message, where="--out", fix="Use .parquet.")
        for number in range(max(lengths, default=0)):
            columns[f"{name}_{number}"] = pc.list_element(column, number)
    pa_csv.write_csv(pa.table(columns), target)
