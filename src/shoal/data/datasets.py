"""Open the data section of a job: sources, split, and leak check."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.batch import Batch
from shoal.data.leaks import Leak, find_duplicates, find_leaks
from shoal.data.source import DataSource, Ids, Notify, no_notify, open_source
from shoal.data.split import SplitIds, split
from shoal.errors import error
from shoal.spec.base import Ref
from shoal.spec.data import DataConfig, FoldSplitConfig
from shoal.spec.resolve import build_ref, import_ref

Transform = Callable[[Batch], Batch]
MAX_ROWS_CHECKED_FOR_WARNINGS = 100_000


@dataclass(frozen=True)
class DatasetSplit:
    """The samples of one part of the data, with the functions applied to each batch."""

    name: str
    source: DataSource
    ids: Ids
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Datasets:
    """The training split; `held_out` holds validation and test if the job has them."""

    train: DatasetSplit
    held_out: dict[str, DatasetSplit] = field(default_factory=dict)
    augment: Callable[..., Batch] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        return {part.name: len(part) for part in (self.train, *self.held_out.values())}

    @property
    def skipped_rows(self) -> int:
        """Bad rows that were left out, over all sources."""
        sources = {id(part.source): part.source for part in (self.train, *self.held_out.values())}
        return sum(source.skipped_rows for source in sources.values())


def open_datasets(
    data: DataConfig, *, seed: int, base_dir: str, cache_dir: Path, notify: Notify = no_notify
) -> Datasets:
    """Open the sources, split them, and look for leaks. `data.split.fold` selects the fold."""
    options: dict[str, Any] = {
        "base_dir": base_dir,
        "on_bad_row": data.on_bad_row,
        "cache_dir": str(cache_dir),
        "notify": notify,
    }
    source = open_source(data.source, **options)
    transform = bind_ref(data.transform, base_dir=base_dir)
    split_ids = split(data.split, source, seed=seed, fold=_fold_number(data))
    train = DatasetSplit("train", source, split_ids.train, transform)
    if not len(train):
        raise error("SH351", "no sample is left for training", where="data.split")
    held_out = {}
    for name, ids in (("validation", split_ids.validation), ("test", split_ids.test)):
        own = getattr(data, name)
        if own is not None:
            other = open_source(own, training_source=source, **options)
            held_out[name] = DatasetSplit(name, other, np.arange(len(other), dtype=np.int64), transform)
        elif len(ids):
            held_out[name] = DatasetSplit(name, source, ids, transform)
    datasets = Datasets(train, held_out, bind_ref(data.augment, base_dir=base_dir))
    _check_leaks(datasets, split_ids, data, notify)
    return datasets


def leaks_between_sources(datasets: Datasets) -> list[Leak]:
    """Training samples that also occur in a separate validation or test source."""
    own = [part for part in datasets.held_out.values() if part.source is not datasets.train.source]
    return [leak for part in own for leak in find_duplicates(datasets.train, part)]


def _check_leaks(datasets: Datasets, split_ids: SplitIds, data: DataConfig, notify: Notify) -> None:
    """`leaks: fail` always checks; `leaks: warn` checks only where that is cheap."""
    everything = [datasets.train, *datasets.held_out.values()]
    quick = all(p.source.in_memory for p in everything) and sum(map(len, everything)) <= MAX_ROWS_CHECKED_FOR_WARNINGS
    if data.leaks == "ignore" or (data.leaks == "warn" and not quick):
        return
    leaks = find_leaks(split_ids, datasets.train.source, data.split) + leaks_between_sources(datasets)
    if leaks and data.leaks == "fail":
        raise error("SH353", "; ".join(map(str, leaks)), where="data.split")
    for leak in leaks:
        notify(f"leak: {leak}")


def bind_ref(ref: Ref | None, *, base_dir: str) -> Callable[..., Any] | None:
    """The function with its arguments bound, or an instance of the class."""
    if ref is None:
        return None
    target = import_ref(ref, base_dir=base_dir)
    if not callable(target):
        raise error("SH206", f"'{ref.name}' is not a function", where=ref.name)
    if inspect.isclass(target):
        return build_ref(ref, base_dir=base_dir)  # type: ignore[no-any-return]
    return functools.partial(target, **ref.args) if ref.args else target


def _fold_number(data: DataConfig) -> int:
    return (data.split.fold or 0) if isinstance(data.split, FoldSplitConfig) else 0
