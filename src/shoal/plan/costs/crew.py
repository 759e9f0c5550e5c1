"""The workers of a choice: where they are, what they carry, and how much slower than undisturbed each is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.plan import balance
from shoal.plan.costs.facts import Choice, Machine, Measured


@dataclass(frozen=True)
class Crew:
    """By seat. `slowness` is how many times as long as on an idle core of this machine any work takes. `partials` are
    how many sums of its lanes a worker has to send, when they are added up on the tree."""

    lanes: int
    host: Mapping[int, int]
    carries: Mapping[int, int]
    partials: Mapping[int, int]
    slowness: Mapping[int, float]

    @property
    def seats(self) -> list[int]:
        return list(self.carries)


def crew(choice: Choice, measured: Measured, machine: Machine) -> Crew:
    """Workers who are so slow that they carry nothing are left out."""
    numbers = numbers_on(choice, machine)
    places = [(h, k) for h, number in enumerate(numbers) for k in range(number)]
    host = {seat: h for seat, (h, _) in enumerate(places)}
    slowness = {seat: slowness_at(choice, machine, h, numbers[h], k) for seat, (h, k) in enumerate(places)}
    lane_s = measured.times[choice.threads].lane_s
    runs = balance.shares(measured.lanes, {seat: lane_s * slow for seat, slow in slowness.items()})
    working = {seat: run for seat, run in runs.items() if run}
    return Crew(
        lanes=measured.lanes,
        host={seat: host[seat] for seat in working},
        carries={seat: len(run) for seat, run in working.items()},
        partials={seat: balance.partials(run[0], run[-1] + 1, measured.lanes) for seat, run in working.items()},
        slowness={seat: slowness[seat] for seat in working},
    )


def numbers_on(choice: Choice, machine: Machine) -> list[int]:
    """How many workers on each host: what others brought, one on each, the rest where there is most room."""
    hosts = machine.hosts[: choice.hosts]
    numbers = [host.brought or 1 for host in hosts]
    free = [h for h, host in enumerate(hosts) if not host.brought]
    for _ in range(choice.workers - sum(numbers)):
        crowded = [(numbers[h] + 1) / (hosts[h].cores * hosts[h].speed) for h in free]
        numbers[free[crowded.index(min(crowded))]] += 1
    return numbers


def slowness_at(choice: Choice, machine: Machine, host: int, workers: int, place: int) -> float:
    """Of one of so many workers there. They share the cores; and cores that are all busy are slower (memory, heat, two
    to one): with each doubling by the same factor."""
    there = machine.hosts[host]
    busy = workers * choice.threads
    doublings = math.log2(max(min(busy, there.cores) / choice.threads, 1.0))
    own = there.each[place] if place < len(there.each) else 1.0
    return max(1.0, busy / there.cores) * math.pow(machine.crowding, doublings) / (there.speed * own)
