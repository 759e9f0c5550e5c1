"""The ways to run a job that are worth a look."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.costs.facts import Choice, Machine, Measured, ShardKind
from shoal.spec.job import LocalSync

EVERY = (8, 32, 128)
SETTLE: int = LocalSync.model_fields["settle"].default
FEWEST_PERIODS = 2
"""How often at least lanes that train by themselves must agree on everything in a run."""
SERVERS = (1, 2)
STALENESS = (4, math.inf)
_STEADY = 8  # up to so many workers every number is tried


def candidates(own: Choice, measured: Measured, machine: Machine, *, most: int) -> list[Choice]:
    """Whole models: up to `most` workers, on one host or more. `own` is what the job says: unless it has a shard, that
    is among them."""
    found = [
        replace(kind, workers=workers, hosts=hosts, threads=threads)
        for hosts in range(1, len(machine.hosts) + 1)
        for workers in _numbers(most)
        if workers >= hosts
        for threads in measured.times
        for kind in _kinds(own, measured, alone=workers == 1)
    ]
    return list(dict.fromkeys(found))


def sharded(own: Choice, *, most: int) -> list[Choice]:
    """One replica over all workers of the driver's host: only they can save it. A job's own shard may be over a number
    of workers that is part of it."""
    kinds: tuple[ShardKind, ...] = ("fsdp", "tensor", "pipeline")
    return [
        Choice(workers=workers, threads=own.threads, shard=kind)
        for workers in _numbers(most)
        for kind in kinds
        if workers > 1 and (kind != own.shard or own.workers in (1, workers))
    ]


def changes(choice: Choice, own: Choice) -> tuple[str, ...]:
    """What of it gives another result than the job as it stands, in the words of `plan.allow`."""
    differs = {
        "codecs": choice.codec != own.codec,
        "local": _rounds(choice) != _rounds(own),
        "staleness": choice.staleness != own.staleness,
        "threads": choice.threads != own.threads,
        "shard": choice.shard != own.shard,
    }
    return tuple(word for word, other in differs.items() if other)


def _rounds(choice: Choice) -> tuple[int, int] | None:
    return (choice.every, choice.settle) if choice.sync == "local" else None


def _numbers(most: int) -> list[int]:
    powers = [n << k for k in range(10) for n in (8, 12)]
    return sorted({*range(1, min(most, _STEADY) + 1), *(n for n in powers if n <= most), most})


def _kinds(own: Choice, measured: Measured, *, alone: bool) -> Iterator[Choice]:
    """Who is alone sends nothing: there only what the job asks for, and the plain way."""
    plain = Choice()
    yield plain
    if own.shard == "none":
        yield own
    codecs = [own.codec] if alone else ["none", *measured.codecs]
    yield from (replace(plain, codec=codec) for codec in codecs)
    if alone:
        if measured.only_servers:
            yield replace(plain, sync="server", servers=own.servers or 1)
        return
    for servers in dict.fromkeys((*SERVERS, *((own.servers,) if own.servers else ()))):
        served = replace(plain, sync="server", servers=servers)
        yield from (replace(served, codec=codec) for codec in codecs)
        yield from (replace(served, staleness=staleness) for staleness in STALENESS)
    for every in EVERY:
        if settle := int(min(SETTLE, measured.steps / FEWEST_PERIODS // every)):
            local = replace(plain, sync="local", every=every, settle=settle)
            yield from (replace(local, codec=codec) for codec in codecs)
