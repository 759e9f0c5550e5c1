"""What crosses between hosts in a step: pure arithmetic after `parallel.exchange_plan` and `parallel.encoded`.

A phase is over when everybody has what it brings; every host has one link, which its workers share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shoal.plan.costs.model import NetworkLink
from shoal.plan.costs.worker_layout import WorkerLayout

LITTLE_BYTES = 1 << 20  # as in parallel.exchange_plan: less than this is added up by everybody, in one phase
BUCKET_BYTES = 1 << 20  # as in parallel.ahead: so much at least leaves at once
DRIVER_HOST = 0  # the host of the servers


@dataclass(frozen=True)
class ExchangePhase:
    """Bytes: what every seat sends to other hosts, and what leaves and reaches every host."""

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
    """Everybody adds up everything, or each its share and then collects the others'."""
    members = len(layout.seats)
    return 1 if members <= 2 or members * stretch_bytes < LITTLE_BYTES else 2


def allreduce_phases(layout: WorkerLayout, stretch_bytes: int) -> list[ExchangePhase]:
    """Everybody sends its partial sums to those who add them up; if each adds up a share, that is sent back."""
    if phase_count(layout, stretch_bytes) == 1:
        return [_all_to_all_phase(layout, lambda seat: stretch_bytes * layout.partial_sums[seat])]
    share = stretch_bytes // len(layout.seats)
    return [
        _all_to_all_phase(layout, lambda seat: share * layout.partial_sums[seat]),
        _all_to_all_phase(layout, lambda seat: share),
    ]


def encoded_phases(layout: WorkerLayout, lane_bytes: int) -> list[ExchangePhase]:
    """Every lane goes to every other worker."""
    return [_all_to_all_phase(layout, lambda seat: lane_bytes * layout.lane_counts[seat])]


def push_pull_phases(
    layout: WorkerLayout, pushed_bytes: Callable[[int], int], pulled_bytes: Callable[[int], int]
) -> list[ExchangePhase]:
    """There and back, for the workers that are not on the servers' host."""
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
    """Each seat sends so much to every worker on another host."""
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
