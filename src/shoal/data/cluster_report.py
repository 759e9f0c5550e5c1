"""How far a split by clusters takes its parts apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.data.clusters import ClusteredSource, Features
from shoal.data.permutation import Ids, Permutation
from shoal.data.split import SplitIds

_MOST_HELD_OUT = 1_000
_MOST_TRAIN = 10_000


def cluster_report(source: ClusteredSource, splits_by_fold: Mapping[int, SplitIds]) -> dict[str, Any]:
    """Number and sizes of clusters, how many are on both sides in each fold, and the median distance of held-out
    samples to the nearest training sample, beside that of a random split with the same sizes."""
    sizes = np.bincount(source.labels)
    return {
        "count": len(sizes),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "folds": {str(fold): _fold(source, parts) for fold, parts in splits_by_fold.items()},
    }


def _fold(source: ClusteredSource, parts: SplitIds) -> dict[str, Any]:
    train, held_out = np.unique(parts.train), np.concatenate([parts.validation, parts.test])
    both = np.intersect1d(source.labels[train], source.labels[held_out])
    everything = Permutation(len(train) + len(held_out), 1)(np.arange(len(train) + len(held_out)))
    mixed = np.concatenate([train, held_out])[everything]
    return {
        "on_both_sides": len(both),
        "distance": _median_distance(source.features, train, held_out),
        "random_distance": _median_distance(source.features, mixed[: len(train)], mixed[len(train) :]),
    }


def _median_distance(features: Features, train: Ids, held_out: Ids) -> float | None:
    """Over evenly chosen samples, so that the work is bounded. None if a side is empty."""
    from sklearn.neighbors import NearestNeighbors

    if not len(train) or not len(held_out):
        return None
    some, others = _spread(train, _MOST_TRAIN), _spread(held_out, _MOST_HELD_OUT)
    found = NearestNeighbors(n_neighbors=1).fit(features[some]).kneighbors(features[others])[0]
    return float(np.median(found))


def _spread(ids: Ids, most: int) -> Ids:
    return ids if len(ids) <= most else ids[np.linspace(0, len(ids) - 1, most).astype(np.int64)]
