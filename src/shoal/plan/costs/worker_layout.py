"""The workers of a choice: their hosts, their lanes, and their slowdown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.plan import lane_assignment
from shoal.plan.costs.model import Cluster, MeasuredJob, RunChoice


@dataclass(frozen=True)
class WorkerLayout:
    """All by seat. `slowdown` is relative to an idle core of this machine. `partial_sums` is the number of sums of its
    lanes that a worker sends."""

    lanes: int
    host_of: Mapping[int, int]
    lane_counts: Mapping[int, int]
    partial_sums: Mapping[int, int]
    slowdown: Mapping[int, float]

    @property
    def seats(self) -> list[int]:
        return list(self.lane_counts)


def lay_out_workers(choice: RunChoice, measured: MeasuredJob, cluster: Cluster) -> WorkerLayout:
    """The layout of a choice. Workers that are too slow to get a lane are left out."""
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
    """Number of workers on each host: as many as a joined host brought, one on each, the rest where most cores are."""
    hosts = cluster.hosts[: choice.hosts]
    numbers = [host.brought or 1 for host in hosts]
    free = [h for h, host in enumerate(hosts) if not host.brought]
    for _ in range(choice.workers - sum(numbers)):
        crowded = [(numbers[h] + 1) / (hosts[h].cores * hosts[h].speed) for h in free]
        numbers[free[crowded.index(min(crowded))]] += 1
    return numbers


def slowdown_at(choice: RunChoice, cluster: Cluster, host: int, workers: int, index: int) -> float:
    """Slowdown of one of `workers` workers on a host. They share the cores, and busy cores are slower (memory
    bandwidth, heat, hyper-threads): by the same factor with each doubling."""
    there = cluster.hosts[host]
    busy = workers * choice.threads
    doublings = math.log2(max(min(busy, there.cores) / choice.threads, 1.0))
    own = there.each[index] if index < len(there.each) else 1.0
    return max(1.0, busy / there.cores) * math.pow(cluster.crowding, doublings) / (there.speed * own)
