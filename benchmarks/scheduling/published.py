"""Two published policies, as their authors' simulator runs them. They show that this simulator is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.scheduling.application import OutOfProfileError
from benchmarks.scheduling.batch import split
from benchmarks.scheduling.cluster import Allocations, Nodes, Setting
from benchmarks.scheduling.job import SimulatedJob, whole_nodes


def _place(wanted: Mapping[str, int], kept: Allocations, setting: Setting) -> Allocations:
    """In this order, each job on the nodes with most free GPUs."""
    free = dict.fromkeys(range(setting.nodes), setting.gpus_per_node)
    for nodes in kept.values():
        for node in nodes:
            free[node] -= 1
    free = {node: count for node, count in free.items() if count > 0}
    found = dict(kept)
    for key, gpus in wanted.items():
        if gpus and not found.get(key):
            found[key] = _emptiest(free, gpus)
    return found


def _emptiest(free: dict[int, int], gpus: int) -> Nodes:
    nodes: list[int] = []
    while len(nodes) < gpus:
        node = max(free, key=lambda it: free[it])
        count = min(free[node], gpus - len(nodes))
        nodes += [node] * count
        free[node] -= count
    return tuple(nodes)


@dataclass
class Tiresias:
    """Two queues. A job that has used much GPU time goes to the second; each is served in order of arrival."""

    setting: Setting
    demotion_gpu_s: float = 3600.0 * 16
    _queues: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    _running: set[str] = field(default_factory=set)
    _checked_s: dict[str, float] = field(default_factory=dict)
    _executed_s: dict[str, float] = field(default_factory=dict)

    def decide(self, now_s: float, jobs: Mapping[str, SimulatedJob], current: Mapping[str, Nodes]) -> Allocations:
        for queue in self._queues:
            queue[:] = [key for key in queue if key in jobs]
        self._queues[0].extend(key for key in jobs if key not in self._checked_s)
        for key, job in jobs.items():
            self._account(key, job, now_s)
        self._running = self._served(jobs)
        kept = {key: nodes for key, nodes in current.items() if key in self._running}
        wanted = {key: jobs[key].gpus_asked for queue in self._queues for key in queue if key in self._running}
        return _place(wanted, kept, self.setting)

    def _account(self, key: str, job: SimulatedJob, now_s: float) -> None:
        if key in self._running:
            self._executed_s[key] = self._executed_s.get(key, 0.0) + now_s - self._checked_s[key]
            if key in self._queues[0] and self._executed_s[key] * job.gpus_asked >= self.demotion_gpu_s:
                self._queues[0].remove(key)
                self._queues[1].append(key)
        self._checked_s[key] = now_s

    def _served(self, jobs: Mapping[str, SimulatedJob]) -> set[str]:
        free, served = self.setting.nodes * self.setting.gpus_per_node, set()
        for queue in self._queues:
            for key in queue:
                if jobs[key].gpus_asked <= free:
                    served.add(key)
                    free -= jobs[key].gpus_asked
        return served


@dataclass
class Optimus:
    """One GPU for each job, then one more where it shortens the remaining time most. It knows true step times."""

    setting: Setting
    _step_s: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def decide(self, now_s: float, jobs: Mapping[str, SimulatedJob], current: Mapping[str, Nodes]) -> Allocations:
        gpus = self._sizes(jobs)
        kept = {key: nodes for key, nodes in current.items() if len(nodes) == gpus[key]}
        smallest_first = sorted(jobs, key=lambda key: gpus[key])
        return _place({key: gpus[key] for key in smallest_first}, kept, self.setting)

    def _sizes(self, jobs: Mapping[str, SimulatedJob]) -> dict[str, int]:
        free = self.setting.nodes * self.setting.gpus_per_node
        gpus, gains = {}, {}
        for key, job in jobs.items():
            gpus[key] = min(free, 1)
            free -= gpus[key]
            gains[key] = self._gain(job, 1) if gpus[key] and free else 0.0
        while free > 0 and max(gains.values()) > 0:
            key = max(gains, key=lambda it: gains[it])
            gpus[key] += 1
            gains[key] = self._gain(jobs[key], gpus[key])
            free -= 1
        return gpus

    def _gain(self, job: SimulatedJob, gpus: int) -> float:
        if gpus + 1 > (1 if job.app.name == "ncf" else job.batch_asked // job.app.min_local):
            return 0.0
        last = job.app.max_epochs - 1
        left = 1.0
        if job.epoch < last:
            left = job.app.iterations(job.batch_asked, last) - job.app.iterations(job.batch_asked, job.epoch)
        return (self._predict_s(job, gpus) - self._predict_s(job, gpus + 1)) * left

    def _predict_s(self, job: SimulatedJob, gpus: int) -> float:
        key = (job.app.name, job.batch_asked, gpus)
        if key not in self._step_s:
            self._step_s[key] = _iteration_s(job, gpus)
        return self._step_s[key]


def _iteration_s(job: SimulatedJob, gpus: int) -> float:
    local, accumulation = split(job.app, job.batch_asked, gpus, always_accumulate=True)
    try:
        step_s, sync_s = job.app.throughput(whole_nodes(gpus), local)
    except OutOfProfileError:
        return float("inf")
    return step_s + (step_s - sync_s) * accumulation
