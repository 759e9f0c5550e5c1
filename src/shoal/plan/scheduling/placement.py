"""Which nodes the workers of each job get.

A job stays where it is if its number of workers stays the same. Others are placed from the largest to the smallest: in
one node if they fit, else in whole nodes, so that at most one job that spans nodes uses a node. Smaller jobs make way.
A job that fits nowhere is made smaller.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.plan.scheduling.views import JobView, NodeId, NodeView


@dataclass(frozen=True, slots=True)
class Demand:
    """A job with the numbers of workers that would do, and which of them it should get.

    `rank`: its place in the order of jobs; the first is 0.
    """

    job: JobView
    counts: tuple[int, ...]
    size: int
    rank: int = 0

    @property
    def workers(self) -> int:
        return self.counts[self.size]

    def smaller(self) -> Iterator[Demand]:
        """This demand, then smaller ones."""
        for size in range(self.size, -1, -1):
            yield Demand(self.job, self.counts, size, self.rank)


@dataclass(slots=True)
class NodeRoom:
    """What is free on a node, and who is there."""

    slots: int
    memory_bytes: int
    capacity: int
    workers: dict[str, int] = field(default_factory=dict)

    def fits(self, job: JobView) -> int:
        by_slots = self.slots // job.slots
        return min(by_slots, self.memory_bytes // job.memory_bytes) if job.memory_bytes else by_slots


class Placement:
    """Free room of all nodes while jobs are placed one after the other."""

    def __init__(self, nodes: Mapping[NodeId, NodeView]) -> None:
        self.rooms = {key: NodeRoom(node.slots, node.memory_bytes, node.slots) for key, node in nodes.items()}
        self.placed: dict[str, tuple[NodeId, ...]] = {}
        self._demands: dict[str, Demand] = {}
        self._by_free: dict[int, dict[NodeId, None]] = {}
        self._largest = max((node.slots for node in nodes.values()), default=0)

    def keep(self, demands: Sequence[Demand], current: Mapping[str, tuple[NodeId, ...]]) -> list[Demand]:
        """Leave jobs where they are, if they have the right size. Returns the others. Before anything is placed."""
        others, rooms, placed, known = [], self.rooms, self.placed, self._demands
        for demand in demands:
            job = demand.job
            where = current.get(job.id)
            if not where or len(where) != demand.counts[demand.size] or not self._hold(job, where, rooms):
                others.append(demand)
            else:
                placed[job.id], known[job.id] = where, demand
        return others

    @staticmethod
    def _hold(job: JobView, where: tuple[NodeId, ...], rooms: Mapping[NodeId, NodeRoom]) -> bool:
        counts = {where[0]: len(where)} if where[0] == where[-1] else Counter(where)
        for node, count in counts.items():
            room = rooms.get(node)
            if room is None or room.slots < count * job.slots or room.memory_bytes < count * job.memory_bytes:
                return False
        for node, count in counts.items():
            room = rooms[node]
            room.slots -= count * job.slots
            room.memory_bytes -= count * job.memory_bytes
            room.workers[job.id] = count
        return True

    def sort_nodes(self) -> None:
        """Once all jobs that stay are known."""
        for key, room in self.rooms.items():
            self._by_free.setdefault(room.slots, {})[key] = None

    def put(self, demand: Demand, where: Sequence[NodeId]) -> None:
        job = demand.job
        self.placed[job.id], self._demands[job.id] = tuple(where), demand
        for node in dict.fromkeys(where):
            self._change(node, job, where.count(node))

    def demands(self) -> list[Demand]:
        """Of the jobs that are placed."""
        return list(self._demands.values())

    def remove(self, job_id: str) -> Demand:
        demand, where = self._demands.pop(job_id), self.placed.pop(job_id)
        for node in dict.fromkeys(where):
            self._change(node, demand.job, -where.count(node))
        return demand

    def _change(self, node: NodeId, job: JobView, workers: int) -> None:
        room = self.rooms[node]
        del self._by_free[room.slots][node]
        room.slots -= workers * job.slots
        room.memory_bytes -= workers * job.memory_bytes
        self._by_free.setdefault(room.slots, {})[node] = None
        room.workers[job.id] = room.workers.get(job.id, 0) + workers
        if not room.workers[job.id]:
            del room.workers[job.id]

    def place(self, demand: Demand, preferred: Sequence[NodeId]) -> list[Demand] | None:
        """Place a job; returns those that made way. None if it fits nowhere."""
        job, workers = demand.job, demand.workers
        one = self._one_node(job, workers, preferred)
        if one is not None:
            self.put(demand, (one,) * workers)
            return []
        if (where := self._empty_nodes(job, workers, preferred)) is not None:
            self.put(demand, where)
            return []
        return self._make_way(demand)

    def _one_node(self, job: JobView, workers: int, preferred: Sequence[NodeId]) -> NodeId | None:
        """The fullest node that has room; one where the job already is, if possible."""
        for node in preferred:
            if node in self.rooms and self.rooms[node].fits(job) >= workers:
                return node
        for free in sorted(key for key, nodes in self._by_free.items() if nodes and key >= workers * job.slots):
            for node in self._by_free[free]:
                if self.rooms[node].fits(job) >= workers:
                    return node
        return None

    def _empty_nodes(self, job: JobView, workers: int, preferred: Sequence[NodeId]) -> tuple[NodeId, ...] | None:
        """Empty nodes with room for all workers together; those where the job already is come first."""
        found: list[NodeId] = []
        known = [node for node in dict.fromkeys(preferred) if node in self.rooms and not self.rooms[node].workers]
        sizes = sorted((key for key, nodes in self._by_free.items() if nodes), reverse=True)
        others = (node for free in sizes for node in self._by_free[free] if not self.rooms[node].workers)
        for node in dict.fromkeys([*known, *others]) if known else others:
            found += [node] * min(self.rooms[node].fits(job), workers - len(found))
            if len(found) == workers:
                return tuple(found)
        return None

    def _make_way(self, demand: Demand) -> list[Demand] | None:
        """Clear nodes whose jobs are smaller than this one: those with most free slots, as few as possible."""
        chosen = self._one_clearable(demand) or self._several_clearable(demand)
        if chosen is None:
            return None
        moved = [self.remove(key) for node in chosen for key in list(self.rooms[node].workers)]
        self.place(demand, chosen)
        return moved

    def _one_clearable(self, demand: Demand) -> list[NodeId] | None:
        if demand.workers * demand.job.slots > self._largest:
            return None
        fitting = (it for it in self._clearable(demand) if self._cleared(it, demand.job) >= demand.workers)
        node = next(fitting, None)
        return None if node is None else [node]

    def _several_clearable(self, demand: Demand) -> list[NodeId] | None:
        chosen: list[NodeId] = []
        left = demand.workers
        for node in self._clearable(demand):
            chosen.append(node)
            left -= self._cleared(node, demand.job)
            if left <= 0:
                return chosen
        return None

    def _clearable(self, demand: Demand) -> Iterator[NodeId]:
        """Nodes whose jobs are all smaller than this one, most free slots first."""
        need = demand.workers * demand.job.slots
        for free in sorted(self._by_free, reverse=True):
            for node in list(self._by_free[free]):
                if all(self._slots_of(key) < need for key in self.rooms[node].workers):
                    yield node

    def _slots_of(self, job_id: str) -> int:
        demand = self._demands[job_id]
        return demand.workers * demand.job.slots

    def _cleared(self, node: NodeId, job: JobView) -> int:
        """How many workers of the job the node takes when everybody there is gone."""
        room = self.rooms[node]
        others = [self._demands[key].job for key in room.workers]
        held = sum(room.workers[other.id] * other.memory_bytes for other in others)
        by_slots = room.capacity // job.slots
        return min(by_slots, (room.memory_bytes + held) // job.memory_bytes) if job.memory_bytes else by_slots

    def spread(self, demand: Demand) -> bool:
        """Use free room wherever it is."""
        where: list[NodeId] = []
        for node in sorted(self.rooms, key=lambda key: -self.rooms[key].slots):
            where += [node] * min(self.rooms[node].fits(demand.job), demand.workers - len(where))
            if len(where) == demand.workers:
                self.put(demand, where)
                return True
        return False


def place_all(
    demands: Sequence[Demand],
    nodes: Mapping[NodeId, NodeView],
    current: Mapping[str, tuple[NodeId, ...]],
    waiting: Sequence[Demand] = (),
) -> dict[str, tuple[NodeId, ...]]:
    """Nodes for every demand that fits. Never more than a node has.

    Jobs of `waiting` come last. They run where jobs before them have slots but not the memory, for example.
    """
    placement = Placement(nodes)
    pending = placement.keep(demands, current)
    placement.sort_nodes()
    unplaced = sorted(_largest_first(placement, pending, current), key=lambda it: it.rank)
    for demand in unplaced:
        _squeeze_in(placement, demand)
    for demand in waiting if unplaced else ():
        placement.spread(demand)
    return placement.placed


def _largest_first(
    placement: Placement, pending: list[Demand], current: Mapping[str, tuple[NodeId, ...]]
) -> list[Demand]:
    unplaced = []
    heap = [_by_size(demand) for demand in pending]
    heapq.heapify(heap)
    while heap:
        demand = heapq.heappop(heap)[-1]
        moved = placement.place(demand, current.get(demand.job.id, ()))
        if moved is None:
            unplaced.append(demand)
        for other in moved or ():
            heapq.heappush(heap, _by_size(other))
    return unplaced


def _by_size(demand: Demand) -> tuple[int, int, Demand]:
    return (-demand.workers * demand.job.slots, demand.rank, demand)


def _squeeze_in(placement: Placement, demand: Demand) -> None:
    """The largest size that fits into what is free. Else later jobs are removed, the last first, for the smallest."""
    if _refill(placement, demand):
        return
    least = Demand(demand.job, demand.counts, 0, demand.rank)
    later = sorted((it for it in placement.demands() if it.rank > demand.rank), key=lambda it: -it.rank)
    for victim in later:
        placement.remove(victim.job.id)
        if placement.spread(least):
            break
    for victim in reversed(later):
        if victim.job.id not in placement.placed:
            _refill(placement, victim)


def _refill(placement: Placement, demand: Demand) -> bool:
    return any(placement.spread(smaller) for smaller in demand.smaller())
