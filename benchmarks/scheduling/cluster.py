"""The simulated cluster: jobs advance, the policy decides, changes take effect.

In rounds, as published: every `round_s` seconds. On events: also when a job arrives or ends.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.scheduling.job import SimulatedJob, placement_of

Nodes = tuple[int, ...]
Allocations = dict[str, Nodes]


SHORTEST_STEP_S = 1.0
"""Events within a second are one. An epoch that ends within half a second takes none, so time must pass by itself."""


class ClusterPolicy(Protocol):
    def decide(self, now_s: float, jobs: Mapping[str, SimulatedJob], current: Mapping[str, Nodes]) -> Allocations:
        """Nodes by job, one for each GPU. A policy looks only at what its information class allows."""


@dataclass(frozen=True)
class Setting:
    nodes: int = 16
    gpus_per_node: int = 4
    round_s: int = 60
    restart_s: float = 30.0
    interference: float = 0.0
    events: bool = False


@dataclass(frozen=True)
class DecisionRecord:
    t: float
    jobs: int
    gpus_total: int
    gpus_alloc: int
    changed: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Change:
    t: float
    job: str
    before: Nodes
    after: Nodes


@dataclass
class Simulation:
    jobs: Sequence[SimulatedJob]
    policy: ClusterPolicy
    setting: Setting = field(default_factory=Setting)
    now_s: float = 0.0
    current: Allocations = field(default_factory=dict)
    decisions: list[DecisionRecord] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    left: list[SimulatedJob] = field(default_factory=list)
    """Jobs that have not ended."""

    def run(self) -> None:
        self.left = list(self.jobs)
        while self.left:
            self._advance(self._step_s())
            self.left = [job for job in self.left if job.finished_s is None]
            self._decide()

    def _step_s(self) -> float:
        """Seconds to the next round, or to the next event before it."""
        to_round = self.setting.round_s - self.now_s % self.setting.round_s
        if not self.setting.events:
            return to_round
        arrivals = [job.submitted_s - self.now_s for job in self.left if job.submitted_s > self.now_s]
        ends = [end - self.now_s for job in self.left if (end := self._end_s(job, to_round)) is not None]
        return min(to_round, max(min([to_round, *arrivals, *ends]), SHORTEST_STEP_S))

    def _end_s(self, job: SimulatedJob, seconds: float) -> float | None:
        """When the job ends, if that is within so many seconds."""
        if not job.placement or job.remaining > 2 * seconds * job.rate():
            return None
        ahead = copy.copy(job)
        ahead.times = copy.copy(job.times)
        ahead.times.seconds = dict(job.times.seconds)
        ahead.advance(self.now_s, seconds)
        return ahead.finished_s

    def _advance(self, seconds: float) -> None:
        slowed = self._slowed()
        for job in self.left:
            job.advance(self.now_s, seconds, self.setting.interference if job.name in slowed else 0.0)
        self.now_s += seconds

    def _slowed(self) -> set[str]:
        """Jobs that span nodes and share one of them with another such job."""
        if not self.setting.interference:
            return set()
        wide = {key: set(nodes) for key, nodes in self.current.items() if len(set(nodes)) > 1}
        return {key for key, own in wide.items() if any(own & nodes for other, nodes in wide.items() if other != key)}

    def _decide(self) -> None:
        active = {job.name: job for job in self.left if job.submitted_s <= self.now_s}
        self.current = {key: nodes for key, nodes in self.current.items() if key in active}
        if not active:
            return
        began = time.process_time(), time.perf_counter()
        found = self.policy.decide(self.now_s, active, self.current)
        spent = time.process_time() - began[0], time.perf_counter() - began[1]
        self._check(found)
        changed = [job for key, job in active.items() if found.get(key) != self.current.get(key)]
        for job in changed:
            self._reallocate(job, found.get(job.name, ()))
        self.current = found
        total = self.setting.nodes * self.setting.gpus_per_node
        used = sum(map(len, found.values()))
        self.decisions.append(DecisionRecord(self.now_s, len(active), total, used, len(changed), *spent))

    def _check(self, found: Allocations) -> None:
        used = [0] * self.setting.nodes
        for nodes in found.values():
            for node in nodes:
                used[node] += 1
        if max(used) > self.setting.gpus_per_node:
            raise RuntimeError(f"the policy gave a node to too many GPUs: {used}")

    def _reallocate(self, job: SimulatedJob, nodes: Nodes) -> None:
        self.changes.append(Change(self.now_s, job.name, self.current.get(job.name, ()), nodes))
        job.reallocate(placement_of(nodes), self.setting.restart_s)
        if nodes and job.first_alloc_s is None:
            job.first_alloc_s = self.now_s
