"""The model of a finished run in the formats of other programs: ONNX, torch's exported program, Hugging Face."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.example_inputs import make_example
from shoal.checkpoint.export import load_weights, save_program
from shoal.compression.onnx_files import export_onnx
from shoal.data.files import absolute_path
from shoal.errors import describe_exception, error
from shoal.spec.job import Job
from shoal.spec.sources.config import HuggingFaceSourceConfig
from shoal.tasks.model import build_task
from shoal.tasks.own_loss import with_plain_inputs


def write_model(job: Job, *, weights: str, example: Any, kind: str, out: str) -> dict[str, Any]:
    """Write the file or directory `out`. SH810 with the exporter's words if the model cannot be written like this."""
    model = build_task(job).model()
    model.load_state_dict(load_weights(weights))
    writers: dict[str, Callable[[nn.Module, Any, Path], None]] = {"onnx": _write_onnx, "pt2": _write_program}
    if kind == "hf":
        _write_hugging_face(model.eval(), job, Path(out))
    else:
        writers[kind](model.eval(), example, Path(out))
    return {"out": out}


def _write_onnx(model: nn.Module, example: Any, out: Path) -> None:
    export_onnx(*with_plain_inputs(model, make_example(example)), out)


def _write_program(model: nn.Module, example: Any, out: Path) -> None:
    plain, inputs = with_plain_inputs(model, make_example(example))
    try:
        save_program(plain, inputs, out)
    except Exception as failure:  # torch.export raises whatever tracing raises
        raise error("SH810", f"torch.export failed: {describe_exception(failure)[:600]}", where="pt2") from failure


def _write_hugging_face(model: nn.Module, job: Job, out: Path) -> None:
    """`save_pretrained` of the model, with the tokenizer of the job's data. A PEFT model writes its adapter alone."""
    save = getattr(model, "save_pretrained", None)
    if save is None:
        message = f"{type(model).__name__} has no save_pretrained: it is not a model of Hugging Face"
        raise error("SH810", message, where="hf", fix="Use --format safetensors, onnx or pt2.")
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".shoal-export-") as scratch:
        made = Path(scratch) / out.name
        with torch.no_grad():
            save(made)
        source = job.data.source
        if isinstance(source, HuggingFaceSourceConfig) and source.tokenizer is not None:
            _copy_tokenizer(Path(absolute_path(source.tokenizer, job.base_dir)), made)
        made.rename(out)


def _copy_tokenizer(tokenizer: Path, target: Path) -> None:
    files = [tokenizer] if tokenizer.is_file() else [file for file in sorted(tokenizer.glob("*")) if file.is_file()]
    for file in files:
        if not (target / file.name).exists():
            shutil.copy(file, target / file.name)
