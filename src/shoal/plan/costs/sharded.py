"""Memory and time of a sharded model. Estimated, not measured: it shows what fits and about how fast it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.codecs.size import FLOAT_BYTES
from shoal.plan.costs.memory import memory_shortfall
from shoal.plan.costs.model import Cluster, CostPrediction, MeasuredJob, NetworkLink, RunChoice
from shoal.plan.costs.worker_layout import slowdown_at, workers_per_host
from shoal.spec.sharding import PipelineParallelConfig

MICROBATCHES: int = PipelineParallelConfig.model_fields["microbatches"].default
FSDP_PASSES = 3
"""Times that fsdp moves the size of all weights per lane: weights are gathered twice, gradients scattered once."""

STEP_OVERHEAD_S, COLLECTIVE_OVERHEAD_S, GLOO_BYTES_S = 18e-3, 1.2e-3, 200e6
"""Measured with two workers on a small host: seconds per step for commit and backups, seconds per torch collective,
and bytes per second of gloo."""
CALLS_PER_STAGE_BOUNDARY = 4


@dataclass(frozen=True)
class UnshardedMemory:
    """Memory of a worker with the full model: weights, gradients and optimizer state (`state_bytes`), what a lane needs
    in addition (`working_bytes`), and the largest tensor that is gathered for use."""

    state_bytes: float
    working_bytes: float
    largest_tensor_bytes: float


def predict_sharded(choice: RunChoice, measured: MeasuredJob, cluster: Cluster, link: NetworkLink) -> CostPrediction:
    """The prediction for one replica over all workers of the choice."""
    numbers, ways = workers_per_host(choice, cluster), choice.workers
    each = _worker_memory_bytes(choice, _unsharded_memory(measured))
    needed = {host: measured.base_bytes + number * each for host, number in enumerate(numbers)}
    most = max(needed.values())
    if why := memory_shortfall(needed, cluster):
        return CostPrediction(choice, memory_bytes=most, refused=why)
    slow = max(slowdown_at(choice, cluster, h, n, k) for h, n in enumerate(numbers) for k in range(n))
    time = measured.times[choice.threads]
    sent, calls = _sent_bytes(choice, measured), _collective_calls(choice, measured)
    speed = min(link.send_bytes_s, GLOO_BYTES_S) if choice.hosts > 1 else GLOO_BYTES_S
    latency_s = link.latency_s if choice.hosts > 1 else 0.0
    return CostPrediction(
        choice,
        compute_s=slow * time.lane_s * _sequential_lanes(choice, measured.lanes),
        exchange_s=STEP_OVERHEAD_S + sent / speed + calls * (COLLECTIVE_OVERHEAD_S + latency_s),
        apply_s=slow * time.apply_s / ways,
        sent_bytes=sent if choice.hosts > 1 else 0.0,
        memory_bytes=most,
        steps_per_epoch=measured.steps_per_epoch,
    )


def _unsharded_memory(measured: MeasuredJob) -> UnshardedMemory:
    state = 2 * measured.stretch_bytes + measured.optimizer_bytes
    largest = max((math.prod(shape) for shape in measured.shapes), default=0)
    return UnshardedMemory(state, max(measured.worker_bytes - state, 0), FLOAT_BYTES * largest)


def _worker_memory_bytes(choice: RunChoice, unsharded: UnshardedMemory) -> float:
    """Memory of one worker."""
    ways = choice.workers
    if choice.shard == "fsdp":
        return unsharded.state_bytes / ways + 2 * unsharded.largest_tensor_bytes + unsharded.working_bytes
    if choice.shard == "tensor":
        return unsharded.state_bytes / ways + unsharded.working_bytes
    return unsharded.state_bytes / ways + unsharded.working_bytes * min(ways, MICROBATCHES) / (ways * MICROBATCHES)


def _sequential_lanes(choice: RunChoice, lanes: int) -> float:
    """Lanes that run one after another. With fsdp every worker has its own lanes; otherwise all workers run the same
    lanes, and pipeline stages are idle while the pipeline fills and drains."""
    if choice.shard == "fsdp":
        return _lanes_per_worker(choice, lanes)
    bubble = (choice.workers - 1) / MICROBATCHES if choice.shard == "pipeline" else 0.0
    return lanes * (1 + bubble) / choice.workers


def _lanes_per_worker(choice: RunChoice, lanes: int) -> int:
    return math.ceil(lanes / choice.workers)


def _collective_calls(choice: RunChoice, measured: MeasuredJob) -> int:
    """Approximate number of collectives in a step: per tensor, or per stage boundary."""
    if choice.shard == "pipeline":
        return CALLS_PER_STAGE_BOUNDARY * MICROBATCHES * measured.lanes
    return len(measured.shapes) * (
        _lanes_per_worker(choice, measured.lanes) if choice.shard == "fsdp" else measured.lanes
    )


def _sent_bytes(choice: RunChoice, measured: MeasuredJob) -> float:
    """Bytes that one worker sends in a step for weights and gradients. The size of activations is unknown."""
    others = (choice.workers - 1) / choice.workers
    if choice.shard != "fsdp":
        return 0.0
    return FSDP_PASSES * measured.stretch_bytes * others * _lanes_per_worker(choice, measured.lanes)
