"""Fork servers for the processes of jobs, one per environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

from shoal.fleet.forkserver import ForkServer
from shoal.jobs.server_group import SERVER_MODULE
from shoal.jobs.worker_group import WORKER_MODULE
from shoal.spec.job import Job

OPTIMIZER_MODULE = "torch._dynamo"  # torch imports it with the first optimizer, which takes a second


class ForkServerPool:
    """One fork server per (interpreter, threads, modules), started on first use and closed with the pool. A `shared`
    fork server serves every job instead, and its creator closes it. Belongs to one thread."""

    def __init__(self, shared: ForkServer | None = None) -> None:
        self._shared = shared
        self._made: dict[tuple[str, int, frozenset[str]], ForkServer] = {}

    def get(self, threads: int, *, modules: Sequence[str] = (), python: str = "") -> ForkServer:
        if self._shared is not None:
            return self._shared
        key = python, threads, frozenset(modules)
        if key not in self._made:
            self._made[key] = make_fork_server(threads, modules=modules, python=python)
        return self._made[key]

    def for_job(self, job: Job) -> ForkServer:
        return self.get(job.threads, modules=modules_to_preload(job))

    def close(self) -> None:
        """Close the fork servers of the pool. No process that they forked is left."""
        while self._made:
            self._made.popitem()[1].close()

    def __enter__(self) -> ForkServerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_fork_server(threads: int, *, modules: Sequence[str] = (), python: str = "") -> ForkServer:
    """A fork server for workers; it imports `modules` once for all of them.

    The one place that sets environment variables: threads are fixed before torch is loaded, and sets iterate in the
    same order in every process.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return ForkServer(environment, [WORKER_MODULE, SERVER_MODULE, OPTIMIZER_MODULE, *modules], python=python)


def modules_to_preload(job: Job) -> list[str]:
    """Modules, besides torch, that every worker of this job imports and that are slow to import."""
    data = job.data
    kinds = {source.kind for source in (data.source, data.validation, data.test) if source is not None}
    wanted = {
        "torchmetrics": bool(job.metrics),
        "sklearn.datasets": "sklearn" in kinds,
        "sklearn.model_selection": data.split.kind in ("kfold", "stratified", "grouped", "holdout"),
        "pyarrow.parquet": "parquet" in kinds,
        "pyarrow.csv": "csv" in kinds,
    }
    return [module for module, needed in wanted.items() if needed]
