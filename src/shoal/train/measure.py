"""What a planner has to know of a job and of this machine, found by trying: a few seconds of real lanes and updates."""

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

from shoal.codecs.memory import Memory as LaneMemory
from shoal.data.batch import Batch
from shoal.errors import error
from shoal.events import Stream
from shoal.parallel.cutting import Form, runs
from shoal.parallel.lane_sum import LaneSum, add
from shoal.parallel.links.memory import Memory
from shoal.parallel.links.pace import pace
from shoal.parallel.local.pace import fragments_of
from shoal.parallel.replica import Replica
from shoal.parallel.server.chunks import hyper_of
from shoal.parallel.server.elementwise import is_known, why_not_in_parts
from shoal.parallel.shard.memory import limit_bytes, rooms
from shoal.parallel.tree import TreeSum
from shoal.spec.job import Job, LanesSync, LocalSync
from shoal.spec.paths import RunPaths, cache_directory
from shoal.spec.shard import NoShard
from shoal.train.blame import blaming
from shoal.train.build import Built, build, make_feed
from shoal.train.model import build_task
from shoal.train.pair import Pair, pair, typical

EACH_S, CODEC_S, PAIR_S = 0.2, 0.1, 0.5
"""So long each thing is tried, but at least some times."""

LOOP_S = 0.2e-3
"""What a run does around a lane and a try does not: clocks, accounts, rows, and threads that tell and listen."""

_SPREAD = "Take a machine with more memory; where only a process is limited, `shard: fsdp` with more workers."
_LEAST, _MOST = 3, 50
_MOST_LANES, _LARGE_S = 4, 1.0
Clock = Callable[[], float]


def measure(
    job: Job, paths: RunPaths, stream: Stream, *, codecs: Sequence[Mapping[str, Any]], threads: Sequence[int]
) -> dict[str, Any]:
    """Lanes and updates with these numbers of threads (1 among them), codecs with these settings, memory, and the
    machine. Of the whole model with plain updates, however the job has it."""
    base_bytes = psutil.Process().memory_info().rss
    job = job.model_copy(update={"shard": NoShard(), **({"sync": LanesSync()} if job.sync.kind == "local" else {})})
    _room_for(job)
    built = build(job, cache_dir=cache_directory(), tell=stream.emit)
    replica, batch = built.replica, built.example.to(built.replica.device)
    replica.schedule = None  # it may end before the tries do
    with blaming("SH401", "one step"):
        total = _step(built, batch)
    worker_bytes = max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base_bytes, 0)
    times = _by_threads(built, batch, total, threads)
    torch.set_num_threads(1)
    add_bytes_s, no_codecs, talk = _adding_bytes_s(replica), _no_codecs(replica), pace()
    rest_s, lane_cpu_s = _in_steps(built, batch, times[1], replica.layout.size_bytes / add_bytes_s)
    beside = _beside(replica, batch, worker_bytes) or Pair(lane_cpu_s, 0.0)
    return {
        "lanes": job.lane_count,
        "steps": built.course.steps,
        "steps_per_epoch": built.dealer.steps_per_epoch,
        "times": [{"threads": n, **found} for n, found in times.items()],
        "rest_s": rest_s,
        "slow_threads": [n for n in threads if n not in times],
        "shapes": [list(p.shape) for p in replica.trainable],
        "stretch_bytes": replica.layout.size_bytes,
        "fragments": _fragments(replica),
        "optimizer_bytes": sum(t.numel() * t.element_size() for t in _state(replica)),
        "base_bytes": base_bytes,
        "worker_bytes": worker_bytes,
        "codecs": [] if no_codecs else [{"settings": s, **_codec(replica, s)} for s in codecs],
        "no_codecs": no_codecs,
        "no_servers": _no_servers(replica),
        "only_servers": "the model has sparse tables, which live on servers" if replica.tables else "",
        "cores": len(os.sched_getaffinity(0)),
        "gpus": torch.cuda.device_count() if replica.device.type == "cuda" else 0,
        "no_shards": _no_shards(job, replica),
        "memory_bytes": limit_bytes(),
        "crowding": max(beside.lane_cpu_s / lane_cpu_s, 1.0),
        "exchange_s": beside.exchange_s,
        "add_bytes_s": add_bytes_s,
        "latency_s": talk.latency_s,
        "socket_bytes_s": talk.bytes_s,
    }


