"""Which samples a lane gets at a step: a pure function, so that no worker has to remember what was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.permutation import Ids
from shoal.data.sample_hash import Hashes, hash_values
from shoal.data.samplers import (
    BalancedLaneSampler,
    EpochShuffle,
    HashLaneSampler,
    LaneSampler,
    RandomLaneSampler,
    jump_hash,
)
from shoal.data.source import DataSource
from shoal.errors import did_you_mean, error
from shoal.spec.data import BalancedSamplerConfig, HashSamplerConfig, SamplerConfig
from shoal.spec.seeds import derive_seed

__all__ = ["LaneSampler", "make_sampler"]

_STREAM = 0xDEA1
_WHERE = "data.sampler"


def make_sampler(
    spec: SamplerConfig,
    *,
    ids: Ids,
    lanes: int,
    batch_size: int,
    seed: int,
    source: DataSource,
    drop_last: bool = False,
) -> LaneSampler:
    """The dealer of these samples of a source. A path in `spec.by` must be absolute or start where we are."""
    _check_sizes(len(ids), batch_size, drop_last)
    key = derive_seed(seed, _STREAM)
    if isinstance(spec, HashSamplerConfig):
        lane = jump_hash(_hash_keys(spec, ids, source), lanes)
        shuffles = [
            EpochShuffle(ids[lane == i], spec=spec, blocks=source.blocks, key=derive_seed(key, i)) for i in range(lanes)
        ]
        return HashLaneSampler(shuffles, batch_size=batch_size, drop_last=drop_last)
    shuffle = EpochShuffle(ids, spec=spec, blocks=source.blocks, key=key)
    if isinstance(spec, BalancedSamplerConfig):
        costs = _costs(spec, source)
        return BalancedLaneSampler(shuffle, costs=costs, lanes=lanes, batch_size=batch_size, drop_last=drop_last)
    return RandomLaneSampler(shuffle, lanes=lanes, batch_size=batch_size, drop_last=drop_last)


def _check_sizes(n: int, batch_size: int, drop_last: bool) -> None:
    if n == 0:
        raise error("SH355", "there are no samples to deal", where=_WHERE, fix="Give training samples.")
    if drop_last and n < batch_size:
        raise error(
            "SH355",
            f"drop_last leaves no step: {n} samples are less than one batch of {batch_size}",
            where="drop_last",
            fix=f"Set batch_size to at most {n}, or drop_last: false.",
        )


def _hash_keys(spec: HashSamplerConfig, ids: Ids, source: DataSource) -> Hashes:
    return hash_values(ids if spec.by is None else _column(spec.by, source)[ids])


def _costs(spec: BalancedSamplerConfig, source: DataSource) -> NDArray[np.float64]:
    values = _load_costs(spec.by) if spec.by.endswith(".npy") else _column(spec.by, source)
    if values.dtype.kind not in "biuf":
        raise error("SH355", f"the costs '{spec.by}' are not numbers", where=f"{_WHERE}.by")
    if values.shape != (len(source),):
        shape = "×".join(map(str, values.shape))
        raise error("SH355", f"'{spec.by}' has {shape} costs for {len(source)} samples", where=f"{_WHERE}.by")
    costs = values.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if bad.size:
        raise error(
            "SH355",
            f"the cost of sample {bad[0]} in '{spec.by}' is {costs[bad[0]]} ({bad.size} such samples)",
            where=f"{_WHERE}.by",
            fix="Costs must be finite numbers from 0 upwards.",
        )
    return costs


def _load_costs(path: str) -> NDArray[Any]:
    if not Path(path).is_file():
        raise error("SH301", f"no such file: {path}", where=f"{_WHERE}.by")
    try:
        values: NDArray[Any] = np.load(path, allow_pickle=False)
    except ValueError as failure:
        raise error("SH307", f"{path} is no array of numbers: {failure}", where=f"{_WHERE}.by") from None
    return values


def _column(name: str, source: DataSource) -> NDArray[Any]:
    if name not in source.columns():
        fix = did_you_mean(name, source.columns())
        raise error("SH356", f"the data has no column '{name}'", where=f"{_WHERE}.by", fix=fix)
    return source.column(name)
