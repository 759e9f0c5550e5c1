"""Statistics of a split, and the split as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.column_hints import find_column_hints
from shoal.data.leaks import find_leaks, group_column, sides_of, time_column, times_of
from shoal.data.permutation import Ids
from shoal.data.sample_hash import category_codes, hash_samples
from shoal.data.source import BUILTIN_COLUMNS, DataSource
from shoal.data.split import SplitIds
from shoal.data.split_columns import split_column
from shoal.errors import DataError
from shoal.spec import data as spec_of

if TYPE_CHECKING:
    import pyarrow as pa

MAX_CLASSES = 50
_CHUNK_ROWS = 1 << 16
_RESERVED_COLUMNS = ("fold", "part", "id")


def split_report(
    source: DataSource, splits_by_fold: Mapping[int, SplitIds], spec: spec_of.SplitConfig
) -> dict[str, Any]:
    """Per fold and part: sizes, class balance or statistics of the target, times and groups; the leaks; what was looked
    at to find them; and the columns that look like groups or times but are not used."""
    digests = hash_samples(source, np.arange(len(source)))
    statistics = _SplitStatistics(source, spec)
    folds = [
        {
            "fold": fold,
            "parts": {name: statistics.describe(ids) for name, ids in parts.by_name().items() if len(ids)},
            "leaks": [asdict(leak) | {"text": str(leak)} for leak in find_leaks(parts, source, spec, hashes=digests)],
        }
        for fold, parts in splits_by_fold.items()
    ]
    compared = any(len(sides_of(parts)) > 1 for parts in splits_by_fold.values())
    hints = find_column_hints(source, splits_by_fold, spec)
    return {
        "kind": spec.kind,
        "samples": len(source),
        "folds": folds,
        "checks": [asdict(check) for check in _split_checks(spec, compared=compared)],
        "hints": [asdict(hint) for hint in hints],
    }


@dataclass(frozen=True)
class SplitCheck:
    """One kind of leak: whether it was looked for, and how, or why not."""

    what: Literal["duplicates", "groups", "time order"]
    checked: bool
    how: str


def _split_checks(spec: spec_of.SplitConfig, *, compared: bool) -> list[SplitCheck]:
    if not compared:
        why = "all samples are in one part"
        return [
            SplitCheck("duplicates", False, why),
            SplitCheck("groups", False, why),
            SplitCheck("time order", False, why),
        ]
    group, time = group_column(spec), time_column(spec)
    is_forward = isinstance(spec, spec_of.TimeSeriesSplitConfig | spec_of.WindowsSplitConfig)
    by_time = f"by column '{time}'" if time else "by the order of rows, which the split takes for time"
    return [
        SplitCheck("duplicates", True, "by a hash of inputs and target"),
        SplitCheck(
            "groups", group is not None, f"by column '{group}'" if group else "the split names no column of groups"
        ),
        SplitCheck("time order", is_forward, by_time if is_forward else "the split names no column of times"),
    ]


class _SplitStatistics:
    """The columns that a report describes, read once."""

    def __init__(self, source: DataSource, spec: spec_of.SplitConfig) -> None:
        self._n = len(source)
        self._target = _target(source)
        self._classes = _classes(self._target)
        group = group_column(spec)
        self._times = times_of(source, spec)
        self._groups = None if group is None else category_codes(split_column(source, group, field="group"))[1]

    def describe(self, ids: Ids) -> dict[str, Any]:
        out: dict[str, Any] = {"size": len(ids), "share": len(ids) / self._n}
        if self._classes is not None:
            out["classes"] = _class_balance(*self._classes, ids)
        elif self._target is not None and self._target.dtype.kind in "iuf":
            out["target"] = _target_statistics(self._target[ids].astype(np.float64))
        if self._times is not None:
            times = self._times[ids]
            out["time"] = [_plain_time(times.min()), _plain_time(times.max())]
        if self._groups is not None:
            out["groups"] = len(np.unique(self._groups[ids]))
        return out


def _target(source: DataSource) -> NDArray[Any] | None:
    try:
        return source.column("target")
    except DataError:  # not every source has a target
        return None


def _classes(target: NDArray[Any] | None) -> tuple[list[Any], Ids] | None:
    if target is None or target.ndim != 1 or target.dtype.kind == "f":
        return None
    kinds, numbers = category_codes(target)
    return (kinds, numbers) if len(kinds) <= MAX_CLASSES else None


def _class_balance(kinds: list[Any], numbers: Ids, ids: Ids) -> dict[str, dict[str, float]]:
    counts = np.bincount(numbers[ids], minlength=len(kinds)).tolist()
    return {str(kind): {"count": count, "share": count / len(ids)} for kind, count in zip(kinds, counts, strict=True)}


def _target_statistics(values: NDArray[np.float64]) -> dict[str, float]:
    marks = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    names = ("min", "q25", "median", "q75", "max")
    return {"mean": float(values.mean()), "std": float(values.std()), **dict(zip(names, marks, strict=True))}


def _plain_time(time: Any) -> Any:
    return str(time) if isinstance(time, np.datetime64) else time.item()


# ---- the split as a file ----


def export_split(splits_by_fold: Mapping[int, SplitIds], source: DataSource, directory: str | Path) -> Path:
    """Write `split.parquet`: fold, part, id, and the source's columns. Returns its path.

    Holds one column of the source and some ten thousand rows in memory, whatever the size of the source.
    """
    import pyarrow.parquet as pq

    path = Path(directory) / "split.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory) as scratch:
        columns = _map_columns(source, Path(scratch))
        tables = _tables(splits_by_fold, columns)
        first = next(tables)
        with pq.ParquetWriter(path, first.schema) as writer:
            for table in chain([first], tables):
                writer.write_table(table)
    return path


def _tables(splits_by_fold: Mapping[int, SplitIds], columns: dict[str, pa.ChunkedArray]) -> Iterator[pa.Table]:
    import pyarrow as pa

    for fold, parts in splits_by_fold.items():
        for name, ids in parts.by_name().items():
            for start in range(0, len(ids), _CHUNK_ROWS):
                chunk = pa.array(ids[start : start + _CHUNK_ROWS])
                own = {
                    "fold": pa.repeat(pa.scalar(fold, pa.int32()), len(chunk)),
                    "part": pa.repeat(name, len(chunk)),
                }
                yield pa.table({**own, "id": chunk, **{key: column.take(chunk) for key, column in columns.items()}})


def _map_columns(source: DataSource, scratch: Path) -> dict[str, pa.ChunkedArray]:
    """The source's columns, memory-mapped from files: they are written one by one and need not fit in memory
    together."""
    import pyarrow as pa

    names = [name for name in source.columns() if name not in BUILTIN_COLUMNS]
    mapped = {}
    for number, name in enumerate(names or (["target"] if _target(source) is not None else [])):
        file = str(scratch / f"{number}.arrow")
        table = pa.table({name: _to_arrow(source.column(name))})
        with pa.OSFile(file, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        mapped[f"data.{name}" if name in _RESERVED_COLUMNS else name] = (
            pa.ipc.open_file(pa.memory_map(file)).read_all().column(0)
        )
    return mapped


def _to_arrow(values: NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(list(values) if values.ndim > 1 else values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # values of several types in one column
        return pa.array([None if value is None else str(value) for value in values.tolist()])
