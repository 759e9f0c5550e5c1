"""Shapes of trials: asked from a probe process, once for all trials that differ in nothing that matters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from shoal.errors import ShoalError
from shoal.fleet.engine import Node
from shoal.jobs.coroutines import Steps
from shoal.jobs.fork_servers import ForkServerPool, hold_data
from shoal.jobs.probes import probe_steps
from shoal.jobs.search.journal import ShapeRow
from shoal.jobs.search.trials import MACHINE_CODES, SEARCH_CODES, describe_failure, failure_code
from shoal.plan.costs.units import format_gigabytes
from shoal.plan.search.trial import ShapeWanted
from shoal.spec.job import Job

STEP_OVERHEAD_FLOPS = 50e6
"""What a step costs besides its FLOPs: a small step is not free."""
MAX_DEATHS = 3
"""How often the process that finds out a shape may be killed before the trial counts as failed."""
FACT_FIELDS = {
    "parameters": "parameters",
    "flops": "flops_per_sample",
    "size": "size_bytes",
    "latency": "latency_ms",
}
_WITHOUT_SHAPE = {
    "name", "optimizer", "schedule", "clip", "self_check", "checkpoint", "best", "stop_early", "elastic", "network",
    "plan", "watchers", "export", "faults", "engine", "workers", "search", "device", "threads", "metrics",
}  # fmt: skip
"""Fields that change neither the steps of a job nor their cost. The optimizer's name matters for the memory."""


class ShapeProbe:
    """Shapes by the parts of a job that matter. Belongs to the search's thread."""

    def __init__(self, fork_servers: ForkServerPool, nodes: list[Node], *, latency: bool = False) -> None:
        self._fork_servers = fork_servers
        self._memory_bytes = max((node.memory_bytes for node in nodes), default=0)
        self._latency = latency
        self._known: dict[str, Mapping[str, Any]] = {}

    def ask(self, wanted: ShapeWanted, job: Job | ShoalError, cost: str) -> Steps[ShapeRow]:
        """The shape of a trial, as steps that do not block. A job that cannot be trained has a failure instead. Raises
        what would stop every other trial, too."""
        asked = ShapeRow(
            trial=wanted.trial, changes=dict(wanted.changes), units=0, cost=0.0, memory=list(wanted.memory)
        )
        if isinstance(job, ShoalError):
            return asked.model_copy(update={"failure": describe_failure(job, None)})
        key = shape_key(job)
        if key not in self._known:
            try:
                self._known[key] = yield from self._measure(job)
            except (ShoalError, RuntimeError) as failure:
                code = failure_code(failure)
                if code in SEARCH_CODES:
                    raise
                machine = code in MACHINE_CODES
                return asked.model_copy(update={"failure": describe_failure(failure, job), "machine": machine})
        return asked.model_copy(update=self._fields(job, self._known[key], cost))

    def _measure(self, job: Job) -> Steps[Mapping[str, Any]]:
        """What a process finds out. One that is killed says nothing about the job: another one is asked."""
        one_run, fork_server = job.fold(0), self._fork_servers.for_job(job)
        hold_data(fork_server, one_run)
        for deaths in range(MAX_DEATHS):
            try:
                return (yield from probe_steps("shape", one_run, fork_server, latency=self._latency))
            except ShoalError as failure:
                if failure_code(failure) != "SH603" or deaths == MAX_DEATHS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _fields(self, job: Job, found: Mapping[str, Any], cost: str) -> dict[str, Any]:
        folds = job.fold_count
        needed = float(found["memory_bytes"]) / job.workers_per_replica
        limit, room = job.limits.memory_bytes, self._memory_bytes
        if limit is not None and (not room or limit < room):
            room, owner = limit, "limits.memory is"
        else:
            owner = "the machine has"
        too_large = bool(room) and needed > room
        has = f"SH634: it needs at least {format_gigabytes(needed)}, {owner} {format_gigabytes(room)}"
        boundaries = list(found["boundaries"])
        nothing = "" if boundaries else "the job has no validation samples"
        return {
            "units": folds if folds > 1 else len(boundaries),
            "cost": folds * training_cost(job, found, cost),
            "facts": {fact: float(found[name]) for fact, name in FACT_FIELDS.items() if name in found},
            "boundaries": [] if folds > 1 else boundaries,
            "failure": has if too_large else nothing,
            "machine": too_large,
        }


def training_cost(job: Job, found: Mapping[str, Any], cost: str) -> float:
    """Virtual time of one training: a pure function of the job. FLOPs count in thousand millions."""
    steps = float(found["steps"])
    if cost == "steps":
        return steps
    if cost == "samples":
        return steps * job.batch_size
    return steps * (float(found["flops_per_sample"]) * job.batch_size + STEP_OVERHEAD_FLOPS) / 1e9


def shape_key(job: Job) -> str:
    """Equal for jobs of the same shape."""
    body = job.model_dump(mode="json", exclude=_WITHOUT_SHAPE)
    body |= {"optimizer": job.optimizer.name, "lanes": job.lane_count}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
