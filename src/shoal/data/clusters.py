"""Groups of similar samples: the column `cluster`, which any split may use as groups or strata.

Every worker makes the clusters by itself, so they are a pure function of data, config and seed: one thread computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.data.augment_rng import seeded_rng, single_threaded
from shoal.data.batch import Batch
from shoal.data.source import Array, DataSource, Ids
from shoal.data.split_columns import split_column
from shoal.errors import error
from shoal.spec.base import Ref
from shoal.spec.data import ClusterConfig
from shoal.spec.resolve import build_ref, import_ref, is_users_failure, user_error
from shoal.spec.seeds import derive_seed

WHERE = "data.clusters"
COLUMN = "cluster"
MAX_FEATURE_BYTES = 4 << 30
MAX_SAMPLES_BY_DISTANCE = 50_000
_STREAM = 0xC1A5
_CHUNK = 1024
_STARTS = 4
Features = npt.NDArray[np.float64]


class ClusteredSource(DataSource):
    """A source with the further column `cluster`. For splits and their reports: batches come from the source itself."""

    def __init__(self, source: DataSource, features: Features, labels: Ids) -> None:
        self.source, self.features, self.labels = source, features, labels
        self.in_memory, self.per_sample, self.classes = source.in_memory, source.per_sample, source.classes
        self.encoders, self.is_sequential = source.encoders, source.is_sequential
        self.input_columns = source.input_columns

    def __len__(self) -> int:
        return len(self.source)

    def take(self, ids: Ids) -> Batch:
        return self.source.take(ids)

    def own_columns(self) -> list[str]:
        return [*self.source.own_columns(), COLUMN]

    def own_column(self, name: str) -> Array:
        return self.labels if name == COLUMN else self.source.own_column(name)

    def sizes(self) -> Array:
        return self.source.sizes()

    def targets(self) -> Array:
        return self.source.targets()


def with_clusters(source: DataSource, config: ClusterConfig | None, *, seed: int, base_dir: str) -> DataSource:
    """The source with its clusters, or as it is if the job asks for none."""
    if config is None:
        return source
    if COLUMN in source.columns():
        fix = "Rename the column, or leave `data.clusters` out and use the data's own."
        raise error("SH730", f"the data has a column '{COLUMN}' already", where=WHERE, fix=fix)
    features = _features(source, config, seed=seed, base_dir=base_dir)
    if not np.isfinite(features).all():
        raise error("SH730", "a feature is not a finite number", where=WHERE)
    if config.scale:
        deviation = features.std(0)
        features = (features - features.mean(0)) / np.where(deviation > 0, deviation, 1)
    return ClusteredSource(source, features, cluster_numbers(features, config, seed=seed))


def cluster_numbers(features: Features, config: ClusterConfig, *, seed: int) -> Ids:
    """The cluster of each sample, numbered in the order in which they first occur."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1):
        labels = (
            _within(features, config.distance) if config.distance else _nearest_centers(features, config, seed=seed)
        )
    _, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[numbers]


def _nearest_centers(features: Features, config: ClusterConfig, *, seed: int) -> npt.NDArray[Any]:
    from sklearn.cluster import KMeans

    count, distinct = config.count or 2, len(np.unique(features, axis=0))
    if distinct < count:
        message = f"{count} clusters are asked for, and the data has {distinct} different samples"
        raise error("SH730", message, where=f"{WHERE}.count", fix="Ask for fewer.")
    state = derive_seed(seed, _STREAM) & 0x7FFFFFFF
    labels: npt.NDArray[Any] = KMeans(count, n_init=_STARTS, random_state=state).fit(features).labels_
    return labels


def _within(features: Features, distance: float) -> npt.NDArray[Any]:
    """Chains of neighbours: two samples that are at most `distance` apart are always in one cluster."""
    from scipy.sparse.csgraph import connected_components
    from sklearn.neighbors import radius_neighbors_graph

    if len(features) > MAX_SAMPLES_BY_DISTANCE:
        message = f"{len(features):,} samples are too many for `distance`, which compares them with each other"
        raise error("SH730", message, where=f"{WHERE}.distance", fix="Use `count`.")
    graph = radius_neighbors_graph(features, distance, mode="connectivity", include_self=True)
    labels: npt.NDArray[Any] = connected_components(graph, directed=False)[1]
    return labels


# ---- features ----


def _features(source: DataSource, config: ClusterConfig, *, seed: int, base_dir: str) -> Features:
    if config.by is not None:
        names = [config.by] if isinstance(config.by, str) else config.by
        return np.stack([_numbers(source, name) for name in names], axis=1)
    parts: list[Features] = []
    with single_threaded(), seeded_rng(derive_seed(seed, _STREAM, 1)), torch.no_grad():
        function = None if config.features is None else _bind(config.features, base_dir=base_dir)
        for start in range(0, len(source), _CHUNK):
            batch = source.take(np.arange(start, min(start + _CHUNK, len(source)), dtype=np.int64))
            parts.append(_inputs(batch) if function is None else _call(function, batch))
            if sum(part.nbytes for part in parts) > MAX_FEATURE_BYTES:
                raise error("SH730", "the features need more than 4 GiB", where=WHERE, fix="Name fewer: by, features.")
    return np.concatenate(parts)


def _bind(ref: Ref, *, base_dir: str) -> Callable[[Batch], Any]:
    """A function of a batch. A module gets the inputs of the batch, as a model does."""
    target = import_ref(ref, base_dir=base_dir)
    if not isinstance(target, type):
        return functools.partial(target, **ref.args)
    made: Any = build_ref(ref, base_dir=base_dir)
    if isinstance(made, torch.nn.Module):
        made.eval()
        return lambda batch: made(*batch.inputs)
    return made  # type: ignore[no-any-return]


def _numbers(source: DataSource, name: str) -> Features:
    values = split_column(source, name, field="by")
    if values.dtype.kind not in "biuf":
        message = f"the column '{name}' has no numbers"
        raise error("SH730", message, where=f"{WHERE}.by", fix="Name columns with numbers, or write `features`.")
    return values.astype(np.float64)


def _inputs(batch: Batch) -> Features:
    tensors = [value for value in batch.inputs if isinstance(value, Tensor)]
    if not tensors or len(tensors) < len(batch.inputs):
        raise error("SH730", "the inputs are not plain tensors", where=WHERE, fix="Write `by` or `features`.")
    return np.concatenate([value.reshape(batch.size, -1).double().numpy() for value in tensors], axis=1)


def _call(function: Callable[[Batch], Any], batch: Batch) -> Features:
    try:
        made = function(batch)
    except Exception as failure:
        if not is_users_failure(failure):
            raise
        raise user_error("SH730", failure, "features") from failure
    values = torch.as_tensor(made)
    if values.dim() < 1 or len(values) != batch.size:
        fix = "Return a tensor with one row for each sample."
        raise error("SH730", f"features returned {list(values.shape)} for {batch.size} samples", where=WHERE, fix=fix)
    return values.reshape(batch.size, -1).double().numpy()
