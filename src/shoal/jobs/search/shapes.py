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
from shoal.jobs.search.trials import describe_failure, failure_code
from shoal.plan.costs.units import format_gigabytes
from shoal.spec.job import Job

STEP_OVERHEAD_FLOPS = 50e6
"""What a step costs besides its FLOPs: a small step is not free."""
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

    def ask(self, trial: int, job: Job | ShoalError, changes: Mapping[str, Any], cost: str) -> Steps[ShapeRow]:
        """The shape of a trial, as steps that do not block. A job that cannot be trained has a failure instead."""
        failed = ShapeRow(trial=trial, changes=dict(changes), units=0, cost=0.0)
        if isinstance(job, ShoalError):
            return failed.model_copy(update={"failure": describe_failure(job)})
        key = shape_key(job)
        if key not in self._known:
            try:
                one_run, fork_server = job.fold(0), self._fork_servers.for_job(job)
                hold_data(fork_server, one_run)
                self._known[key] = yield from probe_steps("shape", one_run, fork_server, latency=self._latency)
            except (ShoalError, RuntimeError) as failure:
                machine = failure_code(failure) == "SH407"
                return failed.model_copy(update={"failure": describe_failure(failure), "machine": machine})
        return self._row(trial, job, changes, self._known[key], cost)

    def _row(self, trial: int, job: Job, changes: Mapping[str, Any], found: Mapping[str, Any], cost: str) -> ShapeRow:
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
        return ShapeRow(
            trial=trial,
            changes=dict(changes),
            units=folds if folds > 1 else len(boundaries),
            cost=folds * training_cost(job, found, cost),
            facts={fact: float(found[name]) for fact, name in FACT_FIELDS.items() if name in found},
            boundaries=[] if folds > 1 else boundaries,
            failure=has if too_large else nothing,
            machine=too_large,
        )


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
