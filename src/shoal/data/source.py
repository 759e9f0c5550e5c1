"""The interface of data sources, and `open_source`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from shoal.data.batch import Batch
from shoal.data.fitted import ColumnEncoder, Fitted
from shoal.errors import did_you_mean, error
from shoal.spec.run_paths import cache_directory
from shoal.spec.sources import config as spec_of

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Notify = Callable[[str], object]
BUILTIN_COLUMNS = ("id", "size", "target")


def format_ids(ids: Sequence[int] | Ids) -> str:
    """The first ids, for messages."""
    shown = ", ".join(str(int(i)) for i in ids[:8])
    return f"[{shown}, …]" if len(ids) > 8 else f"[{shown}]"


class DataSource(Protocol):
    """Samples by number. Immutable after opening: any thread, and a fork, may call `take`."""

    blocks: Ids | None = None
    """Rows at which storage blocks start, if access is cheap only within a block; None if it is cheap everywhere."""
    in_memory: bool = True
    """`take` is as cheap as indexing a tensor, so prefetching would only cost time."""
    per_sample: bool = False
    """Python code builds each sample and may use global generators: prefetching needs processes, not threads."""
    skipped_rows: int = 0
    """Number of bad rows that were skipped."""
    classes: tuple[Any, ...] | None = None
    """The classes (or tokens) in the order of their numbers, if the source has numbered them."""
    encoders: Mapping[str, ColumnEncoder] = MappingProxyType({})
    """How columns become inputs, if the source has encoded them."""
    is_sequential: bool = False
    """Samples can only be read in order, from the first one: `blocks` must not be permuted."""

    input_columns: tuple[str, ...] | None = None
    """The columns that the inputs are made of, in their order, if the source is a table."""
    name_column: str | None = None
    """The column by which a person knows a sample, if it is not the number of its row."""

    def __len__(self) -> int: ...

    def take(self, ids: Ids) -> Batch:
        """These samples, in this order."""
        ...

    def take_each(self, parts: Sequence[Ids]) -> list[Batch]:
        """A batch of each of these. Cheaper than many calls of `take` for sources with `blocks`."""
        return [self.take(ids) for ids in parts]

    def warm(self, ids: Ids) -> None:
        """Decode these samples soon. Called from a side thread, for sources with `blocks`."""
        return

    def columns(self) -> list[str]:
        """The names that `column` accepts."""
        return list(dict.fromkeys((*BUILTIN_COLUMNS, *self.own_columns())))

    def column(self, name: str) -> Array:
        """One value per sample. Every source has `target` (as numbers), and by default `id` and `size`."""
        if name == "target":
            return self.targets()
        if name in self.own_columns():
            return self.own_column(name)
        if name == "id":
            return np.arange(len(self), dtype=np.int64)
        if name == "size":
            return self.sizes()
        raise error("SH303", f"no column '{name}'", fix=did_you_mean(name, self.columns()))

    def own_columns(self) -> list[str]:
        return []

    def own_column(self, name: str) -> Array:
        """A column listed in `own_columns`."""
        return self.column(name)

    def sizes(self) -> Array:
        """Bytes or length of each sample."""
        return np.ones(len(self), dtype=np.int64)

    def targets(self) -> Array: ...


@dataclass(frozen=True)
class SourceOptions:
    """Options of `open_source`: base of relative paths, handling of bad rows, cache directory.

    `fitted` is what the training source has learnt: this source must number classes and encode columns in the same
    way. `not_inputs` are columns that have another use. Not `labelled`: a source that finds targets by itself must not.
    """

    base_dir: str
    on_bad_row: Literal["fail", "skip"]
    cache_dir: Path
    notify: Notify
    fitted: Fitted | None = None
    not_inputs: tuple[str, ...] = ()
    labelled: bool = True

    @property
    def input_columns(self) -> tuple[str, ...] | None:
        """The columns that the training source has made its inputs of."""
        return None if self.fitted is None else self.fitted.input_columns

    @property
    def classes(self) -> tuple[Any, ...] | None:
        return None if self.fitted is None else self.fitted.classes

    @property
    def skip_bad_rows(self) -> bool:
        return self.on_bad_row == "skip"


def no_notify(_: str) -> None:
    """Discard the message."""


def open_source(
    spec: spec_of.SourceConfig,
    *,
    base_dir: str,
    on_bad_row: Literal["fail", "skip"] = "fail",
    cache_dir: str | None = None,
    notify: Notify = no_notify,
    fitted: Fitted | None = None,
    not_inputs: tuple[str, ...] = (),
    labelled: bool = True,
) -> DataSource:
    """The source that a spec describes.

    Validation and test data, and new data of a trained model, get what the training source has `fitted`, so that
    classes and tokens have the same numbers, and inputs are the same columns with the same encoding. `not_inputs` are
    no inputs unless the spec names them. New data need not be `labelled`.
    """
    cache = Path(cache_dir) if cache_dir else cache_directory()
    return _open(spec, SourceOptions(base_dir, on_bad_row, cache, notify, fitted, not_inputs, labelled))


def _open(spec: spec_of.SourceConfig, options: SourceOptions) -> DataSource:
    # Imported when used: a job on arrays needs neither pyarrow nor scikit-learn nor Pillow.
    match spec:
        case spec_of.CsvSourceConfig():
            from shoal.data.sources.csv_table import open_csv

            return open_csv(spec, options)
        case spec_of.ParquetSourceConfig():
            from shoal.data.sources.parquet_table import open_parquet

            return open_parquet(spec, options)
        case spec_of.NpySourceConfig():
            from shoal.data.sources.array_files import open_npy

            return open_npy(spec, options)
        case spec_of.NpzSourceConfig():
            from shoal.data.sources.array_files import open_npz

            return open_npz(spec, options)
        case spec_of.IdxSourceConfig():
            from shoal.data.sources.idx import open_idx

            return open_idx(spec, options)
        case spec_of.ImagesSourceConfig():
            from shoal.data.sources.images import ImageFolderSource

            return ImageFolderSource(spec, options)
        case spec_of.TextSourceConfig():
            from shoal.data.sources.text import open_text

            return open_text(spec, options)
        case spec_of.TarSourceConfig():
            from shoal.data.sources.tar_shards import open_tar_shards

            return open_tar_shards(spec, options)
        case spec_of.PythonSourceConfig():
            from shoal.data.sources.dataset import open_python

            return open_python(spec, options)
        case spec_of.HuggingFaceSourceConfig():
            from shoal.data.sources.huggingface import open_huggingface

            return open_huggingface(spec, options)
        case spec_of.SklearnSourceConfig():
            from shoal.data.sources.builtin import open_sklearn

            return open_sklearn(spec)
