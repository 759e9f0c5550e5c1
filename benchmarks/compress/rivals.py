"""Other tools on the model and data of the row cnn-fast, each used alone: NNCF with OpenVINO, torchao, Torch-Pruning.

They are no dependencies: pip install openvino nncf torchao. A tool that is not installed, or fails, is told.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.compress.models import Cnn
from shoal.compression.measure import measure_in_turns
from shoal.data.datasets import Datasets, open_datasets
from shoal.spec.data import DataConfig
from shoal.spec.run_paths import cache_directory

Made = tuple[Callable[..., Any], int]
"""A model that can be called, and the size of its files."""
TUNING_EPOCHS = 2


def measure(data: dict[str, Any], weights: Path) -> list[dict[str, Any]]:
    """A row for the parent and for each tool: size, test accuracy, times as fast as the parent in torch."""
    torch.set_num_threads(1)
    opened = open_datasets(
        DataConfig.model_validate(data), seed=0, base_dir=str(Path(__file__).parent), cache_dir=cache_directory()
    )
    parent = Cnn()
    parent.load_state_dict(load_file(weights))
    parent.eval()
    tools = {"NNCF + OpenVINO, int8": nncf_int8, "torchao, int8 weights": torchao_int8, "Torch-Pruning, 50 %": pruned}
    with tempfile.TemporaryDirectory(prefix="shoal-rivals-") as scratch:
        made: dict[str, Made] = {"parent": (parent, weights.stat().st_size)}
        failures = {}
        for name, make in tools.items():
            try:
                made[name] = make(parent, opened, Path(scratch))
            except Exception as failure:  # what a tool cannot do is a result
                failures[name] = f"{type(failure).__name__}: {failure}"[:300]
        rows = [_row(name, one, made["parent"][1], opened) for name, one in made.items()]
        times = _times({name: one for name, (one, _) in made.items()}, opened)
    return [{**row, **times[row["tool"]]} for row in rows] + [{"tool": n, "failed": why} for n, why in failures.items()]


def _row(name: str, made: Made, parent_bytes: int, data: Datasets) -> dict[str, Any]:
    hits = total = 0
    with torch.no_grad():
        for x, y in _batches(data, "test", 500):
            hits += int((made[0](x).argmax(1) == y).sum())
            total += len(y)
    return {"tool": name, "bytes": made[1], "smaller": parent_bytes / made[1], "test": hits / total}


def _times(models: dict[str, Callable[..., Any]], data: Datasets) -> dict[str, dict[str, float]]:
    x = next(_batches(data, "train", 64))[0]
    found = measure_in_turns(models, {1: (x[:1],), 64: (x,)})
    return {one.name: {f"eager x{size}": 1 / ratio.median for size, ratio in one.ratios.items()} for one in found}


def _batches(data: Datasets, part: str, size: int, *, order: Tensor | None = None) -> Any:
    split = data.train if part == "train" else data.held_out[part]
    ids = split.ids if order is None else split.ids[order.numpy()]
    for first in range(0, len(ids), size):
        batch = split.source.take(ids[first : first + size])
        batch = split.transform(batch) if split.transform else batch
        yield batch.inputs[0], batch.target


def nncf_int8(parent: nn.Module, data: Datasets, scratch: Path) -> Made:
    nncf: Any = import_module("nncf")
    openvino: Any = import_module("openvino")
    x = next(_batches(data, "train", 64))[0]
    model = openvino.convert_model(parent, example_input=x)
    calibration = [batch for _, (batch, _) in zip(range(8), _batches(data, "train", 64), strict=False)]
    made = nncf.quantize(model, nncf.Dataset(calibration, lambda batch: batch.numpy()))
    openvino.save_model(made, scratch / "nncf.xml", compress_to_fp16=False)
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    compiled = openvino.Core().compile_model(scratch / "nncf.xml", "CPU", settings)
    size = sum((scratch / f"nncf.{ending}").stat().st_size for ending in ("xml", "bin"))
    return (lambda x: torch.from_numpy(compiled(x.numpy())[0])), size


def torchao_int8(parent: nn.Module, data: Datasets, scratch: Path) -> Made:
    tools: Any = import_module("torchao.quantization")
    made = copy.deepcopy(parent)
    tools.quantize_(made, tools.Int8WeightOnlyConfig())
    torch.save(made.state_dict(), scratch / "torchao.pt")
    return made, (scratch / "torchao.pt").stat().st_size


def pruned(parent: nn.Module, data: Datasets, scratch: Path) -> Made:
    torch_pruning: Any = import_module("torch_pruning")
    made, x = copy.deepcopy(parent), next(_batches(data, "train", 2))[0]
    importance = torch_pruning.importance.MagnitudeImportance(p=2)
    pruner = torch_pruning.pruner.MagnitudePruner(
        made, x, importance=importance, pruning_ratio=0.5, ignored_layers=[made.head]
    )
    pruner.step()
    _tune(made, data)
    save_file(made.state_dict(), scratch / "pruned.safetensors")
    return made.eval(), (scratch / "pruned.safetensors").stat().st_size


def _tune(model: nn.Module, data: Datasets) -> None:
    """The tuning of the row cnn-fast: Adam, a cosine, two epochs of batches of 128."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = TUNING_EPOCHS * -(-len(data.train.ids) // 128)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    model.train()
    for _ in range(TUNING_EPOCHS):
        for x, y in _batches(data, "train", 128, order=torch.randperm(len(data.train.ids))):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
