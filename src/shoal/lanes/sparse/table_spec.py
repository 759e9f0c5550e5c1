"""The specification of a sparse table: plain data that workers send to servers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from shoal.lanes.sparse.keys import MAX_ROWS, Floats, Keys, ids_of, initial_rows
from shoal.lanes.sparse.optimizers import ROW_OPTIMIZERS, RowOptimizer, slot_count

MAX_DIM = 1 << 16
MAX_TABLES = 1 << 10


@dataclass(frozen=True)
class TableSpec:
    """`number` is the table's index among the model's tables. ValueError for invalid values."""

    number: int
    rows: int
    dim: int
    optimizer: RowOptimizer
    lr: float
    eps: float
    init: float
    seed: int

    def __post_init__(self) -> None:
        for name, maximum in (("number", MAX_TABLES), ("rows", MAX_ROWS), ("dim", MAX_DIM), ("seed", 1 << 63)):
            value, minimum = getattr(self, name), int(name in ("rows", "dim"))
            if type(value) is not int or not minimum <= value <= maximum:
                raise ValueError(f"{name} of a table is a whole number from {minimum} to {maximum}, not {value!r:.40}")
        for name in ("lr", "eps", "init"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} of a table is a number of at least 0, not {value!r:.40}")
        if self.optimizer not in ROW_OPTIMIZERS:
            raise ValueError(f"the optimizer of a table is {', '.join(ROW_OPTIMIZERS)}, not {self.optimizer!r:.40}")

    @property
    def width(self) -> int:
        """Floats per row: values and optimizer state."""
        return self.dim + slot_count(self.optimizer, self.dim)

    def initial_rows(self, keys: Keys) -> Floats:
        """The initial values of rows."""
        return initial_rows(ids_of(keys), table=self.number, dim=self.dim, seed=self.seed, scale=self.init)

    def describe(self) -> dict[str, Any]:
        """The specification as JSON values."""
        return asdict(self)

    @classmethod
    def from_description(cls, description: Any) -> TableSpec:
        if not isinstance(description, dict):
            raise ValueError("not the description of a table")
        try:
            return cls(**description)
        except TypeError as problem:
            raise ValueError(f"not the description of a table: {problem!r:.200}") from None
