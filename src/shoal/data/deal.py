"""Which samples a lane gets at a step: a pure function, so that no worker has to remember what was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.dealers import BalancedDealer, Dealer, HashDealer, RandomDealer, Shuffle, jump
from shoal.data.digest import Digests, digest_values
from shoal.data.order import Ids
from shoal.data.source import Source
from shoal.errors import did_you_mean, error
from shoal.spec.data import BalancedDeal, Deal, HashDeal
from shoal.spec.seeds import mix

__all__ = ["Dealer", "make_dealer"]

_STREAM = 0xDEA1
_WHERE = "data.deal"


def make_dealer(
    spec: Deal,
    *,
    ids: Ids,
    lanes: int,
    batch_size: int,
    seed: int,
    source: Source,
    drop_last: bool = False,
) -> Dealer:
    """The dealer of these samples of a source. A path in `spec.by` must be absolute or start where we are."""
    _check(len(ids), batch_size, drop_last)
    key = mix(seed, _STREAM)
    if isinstance(spec, HashDeal):
        lane = jump(_keys(spec, ids, source), lanes)
        shuffles = [Shuffle(ids[lane == i], spec=spec, blocks=source.blocks, key=mix(key, i)) for i in range(lanes)]
        return HashDealer(shuffles, batch_size=batch_size, drop_last=drop_last)
    shuffle = Shuffle(ids, spec=spec, blocks=source.blocks, key=key)
    if isinstance(spec, BalancedDeal):
        costs = _costs(spec, source)
        return BalancedDealer(shuffle, costs=costs, lanes=lanes, batch_size=batch_size, drop_last=drop_last)
    return RandomDealer(shuffle, lanes=lanes, batch_size=batch_size, drop_last=drop_last)


def _check(n: int, batch_size: int, drop_last: bool) -> None:
    if n == 0:
        raise error("SH355", "there are no samples to deal", where=_WHERE, fix="Give training samples.")
    if drop_last and n < batch_size:
        raise error(
            "SH355",
            f"drop_last leaves no step: {n} samples are less than one batch of {batch_size}",
            where="drop_last",
            fix=f"Set batch_size to at most {n}, or drop_last: false.",
        )


def _keys(spec: HashDeal, ids: Ids, source: Source) -> Digests:
    return digest_values(ids if spec.by is None else _column(spec.by, source)[ids])


def _costs(spec: BalancedDeal, source: Source) -> NDArray[np.float64]:
    values = _load(spec.by) if spec.by.endswith(".npy") else _column(spec.by, source)
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


def _load(path: str) -> NDArray[Any]:
    if not Path(path).is_file():
        raise error("SH301", f"no such file: {path}", where=f"{_WHERE}.by")
    try:
        values: NDArray[Any] = np.load(path, allow_pickle=False)
    except ValueError as failure:
        raise error("SH307", f"{path} is no array of numbers: {failure}", where=f"{_WHERE}.by") from None
    return values


def _column(name: str, source: Source) -> NDArray[Any]:
    if name not in source.columns():
        fix = did_you_mean(name, source.columns())
        raise error("SH356", f"the data has no column '{name}'", where=f"{_WHERE}.by", fix=fix)
    return source.column(name)
