"""Weights of samples in the loss: a column of the data, or an array in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from shoal.data.batch import Batch
from shoal.data.files import absolute_path
from shoal.data.number_column import number_of_each_sample
from shoal.data.source import Array, DataSource, Ids

WHERE = "data.weight"


class WeightedSource(DataSource):
    """A source whose batches have the weights of their samples."""

    def __init__(self, source: DataSource, weights: Array) -> None:
        self._source = source
        self._weights = torch.from_numpy(weights)
        self.blocks, self.in_memory, self.per_sample = source.blocks, source.in_memory, source.per_sample
        self.skipped_rows, self.classes, self.encoders = source.skipped_rows, source.classes, source.encoders
        self.is_sequential, self.input_columns = source.is_sequential, source.input_columns

    def __len__(self) -> int:
        return len(self._source)

    def take(self, ids: Ids) -> Batch:
        return self.take_each([ids])[0]

    def take_each(self, parts: Sequence[Ids]) -> list[Batch]:
        return [
            replace(batch, weight=self._weights[torch.from_numpy(ids)])
            for batch, ids in zip(self._source.take_each(parts), parts, strict=True)
        ]

    def warm(self, ids: Ids) -> None:
        self._source.warm(ids)

    def own_columns(self) -> list[str]:
        return self._source.own_columns()

    def own_column(self, name: str) -> Array:
        return self._source.own_column(name)

    def sizes(self) -> Array:
        return self._source.sizes()

    def targets(self) -> Array:
        return self._source.targets()


def with_weights(source: DataSource, name: str | None, *, base_dir: str) -> DataSource:
    """The source with the weights of the column `name` or of a .npy file; as it is if the job has no weights."""
    if name is None:
        return source
    place = absolute_path(name, base_dir) if name.endswith(".npy") else name
    weights = number_of_each_sample(place, source, what="weight", where=WHERE, codes=("SH831", "SH831"))
    return WeightedSource(source, weights.astype(np.float64))
