"""Measures what the planner must know about a job and this machine, with a few seconds of real lanes and updates."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import psutil
import torch

from shoal.codecs.residual import Residual as LaneMemory
from shoal.collectives.buckets import EncodedLayout, bucket_params
from shoal.collectives.transport.bandwidth import measure_loopback
from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.data.batch import Batch
from shoal.errors import error
from shoal.events import EventWriter
from shoal.lanes.elementwise import is_known_elementwise, why_not_sliceable
from shoal.lanes.lane_sum import LaneSum, add
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import Replica
from shoal.paramserver.chunk_state import group_hyperparameters
from shoal.sharding.memory_limits import memory_headroom, memory_limit_bytes
from shoal.spec.job import Job, LanesSyncConfig, LocalSgdSyncConfig
from shoal.spec.run_paths import RunPaths, cache_directory
from shoal.spec.sharding import NoShardingConfig
from shoal.strategies.local_sgd.schedule import partition_into_fragments
from shoal.tasks.model import build_task
from shoal.tasks.user_errors import wrap_user_errors
from shoal.train.build import BuiltJob, build, make_batch_loader
from shoal.train.profile_pair import PairProfile, lower_quartile, profile_pair

BUDGET_S, CODEC_BUDGET_S, PAIR_BUDGET_S = 0.2, 0.1, 0.5
"""Seconds for which each measurement repeats. Each runs a minimum number of times in any case."""

LOOP_OVERHEAD_S = 0.2e-3
"""Seconds per lane that a real run spends and a measurement does not: clocks, statistics, event rows, and the threads
of the control client."""

_MEMORY_FIX = "Take a machine with more memory; where only a process is limited, `shard: fsdp` with more workers."
_MIN_REPEATS, _MAX_REPEATS = 3, 50
_MAX_LANES, _SLOW_S = 4, 1.0
Clock = Callable[[], float]


def profile_job(
    job: Job, paths: RunPaths, stream: EventWriter, *, codecs: Sequence[Mapping[str, Any]], threads: Sequence[int]
) -> dict[str, Any]:
    """Time lanes and updates with each number of threads (1 among them) and codecs with each of these settings. Measure
    memory and the machine. The profile is of the whole model with plain updates, also if the job shards it or uses
    local SGD."""
    base_bytes = psutil.Process().memory_info().rss
    job = job.model_copy(
        update={"shard": NoShardingConfig(), **({"sync": LanesSyncConfig()} if job.sync.kind == "local" else {})}
    )
    _check_memory(job)
    built = build(job, cache_dir=cache_directory(), report=stream.emit)
    replica, batch = built.replica, built.example.to(built.replica.device)
    replica.schedule = None  # it may end before the measurements do
    with wrap_user_errors("SH401", "one step"):
        total = _full_step(built, batch)
    worker_bytes = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base_bytes, 0)
    times = _times_by_threads(built, batch, total, threads)
    torch.set_num_threads(1)
    add_bytes_s, no_codecs, talk = _add_bytes_per_s(replica), _why_no_codecs(replica), measure_loopback()
    rest_s, lane_cpu_s = _in_step_overhead(built, batch, times[1], replica.layout.size_bytes / add_bytes_s)
    beside = _pair_profile(replica, batch, worker_bytes) or PairProfile(lane_cpu_s, 0.0)
    return {
        "lanes": job.lane_count,
        "steps": built.train_schedule.steps,
        "steps_per_epoch": built.sampler.steps_per_epoch,
        "times": [{"threads": n, **found} for n, found in times.items()],
        "rest_s": rest_s,
        "slow_threads": [n for n in threads if n not in times],
        "shapes": [list(p.shape) for p in replica.trainable],
        "stretch_bytes": replica.layout.size_bytes,
        "fragments": _fragment_shares(replica),
        "optimizer_bytes": sum(t.numel() * t.element_size() for t in _optimizer_tensors(replica)),
        "base_bytes": base_bytes,
        "worker_bytes": worker_bytes,
        "codecs": [] if no_codecs else [{"settings": s, **_codec_times(replica, s)} for s in codecs],
        "no_codecs": no_codecs,
        "no_servers": _why_no_servers(replica),
        "only_servers": "the model has sparse tables, which live on servers" if replica.tables else "",
        "cores": len(os.sched_getaffinity(0)),
        "gpus": torch.cuda.device_count() if replica.device.type == "cuda" else 0,
        "no_shards": _why_no_shards(job, replica),
        "memory_bytes": memory_limit_bytes(),
        "crowding": max(beside.lane_cpu_s / lane_cpu_s, 1.0),
        "exchange_s": beside.exchange_s,
        "add_bytes_s": add_bytes_s,
        "latency_s": talk.latency_s,
        "socket_bytes_s": talk.bytes_s,
    }


def _check_memory(job: Job) -> None:
    """SH407 if weights and gradients alone exceed the memory: building them would kill this process."""
    needed = 0
    with contextlib.suppress(Exception), torch.device("meta"):  # a model that cannot be built on `meta` is not checked
        model = build_task(job).model()
        needed = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        needed += sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    for has, who in (
        (memory_limit_bytes(), "the machine has"),
        (min(memory_headroom().values()), "a process may take"),
    ):
        if needed > has:
            amounts = f"needs {needed / 1e9:.1f} GB at least, {who} {has / 1e9:.1f} GB"
            raise error("SH407", f"the model's weights and gradients: {amounts}", where="model", fix=_MEMORY_FIX)


def _pair_profile(replica: Replica, batch: Batch, worker_bytes: int) -> PairProfile | None:
    """Profile two workers at once, if possible: on CPU, no sparse tables, two cores, and memory for both."""
    possible = replica.device.type == "cpu" and not replica.tables and len(os.sched_getaffinity(0)) > 1
    if not possible or psutil.virtual_memory().available < 2 * worker_bytes:
        return None
    return profile_pair(replica, batch, budget_s=PAIR_BUDGET_S)


def _full_step(built: BuiltJob, batch: Batch) -> LaneSum:
    """Run a real step with at most two lanes, so that everything that takes memory has been allocated once."""
    lanes = [_forward_backward(built, batch, lane) for lane in range(min(built.job.lane_count, 2))]
    total = lanes[0] if len(lanes) == 1 else add(*lanes)
    built.replica.apply(0, total)
    return total


def _forward_backward(built: BuiltJob, batch: Batch, lane: int) -> LaneSum:
    built.replica.begin_step()
    return built.replica.forward_backward(0, lane, batch, share=1 / built.job.lane_count)


def _times_by_threads(
    built: BuiltJob, batch: Batch, total: LaneSum, threads: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Step times by number of threads. A number that is no faster is left out, unless the job uses it."""
    found: dict[int, dict[str, float]] = {}
    for number in sorted(threads):
        torch.set_num_threads(number)
        fastest_s = min((one["forward_s"] + one["backward_s"] for one in found.values()), default=math.inf)
        tries = (
            _timed(lambda: _forward_backward(built, batch, 0), built.replica.device) for _ in range(2)
        )  # the first try starts the threads
        if number == built.job.threads or min(tries) < fastest_s:
            found[number] = _step_times(built, batch, total)
    return found


