"""The worker's side of `shoal predict`: predictions of its share of the chunks, as an Arrow file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from shoal.data.batch_loader import evaluation_batches
from shoal.data.datasets import bind_ref, open_datasets
from shoal.data.fitted import Fitted
from shoal.data.source import open_source
from shoal.errors import ShoalError, error
from shoal.events import EventWriter
from shoal.spec.data import DataConfig
from shoal.spec.job import Job
from shoal.spec.run_paths import cache_directory
from shoal.spec.seeds import EVALUATION
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors
from shoal.train.trained_replica import build_trained_replica


@contextmanager
def _no_row_is_skipped() -> Iterator[None]:
    """Bad rows of new data are an error, whatever the job does with those of its own."""
    try:
        yield
    except ShoalError as failure:
        if "on_bad_row" not in failure.fix:
            raise
        fix = "Mend or remove the row. None is skipped here: predictions have a row for each row."
        raise error(failure.code, failure.message, where=failure.where, fix=fix) from failure


@_no_row_is_skipped()
@torch.no_grad()
def write_predictions(
    job: Job,
    stream: EventWriter,
    *,
    weights: str,
    rows: str,
    source: dict[str, Any],
    fitted: dict[str, Any] | None,
    out: str,
    share: tuple[int, int],
) -> dict[str, Any]:
    """Predict the chunks `share[0]`, `share[0] + share[1]`, … of the source, a record batch for each.

    A chunk has the same samples whoever predicts it, so the number of workers changes no bit. Without `fitted`, it is
    learnt from the training data, as when the run began.
    """
    task, replica = build_trained_replica(job, weights=weights, rows=rows, report=stream.emit)
    replica.model.eval()
    known = _fit(job) if fitted is None else Fitted.of_model(fitted)
    opened = open_source(
        DataConfig.model_validate({"source": source}).source,
        base_dir=job.base_dir,
        notify=lambda message: stream.emit("note", message=message),
        fitted=known,
        labelled=False,
    )
    names = opened.own_column(opened.name_column) if opened.name_column else None
    size = job.evaluate.batch_size or job.batch_size
    count = -(-len(opened) // size)
    batches = evaluation_batches(
        opened,
        np.arange(len(opened), dtype=np.int64),
        chunk_size=size,
        chunks=range(share[0], count, share[1]),
        transform=bind_ref(job.data.transform, base_dir=job.base_dir),
        loader=job.data.loader,
        seed=job.seed,
    )
    writer: pa.ipc.RecordBatchFileWriter | None = None
    with Path(out).open("wb") as file:
        for chunk, batch in batches:
            replica.rng.seed_all(job.seed, EVALUATION, chunk)
            batch = batch.to(replica.device)
            with replica.autocast_context(), wrap_user_errors("SH401", f"prediction, chunk {chunk}"):
                output = task.predict(replica.model, batch)
            columns = prediction_columns(output, batch.size, task, known.classes)
            numbers = np.arange(chunk * size, chunk * size + batch.size, dtype=np.int64)
            known_as = {} if names is None else {str(opened.name_column): pa.array(names[numbers])}
            record = pa.record_batch({"row": pa.array(numbers), **known_as, **columns})
            writer = writer or pa.ipc.new_file(file, record.schema)
            writer.write_batch(record)
        if writer is not None:
            writer.close()
    return {"samples": len(opened), "chunks": count, "chunk_size": size}


def _fit(job: Job) -> Fitted:
    data = job.data.model_copy(update={"leaks": "ignore"})
    return Fitted.of(
        open_datasets(data, seed=job.seed, base_dir=job.base_dir, cache_dir=cache_directory()).train.source
    )


def prediction_columns(output: Any, size: int, task: Task, classes: Sequence[Any] | None) -> dict[str, pa.Array]:
    """The columns of a batch. Classes: `prediction`, the class itself, and `probabilities`. Yes or no: `prediction` and
    `probability`, that of the second class. Numbers: `prediction`, a list if there are several for a sample."""
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != size:
        shape = f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise error("SH813", f"the prediction of {size} samples is {shape}", where="predict")
    scores = output.detach().float().cpu()
    if scores.dim() > 1 and scores.shape[-1] == 1:
        scores = scores.squeeze(-1)
    if task.predicts_classes and scores.dim() > 1:
        return _class_columns(scores, task, classes)
    if task.logits is not None and not task.predicts_classes and scores.dim() == 1:
        chance = scores.double().sigmoid() if task.logits else scores.double()
        return {"prediction": _named(chance > 0.5, classes, 2), "probability": _lists(chance.float())}
    return {"prediction": _lists(scores)}


def _class_columns(scores: Tensor, task: Task, classes: Sequence[Any] | None) -> dict[str, pa.Array]:
    """Scores and logarithms of probabilities become probabilities; those of `logits = False` are some already."""
    dimension = 1 if scores.dim() == 2 else scores.dim() - 1
    chances = scores if task.logits is False else scores.double().softmax(dimension).float()
    columns = {"prediction": _named(scores.argmax(dimension), classes, scores.shape[dimension])}
    return columns | ({"probabilities": _lists(chances)} if scores.dim() == 2 else {})


def _named(numbers: Tensor, classes: Sequence[Any] | None, count: int) -> pa.Array:
    """The classes with these numbers; the numbers if the data has no such classes."""
    if classes is None or len(classes) != count or numbers.dim() > 1:
        return _lists(numbers.long())
    return pa.array([classes[number] for number in numbers.long().tolist()])


def _lists(values: Tensor) -> pa.Array:
    """A number for each sample, or (nested) lists of numbers."""
    array = pa.array(values.reshape(-1).contiguous().numpy())
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    plain = array.type
    return array if values.dim() == 1 else array.cast(_variable(plain))


def _variable(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_variable(kind.value_type)) if pa.types.is_fixed_size_list(kind) else kind
