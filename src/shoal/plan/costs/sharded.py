"""What a model takes that workers hold together. Arithmetic, not measured: enough to say what would fit, and about how
fast it would be."""

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
"""How often fsdp moves as much as all weights for a lane: gathered twice, and the gradients scattered."""

STEP_OVERHEAD_S, COLLECTIVE_OVERHEAD_S, GLOO_BYTES_S = 18e-3, 1.2e-3, 200e6
"""What it takes two workers of a small host to agree on a step and to keep copies of each other, to go through one
collective of torch's, and how fast these move bytes there."""
CALLS_PER_STAGE_BOUNDARY = 4


@dataclass(frozen=True)
class UnshardedMemory:
    """What one worker would hold. `state`: weights, gradients and the optimizer's; `work`: what a lane needs besides;
    `largest`: of the tensors that are put together for the moment of their use."""

    state_bytes: float
    working_bytes: float
    largest_tensor_bytes: float


def predict_sharded(choice: RunChoice, measured: MeasuredJob, cluster: Cluster, link: NetworkLink) -> CostPrediction:
    """One replica over all workers of the choice."""
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
    """Of one worker."""
    ways = choice.workers
    if choice.shard == "fsdp":
        return unsharded.state_bytes / ways + 2 * unsharded.largest_tensor_bytes + unsharded.working_bytes
    if choice.shard == "tensor":
        return unsharded.state_bytes / ways + unsharded.working_bytes
    return unsharded.state_bytes / ways + unsharded.working_bytes * min(ways, MICROBATCHES) / (ways * MICROBATCHES)


def _sequential_lanes(choice: RunChoice, lanes: int) -> float:
    """With fsdp every worker brings lanes of its own; otherwise all work on the same, and stages of a pipeline wait for
    the first part of it to come and for the last to go."""
    if choice.shard == "fsdp":
        return _lanes_per_worker(choice, lanes)
    bubble = (choice.workers - 1) / MICROBATCHES if choice.shard == "pipeline" else 0.0
    return lanes * (1 + bubble) / choice.workers


def _lanes_per_worker(choice: RunChoice, lanes: int) -> int:
    return math.ceil(lanes / choice.workers)


def _collective_calls(choice: RunChoice, measured: MeasuredJob) -> int:
    """Collectives of a step, about: for every tensor, or at every cut."""
    if choice.shard == "pipeline":
        return CALLS_PER_STAGE_BOUNDARY * MICROBATCHES * measured.lanes
    return len(measured.shapes) * (
        _lanes_per_worker(choice, measured.lanes) if choice.shard == "fsdp" else measured.lanes
    )


def _sent_bytes(choice: RunChoice, measured: MeasuredJob) -> float:
    """Bytes of one worker in a step, as far as they are many: weights and gradients. What activations have is not
    known."""
    others = (choice.workers - 1) / choice.workers
    if choice.shard != "fsdp":
        return 0.0
    return FSDP_PASSES * measured.stretch_bytes * others * _lanes_per_worker(choice, measured.lanes)
