"""Random histories of a cluster: jobs arrive and end, nodes come and go, speeds are measured, the policy decides."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from shoal.plan.scheduling import Decision, JobView, MeasuredSpeed, NodeView, SchedulingPolicy, Weighting

PATIENCE_S = 300.0
WEIGHTING = Weighting(patience_s=PATIENCE_S)
USERS = ("ann", "bob", "cid")
LANES = 8


@dataclass
class History:
    """`step` lets time pass, decides, and checks what must hold after every decision."""

    seed: int
    jobs: dict[str, JobView] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    current: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ever_ran: set[str] = field(default_factory=set)
    now: float = 0.0
    made: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.nodes = {f"n{at}": self.node() for at in range(self.rng.randint(1, 4))}
        quotas = {user: self.rng.randint(1, 6) for user in USERS if self.rng.random() < 0.3}
        self.policy = SchedulingPolicy(WEIGHTING, quotas)

    def node(self) -> NodeView:
        return NodeView(self.rng.choice((1, 2, 4, 8)), self.rng.choice((8, 16, 32)))

    def arrive(self, **changes: object) -> JobView:
        rng, self.made = self.rng, self.made + 1
        gang = rng.choice((1, 1, 1, 2))
        least = gang * rng.choice((1, 1, 1, 2, 3))
        job = JobView(
            id=f"j{self.made}",
            curve=MeasuredSpeed(LANES, {}, gang),
            least=least,
            most=least + gang * rng.randint(0, 6),
            gang=gang,
            priority=rng.choice((0, 0, 0, 1, 3)),
            user=rng.choice(USERS),
            submitted_s=self.now,
            remaining=rng.choice((None, rng.uniform(1, 500))),
            slots=rng.choice((1, 1, 1, 2)),
            memory_bytes=rng.choice((0, 1, 4, 9)),
        )
        job = replace(job, **changes)
        self.jobs[job.id], self.work[job.id] = job, job.remaining or rng.uniform(1, 500)
        return job

    def disturb(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((0, 1, 1, 2))):
            self.arrive()
        if rng.random() < 0.15 and len(self.nodes) > 1:
            del self.nodes[rng.choice(sorted(self.nodes))]
        if rng.random() < 0.15:
            self.nodes[f"n{rng.randint(0, 9)}"] = self.node()

    def step(self, seconds: float) -> Decision:
        self.now += seconds
        for key in list(self.current):
            self._pass(key, seconds)
        decision = self.policy.decide(self.now, self.jobs, self.nodes, self.current)
        self.check(decision)
        self.current = dict(decision.allocation)
        self.ever_ran |= set(self.current)
        return decision

    def _pass(self, key: str, seconds: float) -> None:
        job, workers = self.jobs[key], len(self.current[key])
        self.work[key] -= seconds * workers**0.7
        if self.work[key] <= 0:
            del self.jobs[key], self.work[key], self.current[key]
            return
        curve = job.curve
        nodes = len(set(self.current[key]))
        if (workers, nodes) not in curve.seconds:
            curve = curve.with_measurement(workers, nodes, workers**-0.7)
        left = None if job.remaining is None else self.work[key]
        self.jobs[key] = replace(job, curve=curve, remaining=left, served_s=job.served_s + seconds)

    def can_ever_run(self, job: JobView) -> bool:
        fits = sum(
            min(node.slots // job.slots, node.memory_bytes // job.memory_bytes if job.memory_bytes else 99)
            for node in self.nodes.values()
        )
        within_quota = job.least * job.slots <= self.policy.quotas.get(job.user, 99)
        return fits >= job.least and within_quota

    def check(self, decision: Decision) -> None:
        for key, nodes in decision.allocation.items():
            job = self.jobs[key]
            assert job.least <= len(nodes) <= job.most
            assert len(nodes) % job.gang == 0
            assert len(nodes) <= max(job.curve.most, job.least)
            assert list(nodes) == [node for node in dict.fromkeys(nodes) for _ in range(nodes.count(node))]
        self._check_nodes(decision)
        self._check_quotas(decision)
        self._check_priorities(decision)
        assert all(decision.why(key) for key in self.jobs)
        again = SchedulingPolicy(WEIGHTING, self.policy.quotas).decide(self.now, self.jobs, self.nodes, self.current)
        assert again.allocation == decision.allocation

    def _check_nodes(self, decision: Decision) -> None:
        slots: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        for key, nodes in decision.allocation.items():
            for node in nodes:
                slots[node] += self.jobs[key].slots
                memory[node] += self.jobs[key].memory_bytes
        for node in slots:
            assert slots[node] <= self.nodes[node].slots
            assert memory[node] <= self.nodes[node].memory_bytes

    def _check_quotas(self, decision: Decision) -> None:
        used: Counter[str] = Counter()
        for key, nodes in decision.allocation.items():
            used[self.jobs[key].user] += self.jobs[key].slots * len(nodes)
        assert all(used[user] <= limit for user, limit in self.policy.quotas.items())

    def _check_priorities(self, decision: Decision) -> None:
        """A job does not wait while one of the same shape and user and of lower priority runs, unless that is late."""
        for key, job in self.jobs.items():
            if key in decision.allocation:
                continue
            for other in (self.jobs[name] for name in decision.allocation):
                late = self.now - other.submitted_s - other.served_s > PATIENCE_S
                assert late or other.priority >= job.priority or _shape(other) != _shape(job)


def _shape(job: JobView) -> tuple[object, ...]:
    return job.least, job.gang, job.slots, job.memory_bytes, job.user
