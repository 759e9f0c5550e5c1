"""Columns, classes and groups that a split needs, with an error if the data does not have them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.permutation import Ids
from shoal.data.sample_hash import category_codes
from shoal.data.source import DataSource
from shoal.errors import DataError, did_you_mean, error

WHERE = "data.split"


def split_column(source: DataSource, name: str, *, field: str) -> NDArray[Any]:
    """A column that the split needs, one value per sample."""
    if name not in source.columns():
        fix = did_you_mean(name, source.columns())
        raise error("SH352", f"the data has no column '{name}'", where=f"{WHERE}.{field}", fix=fix)
    try:
        values = source.column(name)
    except DataError as failure:
        raise error("SH352", failure.message, where=f"{WHERE}.{field}", fix=failure.fix) from None
    if values.size == len(values):
        values = values.reshape(-1)
    if values.ndim > 1:
        raise error("SH354", f"'{name}' has several values per sample", where=f"{WHERE}.{field}",
                    fix="Name a column with one value per sample.")  # fmt: skip
    return values


def class_numbers(source: DataSource, name: str, *, field: str) -> Ids:
    """The number of each sample's class."""
    values = split_column(source, name, field=field)
    if values.dtype.kind == "f" and not (np.isfinite(values) & (values == np.round(values))).all():
        raise error(
            "SH354",
            f"'{name}' is a continuous number and has no classes to balance",
            where=f"{WHERE}.{field}",
            fix="Name a column with classes, or use kfold or holdout without stratify.",
        )
    return category_codes(values)[1]


def group_numbers(source: DataSource, name: str, *, field: str, minimum: int) -> Ids:
    """The number of each sample's group. SH351 if there are fewer than `minimum` groups."""
    kinds, numbers = category_codes(split_column(source, name, field=field))
    if len(kinds) == 1 < minimum:
        raise error("SH354", f"all samples are in one group of '{name}'", where=f"{WHERE}.{field}",
                    fix="Name a column with several groups.")  # fmt: skip
    if len(kinds) < minimum:
        raise error("SH351", f"'{name}' has {len(kinds)} groups, but {minimum} parts are needed",
                    where=f"{WHERE}.{field}", fix="Use fewer folds, or more groups.")  # fmt: skip
    return numbers


def check_sample_count(n: int, folds: int) -> None:
    if n < folds:
        raise error("SH351", f"{n} samples cannot make {folds} folds", where=WHERE)


def check_class_sizes(labels: Ids, minimum: int) -> None:
    sizes = np.bincount(labels)
    if sizes.min() < minimum:
        raise error(
            "SH351",
            f"a class has only {sizes.min()} samples, but each of {minimum} parts needs one",
            where=WHERE,
            fix="Use fewer folds, merge rare classes, or do not stratify.",
        )
