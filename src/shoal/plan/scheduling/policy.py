"""The policy of the scheduler: jobs and nodes go in, an allocation with reasons comes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from shoal.plan.scheduling.decision import Decision
from shoal.plan.scheduling.division import admit, all_steps, divide, quota_rows
from shoal.plan.scheduling.placement import Demand, place_all
from shoal.plan.scheduling.sizes import NodeShape, SizeTable, SizeTables
from shoal.plan.scheduling.views import Allocation, Ints, JobView, NodeId, NodeView
from shoal.plan.scheduling.weights import Standing, Weighting


@dataclass
class SchedulingPolicy:
    """Decides for all jobs of a cluster. Equal arguments give an equal decision; only computed sizes are kept.

    `quotas`: the slots that all jobs of a user may have together. Users without an entry have no limit.
    `turns`: within a priority, nobody's second job comes before another user's first one, and so on.
    """

    weighting: Weighting = field(default_factory=Weighting)
    quotas: Mapping[str, int] = field(default_factory=dict)
    turns: bool = False
    _tables: SizeTables = field(default_factory=SizeTables, repr=False)

    def decide(
        self, now: float, jobs: Mapping[str, JobView], nodes: Mapping[NodeId, NodeView], current: Allocation
    ) -> Decision:
        """`now` in the clock of `submitted_s`. `current` may name jobs and nodes that are gone."""
        shape = NodeShape.of(nodes)
        tables = self._tables.of(jobs, shape)
        views = list(jobs.values())
        standing = _standing(now, views, tables)
        order = self._order(views, standing, shape.total_slots)
        weights = self.weighting.weights(standing)
        room = quota_rows([job.user for job in views], self.quotas, shape.total_slots)
        held = [len(current.get(key, ())) for key in jobs]
        steps = all_steps(views, tables, held, standing.remaining_s)
        admitted = admit(order[standing.slots[order] > 0], standing.slots, room)
        sizes = divide(steps, weights, np.where(admitted, standing.slots, 0), room)
        ranks = np.empty(len(views), np.int64)
        ranks[order] = np.arange(len(views))
        demands = _demands(views, tables, admitted, sizes, ranks)
        waiting = self._waiting(views, tables, admitted, order, ranks)
        allocation = place_all(demands, nodes, current, waiting)
        return Decision(allocation, jobs, tables, ranks, demands, room, self.quotas)

    def _order(self, jobs: list[JobView], standing: Standing, total_slots: int) -> Ints:
        order = self.weighting.order(standing, total_slots)
        if not self.turns:
            return order
        before: Counter[str] = Counter()
        turns = np.zeros(len(jobs), np.int64)
        for row in order.tolist():
            turns[row] = before[jobs[row].user]
            before[jobs[row].user] += 1
        by_turn = replace(standing, priority=standing.priority * len(jobs) - turns)
        return self.weighting.order(by_turn, total_slots)

    def _waiting(
        self, jobs: list[JobView], tables: list[SizeTable], admitted: NDArray[np.bool_], order: Ints, ranks: Ints
    ) -> list[Demand]:
        """Jobs for which no slots are left, in order. Those with a quota may be over it."""
        rows = order[~admitted[order]].tolist()
        free = [row for row in rows if tables[row].counts and jobs[row].user not in self.quotas]
        return [Demand(jobs[row], tables[row].counts, 0, int(ranks[row])) for row in free]


def _standing(now: float, jobs: list[JobView], tables: list[SizeTable]) -> Standing:
    age = np.array([max(now - job.submitted_s, 0.0) for job in jobs])
    return Standing(
        remaining_s=np.array(
            [
                job.remaining / table.slowest if job.remaining is not None and table.slowest else np.nan
                for job, table in zip(jobs, tables, strict=True)
            ]
        ),
        waited_s=np.array(
            [a - job.served_s if job.waited_s is None else job.waited_s for a, job in zip(age, jobs, strict=True)]
        ),
        age_s=age,
        submitted_s=np.array([job.submitted_s for job in jobs]),
        priority=np.array([job.priority for job in jobs], np.int64),
        slots=np.array([table.first_slots for table in tables], np.int64),
    )


def _demands(
    jobs: list[JobView], tables: list[SizeTable], admitted: NDArray[np.bool_], sizes: Ints, ranks: Ints
) -> list[Demand]:
    rows = np.flatnonzero(admitted)
    chosen = zip(rows.tolist(), sizes[rows].tolist(), ranks[rows].tolist(), strict=True)
    return [Demand(jobs[row], tables[row].counts, size, rank) for row, size, rank in chosen]
