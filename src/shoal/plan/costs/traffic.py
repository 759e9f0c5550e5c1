"""Bytes between hosts in a step. Follows `collectives.allreduce_plan` and `collectives.encoded_allreduce`.

A phase ends when every worker has received its data. Every host has one link, which its workers share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shoal.plan.costs.model import NetworkLink
from shoal.plan.costs.worker_layout import WorkerLayout

LITTLE_BYTES = 1 << 20  # as in collectives.allreduce_plan: every worker sums less than this itself, in one phase
BUCKET_BYTES = 1 << 20  # as in collectives.overlap: minimum size of a bucket
DRIVER_HOST = 0  # the host of the servers


@dataclass(frozen=True)
class ExchangePhase:
    """Bytes that every seat sends to other hosts, and that leave and reach every host."""

    sent_bytes: Counter[int]
    egress_bytes: Counter[int]
    ingress_bytes: Counter[int]

    def duration_s(self, link: NetworkLink) -> float:
        if not self.egress_bytes.total():
            return 0.0
        slowest = (
            max(self.egress_bytes.values()) / link.send_bytes_s,
            max(self.ingress_bytes.values()) / link.receive_bytes_s,
        )
        return link.latency_s + max(slowest)


def phase_count(layout: WorkerLayout, stretch_bytes: int) -> int:
    """1 if every worker sums everything; 2 if each worker sums a share and collects the others' shares."""
    members = len(layout.seats)
    return 1 if members <= 2 or members * stretch_bytes < LITTLE_BYTES else 2


def allreduce_phases(layout: WorkerLayout, stretch_bytes: int) -> list[ExchangePhase]:
    """Each worker sends partial sums to the workers that add them; if each adds a share, it sends the result back."""
    if phase_count(layout, stretch_bytes) == 1:
        return [_all_to_all_phase(layout, lambda seat: stretch_bytes * layout.partial_sums[seat])]
    share = stretch_bytes // len(layout.seats)
    return [
        _all_to_all_phase(layout, lambda seat: share * layout.partial_sums[seat]),
        _all_to_all_phase(layout, lambda seat: share),
    ]


def encoded_phases(layout: WorkerLayout, lane_bytes: int) -> list[ExchangePhase]:
    """Every encoded lane is sent to every other worker."""
    return [_all_to_all_phase(layout, lambda seat: lane_bytes * layout.lane_counts[seat])]


def push_pull_phases(
    layout: WorkerLayout, pushed_bytes: Callable[[int], int], pulled_bytes: Callable[[int], int]
) -> list[ExchangePhase]:
    """Push and pull of the workers that are not on the servers' host."""
    away = {seat: host for seat, host in layout.host_of.items() if host != DRIVER_HOST}
    push, pull = ExchangePhase(Counter(), Counter(), Counter()), ExchangePhase(Counter(), Counter(), Counter())
    for seat, host in away.items():
        push.sent_bytes[seat] += pushed_bytes(seat)
        push.egress_bytes[host] += pushed_bytes(seat)
        push.ingress_bytes[DRIVER_HOST] += pushed_bytes(seat)
        pull.egress_bytes[DRIVER_HOST] += pulled_bytes(seat)
        pull.ingress_bytes[host] += pulled_bytes(seat)
    return [push, pull]


def _all_to_all_phase(layout: WorkerLayout, size: Callable[[int], int]) -> ExchangePhase:
    """Each seat sends `size(seat)` bytes to every worker on another host."""
    there = Counter(layout.host_of.values())
    away = {host: len(layout.seats) - number for host, number in there.items()}
    found = ExchangePhase(Counter(), Counter(), Counter())
    made = Counter[int]()
    for seat, host in layout.host_of.items():
        made[host] += size(seat)
        found.sent_bytes[seat] += size(seat) * away[host]
        found.egress_bytes[host] += size(seat) * away[host]
    for host, number in there.items():
        found.ingress_bytes[host] += (made.total() - made[host]) * number
    return found
