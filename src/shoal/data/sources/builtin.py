"""The small datasets that come with scikit-learn."""

from __future__ import annotations

import numpy as np

from shoal.data.source import Array
from shoal.data.sources.arrays import ArraySource, InMemoryRows
from shoal.spec.sources.config import SklearnSourceConfig


def open_sklearn(spec: SklearnSourceConfig) -> ArraySource:
    from sklearn import datasets

    loaded = getattr(datasets, f"load_{spec.name}")()
    inputs = np.asarray(loaded.data, dtype=np.float32)
    target = np.asarray(loaded.target)
    names = tuple(str(name) for name in loaded.feature_names)

    def lookup(name: str) -> Array:
        return inputs[:, names.index(name)]

    return ArraySource(
        (InMemoryRows(inputs),),
        InMemoryRows(target.astype(np.float32 if target.dtype.kind == "f" else np.int64)),
        classes=tuple(str(name) for name in loaded.target_names) if "target_names" in loaded else None,
        names=names,
        lookup=lookup,
    )
