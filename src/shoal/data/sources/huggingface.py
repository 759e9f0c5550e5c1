"""Datasets of Hugging Face, with a tokenizer for columns of text. Batches are dicts for models that take names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import IGNORED_LABEL, Batch
from shoal.data.files import absolute_path
from shoal.data.source import Array, DataSource, Ids, SourceOptions
from shoal.errors import describe_exception, did_you_mean, error
from shoal.spec.sources.config import HuggingFaceSourceConfig

HUGGING_FACE_MODULE = "datasets.arrow_dataset"
HUGGING_FACE_STREAM_MODULE = "datasets.iterable_dataset"
LABELS = "labels"
PADDING = {LABELS: IGNORED_LABEL}
"""What fills shorter lists; 0 elsewhere, which an attention mask hides."""
_READERS = {
    ".csv": "from_csv",
    ".json": "from_json",
    ".jsonl": "from_json",
    ".parquet": "from_parquet",
    ".txt": "from_text",
}
_TOKENIZE_ROWS = 1024
MakeBatch = Callable[[list[Any], Ids], Batch]
"""A batch of these samples, which have these ids."""


def open_huggingface(spec: HuggingFaceSourceConfig, options: SourceOptions) -> DataSource:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers and loaders are forked
    dataset = _load(spec, options)
    tokenizer = None if spec.tokenizer is None else Tokenizer(spec, options.base_dir)
    labels = [spec.labels] if spec.labels and options.labelled else []
    columns = [*([] if tokenizer is None else tokenizer.columns), *labels]
    for name in columns:
        if name not in dataset.column_names and not (tokenizer and name == "input_ids"):
            raise error("SH303", f"no column '{name}'", where=spec.path, fix=did_you_mean(name, dataset.column_names))
    return HuggingFaceSource(
        dataset, options.classes, tokenizer=tokenizer, labels=spec.labels, labelled=options.labelled
    )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as failure:
        fix = f"pip install {name}"
        raise error("SH801", f"{name} cannot be imported: {failure}", where="data.source", fix=fix) from failure


def _load(spec: HuggingFaceSourceConfig, options: SourceOptions) -> Any:
    library = _library("datasets")
    path = Path(absolute_path(spec.path, options.base_dir))
    if not path.exists():
        raise error("SH301", "there is no such file or directory", where=str(path))
    reader = _READERS.get(path.suffix.lower())
    try:
        if path.is_dir():
            found = library.load_from_disk(str(path))
        elif reader is not None:
            found = getattr(library.Dataset, reader)(str(path), cache_dir=str(options.cache_dir / "huggingface"))
        else:
            fix = f"Give a directory of save_to_disk, or a file with one of: {', '.join(_READERS)}."
            raise error("SH802", f"'{path.suffix}' is no ending that it reads", where=str(path), fix=fix)
    except (OSError, ValueError, RuntimeError, library.exceptions.DatasetsError) as failure:
        raise error("SH802", describe_exception(failure), where=str(path)) from failure
    return _part(found, spec.split, str(path))


def _part(found: Any, split: str | None, where: str) -> Any:
    """The dataset itself, or a part of a dict of datasets."""
    if not isinstance(found, Mapping):
        if split is not None:
            raise error("SH802", f"there is no part '{split}': it is one dataset", where=where, fix="Remove `split`.")
        return found
    if split not in found:
        names = ", ".join(found)
        message = f"the parts are {names}" if split is None else f"there is no part '{split}'"
        raise error("SH802", message, where=where, fix=f"Write `split:` with one of: {names}.")
    return found[split]


class Tokenizer:
    """A tokenizer of transformers, for one column of text or two. Rows are cut at the job's `max_length`."""

    def __init__(self, spec: HuggingFaceSourceConfig, base_dir: str) -> None:
        library = _library("transformers")
        self.columns: list[str] = [spec.text] if isinstance(spec.text, str) else list(spec.text or ())
        self._max_length = spec.max_length
        path = Path(absolute_path(str(spec.tokenizer), base_dir))
        try:
            if path.is_file():
                self._tokenizer = library.PreTrainedTokenizerFast(tokenizer_file=str(path))
            else:
                self._tokenizer = library.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as failure:  # the library raises whatever its parts raise
            missing = "there is nothing" if not path.exists() else describe_exception(failure)
            fix = (
                "Name a directory of `save_pretrained` or a tokenizer.json; nothing is downloaded. Once: "
                f"AutoTokenizer.from_pretrained('{spec.tokenizer}').save_pretrained('tokenizer')."
            )
            raise error("SH802", f"no tokenizer can be made of it: {missing}", where=str(path), fix=fix) from failure
        self.padding = {"input_ids": self._tokenizer.pad_token_id or 0}

    def encode(self, rows: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
        texts = [[str(value) for value in rows[name]] for name in self.columns]
        return dict(self._tokenizer(*texts, truncation=True, max_length=self._max_length))


class HuggingFaceSource(DataSource):
    """A map-style dataset. The columns of the table are columns for splits and samplers. `make_batch` collates rows as
    the user wants it; without it, columns of numbers are padded. Not `labelled`: labels are not read."""

    in_memory = False

    def __init__(
        self,
        dataset: Any,
        classes: tuple[Any, ...] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        labels: str | None = None,
        make_batch: MakeBatch | None = None,
        labelled: bool = True,
    ) -> None:
        if len(dataset) == 0:
            raise error("SH302", "the dataset is empty", where="data.source")
        self._dataset = dataset.with_format(None)
        self._tokenizer = tokenizer
        found = labels or next((n for n in (LABELS, "label") if n in dataset.column_names), None)
        self._labels = found if labelled else None
        self._make_batch = make_batch
        self.per_sample = make_batch is not None
        self._inputs = (
            []
            if tokenizer
            else _number_columns(dataset, leave_out=None if found == "input_ids" else found, needed=make_batch is None)
        )
        self.classes = self._find_classes(classes)

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, ids: Ids) -> Batch:
        rows = self._dataset[[int(i) for i in ids]]
        if self._make_batch is not None:
            return self._make_batch(self._samples(rows, ids), ids)
        values = self._encode(rows, ids)
        padding = PADDING | (self._tokenizer.padding if self._tokenizer else {})
        batch = {name: to_tensor(column, name, padding.get(name, 0)) for name, column in values.items()}
        return Batch((batch,), batch.get(LABELS), len(ids))

    def _samples(self, rows: Mapping[str, Any], ids: Ids) -> list[dict[str, Any]]:
        """The rows one by one, with class numbers for labels that are texts."""
        if self._labels is not None and self._labels in rows:
            rows = {**rows, self._labels: self._numbered(rows[self._labels], ids)}
        return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]

    def _encode(self, rows: Mapping[str, Any], ids: Ids) -> dict[str, Any]:
        for name in self._tokenizer.columns if self._tokenizer else self._inputs:
            _check_values(rows[name], name, ids)
        values: dict[str, Any] = self._tokenizer.encode(rows) if self._tokenizer else {n: rows[n] for n in self._inputs}
        if self._labels is not None and self._labels in rows:
            values[LABELS] = self._numbered(rows[self._labels], ids)
        elif self._labels in values:
            values[LABELS] = values[self._labels]
        return values

    def _numbered(self, labels: Any, ids: Ids) -> Any:
        _check_values(labels, str(self._labels), ids)
        if self.classes is None:
            return labels
        numbers = {name: number for number, name in enumerate(self.classes)}
        unknown = [label for label in labels if label not in numbers]
        if unknown:
            known = ", ".join(map(str, self.classes[:10]))
            raise error("SH304", f"'{unknown[0]}' is not among the classes of the training data: {known}",
                        where=str(self._labels))  # fmt: skip
        return [numbers[label] for label in labels]

    def _find_classes(self, classes: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """Labels that are texts are numbered in sorted order."""
        if self._labels not in self._dataset.column_names:
            return None
        if getattr(self._dataset.features[self._labels], "dtype", "") not in ("string", "large_string"):
            return None
        if classes is None:
            _check_values(self._dataset[self._labels][:], str(self._labels), range(len(self)))
        return classes or tuple(sorted(self._dataset.unique(self._labels)))

    def own_columns(self) -> list[str]:
        return list(self._dataset.column_names)

    def own_column(self, name: str) -> Array:
        return np.asarray(self._dataset[name][:])

    def targets(self) -> Array:
        if self._labels not in self._dataset.column_names:
            raise error("SH303", "the dataset has no labels", where="data.source", fix="Name a column: `labels:`.")
        return np.asarray(self._numbered(list(self._dataset[self._labels][:]), np.arange(len(self))))

    def sizes(self) -> Array:
        """Tokens of each sample, or the length of its first list."""
        found: list[int] = []
        for first in range(0, len(self), _TOKENIZE_ROWS):
            ids = np.arange(first, min(first + _TOKENIZE_ROWS, len(self)))
            values = self._encode(self._dataset[first : first + _TOKENIZE_ROWS], ids)
            lists = next((v for n, v in values.items() if n != LABELS and isinstance(v[0], list)), None)
            found += [len(one) for one in lists] if lists else [1] * min(_TOKENIZE_ROWS, len(self) - first)
        return np.array(found, dtype=np.int64)


def _check_values(values: Sequence[Any], name: str, ids: Sequence[int] | Ids) -> None:
    """SH304 if a row has no value, or a gap in its list: both would be trained on as if they were one."""
    for row, value in zip(ids, values, strict=True):
        if _has_gap(value):
            message = f"row {row}: '{name}' has {'no value' if value is None else 'a gap in its list'}"
            fix = f"Fill it in, or leave such rows out: dataset.filter(lambda row: row['{name}'] is not None)."
            raise error("SH304", message, where="data.source", fix=fix)


def _has_gap(value: Any) -> bool:
    if not isinstance(value, list):
        return value is None
    if value and isinstance(value[0], list):
        return any(map(_has_gap, value))
    return any(one is None for one in value)


def collate_rows(rows: list[Mapping[str, Any]]) -> Batch:
    """A batch of the rows of a stream. Columns of text are left out; `label` becomes `labels`, as models call it."""
    names = {LABELS if name == "label" else name: name for name in rows[0] if not isinstance(rows[0][name], str)}
    if not names.keys() - {LABELS}:
        fix = "Tokenize the texts in the stream: dataset.map(lambda row: tokenizer(row['text']))."
        raise error("SH802", f"no column has numbers for the model: {', '.join(rows[0])}", where="data.source", fix=fix)
    batch = {
        name: to_tensor([_as_list(row[own]) for row in rows], own, PADDING.get(name, 0)) for name, own in names.items()
    }
    return Batch((batch,), batch.get(LABELS), len(rows))


def _as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | Tensor) else value


