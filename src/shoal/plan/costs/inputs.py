"""Build the inputs of the cost model from a job profile and a job, and a job section from a choice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.plan.costs.model import Cluster, CodecTime, HostResources, LaneTime, MeasuredJob, NetworkLink, RunChoice
from shoal.spec.job import Job, LocalSgdSyncConfig, ServerSyncConfig
from shoal.spec.sharding import NoShardingConfig, PipelineParallelConfig

MIN_ROUND_S = 100e-6
"""Seconds of a round if it was not measured, or was lost in noise."""


@dataclass(frozen=True)
class PlanRequest:
    """What the plan is for. Other hosts are assumed to equal this one, or to have the given relative `speeds`. Without
    `most`, lanes and cores limit the number of workers."""

    latency_s: float = 200e-6
    bytes_s: float = 125e6
    hosts: int = 1
    least: int = 1
    most: int = 0
    speeds: tuple[float, ...] = ()


def read_cluster(facts: Mapping[str, Any], request: PlanRequest) -> Cluster:
    """A measured exchange between two workers, minus the time of copying and adding, gives the time of a round."""
    adding_s = 3 * facts["stretch_bytes"] / facts["add_bytes_s"]
    round_s = max(facts["exchange_s"] - adding_s, MIN_ROUND_S)
    host = HostResources(facts["cores"], facts["memory_bytes"])
    hosts = tuple(replace(host, speed=speed) for speed in request.speeds) or (host,) * request.hosts
    return Cluster(hosts, round_s, facts["add_bytes_s"], facts["crowding"], facts["socket_bytes_s"])


def read_link(facts: Mapping[str, Any], request: PlanRequest) -> NetworkLink:
    """The requested link, limited by the speed of the sockets at its ends."""
    speed = min(request.bytes_s, facts["socket_bytes_s"])
    return NetworkLink(request.latency_s + facts["latency_s"], speed, speed)


def slowest_link(assumed: NetworkLink, measured: Iterable[Mapping[str, float]]) -> NetworkLink:
    """The slowest measured link; the assumed link if none was measured."""
    rows = list(measured)
    if not rows:
        return assumed
    latency_s = max(row["latency_s"] for row in rows)
    return NetworkLink(latency_s, *(min(row[way] for row in rows) for way in ("send_bytes_s", "receive_bytes_s")))


def job_choice(job: Job) -> RunChoice:
    """The job's own choice. Torch's all-reduce is not modelled and counts as lanes. A sharded job with a fixed number
    of workers per replica has that number of workers, otherwise 1."""
    sync, codec, threads, shard = job.sync, job.codec.kind, job.threads, job.shard
    if not isinstance(shard, NoShardingConfig):
        pinned = shard.size or (isinstance(shard, PipelineParallelConfig) and shard.cuts != "auto")
        return RunChoice(workers=job.workers_per_replica if pinned else 1, threads=threads, shard=shard.kind)
    if isinstance(sync, ServerSyncConfig):
        return RunChoice(
            sync="server", servers=sync.servers, staleness=sync.staleness_bound, codec=codec, threads=threads
        )
    if isinstance(sync, LocalSgdSyncConfig):
        return RunChoice(sync="local", every=sync.every, settle=sync.rounds_per_sync, codec=codec, threads=threads)
    return RunChoice(codec=codec, threads=threads)


def read_measured(facts: Mapping[str, Any]) -> MeasuredJob:
    """The job profile as an input of the cost model."""
    codecs = [CodecTime(row["settings"], row["encode_s"], row["decode_s"]) for row in facts["codecs"]]
    return MeasuredJob(
        lanes=facts["lanes"],
        steps_per_epoch=facts["steps_per_epoch"],
        times={r["threads"]: LaneTime(r["forward_s"], r["backward_s"], r["apply_s"]) for r in facts["times"]},
        shapes=tuple(tuple(shape) for shape in facts["shapes"]),
        stretch_bytes=facts["stretch_bytes"],
        rest_s=facts.get("rest_s", 0.0),  # older plans have neither this nor fragments
        fragments=tuple(facts.get("fragments", MeasuredJob.fragments)),
        optimizer_bytes=facts["optimizer_bytes"],
        base_bytes=facts["base_bytes"],
        worker_bytes=facts["worker_bytes"],
        slow_threads=tuple(facts["slow_threads"]),
        codecs={codec.settings["kind"]: codec for codec in codecs},
        no_codecs=facts["no_codecs"],
        no_servers=facts["no_servers"],
        only_servers=facts["only_servers"],
        no_shards=facts.get("no_shards", ""),
        gpus=facts.get("gpus", 0),
        steps=facts.get("steps", math.inf),
    )


def sync_section(choice: RunChoice) -> dict[str, Any]:
    """The `sync` section of a job for this choice."""
    if choice.sync == "server":
        stale = {"staleness": staleness_setting(choice)} if choice.staleness else {}
        return {"kind": "server", "servers": choice.servers, **stale}
    if choice.sync == "local":
        return {"kind": "local", "every": choice.every, "rounds_per_sync": choice.settle}
    return {"kind": "lanes"}


def staleness_setting(choice: RunChoice) -> int | str:
    return "inf" if math.isinf(choice.staleness) else int(choice.staleness)
