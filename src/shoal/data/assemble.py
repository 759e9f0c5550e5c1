"""From the data section of a job to the parts that train, validate and test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.batch import Batch
from shoal.data.leaks import Leak, find_doubles, find_leaks
from shoal.data.source import Ids, Source, Tell, open_source, silent
from shoal.data.split import Parts, split
from shoal.errors import error
from shoal.spec.base import Ref
from shoal.spec.data import Data, FoldSplit
from shoal.spec.resolve import build_ref, import_ref

Transform = Callable[[Batch], Batch]
MOST_ROWS_CHECKED_BY_THE_WAY = 100_000


@dataclass(frozen=True)
class Part:
    """Some samples of a source, with what is done to each batch of them."""

    name: str
    source: Source
    ids: Ids
    transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Assembled:
    """`others` holds validation and test, as far as there are any."""

    train: Part
    others: dict[str, Part] = field(default_factory=dict)
    augment: Callable[..., Batch] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        return {part.name: len(part) for part in (self.train, *self.others.values())}

    @property
    def skipped(self) -> int:
        """Bad rows that were left out, over all sources."""
        sources = {id(part.source): part.source for part in (self.train, *self.others.values())}
        return sum(source.skipped for source in sources.values())


def assemble(data: Data, *, seed: int, base_dir: str, cache_dir: Path, tell: Tell = silent) -> Assembled:
    """Open the sources, split them, look for leaks. `data.split.fold` tells which fold."""
    opening: dict[str, Any] = {
        "base_dir": base_dir,
        "on_bad_row": data.on_bad_row,
        "cache_dir": str(cache_dir),
        "tell": tell,
    }
    source = open_source(data.source, **opening)
    transform = bind(data.transform, base_dir=base_dir)
    parts = split(data.split, source, seed=seed, fold=_fold(data))
    train = Part("train", source, parts.train, transform)
    if not len(train):
        raise error("SH351", "no sample is left for training", where="data.split")
    others = {}
    for name, ids in (("validation", parts.validation), ("test", parts.test)):
        own = getattr(data, name)
        if own is not None:
            other = open_source(own, like=source, **opening)
            others[name] = Part(name, other, np.arange(len(other), dtype=np.int64), transform)
        elif len(ids):
            others[name] = Part(name, source, ids, transform)
    assembled = Assembled(train, others, bind(data.augment, base_dir=base_dir))
    _tell_leaks(assembled, parts, data, tell)
    return assembled


def leaks_between_sources(assembled: Assembled) -> list[Leak]:
    """Samples of the training part that stand again in a source of its own."""
    own = [part for part in assembled.others.values() if part.source is not assembled.train.source]
    return [leak for part in own for leak in find_doubles(assembled.train, part)]


def _tell_leaks(assembled: Assembled, parts: Parts, data: Data, tell: Tell) -> None:
    """`leaks: fail` always looks; `warn` looks where that costs next to nothing."""
    everything = [assembled.train, *assembled.others.values()]
    quick = all(p.source.in_memory for p in everything) and sum(map(len, everything)) <= MOST_ROWS_CHECKED_BY_THE_WAY
    if data.leaks == "ignore" or (data.leaks == "warn" and not quick):
        return
    leaks = find_leaks(parts, assembled.train.source, data.split) + leaks_between_sources(assembled)
    if leaks and data.leaks == "fail":
        raise error("SH353", "; ".join(map(str, leaks)), where="data.split")
    for leak in leaks:
        tell(f"leak: {leak}")


def bind(ref: Ref | None, *, base_dir: str) -> Callable[..., Any] | None:
    """A function with its arguments given, or an object of a class."""
    if ref is None:
        return None
    target = import_ref(ref, base_dir=base_dir)
    if not callable(target):
        raise error("SH206", f"'{ref.name}' is not a function", where=ref.name)
    if inspect.isclass(target):
        return build_ref(ref, base_dir=base_dir)  # type: ignore[no-any-return]
    return functools.partial(target, **ref.args) if ref.args else target


def _fold(data: Data) -> int:
    return (data.split.fold or 0) if isinstance(data.split, FoldSplit) else 0
