"""Gradients are dense tensors: lanes add them, workers exchange them and servers cut them as such."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.errors import ShoalError, error

_FIX = (
    "Remove `sparse=True`: dense gradients train the same. For a table that is too large for that, use "
    "shoal.SparseTable with `sync: {kind: server}`, see docs/sparse.md."
)


def check_layers(model: nn.Module) -> None:
    """SH420 if a layer says that its gradient is sparse."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            place = f"{name}.weight" if name else "weight"
            raise _error(f"{type(module).__name__}(sparse=True) gives '{place}'")


def sparse_gradient_error(model: nn.Module, parameter: Tensor) -> ShoalError:
    """For a gradient that turns out to be sparse in a backward pass."""
    name = next((name for name, one in model.named_parameters() if one is parameter), "?")
    return _error(f"backward gave '{name}'")


def _error(subject: str) -> ShoalError:
    return error("SH420", f"{subject} a sparse gradient, and lanes add dense ones", where="model", fix=_FIX)
