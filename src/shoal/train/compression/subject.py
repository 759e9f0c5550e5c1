"""What an action works on: the data of the parent's job, and models that were saved to files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.blobs import encode_blob
from shoal.checkpoint.export import load_weights
from shoal.checkpoint.files import atomic_replace
from shoal.compression.dependency import find_groups
from shoal.compression.groups import Groups
from shoal.compression.onnx_files import OnnxModel
from shoal.compression.packed_file import read_packed
from shoal.data.batch import Batch
from shoal.data.datasets import Datasets, DatasetSplit, open_datasets
from shoal.data.samplers import LaneSampler, make_sampler
from shoal.errors import error
from shoal.spec.compression.measured import Artefact, ModelFile
from shoal.spec.compression.steps import ModelShape
from shoal.spec.job import Job
from shoal.spec.names import MODEL_LOSS
from shoal.spec.run_paths import cache_directory
from shoal.tasks.model import build_task
from shoal.tasks.own_loss import NamedOutputs, with_plain_inputs
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors


@dataclass(frozen=True)
class Subject:
    """The parent's job with its data, opened when it is needed. Everything is on the CPU."""

    job: Job

    @cached_property
    def data(self) -> Datasets:
        return open_datasets(self.job.data, seed=self.job.seed, base_dir=self.job.base_dir, cache_dir=cache_directory())

    @cached_property
    def sampler(self) -> LaneSampler:
        return make_sampler(
            self.job.data.sampler,
            ids=self.data.train.ids,
            lanes=self.job.lane_count,
            batch_size=self.job.batch_size,
            seed=self.job.seed,
            drop_last=self.job.drop_last,
            source=self.data.train.source,
        )

    def task(self, shape: Sequence[Any] = ()) -> Task:
        update = {"init_from": None, "distil": None, "shape": ModelShape(steps=list(shape)) if shape else None}
        return build_task(self.job.model_copy(update=update))

    def model(self, file: ModelFile) -> nn.Module:
        """The model of a file, loaded back from disk, in evaluation mode."""
        path = Path(file.path)
        if path.suffix == ".onnx":
            made = OnnxModel(path)
            return (NamedOutputs(made, self.task().model()) if self.has_names else made).eval()
        weights = read_packed(path) if path.suffix == ".packed" else load_weights(path)
        with wrap_user_errors("SH204", "making the model"):
            model = self.task(file.shape).to(torch.device("cpu"))
        try:
            model.load_state_dict(weights)
        except RuntimeError as failure:
            raise error("SH406", str(failure).splitlines()[-1].strip(), where=file.path) from failure
        return model.eval()

    @property
    def has_names(self) -> bool:
        """Whether the model computes its loss itself, and takes its inputs by name."""
        return self.job.loss is not None and self.job.loss.name == MODEL_LOSS

    def plain(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
        """Model and inputs in order, and logits as output."""
        return with_plain_inputs(model, inputs) if self.has_names else (model, inputs)

    def groups(self, model: nn.Module, inputs: tuple[Any, ...]) -> Groups:
        """What can be removed from the model, under the names of its layers."""
        plain, values = self.plain(model, inputs)
        found = find_groups(plain, values)
        return found if plain is model else found.without_prefix("model.")

    def part(self, name: str) -> DatasetSplit:
        parts = {"train": self.data.train, **self.data.held_out}
        if name not in parts:
            raise error("SH665", f"the job has no {name} part", where="data.split", fix="Add one to `data.split`.")
        return parts[name]

    def lane_batches(self, samples: int, lanes: Sequence[int]) -> Iterator[dict[int, Batch | None]]:
        """The batches of these lanes, step by step as in training, until all lanes together had at least so many
        samples."""
        given = 0
        for step in range(self.sampler.steps_per_epoch):
            if given >= samples:
                return
            ids = [self.sampler.ids(step, lane) for lane in range(self.job.lane_count)]
            given += sum(map(len, ids))
            yield {lane: self._take(ids[lane]) for lane in lanes}

    def train_batches(self, samples: int, size: int = 64) -> Iterator[Batch]:
        """The first training samples, in the order of the data."""
        ids = self.data.train.ids[:samples]
        for first in range(0, len(ids), size):
            batch = self._take(ids[first : first + size])
            assert batch is not None
            yield batch

    def _take(self, ids: Any) -> Batch | None:
        if not len(ids):
            return None
        train = self.data.train
        batch = train.source.take(ids)
        return train.transform(batch) if train.transform else batch


def check_own_inputs(task: Task, model: nn.Module, batch: Batch) -> None:
    """SH662 if the task gives the model anything else than the batch's inputs: their bounds are not those of the
    model's inputs then."""
    calls: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, named: calls.append((args, named)), with_kwargs=True)
    try:
        with torch.no_grad(), wrap_user_errors("SH401", "the task"):
            if task.needs_predictions:
                task.evaluate(model, batch)
            else:
                task.loss(model, batch)
    finally:
        hook.remove()
    wanted = single_input(batch)
    if not calls or any(named or len(args) != 1 or not _equal(args[0], wanted) for args, named in calls):
        raise error("SH662", "the task does not give the model the inputs of the batch as they are", where="lossless")


def _equal(value: Any, wanted: Tensor) -> bool:
    return isinstance(value, Tensor) and torch.equal(value, wanted)


def save_weights(state: Mapping[str, Tensor], target: Path) -> Artefact:
    with atomic_replace(target) as temporary, temporary.open("wb") as file:
        file.writelines(encode_blob({k: v.contiguous() for k, v in state.items()}, metadata={"format": "pt"}).chunks)
    return artefact_of(target)


def artefact_of(path: Path) -> Artefact:
    """The file as it lies on disk."""
    content = path.read_bytes()
    return Artefact(path=str(path), size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def single_input(batch: Batch) -> Tensor:
    """The model's only input. SH662 if there are several, or it is not of floats."""
    if len(batch.inputs) != 1 or not isinstance(batch.inputs[0], Tensor) or not batch.inputs[0].is_floating_point():
        raise error("SH662", "bounds need one input of floating-point numbers", where="lossless")
    return batch.inputs[0]
