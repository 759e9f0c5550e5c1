"""The workers of a choice: where they are, what they carry, and how much slower than undisturbed each is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.plan import lane_assignment
from shoal.plan.costs.model import Cluster, MeasuredJob, RunChoice


@dataclass(frozen=True)
class WorkerLayout:
    """By seat. `slowness` is how many times as long as on an idle core of this machine any work takes. `partials` are
    how many sums of its lanes a worker has to send, when they are added up on the tree."""

    lanes: int
    host_of: Mapping[int, int]
    lane_counts: Mapping[int, int]
    partial_sums: Mapping[int, int]
    slowdown: Mapping[int, float]

    @property
    def seats(self) -> list[int]:
        return list(self.lane_counts)


def lay_out_workers(choice: RunChoice, measured: MeasuredJob, cluster: Cluster) -> WorkerLayout:
    """Workers who are so slow that they carry nothing are left out."""
    numbers = workers_per_host(choice, cluster)
    places = [(h, k) for h, number in enumerate(numbers) for k in range(number)]
    host = {seat: h for seat, (h, _) in enumerate(places)}
    slowdown = {seat: slowdown_at(choice, cluster, h, numbers[h], k) for seat, (h, k) in enumerate(places)}
    lane_s = measured.times[choice.threads].lane_s
    runs = lane_assignment.assign_by_speed(measured.lanes, {seat: lane_s * slow for seat, slow in slowdown.items()})
    working = {seat: run for seat, run in runs.items() if run}
    return WorkerLayout(
        lanes=measured.lanes,
        host_of={seat: host[seat] for seat in working},
        lane_counts={seat: len(run) for seat, run in working.items()},
        partial_sums={
            seat: lane_assignment.partial_sum_count(run[0], run[-1] + 1, measured.lanes)
            for seat, run in working.items()
        },
        slowdown={seat: slowdown[seat] for seat in working},
    )


def workers_per_host(choice: RunChoice, cluster: Cluster) -> list[int]:
    """How many workers on each host: what others brought, one on each, the rest where there is most room."""
    hosts = cluster.hosts[: choice.hosts]
    numbers = [host.brought or 1 for host in hosts]
    free = [h for h, host in enumerate(hosts) if not host.brought]
    for _ in range(choice.workers - sum(numbers)):
        crowded = [(numbers[h] + 1) / (hosts[h].cores * hosts[h].speed) for h in free]
        numbers[free[crowded.index(min(crowded))]] += 1
    return numbers


def slowdown_at(choice: RunChoice, cluster: Cluster, host: int, workers: int, index: int) -> float:
    """Of one of so many workers there. They share the cores; and cores that are all busy are slower (memory, heat, two
    to one): with each doubling by the same factor."""
    there = cluster.hosts[host]
    busy = workers * choice.threads
    doublings = math.log2(max(min(busy, there.cores) / choice.threads, 1.0))
    own = there.each[index] if index < len(there.each) else 1.0
    return max(1.0, busy / there.cores) * math.pow(cluster.crowding, doublings) / (there.speed * own)
