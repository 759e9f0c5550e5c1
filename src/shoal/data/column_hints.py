"""Columns that look like groups or times, and whether a split separates them. Guesses from names and values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.data.leaks import Leak, find_lookahead, find_shared, group_column, sides_of, time_column
from shoal.data.sample_hash import category_codes
from shoal.data.source import DataSource
from shoal.data.split import SplitIds
from shoal.data.split_columns import split_column
from shoal.data.time_order import parse_times
from shoal.errors import DataError
from shoal.spec import data as spec_of

MIN_TEXT_GROUPS = 5
MIN_TIMES = 3
MIN_MONOTONE_ROWS = 20
_SHOWN_TEXTS = 50

_GROUP_WORDS = (
    "account|author|case|client|customer|device|family|group|household|item|machine|member|participant|patient|"
    "person|product|session|shop|site|speaker|store|student|subject|user|visitor"
)
_GROUP_NAME = re.compile(
    rf"(?:.*[_\-. ])?(?:id|uid|uuid|(?:{_GROUP_WORDS})(?:s|[_\-. ]?(?:id|no|nr|number|key))?)", re.I
)
_TIME_NAME = re.compile(r"(?:.*[_\-. ])?(?:date|datetime|day|hour|month|time|timestamp|ts|week|year)|.*[_\-. ]at", re.I)
_DATE_TEXT = re.compile(r"\d{4}-\d{2}(?:-\d{2}(?:[T ]\d{2}.*)?)?")


@dataclass(frozen=True)
class ColumnHint:
    """A column that looks like groups or times and that the split does not use.

    `separated`: how it is divided between two parts, None if no part shares a group and the times are in order.
    `job_line` is what to write under `data` to respect it.
    """

    column: str
    role: Literal["groups", "times"]
    reason: str
    separated: str | None
    job_line: str


def find_column_hints(
    source: DataSource, splits_by_fold: Mapping[int, SplitIds], spec: spec_of.SplitConfig
) -> list[ColumnHint]:
    """The columns that look like groups or times, except those that the split already uses. None if the split has one
    part: there is nothing to compare."""
    folds = [sides for parts in splits_by_fold.values() if len(sides := sides_of(parts)) > 1]
    if not folds:
        return []
    used = {group_column(spec), time_column(spec)}
    target = _target(source)
    return [
        hint
        for name in source.own_columns()
        if name != "target" and name not in used
        for hint in _hints_of(name, source, folds, spec, target)
    ]


def _hints_of(
    name: str, source: DataSource, folds: list[dict[str, Any]], spec: spec_of.SplitConfig, target: NDArray[Any] | None
) -> Iterator[ColumnHint]:
    try:
        values = split_column(source, name, field="by")
        times = parse_times(values, name) if (reason := why_times(name, values)) else None
    except DataError:  # several values per sample, or times that are missing: no split could use it
        return
    if target is not None and values.dtype.kind in "iuf" and np.array_equal(values, target):
        return
    if times is not None:
        worst = _worst(leak for sides in folds for leak in find_lookahead(sides, times, name))
        yield ColumnHint(name, "times", reason, worst, _time_line(spec, name))
        return
    if isinstance(spec, spec_of.ColumnSplitConfig) and name == spec.by:
        return
    kinds, codes = category_codes(values)
    if (reason := why_groups(name, values, len(kinds))) and not _repeats_target(codes, len(kinds), target):
        what = f"have a '{name}' that is also in"
        worst = _worst(leak for sides in folds for leak in find_shared(sides, codes.view(np.uint64), "group", what))
        yield ColumnHint(name, "groups", reason, worst, _group_line(spec, name))


# ---- what a column looks like ----


def why_times(name: str, values: NDArray[Any]) -> str:
    """Why a column looks like times; '' if it does not."""
    if values.dtype.kind == "M":
        return "dates"
    if values.dtype.kind in "iuf":
        return _why_number_times(name, values)
    texts = [value for value in values[:_SHOWN_TEXTS].tolist() if value is not None]
    dates = texts and all(isinstance(text, str) and _DATE_TEXT.fullmatch(text.strip()) for text in texts)
    return "texts that are dates" if dates else ""


def _why_number_times(name: str, values: NDArray[Any]) -> str:
    if _TIME_NAME.fullmatch(name):
        return "its name" if len(np.unique(values)) >= MIN_TIMES else ""
    if len(values) < MIN_MONOTONE_ROWS or _GROUP_NAME.fullmatch(name):
        return ""
    steps = np.diff(values.astype(np.float64))
    is_row_number = (steps == steps[0]).all()
    return (
        "numbers that never fall" if (steps >= 0).all() and (steps > 0).sum() >= MIN_TIMES and not is_row_number else ""
    )


def why_groups(name: str, values: NDArray[Any], kinds: int) -> str:
    """Why a column of so many different values looks like groups; '' if it does not."""
    if not 2 <= kinds < len(values):
        return ""
    each = f"{kinds:,} values, {len(values) / kinds:.1f} samples each"
    if _GROUP_NAME.fullmatch(name) and (values.dtype.kind != "f" or _is_whole(values)):
        return f"its name; {each}"
    is_text = values.dtype.kind in "OUS" and all(isinstance(v, str | bytes) for v in values[:_SHOWN_TEXTS].tolist())
    return f"texts that repeat; {each}" if is_text and kinds >= MIN_TEXT_GROUPS and 2 * kinds <= len(values) else ""


def _is_whole(values: NDArray[Any]) -> bool:
    return bool((np.isfinite(values) & (values == np.round(values))).all())


def _target(source: DataSource) -> NDArray[Any] | None:
    try:
        target = source.column("target")
    except DataError:  # not every source has a target
        return None
    return target.reshape(-1) if target.size == len(target) else None


def _repeats_target(codes: NDArray[Any], kinds: int, target: NDArray[Any] | None) -> bool:
    """Whether each value stands for one class and each class for one value: it is the target under another name."""
    if target is None or target.dtype.kind == "f":
        return False
    classes, numbers = category_codes(target)
    return len(classes) == kinds == len(np.unique(codes * kinds + numbers))


# ---- what the split does with it, and what to write ----


def _worst(leaks: Iterable[Leak]) -> str | None:
    worst = max(leaks, key=lambda leak: leak.count, default=None)
    return None if worst is None else worst.summary


def _group_line(spec: spec_of.SplitConfig, name: str) -> str:
    column = _as_yaml(name)
    if isinstance(spec, spec_of.NoSplitConfig):
        return f"split: {{kind: holdout, group: {column}}}"
    if isinstance(spec, spec_of.HoldoutSplitConfig) and not spec.stratify:
        test = f", test: {spec.test:g}" if spec.test else ""
        return f"split: {{kind: holdout, validation: {spec.validation:g}{test}, group: {column}}}"
    return f"split: {{kind: grouped, by: {column}, folds: {_folds(spec)}}}"


def _time_line(spec: spec_of.SplitConfig, name: str) -> str:
    kind = spec.kind if isinstance(spec, spec_of.WindowsSplitConfig) else "timeseries"
    return f"split: {{kind: {kind}, by: {_as_yaml(name)}, folds: {_folds(spec)}}}"


def _folds(spec: spec_of.SplitConfig) -> int:
    return spec.folds if isinstance(spec, spec_of.FoldSplitConfig) else 5


def _as_yaml(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w.]*", name) else f"'{name.replace(chr(39), 2 * chr(39))}'"
