"""A finished run's model, built again to evaluate or predict with it."""

from __future__ import annotations

from collections.abc import Callable

from shoal.checkpoint.export import load_weights
from shoal.lanes.replica import Replica
from shoal.paramserver.sparse.offline import bind_checkpoint_rows
from shoal.spec.job import Job
from shoal.strategies.make import build_replica
from shoal.tasks.task import Task
from shoal.train.devices import pick_device


def build_trained_replica(job: Job, *, weights: str, rows: str, report: Callable[..., object]) -> tuple[Task, Replica]:
    """`weights`: the exported file. `rows`: the checkpoint with the rows of sparse tables, if the model has any."""
    task, replica = build_replica(
        job.model_copy(update={"init_from": None}),
        pick_device(job.device),
        example=None,
        steps=1,
        steps_per_epoch=1,
        report=report,
    )
    if replica.tables:
        bind_checkpoint_rows(replica.tables, rows, seed=job.seed)
    replica.model.load_state_dict(load_weights(weights))
    return task, replica