def _room_for(job: Job) -> None:
    """Where weights and gradients alone are more than there is, to try would be the end of this process."""
    needed = 0
    with contextlib.suppress(Exception), torch.device("meta"):  # whatever cannot be made so is made as always
        model = build_task(job).model()
        needed = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        needed += sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    for has, who in ((limit_bytes(), "the machine has"), (min(rooms().values()), "a process may take")):
        if needed > has:
            amounts = f"needs {needed / 1e9:.1f} GB at least, {who} {has / 1e9:.1f} GB"
            raise error("SH407", f"the model's weights and gradients: {amounts}", where="model", fix=_SPREAD)


def _beside(replica: Replica, batch: Batch, worker_bytes: int) -> Pair | None:
    """Two workers at once, where that can be tried: two cores, room for both, and lanes that can be exchanged."""
    possible = replica.device.type == "cpu" and not replica.tables and len(os.sched_getaffinity(0)) > 1
    if not possible or psutil.virtual_memory().available < 2 * worker_bytes:
        return None
    return pair(replica, batch, budget_s=PAIR_S)


def _step(built: Built, batch: Batch) -> LaneSum:
    """A step as it is, with two lanes at most: all that takes memory was there once."""
    lanes = [_lane(built, batch, lane) for lane in range(min(built.job.lane_count, 2))]
    total = lanes[0] if len(lanes) == 1 else add(*lanes)
    built.replica.apply(0, total)
    return total


def _lane(built: Built, batch: Batch, lane: int) -> LaneSum:
    built.replica.begin()
    return built.replica.forward_backward(0, lane, batch, share=1 / built.job.lane_count)


def _by_threads(built: Built, batch: Batch, total: LaneSum, threads: Sequence[int]) -> dict[int, dict[str, float]]:
    """Numbers of threads that the first try shows to be no use are left out, but for the job's own."""
    found: dict[int, dict[str, float]] = {}
    for number in sorted(threads):
        torch.set_num_threads(number)
        fastest_s = min((one["forward_s"] + one["backward_s"] for one in found.values()), default=math.inf)
        tries = (_once(lambda: _lane(built, batch, 0), built.replica.device) for _ in range(2))  # the first starts them
        if number == built.job.threads or min(tries) < fastest_s:
            found[number] = _times(built, batch, total)
    return found


def _times(built: Built, batch: Batch, total: LaneSum) -> dict[str, float]:
    replica = built.replica

    def forward() -> None:
        replica.begin()
        with replica.casting():
            built.task.loss(replica.model, batch)
        replica.undo()

    grads = [grad.clone() for grad in total.grads]

    def fresh() -> None:
        """An update may change the gradients; numbers that become ever smaller would be slower."""
        for grad, kept in zip(total.grads, grads, strict=True):
            grad.copy_(kept)

    lane_s = _seconds(lambda: _lane(built, batch, 0), replica.device)
    forward_s = min(_seconds(forward, replica.device), lane_s)
    apply_s = _seconds(lambda: replica.apply(0, total), replica.device, before=fresh)
    return {"forward_s": forward_s, "backward_s": lane_s - forward_s, "apply_s": apply_s}


def _in_steps(built: Built, batch: Batch, times: Mapping[str, float], add_s: float) -> tuple[float, float]:
    """What a lane of a real step takes besides what it takes by itself and what adding it to others takes: its batch,
    and those that are made ahead while it computes. Steps and lanes alone take turns: a machine is faster in some
    moments than in others. And processor time of a lane there. Of large models it is not worth the wait."""
    replica, lanes = built.replica, range(min(built.job.lane_count, _MOST_LANES))
    lane_s = times["forward_s"] + times["backward_s"]
    if replica.tables or len(lanes) * lane_s > _LARGE_S:
        return 0.0, _alone_cpu_s(built, batch)
    feed, numbers, lane_cpu_s, whole = make_feed(built), itertools.count(), list[float](), batch.size

    def step() -> None:
        number, sums = next(numbers), TreeSum(len(lanes), add)
        replica.begin()
        for lane in lanes:
            batch = feed.get(number, lane)
            share = 1 / len(lanes)
            here = batch.to(replica.device) if batch else None
            start = time.thread_time()
            found = replica.forward_backward(number, lane, here, share=share) if here else None
            if here and here.size == whole:
                lane_cpu_s.append(time.thread_time() - start)
            sums.lane(lane, found)
        if total := sums.total():
            replica.apply(number, total)

    def alone() -> None:
        for lane in lanes:
            _lane(built, batch, lane)

    with contextlib.closing(feed):
        feed.carry(lanes, 0)
        longer_s = _longer(step, alone, replica.device)
    rest_s = max(longer_s - len(lanes) * add_s - times["apply_s"], 0.0) / len(lanes)
    if len(lane_cpu_s) < _LEAST:  # there are hardly any samples
        lane_cpu_s = [_alone_cpu_s(built, batch)]
    return rest_s + LOOP_S, typical(lane_cpu_s)


