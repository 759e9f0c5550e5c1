"""A small real source for tests of splits and dealing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.data.batch import Batch
from shoal.data.source import DataSource
from shoal.errors import error


class MemorySource(DataSource):
    """Named arrays in memory; `x` is the input (the row number where it is not given)."""

    def __init__(self, n: int, *, blocks: Any = None, **columns: Any) -> None:
        self._n = n
        self._columns = {name: np.asarray(values) for name, values in columns.items()}
        self.blocks = None if blocks is None else np.asarray(blocks, dtype=np.int64)

    def __len__(self) -> int:
        return self._n

    def take(self, ids: Any) -> Batch:
        x = self._columns.get("x", np.arange(self._n))[ids]
        target = torch.from_numpy(self._columns["target"][ids]) if "target" in self._columns else None
        return Batch((torch.from_numpy(x),), target, len(ids))

    def own_columns(self) -> list[str]:
        return [name for name in self._columns if name not in ("x", "target", "size")]

    def own_column(self, name: str) -> Any:
        return self._columns[name]

    def sizes(self) -> Any:
        return self._columns.get("size", np.ones(self._n, dtype=np.int64))

    def targets(self) -> Any:
        if "target" not in self._columns:
            raise error("SH303", "the data has no target")
        return self._columns["target"]
