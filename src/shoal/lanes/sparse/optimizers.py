"""How a row's gradient changes it. Each row is treated by itself, and only when it has a gradient."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from shoal.lanes.sparse.keys import Floats

RowOptimizer = Literal["sgd", "adagrad", "rowwise_adagrad"]
ROW_OPTIMIZERS: tuple[RowOptimizer, ...] = get_args(RowOptimizer)


def slot_count(optimizer: RowOptimizer, dim: int) -> int:
    """How many floats the optimizer keeps beside a row's values."""
    return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[optimizer]


def update_rows(optimizer: RowOptimizer, rows: Floats, grads: Floats, *, lr: float, eps: float) -> None:
    """In place; behind the values of each row lie its slots. What is computed for a row depends on no other."""
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
    """Of each row, as a column; halves are added to halves, so that the order is fixed whatever numpy likes."""
    dim, width = values.shape[1], values.shape[1]
    total = values.copy()
    while width > 1:
        half = (width + 1) // 2
        total[:, : width - half] += total[:, half:width]
        width = half
    mean: Floats = total[:, :1] / np.float32(dim)
    return mean
