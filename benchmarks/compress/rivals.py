"""Other tools on the models and data of the rows, each used alone: NNCF with OpenVINO, torchao, Torch-Pruning.

They are no dependencies: pip install openvino nncf torchao. A tool that is not installed, or fails, is told.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.compress import models
from shoal.compression.measure import measure_in_turns
from shoal.data.datasets import Datasets, open_datasets
from shoal.spec.data import DataConfig
from shoal.spec.run_paths import cache_directory

Made = tuple[Callable[..., Any], int]
"""A model that can be called, and the size of its files."""


@dataclass(frozen=True)
class Subject:
    """A trained model, its data, and how the row tunes: `rate` is that of its optimizer."""

    parent: nn.Module
    data: Datasets
    scratch: Path
    batch_size: int
    epochs: int
    rate: float

    @property
    def is_gpt(self) -> bool:
        return isinstance(self.parent, models.Gpt)


def measure(
    model: str, data: dict[str, Any], weights: Path, *, batch_size: int, epochs: int, rate: float
) -> list[dict[str, Any]]:
    """A row for the parent and for each tool: size, accuracy or loss on the test part, times as fast as the parent in
    torch."""
    torch.set_num_threads(1)
    opened = open_datasets(
        DataConfig.model_validate(data), seed=0, base_dir=str(Path(__file__).parent), cache_dir=cache_directory()
    )
    parent: nn.Module = getattr(models, model)()
    parent.load_state_dict(load_file(weights))
    parent.eval()
    tools = {"NNCF + OpenVINO, int8": nncf_int8, "torchao, int8 weights": torchao_int8, "Torch-Pruning, 50 %": pruned}
    with tempfile.TemporaryDirectory(prefix="shoal-rivals-") as scratch:
        subject = Subject(parent, opened, Path(scratch), batch_size, epochs, rate)
        made: dict[str, Made] = {"parent": (parent, weights.stat().st_size)}
        failures = {}
        for name, make in tools.items():
            try:
                made[name] = make(subject)
                made[name][0](next(_batches(opened, "train", 2))[0])
            except Exception as failure:  # what a tool cannot do is a result
                made.pop(name, None)
                failures[name] = f"{type(failure).__name__}: {failure}"[:300]
        rows = [_row(name, one, made["parent"][1], opened) for name, one in made.items()]
        times = _times({name: one for name, (one, _) in made.items()}, opened)
    return [{**row, **times[row["tool"]]} for row in rows] + [{"tool": n, "failed": why} for n, why in failures.items()]


@torch.no_grad()
def _row(name: str, made: Made, parent_bytes: int, data: Datasets) -> dict[str, Any]:
    right = loss = total = 0.0
    for x, y in _batches(data, "test", 500):
        output = made[0](x).flatten(0, -2)
        right += int((output.argmax(1) == y.flatten()).sum())
        loss += float(F.cross_entropy(output, y.flatten(), reduction="sum"))
        total += y.numel()
    sizes = {"bytes": made[1], "smaller": parent_bytes / made[1]}
    return {"tool": name, **sizes, "test": right / total, "loss": loss / total}


def _times(made: dict[str, Callable[..., Any]], data: Datasets) -> dict[str, dict[str, float]]:
    x = next(_batches(data, "train", 64))[0]
    found = measure_in_turns(made, {1: (x[:1],), 64: (x,)})
    return {one.name: {f"eager x{size}": 1 / ratio.median for size, ratio in one.ratios.items()} for one in found}


def _batches(data: Datasets, part: str, size: int, *, order: Tensor | None = None) -> Any:
    split = data.train if part == "train" else data.held_out[part]
    ids = split.ids if order is None else split.ids[order.numpy()]
    for first in range(0, len(ids), size):
        batch = split.source.take(ids[first : first + size])
        batch = split.transform(batch) if split.transform else batch
        yield batch.inputs[0], batch.target


def nncf_int8(subject: Subject) -> Made:
    nncf: Any = import_module("nncf")
    openvino: Any = import_module("openvino")
    x = next(_batches(subject.data, "train", 64))[0]
    model = openvino.convert_model(subject.parent, example_input=x)
    calibration = [batch for _, (batch, _) in zip(range(8), _batches(subject.data, "train", 64), strict=False)]
    how = {"model_type": nncf.ModelType.TRANSFORMER} if subject.is_gpt else {}
    made = nncf.quantize(model, nncf.Dataset(calibration, lambda batch: batch.numpy()), **how)
    target = subject.scratch / "nncf.xml"
    openvino.save_model(made, target, compress_to_fp16=False)
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    compiled = openvino.Core().compile_model(target, "CPU", settings)
    size = sum(target.with_suffix(ending).stat().st_size for ending in (".xml", ".bin"))
    return (lambda x: torch.from_numpy(compiled(x.numpy())[0])), size


def torchao_int8(subject: Subject) -> Made:
    tools: Any = import_module("torchao.quantization")
    made = copy.deepcopy(subject.parent)
    tools.quantize_(made, tools.Int8WeightOnlyConfig())
    target = subject.scratch / "torchao.pt"
    torch.save(made.state_dict(), target)
    return made, target.stat().st_size


def pruned(subject: Subject) -> Made:
    """Half of the channels and neurons. In the GPT half of the neurons between two dense layers: its code reshapes to
    the widths of attention and of the stream."""
    torch_pruning: Any = import_module("torch_pruning")
    made, x = copy.deepcopy(subject.parent), next(_batches(subject.data, "train", 2))[0]
    importance = torch_pruning.importance.MagnitudeImportance(p=2)
    ratios: dict[str, Any] = {"pruning_ratio": 0.5, "ignored_layers": [_last_layer(made)]}
    if isinstance(made, models.Gpt):
        blocks: list[Any] = list(made.blocks)
        ratios = {"pruning_ratio": 0.0, "pruning_ratio_dict": {block.mlp[0]: 0.5 for block in blocks}}
        ratios["ignored_layers"] = [_last_layer(made), *(m for b in blocks for m in (b.qkv, b.out))]
    torch_pruning.pruner.MagnitudePruner(made, x, importance=importance, **ratios).step()
    _tune(made, subject)
    target = subject.scratch / "pruned.safetensors"
    save_file(made.state_dict(), target)
    return made.eval(), target.stat().st_size


def _last_layer(model: nn.Module) -> nn.Module:
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]


def _tune(model: nn.Module, subject: Subject) -> None:
    """The tuning of the row: Adam or AdamW, a cosine, as many epochs as one of its trainings."""
    torch.manual_seed(0)
    kind = torch.optim.AdamW if subject.is_gpt else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=subject.rate)
    samples = len(subject.data.train.ids)
    steps = subject.epochs * -(-samples // subject.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    model.train()
    for _ in range(subject.epochs):
        for x, y in _batches(subject.data, "train", subject.batch_size, order=torch.randperm(samples)):
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
