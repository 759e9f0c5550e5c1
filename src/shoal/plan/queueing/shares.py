"""How many workers each job of a queue gets now: what a policy is asked, and the plainest policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.plan.costs.units import format_gigabytes
from shoal.plan.queueing.entry import JobNeeds, QueueEntry


@dataclass(frozen=True)
class Share:
    """Workers of a job, and why it has so many. `nodes`: where the policy wants each of them; empty: anywhere."""

    workers: int
    why: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job besides its entry. Times are of the daemon's monotonic clock.

    `turn_s`: for how long its present attempt has had workers. `speeds`: measured steps per second by number of
    workers. `remaining`: steps that are left; None if unknown.
    """

    waiting_since_s: float = 0.0
    served_s: float = 0.0
    turn_s: float = 0.0
    speeds: Mapping[int, float] = field(default_factory=dict)
    remaining: float | None = None


@dataclass(frozen=True)
class CoreCapacity:
    """Cores and memory by node, and the most cores that the jobs of a user may have at a time.

    `seats`: `nodes` has places for workers instead, each for one worker with any number of threads; quotas count them
    too. `lost`: hosts of the cluster that cannot be reached. They are in `nodes` while they may come back at once.
    """

    nodes: Mapping[str, int]
    quotas: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    seats: bool = False
    lost: tuple[str, ...] = ()

    @property
    def cores(self) -> int:
        return sum(self.nodes.values())


def exceeds(needs: JobNeeds, cluster: CoreCapacity) -> bool:
    """Whether even the least workers of a job need more cores than there are. They then share cores, as with
    `shoal run`."""
    return needs.least * needs.cores_per_worker > cluster.cores


def misfit(needs: JobNeeds, cluster: CoreCapacity) -> str:
    """Why the least workers of a job would not fit even if nobody else were there; '' if they would."""
    if not cluster.nodes:
        return "It waits: there is no machine."
    most = max(cluster.nodes.values())
    cores = most if exceeds(needs, cluster) else needs.cores_per_worker
    memory = needs.memory_bytes * needs.copies
    if cores > most:
        return f"It waits: a worker needs {cores} cores, and no machine has more than {most}."
    rooms = [(own // cores, cluster.memory_bytes.get(name)) for name, own in cluster.nodes.items()]
    room = sum(free if known is None or not memory else min(free, known // memory) for free, known in rooms)
    least = 1 if exceeds(needs, cluster) else -(-needs.least // needs.gang) * needs.gang
    if room >= least:
        return ""
    wanted = f"{cores} core{'s' if cores > 1 else ''} and {format_gigabytes(memory)} of memory"
    if not room:
        return f"It waits: no machine has the {wanted} that a worker needs."
    return f"It waits: the machines have room for {room} of its {least} workers, with {wanted} for each."


class SharePolicy(Protocol):
    """Called on events. A running job that gets no workers is saved and waits; a waiting one that gets some is
    started. A share without workers says why."""

    def divide(
        self,
        now_s: float,
        running: Sequence[QueueEntry],
        ready: Sequence[QueueEntry],
        *,
        cluster: CoreCapacity,
        facts: Mapping[int, JobFacts],
    ) -> dict[int, Share]:
        """By job. `ready` is in the order in which jobs should start."""


class FirstComeFirstServed:
    """Each job gets what it asks for at most, as far as there is room, and keeps it to its end.

    A job that does not fit holds up those behind it, unless only the quota of its user is in its way.
    """

    def divide(
        self,
        now_s: float,
        running: Sequence[QueueEntry],
        ready: Sequence[QueueEntry],
        *,
        cluster: CoreCapacity,
        facts: Mapping[int, JobFacts],
    ) -> dict[int, Share]:
        shares = {entry.id: Share(entry.workers, entry.reason) for entry in running}
        used = Counter[str]()
        for entry in running:
            used[entry.user] += entry.workers * entry.needs.cores_per_worker
        for entry in ready:
            room, quota = cluster.cores - used.total(), cluster.quotas.get(entry.user, cluster.cores)
            if not fitting(entry.needs, room=room, whole=cluster.cores):
                shares[entry.id] = Share(0, f"{room} of {cluster.cores} cores are free")
                break
            allowed = min(room, quota - used[entry.user])
            if workers := fitting(entry.needs, room=allowed, whole=cluster.cores):
                shares[entry.id] = Share(workers, f"{workers} of {entry.needs.most} workers fit")
                used[entry.user] += workers * entry.needs.cores_per_worker
            else:
                shares[entry.id] = Share(0, f"the jobs of {entry.user} use {used[entry.user]} of {quota} cores")
        return shares


def fitting(needs: JobNeeds, *, room: int, whole: int) -> int:
    """How many workers of a job fit into a number of free cores; 0 if fewer than its least do.

    A job that needs more than the whole cluster gets it all: its workers then share cores, as with `shoal run`.
    """
    workers = min(room // needs.cores_per_worker, needs.most)
    workers -= workers % needs.gang
    if workers >= needs.least:
        return workers
    alone = room >= whole and needs.least * needs.cores_per_worker > whole
    return needs.least if alone else 0
