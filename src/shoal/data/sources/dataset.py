"""The user's own dataset: any object with __len__ and __getitem__."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from shoal.data.batch import Batch
from shoal.data.source import Array, DataSource, Ids, SourceOptions, format_ids
from shoal.data.sources.huggingface import (
    HUGGING_FACE_MODULE,
    HUGGING_FACE_STREAM_MODULE,
    HuggingFaceSource,
    collate_rows,
)
from shoal.data.sources.stream import DEFAULT_WINDOW, StreamSource, stream_length
from shoal.errors import describe_exception, error, plural
from shoal.spec.base import Ref
from shoal.spec.resolve import build_ref, import_ref, is_users_failure, user_error
from shoal.spec.sources.config import PythonSourceConfig

Collate = Callable[[list[Any]], Any]


def open_python(spec: PythonSourceConfig, options: SourceOptions) -> DataSource:
    dataset = _build_dataset(spec.factory, options.base_dir)
    collate = bind_collate(spec.collate, base_dir=options.base_dir)
    if type(dataset).__module__ == HUGGING_FACE_MODULE:
        own = None if collate is None else functools.partial(make_batch, collate=collate)
        return HuggingFaceSource(dataset, options.classes, make_batch=own, labelled=options.labelled)
    if type(dataset).__module__ == HUGGING_FACE_STREAM_MODULE:
        collate = collate or collate_rows
    if isinstance(dataset, IterableDataset):
        return _open_stream(dataset, spec, collate)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise error("SH206", f"'{spec.factory.name}' returns a {type(dataset).__name__}, which is not a dataset",
                    fix="Give a torch Dataset with __len__ and __getitem__, or an IterableDataset.")  # fmt: skip
    if len(dataset) == 0:
        raise error("SH302", "the dataset is empty", where=spec.factory.name)
    if type(dataset) is TensorDataset and len(dataset.tensors) > 1 and collate is None:
        return TensorDatasetSource(dataset)
    return PythonDatasetSource(dataset, collate)


def _open_stream(dataset: Any, spec: PythonSourceConfig, collate: Collate | None) -> StreamSource:
    try:
        length = stream_length(dataset, spec.length)
    except Exception as failure:
        _raise_sample_error(failure, "of the stream")
    if not length:
        raise error("SH302", "the stream is empty", where=spec.factory.name)
    window = spec.window or DEFAULT_WINDOW
    return StreamSource(
        dataset, length=length, window=window, make_batch=lambda samples, ids: make_batch(samples, ids, collate)
    )


def bind_collate(ref: Ref | None, *, base_dir: str) -> Collate | None:
    """The function with its arguments bound, or an instance of the class."""
    if ref is None:
        return None
    target = import_ref(ref, base_dir=base_dir)
    if isinstance(target, type):
        return cast(Collate, build_ref(ref, base_dir=base_dir))
    return cast(Collate, functools.partial(target, **ref.args))


def make_batch(samples: list[Any], ids: Ids, collate: Collate | None) -> Batch:
    """The samples as one batch: by the user's function, or stacked as torch does."""
    if collate is not None:
        return _collated(collate, samples, ids)
    try:
        collated = default_collate(samples)
    except Exception as failure:  # torch raises TypeError and RuntimeError, types of the user anything
        message = f"samples {format_ids(ids)} do not make a batch: {describe_exception(failure)}"
        fix = "Give samples of one type and shape, or write `collate` in data.source."
        if missing := [int(i) for i, sample in zip(ids, samples, strict=True) if sample is None]:
            message = f"the dataset returns None for sample {missing[0]}"
            fix = "Return a sample for each number below the length: __getitem__ may lack a `return`."
        if "PIL." in message:
            fix = "Make tensors of the images: transform=torchvision.transforms.ToTensor(), or numpy.asarray(image)."
        raise error("SH306", message, fix=fix) from failure
    inputs, target = _split_target(collated, samples[0])
    return Batch(inputs, target, len(ids))


def _collated(collate: Collate, samples: list[Any], ids: Ids) -> Batch:
    try:
        made = collate(samples)
    except BaseException as failure:
        if not is_users_failure(failure):
            raise
        texts = (
            [name for name, v in samples[0].items() if isinstance(v, str)] if isinstance(samples[0], Mapping) else []
        )
        fix = f"It may be the texts: remove these columns, as a Trainer does: dataset.remove_columns({texts})."
        doing = f"collate of samples {format_ids(ids)}"
        raise user_error("SH830", failure, doing, fix=fix if texts else "") from failure
    batch = made if isinstance(made, Batch) else _batch_of_collated(made, len(ids))
    if batch.size < len(ids):
        message = (
            f"collate of samples {format_ids(ids)} returns {plural(batch.size, 'target')} for {len(ids):,}: it drops "
            "samples, which still count where lanes are averaged"
        )
        fix = (
            "Leave them out in the dataset, or give them a label that the loss ignores. Where a target stands for "
            "several samples, return shoal.Batch(inputs, target, len(samples))."
        )
        raise error("SH830", message, fix=fix)
    return replace(batch, size=len(ids))