def _step_times(built: BuiltJob, batch: Batch, total: LaneSum) -> dict[str, float]:
    replica = built.replica

    def forward() -> None:
        replica.begin_step()
        with replica.autocast_context():
            built.task.loss(replica.model, batch)
        replica.undo_step()

    grads = [grad.clone() for grad in total.grads]

    def fresh() -> None:
        """Restore the gradients. An update may change them, and ever smaller numbers would become slow denormals."""
        for grad, kept in zip(total.grads, grads, strict=True):
            grad.copy_(kept)

    lane_s = _typical_seconds(lambda: _forward_backward(built, batch, 0), replica.device)
    forward_s = min(_typical_seconds(forward, replica.device), lane_s)
    apply_s = _typical_seconds(lambda: replica.apply(0, total), replica.device, before=fresh)
    return {"forward_s": forward_s, "backward_s": lane_s - forward_s, "apply_s": apply_s}


def _in_step_overhead(built: BuiltJob, batch: Batch, times: Mapping[str, float], add_s: float) -> tuple[float, float]:
    """Seconds that a lane of a real step takes beyond its own time and its addition; and CPU seconds of a lane there.

    The extra time goes into its batch, and into batches that are prefetched while it computes. Steps and bare lanes are
    timed alternately, because the speed of a machine drifts. Large models skip the measurement: it would take too long.
    """
    replica, lanes = built.replica, range(min(built.job.lane_count, _MAX_LANES))
    lane_s = times["forward_s"] + times["backward_s"]
    if replica.tables or len(lanes) * lane_s > _SLOW_S:
        return 0.0, _lane_cpu_s(built, batch)
    feed, numbers, lane_cpu_s, whole = make_batch_loader(built), itertools.count(), list[float](), batch.size

    def step() -> None:
        number, sums = next(numbers), TreeSum(len(lanes), add)
        replica.begin_step()
        for lane in lanes:
            batch = feed.get(number, lane)
            share = 1 / len(lanes)
            here = batch.to(replica.device) if batch else None
            start = time.thread_time()
            found = replica.forward_backward(number, lane, here, share=share) if here else None
            if here and here.size == whole:
                lane_cpu_s.append(time.thread_time() - start)
            sums.push_lane(lane, found)
        if total := sums.total():
            replica.apply(number, total)

    def alone() -> None:
        for lane in lanes:
            _forward_backward(built, batch, lane)

    with contextlib.closing(feed):
        feed.set_lanes(lanes, 0)
        longer_s = _extra_seconds(step, alone, replica.device)
    rest_s = max(longer_s - len(lanes) * add_s - times["apply_s"], 0.0) / len(lanes)
    if len(lane_cpu_s) < _MIN_REPEATS:  # hardly any batch was full
        lane_cpu_s = [_lane_cpu_s(built, batch)]
    return rest_s + LOOP_OVERHEAD_S, lower_quartile(lane_cpu_s)


