"""The user's module: an embedding whose rows live on parameter servers."""

from __future__ import annotations

from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import error
from shoal.lanes.sparse.keys import Floats, Keys, keys_of
from shoal.lanes.sparse.optimizers import RowOptimizer
from shoal.lanes.sparse.rows import SparseRows, add_rows, empty_rows
from shoal.lanes.sparse.table_spec import TableSpec


class RowSource(Protocol):
    """Reads rows. Keys are unique and ascending."""

    def read(self, table: TableSpec, keys: Keys) -> Floats: ...


class InitialRows:
    """Rows with their initial values, for running a model without servers."""

    def read(self, table: TableSpec, keys: Keys) -> Floats:
        return table.initial_rows(keys)


class SparseTable(nn.Module):
    """An embedding of up to `rows` rows, of which a worker fetches only those that its batch needs.

    `table(ids)` returns a vector of `dim` numbers for each integer in `ids`, which may have any shape. Rows are created
    at their first use, uniform between -init and init. `optimizer` (sgd, adagrad or rowwise_adagrad, with this learning
    rate) updates only the rows that a step has used. The job's optimizer, its schedule and clipping by norm do not
    apply to them.

    Needs `sync: {kind: server}`. It has no parameters, and an exported model does not contain its rows.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        optimizer: RowOptimizer = "rowwise_adagrad",
        lr: float = 0.05,
        init: float = 0.05,
        eps: float = 1e-8,
    ) -> None:
        super().__init__()
        self.spec = TableSpec(
            number=0, rows=rows, dim=dim, optimizer=optimizer, lr=lr, eps=eps, init=init, seed=0
        )  # the replica sets number and seed
        self._chunks = 1
        self._source: RowSource | None = None
        self._used: list[tuple[Keys, Tensor]] = []

    def bind(self, source: RowSource, *, chunks: int = 1) -> None:
        """Read rows from this source, which spreads them over `chunks` chunks."""
        self._source, self._chunks = source, chunks

    def forward(self, ids: Tensor) -> Tensor:
        distinct, inverse = np.unique(self._checked(ids), return_inverse=True)
        keys = keys_of(distinct, table=self.spec.number, chunks=self._chunks)
        order = np.argsort(keys)
        keys, rank = keys[order], np.empty_like(order)
        rank[order] = np.arange(len(order))
        if self._source is None:
            raise error("SH419", f"a table of {self.spec.rows} rows is used without servers", where="SparseTable")
        rows = torch.from_numpy(self._source.read(self.spec, keys)).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._used.append((keys, rows))
        index = torch.from_numpy(rank[inverse.reshape(-1)]).to(ids.device)
        return nn.functional.embedding(index.view(ids.shape), rows)

    def _checked(self, ids: Tensor) -> Keys:
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"the ids of a SparseTable are integers, not {ids.dtype}")
        flat: Keys = ids.detach().reshape(-1).to("cpu", torch.int64).numpy()
        if len(flat) and (flat.min() < 0 or flat.max() >= self.spec.rows):
            wrong = flat.min() if flat.min() < 0 else flat.max()
            raise IndexError(f"row {wrong} of a SparseTable of {self.spec.rows} rows")
        return flat

    def take_gradients(self) -> SparseRows:
        """The gradients of all rows used since the last call, added in the order of use."""
        used, self._used = self._used, []
        grads = [SparseRows(keys, rows.grad.cpu().numpy()) for keys, rows in used if rows.grad is not None]
        return reduce(add_rows, grads, empty_rows(self.spec.dim))

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{spec.rows}, {spec.dim}, optimizer={spec.optimizer}, lr={spec.lr:g}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model has no connection to the servers."""
        return {**self.__dict__, "_source": None, "_used": []}


def sparse_tables(model: nn.Module) -> list[SparseTable]:
    return [module for module in model.modules() if isinstance(module, SparseTable)]
