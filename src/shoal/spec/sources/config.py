"""The sources of a job's data: one class per `kind`."""

from __future__ import annotations

import codecs
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from shoal.spec.base import Ref, Spec

Columns = str | list[str]
TargetAs = Literal["auto", "class", "number"]
Encoding = Literal["onehot", "number", "standard", "calendar"]
Missing = Literal["unknown", "mean", "flag"] | float


class TableConfig(Spec):
    """What csv and parquet have in common: which columns are inputs and target, and how values become numbers.

    `encode` names columns that become numbers: `onehot` and `number` for categories, `calendar` for times, `standard`
    for numbers and times. `missing` says what stands for a missing value of an input; in other columns it is a bad row.
    """

    path: str
    inputs: Columns | None = None
    target: Columns | None = None
    target_as: TargetAs = "auto"
    encode: dict[str, Encoding] | None = None
    missing: dict[str, Missing] | None = None

    @model_validator(mode="after")
    def _missing_fits_the_encoding(self) -> TableConfig:
        for name, policy in (self.missing or {}).items():
            how = (self.encode or {}).get(name)
            if (policy == "unknown") != (how in ("onehot", "number")):
                wanted = "unknown" if policy != "unknown" else "mean, flag or a number"
                raise ValueError(f"missing: '{name}' is {how or 'not encoded'}, for which {wanted} is possible")
        return self


class CsvSourceConfig(TableConfig):
    """CSV files. `path` is a file, a glob, a directory or a URL; large files are read once into a cache.

    `inputs` default to all numeric columns except the target. Integers in the target are class numbers; texts are
    numbered in sorted order. `target_as: class` numbers any value, `number` requires floats. `null_values` are words
    that stand for a missing value, beside an empty field, NA, NaN and null.
    """

    kind: Literal["csv"]
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    header: bool = True
    encoding: str | None = None
    null_values: list[str] | None = None

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, encoding: str | None) -> str | None:
        try:
            codecs.lookup(encoding or "utf-8")
        except LookupError as failure:
            raise ValueError(str(failure)) from None
        return encoding


class ParquetSourceConfig(TableConfig):
    """Parquet files, read by row group and shuffled in blocks; fields as for csv."""

    kind: Literal["parquet"]


class NpySourceConfig(Spec):
    """One array per file, memory-mapped: `path` holds the inputs, `target` the labels.

    Floats and bytes become float32 without scaling, other integers int64 (tokens, classes).
    """

    kind: Literal["npy"]
    path: str
    target: str | None = None


class NpzSourceConfig(Spec):
    """Named arrays in one file: `inputs` and `target` are their names; types as for npy."""

    kind: Literal["npz"]
    path: str
    inputs: Columns = "x"
    target: str | None = "y"


class IdxSourceConfig(Spec):
    """MNIST's format, plain or gzipped: `path` the images, `target` the labels. Pixels become floats in 0..1."""

    kind: Literal["idx"]
    path: str
    target: str | None = None


class ImagesSourceConfig(Spec):
    """A folder with one sub-folder of images per class. `size` (height, width) is needed if image sizes differ."""

    kind: Literal["images"]
    path: str
    size: tuple[PositiveInt, PositiveInt] | None = None
    channels: Literal[1, 3] = 3


class TextSourceConfig(Spec):
    """Text for a language model: sample i is `context` tokens, its target the same shifted by one."""

    kind: Literal["text"]
    path: str
    context: PositiveInt = 64
    stride: PositiveInt | None = None
    level: Literal["char", "byte"] = "char"


class TarSourceConfig(Spec):
    """Tar shards as WebDataset writes them: files of one sample stand together and differ in their extension.

    `inputs` and `target` are extensions. Images have `size` (height, width) and `channels` as for images.
    """

    kind: Literal["webdataset"]
    path: str
    inputs: Columns
    target: str | None = None
    size: tuple[PositiveInt, PositiveInt] | None = None
    channels: Literal[1, 3] = 3


class PythonSourceConfig(Spec):
    """A function or class that returns a torch Dataset with a length, or an IterableDataset.

    `collate` makes a batch of a list of samples. `length` is the number of samples of an IterableDataset that has no
    length; `window` is how many of its samples are shuffled together (1024).
    """

    kind: Literal["python"]
    factory: Ref
    collate: Ref | None = None
    length: PositiveInt | None = None
    window: PositiveInt | None = None


class HuggingFaceSourceConfig(Spec):
    """A dataset of Hugging Face's `datasets` (a directory of `save_to_disk`), or CSV, JSON, Parquet or text files that
    it reads. Batches are dicts, for models with `loss: model`.

    `split` is a part of a dict of datasets. A `tokenizer` (a directory that `from_pretrained` reads, or tokenizer.json)
    turns the column `text`, or a pair of columns, into tokens. Without one, columns of numbers go to the model. Lists
    of different lengths are padded. `labels: input_ids` is for language models.
    """

    kind: Literal["huggingface"]
    path: str
    split: str | None = None
    tokenizer: str | None = None
    text: Columns | None = None
    labels: str | None = None
    max_length: PositiveInt = 128

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if (self.tokenizer is None) != (self.text is None):
            raise ValueError("`tokenizer` and `text` belong together: give both or none")
        if isinstance(self.text, list) and len(self.text) not in (1, 2):
            raise ValueError("`text` is one column, or a pair of columns")
        return self


class SklearnSourceConfig(Spec):
    """scikit-learn's built-in sets, by the name of their loader: digits, iris, wine, breast_cancer, diabetes."""

    kind: Literal["sklearn"]
    name: Literal["digits", "iris", "wine", "breast_cancer", "diabetes"]


SourceConfig = Annotated[
    CsvSourceConfig
    | ParquetSourceConfig
    | NpySourceConfig
    | NpzSourceConfig
    | IdxSourceConfig
    | ImagesSourceConfig
    | TextSourceConfig
    | TarSourceConfig
    | PythonSourceConfig
    | HuggingFaceSourceConfig
    | SklearnSourceConfig,
    Field(discriminator="kind"),
]
