"""Row optimizers. Each row is updated by itself, and only if it has a gradient."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from shoal.lanes.sparse.keys import Floats

RowOptimizer = Literal["sgd", "adagrad", "rowwise_adagrad"]
ROW_OPTIMIZERS: tuple[RowOptimizer, ...] = get_args(RowOptimizer)


def slot_count(optimizer: RowOptimizer, dim: int) -> int:
    """Number of floats of optimizer state per row."""
    return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[optimizer]


def update_rows(optimizer: RowOptimizer, rows: Floats, grads: Floats, *, lr: float, eps: float) -> None:
    """Update rows in place; a row's optimizer state follows its values. No row's result depends on another row."""
    dim = grads.shape[1]
    values, slots = rows[:, :dim], rows[:, dim:]
    rate, eps32 = np.float32(lr), np.float32(eps)
    if optimizer == "sgd":
        values -= rate * grads
        return
    squares = grads * grads
    slots += squares if optimizer == "adagrad" else row_means(squares)
    values -= rate * grads / (np.sqrt(slots) + eps32)


def row_means(values: Floats) -> Floats:
    """The mean of each row, as a column. Halves are added to halves, so the order does not depend on numpy."""
    dim, width = values.shape[1], values.shape[1]
    total = values.copy()
    while width > 1:
        half = (width + 1) // 2
        total[:, : width - half] += total[:, half:width]
        width = half
    mean: Floats = total[:, :1] / np.float32(dim)
    return mean
