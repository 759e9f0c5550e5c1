"""What a model takes that workers hold together. Arithmetic, not measured: enough to say what would fit, and about how
fast it would be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.codecs.size import FLOAT
from shoal.plan.costs.crew import numbers_on, slowness_at
from shoal.plan.costs.facts import Choice, Link, Machine, Measured, Prediction
from shoal.plan.costs.memory import too_much
from shoal.spec.shard import PipelineShard

MICROBATCHES: int = PipelineShard.model_fields["microbatches"].default
PASSES = 3
"""How often fsdp moves as much as all weights for a lane: gathered twice, and the gradients scattered."""

TOGETHER_S, CALL_S, GLOO_BYTES_S = 18e-3, 1.2e-3, 200e6
"""What it takes two workers of a small host to agree on a step and to keep copies of each other, to go through one
collective of torch's, and how fast these move bytes there."""
CALLS_OF_A_CUT = 4


@dataclass(frozen=True)
class Whole:
    """What one worker would hold. `state`: weights, gradients and the optimizer's; `work`: what a lane needs besides;
    `largest`: of the tensors that are put together for the moment of their use."""

    state: float
    work: float
    largest: float


def predict_sharded(choice: Choice, measured: Measured, machine: Machine, link: Link) -> Prediction:
    """One replica over all workers of the choice."""
    numbers, ways = numbers_on(choice, machine), choice.workers
    each = _memory(choice, _whole(measured))
    needed = {host: measured.base_bytes + number * each for host, number in enumerate(numbers)}
    most = max(needed.values())
    if why := too_much(needed, machine):
        return Prediction(choice, memory_bytes=most, refused=why)
    slow = max(slowness_at(choice, machine, h, n, k) for h, n in enumerate(numbers) for k in range(n))
    time = measured.times[choice.threads]
    sent, calls = _moved(choice, measured), _calls(choice, measured)
    speed = min(link.send_bytes_s, GLOO_BYTES_S) if choice.hosts > 1 else GLOO_BYTES_S
    latency_s = link.latency_s if choice.hosts > 1 else 0.0
    return Prediction(
        choice,
        compute_s=slow * time.lane_s * _lanes_in_turn(choice, measured.lanes),
        exchange_s=TOGETHER_S + sent / speed + calls * (CALL_S + latency_s),
        apply_s=slow * time.apply_s / ways,
        sent_bytes=sent if choice.hosts > 1 else 0.0,
        memory_bytes=most,
        steps_per_epoch=measured.steps_per_epoch,
    )


def _whole(measured: Measured) -> Whole:
    state = 2 * measured.stretch_bytes + measured.optimizer_bytes
    largest = max((math.prod(shape) for shape in measured.shapes), default=0)
    return Whole(state, max(measured.worker_bytes - state, 0), FLOAT * largest)


def _memory(choice: Choice, whole: Whole) -> float:
    """Of one worker."""
    ways = choice.workers
    if choice.shard == "fsdp":
        return whole.state / ways + 2 * whole.largest + whole.work
    if choice.shard == "tensor":
        return whole.state / ways + whole.work
    return whole.state / ways + whole.work * min(ways, MICROBATCHES) / (ways * MICROBATCHES)


def _lanes_in_turn(choice: Choice, lanes: int) -> float:
    """With fsdp every worker brings lanes of its own; otherwise all work on the same, and stages of a pipeline wait for
    the first part of it to come and for the last to go."""
    if choice.shard == "fsdp":
        return _turns(choice, lanes)
    bubble = (choice.workers - 1) / MICROBATCHES if choice.shard == "pipeline" else 0.0
    return lanes * (1 + bubble) / choice.workers


def _turns(choice: Choice, lanes: int) -> int:
    return math.ceil(lanes / choice.workers)


def _calls(choice: Choice, measured: Measured) -> int:
    """Collectives of a step, about: for every tensor, or at every cut."""
    if choice.shard == "pipeline":
        return CALLS_OF_A_CUT * MICROBATCHES * measured.lanes
    return len(measured.shapes) * (_turns(choice, measured.lanes) if choice.shard == "fsdp" else measured.lanes)


def _moved(choice: Choice, measured: Measured) -> float:
    """Bytes of one worker in a step, as far as they are many: weights and gradients. What activations have is not
    known."""
    others = (choice.workers - 1) / choice.workers
    if choice.shard != "fsdp":
        return 0.0
    return PASSES * measured.stretch_bytes * others * _turns(choice, measured.lanes)