def _batch_of_collated(made: Any, count: int) -> Batch:
    """Its size is `count`, or less if there are not even so many targets. Targets of tokens, nodes or steps are more,
    in any dimension."""
    inputs, target = _split_target(made, made)
    known = isinstance(target, Tensor) and target.dim() > 0
    return Batch(inputs, target, min(count, target.numel()) if known else count)


def _build_dataset(factory: Ref, base_dir: str) -> Any:
    """Call a class or function; use a dataset object of a module as it is."""
    found = import_ref(factory, base_dir=base_dir)
    if hasattr(found, "__getitem__") and not isinstance(found, type) and not factory.args:
        return found
    return build_ref(factory, base_dir=base_dir)


class TensorDatasetSource(DataSource):
    """A TensorDataset, indexed directly instead of sample by sample."""

    def __init__(self, dataset: TensorDataset) -> None:
        *self._inputs, self._target = dataset.tensors

    def __len__(self) -> int:
        return len(self._target)

    def take(self, ids: Ids) -> Batch:
        index = torch.from_numpy(ids)
        inputs = tuple([tensor.index_select(0, index) for tensor in self._inputs])
        return Batch(inputs, self._target.index_select(0, index), len(ids))

    def sizes(self) -> Array:
        return np.full(len(self), sum(tensor[0].nbytes for tensor in self._inputs), dtype=np.int64)

    def targets(self) -> Array:
        return self._target.detach().numpy()


class PythonDatasetSource(DataSource):
    """Samples that Python code builds. (x, y) is input and target, (x1, x2, y) has two inputs. A dict is one input, and
    its `labels` are the target. Any other sample is one input without a target. Attributes of the dataset with one
    value per sample are its columns."""

    in_memory = False
    per_sample = True

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._collate = collate
        self._size = len(dataset)

    def __len__(self) -> int:
        return self._size

    def take(self, ids: Ids) -> Batch:
        return make_batch(self._samples([int(i) for i in ids]), ids, self._collate)

    def sizes(self) -> Array:
        """The dataset's `sizes` attribute, or the bytes of each sample, which builds every sample once."""
        own = self._attribute("sizes")
        if own is not None:
            return own
        each = (_split_target(s, s)[0] for i in range(len(self)) for s in self._samples([i]))
        return np.array([sum(map(_size_bytes, inputs)) for inputs in each], dtype=np.int64)

    def targets(self) -> Array:
        """The dataset's `targets` or `labels` attribute, or the target of each sample, which builds every sample
        once."""
        for name in ("targets", "labels"):
            own = self._attribute(name)
            if own is not None:
                return own
        return np.array([self._target(i) for i in range(len(self))])

    def own_columns(self) -> list[str]:
        names = [name for name in vars(self._dataset) if not name.startswith("_")]
        return [name for name in names if self._attribute(name) is not None]

    def own_column(self, name: str) -> Array:
        return cast(Array, self._attribute(name))

    def _attribute(self, name: str) -> Array | None:
        """An attribute with one value per sample. The samples themselves, in rows of different lengths, are none."""
        value = getattr(self._dataset, name, None)
        if not isinstance(value, list | tuple | np.ndarray | Tensor) or getattr(value, "ndim", 1) == 0:
            return None
        if len(value) != len(self):
            return None
        try:
            return np.asarray(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that needs a gradient
            return None

    def _target(self, i: int) -> Any:
        (sample,) = self._samples([i])
        target = _split_target(sample, sample)[1]
        if target is None:
            raise error("SH303", "the dataset's samples have no target", fix="Give (input, target) pairs.")
        return np.asarray(target)

    def _samples(self, ids: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if many is not None:
            try:
                return list(many(ids))
            except BaseException as failure:
                _raise_sample_error(failure, format_ids(ids))
        return [self._sample(i) for i in ids]

    def _sample(self, i: int) -> Any:
        try:
            return self._dataset[i]
        except BaseException as failure:
            _raise_sample_error(failure, str(i))


def _raise_sample_error(failure: BaseException, which: str) -> NoReturn:
    if not is_users_failure(failure):
        raise failure
    raise user_error("SH309", failure, f"sample {which}") from failure


def _split_target(value: Any, sample: Any) -> tuple[tuple[Any, ...], Any]:
    """Inputs and target. The sample shows whether it is a pair, because collating turns tuples into lists."""
    if isinstance(sample, list | tuple) and len(sample) > 1:
        return tuple(value[:-1]), value[-1]
    if isinstance(sample, tuple) and len(sample) == 1:  # of a TensorDataset without labels
        return tuple(value), None
    if isinstance(value, Mapping):  # also a BatchEncoding, as collators of transformers return it
        return (dict(value),), value.get("labels", value.get("label"))
    return (value,), None


def _size_bytes(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return int(value.nbytes)
    return len(value) if hasattr(value, "__len__") else 1