def _lane_cpu_s(built: BuiltJob, batch: Batch) -> float:
    return _typical_seconds(lambda: _forward_backward(built, batch, 0), built.replica.device, clock=time.thread_time)


def _fragment_shares(replica: Replica) -> list[float]:
    """The size of each local SGD fragment, as a share of all parameters."""
    sizes = [sum(replica.layout.grads[i].size_bytes for i in run) for run in bucket_params(replica.layout)]
    most = LocalSgdSyncConfig.model_fields["fragments"].default
    return [sum(sizes[i] for i in fragment) / sum(sizes) for fragment in partition_into_fragments(sizes, most)]


def _codec_times(replica: Replica, settings: Mapping[str, Any]) -> dict[str, float]:
    """Seconds to encode a lane with its residual, and to decode it onto a sum."""
    form = EncodedLayout(replica.layout, settings)
    stretch, out, slot = (ByteBuffer.private(n).tensor for n in (form.layout.size_bytes,) * 2 + (form.lane_bytes,))
    stretch[: form.grads_bytes].view(torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    memory = LaneMemory(form.residual_floats) if form.needs_residual else None

    def encode() -> None:
        form.encode(stretch, slot, memory)
        if memory:
            memory.commit()

    def decode() -> None:
        for cut in form.buckets:
            cut.codec.decode(cut.encoded_bytes(slot), cut.values(out), add=True)

    here = torch.device("cpu")
    return {
        name: _typical_seconds(act, here, budget_s=CODEC_BUDGET_S)
        for name, act in (("encode_s", encode), ("decode_s", decode))
    }


def _add_bytes_per_s(replica: Replica) -> float:
    """Throughput of adding two contiguous buffers."""
    size_bytes = max(replica.layout.size_bytes, 1 << 16)
    one, other, out = (
        ByteBuffer.private(size_bytes).tensor[: size_bytes // 4 * 4].view(torch.float32) for _ in range(3)
    )
    return size_bytes / _typical_seconds(lambda: torch.add(one, other, out=out), torch.device("cpu"))


def _typical_seconds(
    act: Callable[[], object],
    device: torch.device,
    *,
    before: Callable[[], None] | None = None,
    budget_s: float = BUDGET_S,
    clock: Clock = time.perf_counter,
) -> float:
    """Lower quartile of repeated runs after one warm-up. If the warm-up is slow, it is the only run."""
    first = _timed(act, device, clock)
    if first > _SLOW_S:
        return first
    taken: list[float] = []
    while len(taken) < _MIN_REPEATS or (sum(taken) < budget_s and len(taken) < _MAX_REPEATS):
        if before:
            before()
        taken.append(_timed(act, device, clock))
    return lower_quartile(taken)


def _extra_seconds(act: Callable[[], object], than: Callable[[], object], device: torch.device) -> float:
    """Median of the seconds by which `act` takes longer than `than`, timed alternately."""
    taken: list[tuple[float, float]] = []
    while len(taken) <= _MIN_REPEATS or (sum(map(sum, taken)) < 2 * BUDGET_S and len(taken) <= _MAX_REPEATS):
        taken.append((_timed(act, device), _timed(than, device)))
    return median(one - other for one, other in taken[1:])


def _timed(act: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    _synchronise(device)
    start = clock()
    act()
    _synchronise(device)
    return clock() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _optimizer_tensors(replica: Replica) -> Iterator[torch.Tensor]:
    return (t for state in replica.optimizer.state.values() for t in state.values() if torch.is_tensor(t))


def _why_no_codecs(replica: Replica) -> str:
    if replica.tables:
        return "the model has sparse tables: only touched rows travel in any case"
    other = next((p.dtype for p in replica.trainable if p.dtype != torch.float32), None)
    return f"codecs take float32 gradients, and some are {str(other).removeprefix('torch.')}" if other else ""


def _why_no_shards(job: Job, replica: Replica) -> str:
    if replica.device.type != "cpu":
        return f"shards are held on the CPU, and the job is on {replica.device.type}"
    if job.codec.kind != "none":
        return f"shards of gradients are sent as they are, not by {job.codec.kind}"
    return ""


def _why_no_servers(replica: Replica) -> str:
    kind = type(replica.optimizer)
    if not is_known_elementwise(kind):
        return f"servers hold parts of tensors, and {kind.__name__} may need whole ones"
    return why_not_sliceable(kind, group_hyperparameters(replica.optimizer), {p.dtype for p in replica.trainable})
