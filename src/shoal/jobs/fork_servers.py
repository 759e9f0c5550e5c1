"""Fork servers for the processes of jobs, one per environment."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from shoal.fleet.forkserver import ForkServer

if TYPE_CHECKING:  # a fork server may be started before the job is read, and before what reads it is imported
    from shoal.spec.job import Job

WORKER_MODULE = "shoal.train.worker"
SERVER_MODULE = "shoal.paramserver.main"
OPTIMIZER_MODULE = "torch._dynamo"  # torch imports it with the first optimizer, which takes a second
METRICS_MODULE = "shoal.tasks.first_metric"
DATA_MODULE = "shoal.data.datasets"
USUAL_THREADS = 1
"""Of a job that says nothing else."""


class ForkServerPool:
    """One fork server per (interpreter, threads, modules), started on first use and closed with the pool. A `shared`
    fork server serves every job instead, and its creator closes it. `preload`: further modules that each imports.
    Belongs to one thread."""

    def __init__(self, shared: ForkServer | None = None, *, preload: Sequence[str] = ()) -> None:
        self._shared = shared
        self._preload = tuple(preload)
        self._early: ForkServer | None = None
        self._made: dict[tuple[str, int, frozenset[str], bool], ForkServer] = {}

    def start_early(self) -> None:
        """Let a fork server import what most jobs need, while the job is still read."""
        self._early = make_fork_server(USUAL_THREADS)

    def get(self, threads: int, *, modules: Sequence[str] = (), python: str = "") -> ForkServer:
        if self._shared is not None:
            return self._shared
        return self._get(threads, modules, python, at_once=True)

    def for_job(self, job: Job) -> ForkServer:
        """The fork server for the job's engine. It imports nothing for an engine whose processes are elsewhere."""
        if self._shared is not None:
            return self._shared
        return self._get(job.threads, modules_to_preload(job), "", at_once=job.engine.shares_run_dir)

    def _get(self, threads: int, modules: Sequence[str], python: str, *, at_once: bool) -> ForkServer:
        key = python, threads, frozenset(modules), at_once
        if key not in self._made:
            further = [*modules, *self._preload]
            early, self._early = self._early, None
            if early is not None and (python, threads, at_once) == ("", USUAL_THREADS, True):
                early.preload(further)
                self._made[key] = early
            else:
                if early is not None:
                    early.close()
                self._made[key] = make_fork_server(threads, modules=further, python=python, at_once=at_once)
        return self._made[key]

    def close(self) -> None:
        """Close the fork servers of the pool. No process that they forked is left."""
        if self._early is not None:
            self._early.close()
            self._early = None
        while self._made:
            self._made.popitem()[1].close()

    def __enter__(self) -> ForkServerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_fork_server(
    threads: int, *, modules: Sequence[str] = (), python: str = "", at_once: bool = True
) -> ForkServer:
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
    preloaded = [WORKER_MODULE, SERVER_MODULE, OPTIMIZER_MODULE, *modules]
    return ForkServer(environment, preloaded, python=python, at_once=at_once)


def hold_data(fork_server: ForkServer, job: Job) -> None:
    """Let the fork server hold the opened data of the job for its workers, where that is possible."""
    from shoal.spec.run_paths import cache_directory

    if job.engine.shares_run_dir and job.fold_count == 1:
        data = job.data.model_dump(mode="json", exclude={"transform", "augment", "loader", "sampler"})
        asked = {"data": data, "seed": job.seed, "base_dir": job.base_dir, "cache_dir": str(cache_directory())}
        fork_server.hold(DATA_MODULE, json.dumps(asked, sort_keys=True))


def modules_to_preload(job: Job) -> list[str]:
    """Modules, besides torch, that every worker of this job imports and that are slow to import."""
    data = job.data
    kinds = {source.kind for source in (data.source, data.validation, data.test) if source is not None}
    wanted = {
        METRICS_MODULE: bool(job.metrics),
        "sklearn.datasets": "sklearn" in kinds,
        "sklearn.model_selection": data.split.kind in ("kfold", "stratified", "grouped", "holdout"),
        "pyarrow.parquet": "parquet" in kinds,
        "pyarrow.csv": "csv" in kinds,
    }
    return [module for module, needed in wanted.items() if needed]