def _number_columns(dataset: Any, *, leave_out: str | None, needed: bool) -> list[str]:
    """The columns that a model can take: numbers, and lists of them."""
    found = [n for n, kind in dataset.features.items() if n != leave_out and _is_number(kind)]
    if needed and not found:
        names = ", ".join(dataset.column_names)
        fix = "Give a `tokenizer` and the column of `text`."
        raise error("SH802", f"no column has numbers for the model: {names}", where="data.source", fix=fix)
    return found


def _is_number(kind: Any) -> bool:
    while getattr(kind, "feature", None) is not None:
        kind = kind.feature
    dtype = str(getattr(kind, "dtype", ""))
    return dtype.startswith(("int", "uint", "float", "bool"))


def to_tensor(values: Any, name: str, padding: int) -> Tensor:
    """One row per sample: int64 or float32. Lists of different lengths are padded. SH306 if it is neither."""
    try:
        if isinstance(values[0], list) and not any(one and isinstance(one[0], list) for one in values):
            longest = max(map(len, values))
            values = [one + [padding] * (longest - len(one)) for one in values]
        array = np.asarray(values)
        if array.dtype == object or not array.size:
            raise ValueError("values are missing")
        return torch.from_numpy(array.astype(np.int64 if array.dtype.kind in "iub" else np.float32))
    except (ValueError, TypeError) as failure:
        message = f"column '{name}' does not make a batch: {describe_exception(failure)}"
        raise error("SH306", message, where="data.source", fix="Give lists of numbers, without gaps.") from failure
