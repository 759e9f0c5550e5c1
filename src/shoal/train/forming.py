"""From a job to this worker's part of a model that is spread over several: made anew with every view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shoal.checkpoint.export import open_weights
from shoal.data.batch import Batch
from shoal.errors import error
from shoal.parallel.randomness import Chance
from shoal.parallel.replica import Clipping, Replica
from shoal.parallel.shard.blueprint import Blueprint
from shoal.parallel.shard.cut import Cut
from shoal.parallel.shard.grid import Grid
from shoal.parallel.shard.held import Held
from shoal.parallel.shard.make import cut_up
from shoal.parallel.shard.memory import give_back
from shoal.parallel.shard.pipeline import PipelineCut
from shoal.parallel.shard.recipe import Recipe
from shoal.parallel.shard.replica import ShardedReplica
from shoal.parallel.sparse.module import tables_of
from shoal.spec import seeds
from shoal.spec.job import InitFrom, Job
from shoal.spec.shard import NoShard, PipelineShard
from shoal.train.blame import blaming
from shoal.train.model import build_model, build_optimizer, build_schedule, build_task, freeze, plain_task, renamed
from shoal.train.task import Task

Layout = Mapping[str, Any]
"""`shard`, `ways` and `cuts`, as a checkpoint has them."""
Talking = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mould:
    """What parts of the job's model are made with."""

    job: Job
    task: Task
    example: Batch
    steps: int
    steps_per_epoch: int
    nothing: Replica
    """Stands in until there is a view."""
    generator: Tensor | None = None
    """torch's state after the task was made, if that is the user's."""
    chance: Chance = field(default_factory=lambda: Chance(torch.device("cpu")))
    made: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Models that were taken to pieces."""

    def form(self, grid: Grid, layout: Layout | None, talking: Talking) -> ShardedReplica:
        """With the job's first weights. Cut as before, if it was cut in this way before. Members meet in it: `talking`
        turns the loss of one into a LinkError."""
        job, task = self.job, self.task
        self.chance.fully(job.seed, seeds.MODEL)
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        give_back()
        with blaming("SH204", "making the model"):
            blueprint = Blueprint(self._make)
        if tables_of(blueprint.model):
            raise error("SH418", "the model has sparse tables, and the job has a shard", where="shard")
        with blaming("SH413", "making the optimizer"):
            recipe = Recipe(self._optimizer(blueprint.model), blueprint.model)
        with blaming("SH401", "the first batch"), talking():
            cut = cut_up(self._shard(layout), blueprint.model, grid, loss=task.loss, example=self.example)
        held = Held.of(cut)
        held.fill(blueprint)
        optimizer = recipe.make(held.bare)
        epochs = -(-self.steps // self.steps_per_epoch)
        replica = ShardedReplica(
            cut,
            held,
            optimizer,
            task.loss,
            seed=job.seed,
            schedule=build_schedule(job.schedule, optimizer, steps=self.steps, epochs=epochs, base_dir=job.base_dir),
            schedule_every=self.steps_per_epoch if job.schedule and job.schedule.every == "epoch" else 1,
            clipping=Clipping(job.clip.norm, job.clip.value) if job.clip else None,
            autocast=torch.bfloat16 if job.precision == "bf16" else None,
            chance=self.chance,
        )
        replica.why_whole, replica.recipe = blueprint.why_whole, recipe
        with blaming("SH401", "the first batch"), talking():
            replica.probe(self.example)
        return replica

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.task.optimizer(model) or build_optimizer(self.job.optimizer, model, base_dir=self.job.base_dir)

    def _make(self) -> nn.Module:
        before = list(vars(self.task).values())
        model = build_model(self.job) if self.job.task is None else self.task.model()
        if model in self.made or any(model is one for one in before):
            message = "the model is the same object each time, and its parts are made anew whenever workers come or go"
            where, made = ("task", "`model()`") if self.job.task else ("model", "the function")
            raise error("SH204", message, where=where, fix=f"Let {made} make a model whenever it is called.")
        self.made.add(model)
        if self.job.init_from is not None:
            freeze(model, self.job.init_from)
        return model

    def _shard(self, layout: Layout | None) -> Any:
        shard = self.job.shard
        if isinstance(shard, PipelineShard) and layout and self.is_like(layout) and layout["cuts"]:
            return shard.model_copy(update={"cuts": list(layout["cuts"])})
        return shard

    def is_like(self, layout: Layout) -> bool:
        return (layout["shard"], layout["ways"]) == (self.job.shard.kind, self.job.ways)

    def layout(self, cut: Cut) -> dict[str, Any]:
        cuts = cut.cuts if isinstance(cut, PipelineCut) else []
        return {"shard": self.job.shard.kind, "ways": self.job.ways, "cuts": cuts}

    def start(self, replica: ShardedReplica) -> dict[str, Any]:
        """Load the weights that the job starts from, tensor by tensor. Returns what to tell about it."""
        init = self.job.init_from
        if init is None or init.path is None:
            return {}
        path = init.path if "://" in init.path else str(Path(self.job.base_dir) / init.path)
        return load_start(replica.held, replica.names(), open_weights(path), init)


def mould_for(job: Job, example: Batch, *, steps: int, steps_per_epoch: int) -> Mould:
    generator = None
    if job.task is None:
        task = plain_task(job, nn.Module())
    else:
        Chance(torch.device("cpu")).fully(job.seed, seeds.MODEL)
        task = build_task(job)
        generator = torch.get_rng_state()
    nothing = nn.Module()
    nothing.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    replica = Replica(nothing, torch.optim.SGD(nothing.parameters(), lr=0.0), task.loss, seed=job.seed)
    return Mould(job, task, example, steps, steps_per_epoch, replica, generator)


def alone(job: Job) -> Job:
    """The same job for a single process that looks at it."""
    return job.model_copy(update={"shard": NoShard()})


@torch.no_grad()
def load_start(held: Held, names: Mapping[str, str], weights: Mapping[str, Tensor], init: InitFrom) -> dict[str, Any]:
    """What fits the model, by the rules of `init_from`. SH406 if something does not that should."""
    shapes = {name: held.model.state_dict(keep_vars=True)[name].shape for name in names}
    fits, left = [], []
    for name in weights:
        new, values = renamed(name, init.rename), weights[name]
        if shapes.get(new) != values.shape:
            left.append(new)
            continue
        fits.append(new)
        if part := held.parts.get(names[new]):
            part.local.copy_(part.box.of(values))
    missing = sorted(set(names) - set(fits))
    if (init.strict and (missing or left)) or not fits:
        which = f"; first: '{(missing or sorted(left))[0]}'"
        message = f"{len(missing)} tensors of the model are missing there, {len(left)} are left over{which}"
        raise error("SH406", message, where=f"init_from {init.path}")
    return {"loaded": len(fits), "missing": missing[:20], "left": sorted(left)[:20]}
