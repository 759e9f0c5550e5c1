"""Open the data section of a job: sources, split, and leak check."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.augment_rng import Augment, AugmentSequence
from shoal.data.batch import Batch
from shoal.data.clusters import with_clusters
from shoal.data.fitted import Fitted
from shoal.data.held import HELD, MAX_HELD, key_of
from shoal.data.leaks import Leak, find_duplicates, find_leaks
from shoal.data.sample_weights import with_weights
from shoal.data.source import DataSource, Ids, Notify, no_notify, open_source
from shoal.data.split import SplitIds, split
from shoal.errors import error
from shoal.spec.base import Ref
from shoal.spec.data import DataConfig, FoldSplitConfig
from shoal.spec.names import DEFAULT_MODULES
from shoal.spec.resolve import build_ref, import_ref

Transform = Callable[[Batch], Batch]
MAX_ROWS_CHECKED_FOR_WARNINGS = 100_000
AUGMENT_MODULES = DEFAULT_MODULES["augment"]


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
    columns: DataSource | None = None
    """The training source with the columns that the split may name: its own, and `cluster` if the job asks for it."""

    @property
    def sizes(self) -> dict[str, int]:
        return {part.name: len(part) for part in (self.train, *self.held_out.values())}

    @property
    def skipped_rows(self) -> int:
        """Bad rows that were left out, over all sources."""
        sources = {id(part.source): part.source for part in (self.train, *self.held_out.values())}
        return sum(source.skipped_rows for source in sources.values())


@dataclass(frozen=True)
class OpenedData:
    """What a data section opens, without the user's functions: sources and split, leaks that were found, and `notes`
    for the user."""

    parts: Datasets
    leaks: tuple[Leak, ...]
    notes: tuple[str, ...] = ()


def open_datasets(
    data: DataConfig, *, seed: int, base_dir: str, cache_dir: Path, notify: Notify = no_notify
) -> Datasets:
    """Open the sources, split them, and look for leaks. `data.split.fold` selects the fold. What the fork server of
    this process holds is not opened again."""
    opened = HELD.get(key_of(data, seed=seed, base_dir=base_dir)) if HELD else None
    if opened is None:
        opened = _open(data, seed=seed, base_dir=base_dir, cache_dir=cache_dir, notify=notify)
    for note in opened.notes:
        notify(note)
    _tell_leaks(opened.leaks, data, notify)
    transform = bind_ref(data.transform, base_dir=base_dir)
    train = replace(opened.parts.train, transform=transform)
    held_out = {name: replace(part, transform=transform) for name, part in opened.parts.held_out.items()}
    return Datasets(train, held_out, bind_augment(data.augment, base_dir=base_dir), opened.parts.columns)


def hold(argument: str) -> None:
    """Open the data of `{"data": ..., "seed": ..., "base_dir": ..., "cache_dir": ...}` for processes that are forked
    later. Nothing happens if it may not be held. Called by a fork server."""
    asked = json.loads(argument)
    data = DataConfig.model_validate(asked["data"])
    where: dict[str, Any] = {"seed": int(asked["seed"]), "base_dir": str(asked["base_dir"])}
    key = key_of(data, **where)
    if key and key not in HELD and len(HELD) < MAX_HELD:
        notes: list[str] = []
        opened = _open(data, **where, cache_dir=Path(asked["cache_dir"]), notify=notes.append)
        HELD[key] = replace(opened, notes=tuple(notes))


def _open(data: DataConfig, *, seed: int, base_dir: str, cache_dir: Path, notify: Notify) -> OpenedData:
    options: dict[str, Any] = {
        "base_dir": base_dir,
        "on_bad_row": data.on_bad_row,
        "cache_dir": str(cache_dir),
        "notify": notify,
    }
    if data.weight is not None:
        options["not_inputs"] = (data.weight,)
    source = with_weights(open_source(data.source, **options), data.weight, base_dir=base_dir)
    fitted = Fitted.of(source)
    columns = with_clusters(source, data.clusters, seed=seed, base_dir=base_dir)
    split_ids = split(data.split, columns, seed=seed, fold=_fold_number(data))
    train = DatasetSplit("train", source, split_ids.train)
    if not len(train):
        raise error("SH351", "no sample is left for training", where="data.split")
    held_out = {}
    for name, ids in (("validation", split_ids.validation), ("test", split_ids.test)):
        own = getattr(data, name)
        if own is not None:
            other = with_weights(open_source(own, fitted=fitted, **options), data.weight, base_dir=base_dir)
            held_out[name] = DatasetSplit(name, other, np.arange(len(other), dtype=np.int64))
        elif len(ids):
            held_out[name] = DatasetSplit(name, source, ids)
    parts = Datasets(train, held_out, columns=columns)
    return OpenedData(parts, tuple(_find_leaks(parts, split_ids, data)))


def leaks_between_sources(datasets: Datasets) -> list[Leak]:
    """Training samples that also occur in a separate validation or test source."""
    own = [part for part in datasets.held_out.values() if part.source is not datasets.train.source]
    return [leak for part in own for leak in find_duplicates(datasets.train, part)]


def _find_leaks(datasets: Datasets, split_ids: SplitIds, data: DataConfig) -> list[Leak]:
    """`leaks: fail` always checks; `leaks: warn` checks only where that is cheap."""
    everything = [datasets.train, *datasets.held_out.values()]
    quick = all(p.source.in_memory for p in everything) and sum(map(len, everything)) <= MAX_ROWS_CHECKED_FOR_WARNINGS
    if data.leaks == "ignore" or (data.leaks == "warn" and not quick):
        return []
    columns = datasets.columns or datasets.train.source
    return find_leaks(split_ids, columns, data.split) + leaks_between_sources(datasets)


def _tell_leaks(leaks: Sequence[Leak], data: DataConfig, notify: Notify) -> None:
    if leaks and data.leaks == "fail":
        raise error("SH353", "; ".join(map(str, leaks)), where="data.split")
    for leak in leaks:
        notify(f"leak: {leak}")


def bind_augment(refs: Ref | list[Ref] | None, *, base_dir: str) -> Callable[..., Batch] | None:
    """The augmentation, or several in order. A short name is one of `shoal.data.augmentations`."""
    if not isinstance(refs, list):
        return bind_ref(refs, base_dir=base_dir, default_modules=AUGMENT_MODULES)
    bound = [bind_ref(ref, base_dir=base_dir, default_modules=AUGMENT_MODULES) for ref in refs]
    return AugmentSequence(tuple(Augment.of(function) for function in bound if function)) if bound else None


def bind_ref(ref: Ref | None, *, base_dir: str, default_modules: Sequence[str] = ()) -> Callable[..., Any] | None:
    """The function with its arguments bound, or an instance of the class."""
    if ref is None:
        return None
    target = import_ref(ref, base_dir=base_dir, default_modules=default_modules)
    if not callable(target):
        raise error("SH206", f"'{ref.name}' is not a function", where=ref.name)
    if inspect.isclass(target):
        return build_ref(ref, base_dir=base_dir, default_modules=default_modules)  # type: ignore[no-any-return]
    return functools.partial(target, **ref.args) if ref.args else target


def _fold_number(data: DataConfig) -> int:
    return (data.split.fold or 0) if isinstance(data.split, FoldSplitConfig) else 0
