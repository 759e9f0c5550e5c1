"""One number for each sample, checked: a column of the data, or an array in a .npy file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.source import DataSource
from shoal.errors import did_you_mean, error


def number_of_each_sample(
    name: str, source: DataSource, *, what: str, where: str, codes: tuple[str, str]
) -> NDArray[np.float64]:
    """The numbers of a column, or of a file if the name ends in .npy. `codes` are those for unusable numbers and for a
    column that does not exist; `what` is what the numbers are."""
    values = _load(name, where) if name.endswith(".npy") else named_column(name, source, where=where, code=codes[1])
    if values.dtype.kind not in "biuf":
        raise error(codes[0], f"the {what}s '{name}' are not numbers", where=where)
    if values.shape != (len(source),):
        shape = "×".join(map(str, values.shape))
        raise error(codes[0], f"'{name}' has {shape} {what}s for {len(source)} samples", where=where)
    numbers = values.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if bad.size:
        raise error(
            codes[0],
            f"the {what} of sample {bad[0]} in '{name}' is {numbers[bad[0]]} ({bad.size} such samples)",
            where=where,
            fix=f"{what.capitalize()}s must be finite numbers from 0 upwards.",
        )
    return numbers


def named_column(name: str, source: DataSource, *, where: str, code: str) -> NDArray[Any]:
    """A column of the source, or an error that names those that it has."""
    if name not in source.columns():
        fix = did_you_mean(name, source.columns())
        raise error(code, f"the data has no column '{name}'", where=where, fix=fix)
    return source.column(name)


def _load(path: str, where: str) -> NDArray[Any]:
    if not Path(path).is_file():
        raise error("SH301", f"no such file: {path}", where=where)
    try:
        values: NDArray[Any] = np.load(path, allow_pickle=False)
    except ValueError as failure:
        raise error("SH307", f"{path} is not an array of numbers: {failure}", where=where) from None
    return values
