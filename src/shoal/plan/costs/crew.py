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
    numbers = _numbers(choice, machine)
    host = dict(enumerate(h for h, number in enumerate(numbers) for _ in range(number)))
    slowness = {seat: _slowness(choice, machine, h, numbers[h]) for seat, h in host.items()}
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


def _numbers(choice: Choice, machine: Machine) -> list[int]:
    """How many workers on each host: one on each, the others where there is most room."""
    hosts = machine.hosts[: choice.hosts]
    numbers = [1] * len(hosts)
    for _ in range(choice.workers - len(hosts)):
        crowding = [(number + 1) / (host.cores * host.speed) for number, host in zip(numbers, hosts, strict=True)]
        numbers[crowding.index(min(crowding))] += 1
    return numbers


def _slowness(choice: Choice, machine: Machine, host: int, workers: int) -> float:
    """They share the cores; and cores that are all busy are slower (memory, heat, two to one): with each doubling by
    the same factor."""
    there = machine.hosts[host]
    busy = workers * choice.threads
    doublings = math.log2(max(min(busy, there.cores) / choice.threads, 1.0))
    return max(1.0, busy / there.cores) * math.pow(machine.crowding, doublings) / there.speed