def _alone_cpu_s(built: Built, batch: Batch) -> float:
    return _seconds(lambda: _lane(built, batch, 0), built.replica.device, clock=time.thread_time)


def _fragments(replica: Replica) -> list[float]:
    """Of the parameters, as they travel between lanes that train by themselves: what part of them each is."""
    sizes = [sum(replica.layout.grads[i].size_bytes for i in run) for run in runs(replica.layout)]
    most = LocalSync.model_fields["fragments"].default
    return [sum(sizes[i] for i in fragment) / sum(sizes) for fragment in fragments_of(sizes, most)]


def _codec(replica: Replica, settings: Mapping[str, Any]) -> dict[str, float]:
    """Encoding a lane with what it remembers, and decoding it onto a sum."""
    form = Form(replica.layout, settings)
    stretch, out, slot = (Memory.private(n).tensor for n in (form.layout.size_bytes,) * 2 + (form.slot_bytes,))
    stretch[: form.grads_bytes].view(torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    memory = LaneMemory(form.memory_floats) if form.remembers else None

    def encode() -> None:
        form.encode(stretch, slot, memory)
        if memory:
            memory.settle()

    def decode() -> None:
        for cut in form.cuts:
            cut.codec.decode(cut.encoded(slot), cut.values(out), add=True)

    here = torch.device("cpu")
    return {name: _seconds(act, here, budget_s=CODEC_S) for name, act in (("encode_s", encode), ("decode_s", decode))}


def _adding_bytes_s(replica: Replica) -> float:
    """Of sums that lie one beside the other."""
    size_bytes = max(replica.layout.size_bytes, 1 << 16)
    one, other, out = (Memory.private(size_bytes).tensor[: size_bytes // 4 * 4].view(torch.float32) for _ in range(3))
    return size_bytes / _seconds(lambda: torch.add(one, other, out=out), torch.device("cpu"))


def _seconds(
    act: Callable[[], object],
    device: torch.device,
    *,
    before: Callable[[], None] | None = None,
    budget_s: float = EACH_S,
    clock: Clock = time.perf_counter,
) -> float:
    """What is typical of some tries, after one that does not count, unless it takes long."""
    first = _once(act, device, clock)
    if first > _LARGE_S:
        return first
    taken: list[float] = []
    while len(taken) < _LEAST or (sum(taken) < budget_s and len(taken) < _MOST):
        if before:
            before()
        taken.append(_once(act, device, clock))
    return typical(taken)


def _longer(act: Callable[[], object], than: Callable[[], object], device: torch.device) -> float:
    """By how much, typically, when they take turns."""
    taken: list[tuple[float, float]] = []
    while len(taken) <= _LEAST or (sum(map(sum, taken)) < 2 * EACH_S and len(taken) <= _MOST):
        taken.append((_once(act, device), _once(than, device)))
    return median(one - other for one, other in taken[1:])


def _once(act: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    _wait(device)
    start = clock()
    act()
    _wait(device)
    return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _state(replica: Replica) -> Iterator[torch.Tensor]:
    return (t for state in replica.optimizer.state.values() for t in state.values() if torch.is_tensor(t))


def _no_codecs(replica: Replica) -> str:
    if replica.tables:
        return "the model has sparse tables: only touched rows travel in any case"
    other = next((p.dtype for p in replica.trainable if p.dtype != torch.float32), None)
    return f"codecs take float32 gradients, and some are {str(other).removeprefix('torch.')}" if other else ""


def _no_shards(job: Job, replica: Replica) -> str:
    if replica.device.type != "cpu":
        return f"shards are held on the CPU, and the job is on {replica.device.type}"
    if job.codec.kind != "none":
        return f"shards of gradients are sent as they are, not by {job.codec.kind}"
    return ""


def _no_servers(replica: Replica) -> str:
    kind = type(replica.optimizer)
    if not is_known(kind):
        return f"servers hold parts of tensors, and {kind.__name__} may need whole ones"
    return why_not_in_parts(kind, hyper_of(replica.optimizer), {p.dtype for p in replica.trainable})
