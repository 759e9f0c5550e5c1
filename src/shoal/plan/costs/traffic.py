"""What crosses between hosts in a step: pure arithmetic after `parallel.exchange_plan` and `parallel.encoded`.

A phase is over when everybody has what it brings; every host has one link, which its workers share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shoal.plan.costs.crew import Crew
from shoal.plan.costs.facts import Link

LITTLE_BYTES = 1 << 20  # as in parallel.exchange_plan: less than this is added up by everybody, in one phase
BUCKET_BYTES = 1 << 20  # as in parallel.ahead: so much at least leaves at once
DRIVER = 0  # the host of the servers


@dataclass(frozen=True)
class Phase:
    """Bytes: what every seat sends to other hosts, and what leaves and reaches every host."""

    sent: Counter[int]
    leaving: Counter[int]
    reaching: Counter[int]

    def seconds(self, link: Link) -> float:
        if not self.leaving.total():
            return 0.0
        slowest = max(self.leaving.values()) / link.send_bytes_s, max(self.reaching.values()) / link.receive_bytes_s
        return link.latency_s + max(slowest)


def phase_count(crew: Crew, stretch_bytes: int) -> int:
    """Everybody adds up everything, or each its share and then collects the others'."""
    members = len(crew.seats)
    return 1 if members <= 2 or members * stretch_bytes < LITTLE_BYTES else 2


def of_lanes(crew: Crew, stretch_bytes: int) -> list[Phase]:
    """Everybody sends its partial sums to those who add them up; if each adds up a share, that is sent back."""
    if phase_count(crew, stretch_bytes) == 1:
        return [_between(crew, lambda seat: stretch_bytes * crew.partials[seat])]
    share = stretch_bytes // len(crew.seats)
    return [_between(crew, lambda seat: share * crew.partials[seat]), _between(crew, lambda seat: share)]


def of_encoded(crew: Crew, lane_bytes: int) -> list[Phase]:
    """Every lane goes to every other worker."""
    return [_between(crew, lambda seat: lane_bytes * crew.carries[seat])]


def of_servers(crew: Crew, pushed: Callable[[int], int], pulled: Callable[[int], int]) -> list[Phase]:
    """There and back, for the workers that are not on the servers' host."""
    away = {seat: host for seat, host in crew.host.items() if host != DRIVER}
    push, pull = Phase(Counter(), Counter(), Counter()), Phase(Counter(), Counter(), Counter())
    for seat, host in away.items():
        push.sent[seat] += pushed(seat)
        push.leaving[host] += pushed(seat)
        push.reaching[DRIVER] += pushed(seat)
        pull.leaving[DRIVER] += pulled(seat)
        pull.reaching[host] += pulled(seat)
    return [push, pull]


def _between(crew: Crew, size: Callable[[int], int]) -> Phase:
    """Each seat sends so much to every worker on another host."""
    there = Counter(crew.host.values())
    away = {host: len(crew.seats) - number for host, number in there.items()}
    found = Phase(Counter(), Counter(), Counter())
    made = Counter[int]()
    for seat, host in crew.host.items():
        made[host] += size(seat)
        found.sent[seat] += size(seat) * away[host]
        found.leaving[host] += size(seat) * away[host]
    for host, number in there.items():
        found.reaching[host] += (made.total() - made[host]) * number
    return found
