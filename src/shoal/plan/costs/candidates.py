"""The candidates of a plan: ways to run a job that are worth predicting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.costs.model import Cluster, MeasuredJob, RunChoice, ShardKind
from shoal.spec.job import LocalSgdSyncConfig

LOCAL_STEPS = (8, 32, 128)
ROUNDS_PER_SYNC: int = LocalSgdSyncConfig.model_fields["rounds_per_sync"].default
FEWEST_FULL_SYNCS = 2
"""Minimum number of full synchronisations of local SGD in a run."""
SERVER_COUNTS = (1, 2)
STALENESS_BOUNDS = (4, math.inf)
_ALL_COUNTS_UP_TO = 8  # every number of workers up to this is tried


def replicated_candidates(own: RunChoice, measured: MeasuredJob, cluster: Cluster, *, most: int) -> list[RunChoice]:
    """Candidates with a full model on each worker: up to `most` workers, on one or more hosts. `own` is the job's own
    choice, which is included unless it is sharded."""
    found = [
        replace(kind, workers=workers, hosts=hosts, threads=threads)
        for hosts in range(1, len(cluster.hosts) + 1)
        for workers in _worker_counts(most)
        if workers >= hosts
        for threads in measured.times
        for kind in _sync_variants(own, measured, alone=workers == 1)
    ]
    return list(dict.fromkeys(found))


def sharded_candidates(own: RunChoice, *, most: int) -> list[RunChoice]:
    """Candidates with one replica over workers of the driver's host, because only they can save it. The job's own
    sharding may fix the number of workers."""
    kinds: tuple[ShardKind, ...] = ("fsdp", "tensor", "pipeline")
    return [
        RunChoice(workers=workers, threads=own.threads, shard=kind)
        for workers in _worker_counts(most)
        for kind in kinds
        if workers > 1 and (kind != own.shard or own.workers in (1, workers))
    ]


def result_changes(choice: RunChoice, own: RunChoice) -> tuple[str, ...]:
    """What changes the result compared with the job, in the words of `plan.allow`."""
    differs = {
        "codecs": choice.codec != own.codec,
        "local": _local_schedule(choice) != _local_schedule(own),
        "staleness": choice.staleness != own.staleness,
        "threads": choice.threads != own.threads,
        "shard": choice.shard != own.shard,
    }
    return tuple(word for word, other in differs.items() if other)


def _local_schedule(choice: RunChoice) -> tuple[int, int] | None:
    return (choice.every, choice.settle) if choice.sync == "local" else None


def _worker_counts(most: int) -> list[int]:
    powers = [n << k for k in range(10) for n in (8, 12)]
    return sorted({*range(1, min(most, _ALL_COUNTS_UP_TO) + 1), *(n for n in powers if n <= most), most})


def _sync_variants(own: RunChoice, measured: MeasuredJob, *, alone: bool) -> Iterator[RunChoice]:
    """A single worker sends nothing, so only the job's own choice and plain lanes are tried for it."""
    plain = RunChoice()
    yield plain
    if own.shard == "none":
        yield own
    codecs = [own.codec] if alone else ["none", *measured.codecs]
    yield from (replace(plain, codec=codec) for codec in codecs)
    if alone:
        if measured.only_servers:
            yield replace(plain, sync="server", servers=own.servers or 1)
        return
    for servers in dict.fromkeys((*SERVER_COUNTS, *((own.servers,) if own.servers else ()))):
        served = replace(plain, sync="server", servers=servers)
        yield from (replace(served, codec=codec) for codec in codecs)
        yield from (replace(served, staleness=staleness) for staleness in STALENESS_BOUNDS)
    for every in LOCAL_STEPS:
        if settle := int(min(ROUNDS_PER_SYNC, measured.steps / FEWEST_FULL_SYNCS // every)):
            local = replace(plain, sync="local", every=every, settle=settle)
            yield from (replace(local, codec=codec) for codec in codecs)
