"""Shapes and types of a model's inputs, as model.json has them, and inputs made from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import error

MAX_ELEMENTS = 1 << 28


def describe_example(value: Any) -> Any:
    """The nested inputs with {dtype, shape} for each tensor; None where it is something else."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"named": {str(key): describe_example(part) for key, part in value.items()}}
    if isinstance(value, list | tuple):
        return [describe_example(part) for part in value]
    return None


def make_example(description: Any, *, batch: int = 2) -> Any:
    """Inputs of zeros with `batch` samples. SH810 if the description is not one of tensors."""
    if isinstance(description, list):
        return tuple(make_example(part, batch=batch) for part in description)
    if isinstance(description, Mapping) and isinstance(description.get("named"), Mapping):
        return {str(key): make_example(part, batch=batch) for key, part in description["named"].items()}
    try:
        shape = [batch, *(int(size) for size in description["shape"][1:])]
        dtype = getattr(torch, str(description["dtype"]))
        if torch.Size(shape).numel() > MAX_ELEMENTS or not isinstance(dtype, torch.dtype):
            raise ValueError("not the shape of a batch")
        return torch.zeros(shape, dtype=dtype)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as failure:
        message = "the model's inputs are not known: model.json has no shapes of tensors"
        raise error("SH810", message, where="model.json", fix="Run the job again with this version.") from failure
