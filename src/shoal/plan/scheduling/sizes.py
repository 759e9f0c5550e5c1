"""The numbers of workers that are considered for a job, and its speed with each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from shoal.plan.scheduling.views import Floats, Ints, JobView, NodeId, NodeView


@dataclass(frozen=True)
class NodeShape:
    """What most nodes of the cluster are like, and how many slots there are in all."""

    slots: int
    memory_bytes: int
    total_slots: int
    kinds: tuple[tuple[int, int, int], ...]
    """Slots, memory and number of nodes of each kind."""

    @classmethod
    def of(cls, nodes: Mapping[NodeId, NodeView]) -> NodeShape:
        """The shape that holds most slots; the larger one if two hold the same."""
        found = Counter((node.slots, node.memory_bytes) for node in nodes.values())
        slots, memory = max(found, key=lambda key: (found[key] * key[0], key), default=(0, 0))
        kinds = tuple((*key, count) for key, count in sorted(found.items()))
        return cls(slots, memory, sum(key[0] * count for key, count in found.items()), kinds)

    def workers_per_node(self, job: JobView) -> int:
        return _fitting(job, self.slots, self.memory_bytes)

    def capacity(self, job: JobView) -> int:
        """How many workers of the job an empty cluster takes."""
        return sum(count * _fitting(job, slots, memory) for slots, memory, count in self.kinds)


def _fitting(job: JobView, slots: int, memory_bytes: int) -> int:
    by_slots = slots // job.slots
    return min(by_slots, memory_bytes // job.memory_bytes) if job.memory_bytes else by_slots


@lru_cache(maxsize=4096)
def worker_counts(least: int, most: int, gang: int, per_node: int) -> tuple[int, ...]:
    """A few sizes within a node, then whole nodes; always the smallest and the largest size that the job allows."""
    first, last = -(-max(least, 1) // gang) * gang, most // gang * gang
    if last < first:
        return ()
    wanted = {first, last, *_within_node(per_node), *_whole_nodes(per_node, last)}
    return tuple(sorted({count for count in (-(-n // gang) * gang for n in wanted) if first <= count <= last}))


def _within_node(per_node: int) -> set[int]:
    return {per_node, *_round_numbers(per_node)} if per_node else set()


def _whole_nodes(per_node: int, last: int) -> set[int]:
    return {nodes * per_node for nodes in _round_numbers(last // per_node)} if per_node else set()


def _round_numbers(limit: int) -> set[int]:
    """1, 2, 4, 6, 8, 12, 16, 24, … up to a limit. Few sizes mean few changes, and each is worth its pause."""
    found = {1} if limit else set()
    power = 2
    while power <= limit:
        found |= {power, power * 3 // 2} if power > 2 else {power}
        power *= 2
    return {number for number in found if number <= limit}


@dataclass(frozen=True)
class SizeTable:
    """The sizes of one job, smallest first: workers, the slots they take, and the logarithm of the speed."""

    curve: object
    shape: tuple[object, ...]
    workers: Ints
    slots: Ints
    log_speeds: Floats
    slowest: float
    """The speed with the smallest size, 0 if the curve has none in units of work per second."""
    first_slots: int
    """The slots of the smallest size, 0 if none fits."""
    counts: tuple[int, ...]

    @cached_property
    def index(self) -> dict[int, int]:
        """Where a number of workers stands."""
        return {count: at for at, count in enumerate(self.counts)}

    hulls: dict[int, tuple[Ints, Ints, Floats]] = field(default_factory=dict, repr=False, compare=False)
    """Steps of the hull (end, slots, gain), by the worth of staying at the present size."""


class SizeTables:
    """The table of each job, kept while its curve and its request stay the same."""

    def __init__(self) -> None:
        self._kept: dict[str, SizeTable] = {}

    def of(self, jobs: Mapping[str, JobView], shape: NodeShape) -> list[SizeTable]:
        kept = self._kept
        found = {key: self._fresh(kept.get(key), job, shape) for key, job in jobs.items()}
        self._kept = found
        return list(found.values())

    @staticmethod
    def _fresh(known: SizeTable | None, job: JobView, shape: NodeShape) -> SizeTable:
        asked = (job.least, job.most, job.gang, job.slots, job.memory_bytes, job.resize_s, shape)
        if known is not None and known.curve is job.curve and known.shape == asked:
            return known
        return _table(job, shape, asked)


def _table(job: JobView, shape: NodeShape, asked: tuple[object, ...]) -> SizeTable:
    per_node = shape.workers_per_node(job)
    most = min(job.most, max(job.curve.most, job.least), shape.capacity(job))
    workers = np.array(worker_counts(job.least, most, job.gang, per_node), np.int64)
    nodes = np.maximum(-(-workers // max(per_node, 1)), 1)
    speeds = np.asarray(job.curve.speeds(workers, nodes), np.float64) if len(workers) else np.empty(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(speeds > 0, np.log(speeds), -np.inf)
    slowest = float(speeds[0]) if len(speeds) and job.curve.measured and speeds[0] > 0 else 0.0
    slots = workers * job.slots
    first = int(slots[0]) if len(slots) else 0
    return SizeTable(job.curve, asked, workers, slots, logs, slowest, first, tuple(workers.tolist()))
