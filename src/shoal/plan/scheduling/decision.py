"""What the policy decided, and why each job has what it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.plan.scheduling.division import Room
from shoal.plan.scheduling.placement import Demand
from shoal.plan.scheduling.sizes import SizeTable
from shoal.plan.scheduling.views import Allocation, Ints, JobView


@dataclass(frozen=True)
class Decision:
    """`allocation` has every job that gets workers. `why` describes one job, also one that waits."""

    allocation: Allocation
    jobs: Mapping[str, JobView]
    _tables: Sequence[SizeTable]
    _ranks: Ints
    _demands: Sequence[Demand]
    _room: Room
    _quotas: Mapping[str, int]

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self.jobs)}

    @cached_property
    def _wanted(self) -> dict[str, int]:
        """Workers by job, before they were placed."""
        return {demand.job.id: demand.workers for demand in self._demands}

    def why(self, job_id: str) -> str:
        """One or two sentences for a person."""
        job, row = self.jobs[job_id], self._rows[job_id]
        have = len(self.allocation.get(job_id, ()))
        if not have:
            return self._why_waiting(job, row)
        nodes = len(set(self.allocation[job_id]))
        told = f"It has {_count(have, 'worker')} on {_count(nodes, 'node')}."
        return f"{told} {self._why_not_more(job, row, have)}"

    def _why_waiting(self, job: JobView, row: int) -> str:
        if not len(self._tables[row].workers):
            return f"It waits: the cluster has {self._room.slots} slots, and its smallest size does not fit."
        if self._wanted.get(job.id):
            return "It waits: no nodes have the free slots and the memory that its workers need."
        quota = self._quotas.get(job.user, self._room.slots)
        if self._smallest(row) > quota:
            return f"It waits: it needs {self._smallest(row)} slots at least, and the quota of {job.user} is {quota}."
        if job.user in self._quotas and self._used(job.user) + self._smallest(row) > self._quotas[job.user]:
            return f"It waits: the jobs of {job.user} use {self._used(job.user)} of {self._quotas[job.user]} slots."
        ahead = sum(self._ranks[self._rows[other]] < self._ranks[row] for other in self.allocation)
        return f"It waits: {_count(ahead, 'job')} that come first use the {self._room.slots} slots."

    def _why_not_more(self, job: JobView, row: int, have: int) -> str:
        table = self._tables[row]
        larger = np.flatnonzero(table.workers > have)
        if have < self._wanted.get(job.id, 0):
            return f"It should have {self._wanted[job.id]}, but no nodes have the free slots and the memory for more."
        if not len(larger):
            return _why_largest(job, have, self._room.slots)
        if job.user in self._quotas and self._used(job.user) + job.slots > self._quotas[job.user]:
            return f"The jobs of {job.user} use all {self._quotas[job.user]} slots of the quota."
        ratios = np.exp(table.log_speeds[larger] - table.log_speeds[table.workers == have][0])
        best = int(np.argmax(ratios))
        if ratios[best] <= 1.0:
            return "More workers would not make it faster."
        more = int(table.workers[larger[best]])
        if self._used() + job.slots > self._room.slots:
            return (
                f"{_count(more, 'worker')} would make it {ratios[best]:.3g} times as fast; "
                "other jobs gain more from these slots."
            )
        return f"A change to {_count(more, 'worker')} does not fit, or would cost more than it brings."

    def _smallest(self, row: int) -> int:
        return int(self._tables[row].slots[0])

    def _used(self, user: str | None = None) -> int:
        allocation = self.allocation.items()
        return sum(self.jobs[key].slots * len(at) for key, at in allocation if user in (None, self.jobs[key].user))


def _why_largest(job: JobView, have: int, slots: int) -> str:
    if have + job.gang > job.most:
        return f"It asked for at most {job.most}."
    if have >= job.curve.most:
        return f"Its speed with more than {have} is not known yet; it may grow once this size is measured."
    return f"The next size does not fit into the {slots} slots of the cluster."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
