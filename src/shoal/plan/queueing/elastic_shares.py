"""The scheduling policy as a queue asks it: entries and measured speeds go in, workers with reasons come out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from shoal.plan.queueing.entry import QueueEntry
from shoal.plan.queueing.order import MAX_OVERTAKEN, over_quota
from shoal.plan.queueing.shares import CoreCapacity, JobFacts, Share, exceeds
from shoal.plan.scheduling import JobView, MeasuredSpeed, NodeView, SchedulingPolicy
from shoal.plan.scheduling.decision import Decision
from shoal.plan.scheduling.views import NodeId

SHORTEST_TURN_S = 10.0
"""A job that has just begun is not stopped for another one."""
UNKNOWN_BYTES = 2**62
NEWS = 0.05
"""A speed that differs by less from the known one makes no new curve, so that noise moves no workers."""


@dataclass
class ElasticShares:
    """Keeps the curves of jobs between decisions. Belongs to one thread."""

    policy: SchedulingPolicy = field(default_factory=lambda: SchedulingPolicy(turns=True))
    _curves: dict[int, MeasuredSpeed] = field(default_factory=dict)
    _placed: dict[int, tuple[NodeId, ...]] = field(default_factory=dict)

    def divide(
        self,
        now_s: float,
        running: Sequence[QueueEntry],
        ready: Sequence[QueueEntry],
        *,
        cluster: CoreCapacity,
        facts: Mapping[int, JobFacts],
    ) -> dict[int, Share]:
        decision = self._decide(now_s, [*running, *ready], cluster, facts)
        young = [e.id for e in running if facts[e.id].turn_s < SHORTEST_TURN_S]
        if any(str(number) not in decision.allocation for number in young):
            kept = self._decide(now_s, running, cluster, facts)
            waiting = {e.id: Share(0, decision.why(str(e.id))) for e in ready}
            return waiting | self._shares(running, kept, cluster)
        return self._shares([*running, *ready], decision, cluster)

    def _decide(
        self, now_s: float, entries: Sequence[QueueEntry], cluster: CoreCapacity, facts: Mapping[int, JobFacts]
    ) -> Decision:
        over = over_quota(entries, cluster.quotas)
        views = {
            str(entry.id): replace(
                self._view(entry, facts[entry.id], cluster), waited_s=_waited_s(entry, is_over=entry.id in over)
            )
            for entry in entries
        }
        nodes: dict[NodeId, NodeView] = {
            name: NodeView(cores, cluster.memory_bytes.get(name, UNKNOWN_BYTES))
            for name, cores in cluster.nodes.items()
        }
        current = {str(entry.id): self._present(entry, cluster) for entry in entries if entry.state == "running"}
        policy = replace(self.policy, quotas=cluster.quotas) if self.policy.quotas != cluster.quotas else self.policy
        self.policy = policy
        return policy.decide(now_s, views, nodes, current)

    def _shares(self, entries: Sequence[QueueEntry], decision: Decision, cluster: CoreCapacity) -> dict[int, Share]:
        shares = {}
        for entry in entries:
            placed = tuple(decision.allocation.get(str(entry.id), ()))
            self._placed[entry.id] = placed
            workers = entry.needs.least if placed and exceeds(entry.needs, cluster) else len(placed)
            shares[entry.id] = Share(workers, decision.why(str(entry.id)), placed)
        return shares

    def _view(self, entry: QueueEntry, facts: JobFacts, cluster: CoreCapacity) -> JobView:
        needs, curve = entry.needs, self._curve(entry, facts)
        fixed = entry.workers if needs.fixed and entry.workers else 0
        view = JobView(
            str(entry.id),
            curve,
            least=fixed or needs.least,
            most=fixed or needs.most,
            gang=needs.gang,
            priority=entry.priority,
            user=entry.user,
            submitted_s=facts.waiting_since_s,
            served_s=facts.served_s,
            remaining=facts.remaining if curve.measured else None,
            slots=needs.cores_per_worker,
            memory_bytes=needs.memory_bytes * needs.copies,
        )
        if exceeds(entry.needs, cluster):  # it gets the whole cluster, as one worker of that size
            return replace(view, least=1, most=1, gang=1, slots=max(cluster.nodes.values(), default=1))
        return view

    def _curve(self, entry: QueueEntry, facts: JobFacts) -> MeasuredSpeed:
        known = self._curves.get(entry.id)
        seconds = {(workers, 1): 1 / speed for workers, speed in facts.speeds.items()}
        if known is None or _differs(known.seconds, seconds):
            known = self._curves[entry.id] = MeasuredSpeed(entry.needs.lanes, seconds, entry.needs.gang)
        return known

    def _present(self, entry: QueueEntry, cluster: CoreCapacity) -> tuple[NodeId, ...]:
        placed = self._placed.get(entry.id, ())
        if exceeds(entry.needs, cluster) or len(placed) == entry.workers:
            return placed
        return tuple(islice(cycle(cluster.nodes), entry.workers))


def _waited_s(entry: QueueEntry, *, is_over: bool) -> float | None:
    """One that was overtaken too often has waited for ever. One that its quota keeps waiting takes no place of those
    that waited for long."""
    if is_over:
        return 0.0
    return math.inf if entry.overtaken >= MAX_OVERTAKEN else None


def _differs(known: Mapping[tuple[int, int], float], new: Mapping[tuple[int, int], float]) -> bool:
    return known.keys() != new.keys() or any(abs(new[key] - s) > NEWS * s for key, s in known.items())
