"""The data section of a job: sources, splits, and samplers."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from shoal.spec.base import Ref, Spec

Columns = str | list[str]
TargetAs = Literal["auto", "class", "number"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


# ---- sources: one class per `kind` ----


class CsvSourceConfig(Spec):
    """CSV files. `path` is a file, a glob, a directory or a URL; large files are read once into a cache.

    `inputs` default to all numeric columns except the target. Integers in the target are class numbers; texts are
    numbered in sorted order. `target_as: class` numbers any value, `number` requires floats.
    """

    kind: Literal["csv"]
    path: str
    inputs: Columns | None = None
    target: Columns | None = None
    target_as: TargetAs = "auto"
    delimiter: str = Field(default=",", min_length=1, max_length=1)
    header: bool = True


class ParquetSourceConfig(Spec):
    """Parquet files, read by row group and shuffled in blocks; fields as for csv."""

    kind: Literal["parquet"]
    path: str
    inputs: Columns | None = None
    target: Columns | None = None
    target_as: TargetAs = "auto"


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


class PythonSourceConfig(Spec):
    """A function or class that returns a torch Dataset with a length."""

    kind: Literal["python"]
    factory: Ref


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
    | PythonSourceConfig
    | HuggingFaceSourceConfig
    | SklearnSourceConfig,
    Field(discriminator="kind"),
]


# ---- splits: which samples train, which validate, which test ----


class NoSplitConfig(Spec):
    """All samples are for training."""

    kind: Literal["none"] = "none"


class HoldoutSplitConfig(Spec):
    """One split. `stratify` keeps the balance of a column (the target if true); `group` keeps groups together.

    Without `shuffle` the order of rows is kept: the first rows train, the last ones test.
    """

    kind: Literal["holdout"]
    validation: Fraction = 0.2
    test: Fraction = 0.0
    stratify: bool | str = False
    group: str | None = None
    shuffle: bool = True

    @model_validator(mode="after")
    def _check_fractions(self) -> HoldoutSplitConfig:
        if self.validation + self.test >= 1:
            raise ValueError("validation and test leave no sample for training: their sum must be below 1")
        if self.stratify and self.group:
            raise ValueError("stratify and group do not go together: keep one of the two")
        if self.stratify and not self.shuffle:
            raise ValueError("stratify needs shuffle: true")
        return self


class FoldSplitConfig(Spec):
    """Common fields of splits with several folds: `fold` selects one; without it the job runs all folds."""

    folds: Annotated[int, Field(ge=2)] = 5
    fold: NonNegativeInt | None = None
    parallel: PositiveInt = 1

    @model_validator(mode="after")
    def _fold_exists(self) -> Self:
        if self.fold is not None and self.fold >= self.folds:
            raise ValueError(f"fold {self.fold} does not exist: folds are numbered 0 to {self.folds - 1}")
        return self


class KFoldSplitConfig(FoldSplitConfig):
    kind: Literal["kfold"]
    shuffle: bool = True


class StratifiedSplitConfig(FoldSplitConfig):
    """K folds with the same balance of a column, the target if none is named."""

    kind: Literal["stratified"]
    by: str | None = None


class GroupedSplitConfig(FoldSplitConfig):
    """K folds; a group is never on both sides."""

    kind: Literal["grouped"]
    by: str


class TimeSeriesSplitConfig(FoldSplitConfig):
    """Folds that go forward in time. `by` is the time column (the order of rows if none).

    `gap` rows between training and validation are unused. `size` is the number of training rows in a sliding window
    (default: as many as for validation). Rows of the same time are never separated.
    """

    kind: Literal["timeseries"]
    by: str | None = None
    window: Literal["expanding", "sliding"] = "expanding"
    gap: NonNegativeInt = 0
    size: PositiveInt | None = None

    @model_validator(mode="after")
    def _size_slides(self) -> TimeSeriesSplitConfig:
        if self.size is not None and self.window == "expanding":
            raise ValueError("size is for window: sliding; an expanding window has all rows before the cut")
        return self


class BootstrapSplitConfig(FoldSplitConfig):
    """Draws `size` times the number of rows with replacement; rows that are not drawn (out of bag) validate."""

    kind: Literal["bootstrap"]
    size: Annotated[float, Field(gt=0, le=1)] = 1.0


class WindowsSplitConfig(FoldSplitConfig):
    """Overlapping windows over the order of rows or of `by`; the last fraction `validation` of each validates.

    `folds` windows of equal length cover all rows; neighbours share the fraction `overlap`. Rows of the same time are
    never separated.
    """

    kind: Literal["windows"]
    by: str | None = None
    overlap: Fraction = 0.5
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.2
    gap: NonNegativeInt = 0


class ColumnSplitConfig(Spec):
    """A column of the data names the part: `train`, `validation`, `test`, or the values given here.

    Rows with a value in `ignore` are left out. A value in none of the lists is an error.
    """

    kind: Literal["column"]
    by: str
    train: list[Any] = Field(default_factory=lambda: ["train"])
    validation: list[Any] = Field(default_factory=lambda: ["validation", "valid", "val"])
    test: list[Any] = Field(default_factory=lambda: ["test"])
    ignore: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _each_value_once(self) -> ColumnSplitConfig:
        values = [*self.train, *self.validation, *self.test, *self.ignore]
        doubles = [value for i, value in enumerate(values) if value in values[:i]]
        if doubles:
            raise ValueError(f"the value {doubles[0]!r} is in two lists")
        return self


SplitConfig = Annotated[
    NoSplitConfig
    | HoldoutSplitConfig
    | KFoldSplitConfig
    | StratifiedSplitConfig
    | GroupedSplitConfig
    | TimeSeriesSplitConfig
    | BootstrapSplitConfig
    | WindowsSplitConfig
    | ColumnSplitConfig,
    Field(discriminator="kind"),
]


class ClusterConfig(Spec):
    """Clusters of similar samples, as the column `cluster` of the split: `group`, `by` or `stratify`.

    What is compared: the columns `by`, the numbers that the function `features` returns for a batch, or all inputs.
    `count` clusters by k-means; or samples within `distance` of each other, and chains of them, are one cluster. With
    `scale`, each feature has mean 0 and deviation 1 before distances are taken.
    """

    by: Columns | None = None
    features: Ref | None = None
    count: Annotated[int, Field(ge=2)] | None = None
    distance: Annotated[float, Field(gt=0)] | None = None
    scale: bool = True

    @model_validator(mode="after")
    def _one_of_each(self) -> ClusterConfig:
        if (self.count is None) == (self.distance is None):
            raise ValueError("clusters need count or distance, and not both")
        if self.by is not None and self.features is not None:
            raise ValueError("by and features do not go together: keep one of the two")
        return self


# ---- samplers: which sample goes to which lane ----


class ShuffledSamplerConfig(Spec):
    """Common fields of samplers. A source stored in blocks (Parquet row groups) is shuffled within windows of
    `open_blocks` random blocks, so that only these need to be open at once."""

    shuffle: bool = True
    open_blocks: PositiveInt = 8


class RandomSamplerConfig(ShuffledSamplerConfig):
    """Divides the batch of each step equally among the lanes."""

    kind: Literal["random"] = "random"


class HashSamplerConfig(ShuffledSamplerConfig):
    """Consistent hashing of a column (default: the sample's number).

    A sample stays in its lane in every epoch, and a change of the number of lanes moves few samples.
    """

    kind: Literal["hash"]
    by: str | None = None


class BalancedSamplerConfig(ShuffledSamplerConfig):
    """Each lane gets about the same sum of `by`: a column, a .npy file of costs, or the sample's size."""

    kind: Literal["balanced"]
    by: str = "size"


class WeightedSamplerConfig(Spec):
    """Draws samples with replacement. An epoch has as many draws as there are samples.

    `by` is a column or a .npy file with the weight of each sample. Without it, every class of the column `balance` is
    drawn equally often.
    """

    kind: Literal["weighted"]
    by: str | None = None
    balance: str = "target"

    @model_validator(mode="after")
    def _one_of_both(self) -> WeightedSamplerConfig:
        if self.by is not None and "balance" in self.model_fields_set:
            raise ValueError("by and balance do not go together: keep one of the two")
        return self


SamplerConfig = Annotated[
    RandomSamplerConfig | HashSamplerConfig | BalancedSamplerConfig | WeightedSamplerConfig,
    Field(discriminator="kind"),
]


class LoaderConfig(Spec):
    """`workers`: loader processes (0: none, auto: as the source needs); `prefetch`: steps to load ahead."""

    workers: NonNegativeInt | Literal["auto"] = "auto"
    prefetch: PositiveInt = 2


class DataConfig(Spec):
    """Training data. `validation` and `test` name separate sources instead of a split."""

    source: SourceConfig
    validation: SourceConfig | None = None
    test: SourceConfig | None = None
    split: SplitConfig = Field(default_factory=NoSplitConfig)
    clusters: ClusterConfig | None = None
    sampler: SamplerConfig = Field(default_factory=RandomSamplerConfig)
    augment: Ref | list[Ref] | None = None
    transform: Ref | None = None
    on_bad_row: Literal["fail", "skip"] = "fail"
    leaks: Literal["fail", "warn", "ignore"] = "warn"
    loader: LoaderConfig = Field(default_factory=LoaderConfig)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`split: kfold` stands for `split: {kind: kfold}`; the same for `sampler`."""
        if not isinstance(value, dict):
            return value
        return {k: {"kind": v} if k in ("split", "sampler") and isinstance(v, str) else v for k, v in value.items()}

    @model_validator(mode="after")
    def _clusters_are_used(self) -> DataConfig:
        used = [getattr(self.split, field, None) for field in ("group", "by", "stratify")]
        if self.clusters is not None and "cluster" not in used:
            raise ValueError(
                "the split does not use the clusters: write group: cluster, by: cluster or stratify: cluster"
            )
        return self
