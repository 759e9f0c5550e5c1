"""Cuts the model and the optimizer of a checkpoint: the start of a run's second leg."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.compression.importance import by_magnitude, cut_least
from shoal.compression.shape import apply_steps, count_parameters, dense_steps
from shoal.errors import error
from shoal.events import EventWriter
from shoal.lanes.replica import Replica
from shoal.lanes.weight_average import assign, tensors_of
from shoal.spec.compression.steps import ModelShape, ShapeStep
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths, cache_directory
from shoal.train.build import BuiltJob, build, open_store
from shoal.train.compression.subject import Subject
from shoal.train.run_output import DirectoryOutput


def answer(job: Job, stream: EventWriter, *, first: str, second: str) -> dict[str, Any]:
    """Write the checkpoint that the second leg continues from, and return its shape. `first` and `second` are the
    directories of the legs; only the store of the second one is written."""
    assert job.shrink is not None
    built = _build(job, stream)
    with _Store(job, first, stream) as store:
        found = store.load_latest()
    if found is None:
        raise error("SH501", "the first leg has no checkpoint", where=first)
    manifest, state = found
    replica = built.replica
    replica.load_state(state)
    steps, refused = _choose(replica.model, built, Subject(job), remove=1 - job.shrink.keep)
    second_job = job.model_copy(update={"shape": ModelShape(steps=steps), "shrink": None})
    small = _build(second_job, stream).replica
    small.load_state(cut_state(replica, state, steps))
    with _Store(second_job, second, stream) as store:
        store.save(manifest.step, {**small.state(), "loop": state["loop"]}, metric=manifest.metric)
        store.wait()
    return {
        "cut_at": manifest.step,
        "shape": [step.model_dump(mode="json") for step in steps],
        "parameters": [count_parameters(replica.model), count_parameters(small.model)],
        "refused": dict(refused),
    }


def _build(job: Job, stream: EventWriter) -> BuiltJob:
    def quiet(kind: str, /, **fields: Any) -> None:
        """Facts about the data and the model were reported by the first leg."""

    return build(job, cache_dir=cache_directory(), report=quiet, choose_device=lambda wanted: torch.device("cpu"))


@dataclass
class _Store:
    """The checkpoints of a leg, closed at the end."""

    job: Job
    root: str
    stream: EventWriter

    def __enter__(self) -> Any:
        self._store = open_store(self.job, DirectoryOutput(RunPaths.at(self.root)), report=lambda *_, **__: None)
        return self._store

    def __exit__(self, *failure: object) -> None:
        self._store.close()


def _choose(
    model: nn.Module, built: BuiltJob, subject: Subject, *, remove: float
) -> tuple[list[ShapeStep], Mapping[str, str]]:
    """The step that removes the channels with the smallest weights, a pure function of the weights, after what it
    needs. SH669 if no layer can be cut."""
    steps: list[ShapeStep] = [*dense_steps(model)]
    model = apply_steps(copy.deepcopy(model), steps)
    groups = subject.groups(model, built.example.map_tensors(lambda value: value[:2] if value.dim() else value).inputs)
    if not groups.found:
        why = "; ".join(f"{name}: {text}" for name, text in list(groups.refused.items())[:5])
        raise error("SH669", f"no layer can be cut ({why})", where="shrink")
    steps.append(cut_least(groups.found, by_magnitude(model, groups.found), remove=remove))
    return steps, groups.refused


def cut_state(replica: Replica, state: Mapping[str, Any], steps: Sequence[ShapeStep]) -> dict[str, Any]:
    """The state of a replica whose model was cut by these steps: what the optimizer keeps about a weight is cut like
    the weight, and so is the average of the weights. SH669 if the optimizer keeps something whose parts do not belong
    to single weights."""
    cut = _Cutter(replica.model, steps)
    names = {id(p): name for name, p in replica.model.named_parameters()}
    order = [names[id(p)] for group in replica.optimizer.param_groups for p in group["params"]]
    kept = state["optimizer"]
    parts = {number: dict(values) for number, values in kept["state"].items()}
    for key in sorted({key for values in parts.values() for key in values}):
        values = {order[n]: v[key] for n, v in parts.items() if _belongs_to_weights(v.get(key), cut, order[n], key)}
        for name, value in cut(values).items():
            parts[order.index(name)][key] = value
    small = cut.model(dict(state["model"]))
    beside: dict[str, Any] = {name: state[name] for name in ("loss_scale",) if name in state}
    if "average" in state:
        beside["average"] = {**state["average"], "values": cut.average(state["average"]["values"])}
    return {
        "model": dict(small.state_dict()),
        "optimizer": {**kept, "state": parts},
        "schedule": state["schedule"],
        "moving": {name: small.get_buffer(name) for name in state["moving"]},
        **beside,
    }


def _belongs_to_weights(value: Any, cut: _Cutter, name: str, key: str) -> bool:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return False  # a counter
    if value.shape == cut.shapes[name]:
        return True
    raise error("SH669", f"the optimizer keeps '{key}' of shape {list(value.shape)} for '{name}'", where="shrink")


class _Cutter:
    """Cuts any values that have the shapes of the model's parameters."""

    def __init__(self, model: nn.Module, steps: Sequence[ShapeStep]) -> None:
        self._model, self._steps = model, steps
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of parameters by name, cut like the parameters."""
        if not values:
            return {}
        made = copy.deepcopy(self._model)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if name in values:
                    parameter.copy_(values[name])
        small = dict(apply_steps(made, self._steps).named_parameters())
        return {name: small[name].detach().clone() for name in values}

    def average(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The average of parameters and buffers by name, cut like them; empty if it has not begun."""
        if not values:
            return {}
        made = copy.deepcopy(self._model)
        assign(made, values)
        return {name: value.detach().clone() for name, value in tensors_of(apply_steps(made, self._steps)).items()}

    def model(self, weights: Mapping[str, Tensor]) -> nn.Module:
        made = copy.deepcopy(self._model)
        made.load_state_dict(weights)
        return apply_steps(made, self._steps)
