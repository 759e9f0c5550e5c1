"""The shape of a job: its steps, evaluations, parameters and FLOPs. A pure function of the job, except the latency,
which is measured only where somebody asks for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from shoal.data.batch import Batch
from shoal.events import EventWriter
from shoal.lanes.loss import split_loss
from shoal.sharding.deferred_init import META, DeferredInit
from shoal.spec import seeds
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths, cache_directory
from shoal.tasks.model import build_task
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors
from shoal.train.build import example_batch, open_training_data, schedule_of
from shoal.train.loop import TrainSchedule

_STATE_COPIES = {"SGD": 1, "Adagrad": 1, "RMSprop": 1, "Rprop": 2}
"""Tensors of a parameter's size that an optimizer keeps; others keep two."""
LATENCY_S = 0.3
"""Seconds in which a model predicts again and again; the median counts."""


def describe_shape(job: Job, paths: RunPaths, stream: EventWriter, *, latency: bool = False) -> dict[str, Any]:
    """Count what a job is, without training it. The model is built without memory where that is possible.

    `latency`: also measure how long the untrained model predicts one sample on this machine's processor.
    """
    data, sampler = open_training_data(job, cache_dir=cache_directory(), report=stream.emit)
    schedule = schedule_of(job, sampler.steps_per_epoch)
    example = example_batch(data, sampler)
    torch.manual_seed(seeds.MODEL)
    task, model, batch = _meta_task(job, example)
    counted = _count_on_meta(task, model, batch)
    if counted is None:
        task = build_task(job)
        model = task.to(torch.device("cpu"))
        with wrap_user_errors("SH401", "the first batch"):
            counted = _count(model, lambda: _train_once(task, model, example))
    flops, saved_bytes = counted
    parameters = list(model.parameters())
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    copies = 1 + _STATE_COPIES.get(job.optimizer.name.rpartition(":")[2], 2)
    measured = {"latency_ms": measure_latency_ms(job, example)} if latency else {}
    return measured | {
        "steps": schedule.steps,
        "boundaries": list(evaluation_steps(schedule)) if "validation" in data.held_out else [],
        "parameters": sum(p.numel() for p in parameters),
        "size_bytes": sum(t.numel() * t.element_size() for t in (*parameters, *model.buffers())),
        "flops_per_sample": flops / max(example.size, 1),
        "memory_bytes": sum(p.numel() * p.element_size() for p in parameters) + copies * trained + saved_bytes,
    }


def evaluation_steps(schedule: TrainSchedule) -> Iterator[int]:
    """The steps after which the validation split is evaluated, as the loop does it."""
    step = 0
    while step < schedule.steps:
        step = schedule.sync_schedule.next_sync(step, steps=schedule.steps)
        if schedule.evaluation_due(step) or step >= schedule.steps:
            yield step


def measure_latency_ms(job: Job, example: Batch) -> float:
    """The median time of a prediction for one sample, on one thread. Training changes weights, not times."""
    torch.set_num_threads(1)
    task = build_task(job)
    model, one = task.to(torch.device("cpu")).eval(), example.chunk(example.size)[0]
    taken: list[float] = []
    with torch.inference_mode(), wrap_user_errors("SH401", "the first sample"):
        task.predict(model, one)
        until_s = time.perf_counter() + LATENCY_S
        while not taken or time.perf_counter() < until_s:
            began_s = time.perf_counter()
            task.predict(model, one)
            taken.append(time.perf_counter() - began_s)
    return round(1000 * statistics.median(taken), 4)


def _meta_task(job: Job, example: Batch) -> tuple[Task, nn.Module, Batch]:
    """Task and model on the meta device, and a batch for them."""
    made: list[Task] = []

    def make_model() -> nn.Module:
        made.append(build_task(job))
        return made[-1].to(META)

    deferred = DeferredInit(make_model)
    if deferred.why_not_deferred:
        return made[-1] if made else build_task(job), make_model(), example.to(META)
    return made[-1], deferred.model, example.to(META)


def _count_on_meta(task: Task, model: nn.Module, batch: Batch) -> tuple[int, int] | None:
    """See `_count`; None if the meta device cannot compute the shapes. A loss that looks at values is left out: what
    counts are the products of the model."""
    for act in (_train_once, _forward_backward):
        try:
            return _count(model, lambda act=act: act(task, model, batch))  # type: ignore[misc]
        except Exception:  # noqa: S112  # the user's code needs values: the next way tells more
            continue
    return None


def _count(model: nn.Module, act: Callable[[], None]) -> tuple[int, int]:
    """FLOPs of forward and backward, and bytes of what the forward pass keeps for the backward pass."""
    known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = _storage(tensor)
        if place and place not in known:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, saving:
        act()
    return int(counter.get_total_flops()), sum(kept.values())


def _storage(tensor: Tensor) -> int:
    """What tells whether two tensors share their memory; 0 if a tensor, such as a sparse one, has none of its own."""
    if tensor.layout != torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)


def _train_once(task: Task, model: nn.Module, batch: Batch) -> None:
    split_loss(task.loss(model, batch))[0].backward()  # type: ignore[no-untyped-call]


def _forward_backward(task: Task, model: nn.Module, batch: Batch) -> None:
    outputs = [v for v in pytree.tree_leaves(task.predict(model, batch)) if isinstance(v, Tensor) and v.requires_grad]
    torch.autograd.backward([output.sum() for output in outputs])
