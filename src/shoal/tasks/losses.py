"""torch's own losses: by what each divides, and what is wrong if one of them fails.

With `reduction: mean`, nearly all of them divide by the number of elements or of samples, whatever weights they have.
Only cross entropy and NLL divide by the weights of the targets: the weight of a target's class, or 1 without weights,
and 0 for `ignore_index`. Such means of two halves of a batch do not average to the mean of the batch. So they are
computed as a sum and a weight, which are added over the lanes before they divide.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import describe_exception, error, is_out_of_memory
from shoal.spec.base import Ref
from shoal.spec.names import DEFAULT_MODULES
from shoal.spec.resolve import build_ref, import_ref
from shoal.tasks.batch_facts import loss_facts, mistake_error, place_of
from shoal.tasks.mistakes import Mistake, recognise

ClassLoss = nn.CrossEntropyLoss | nn.NLLLoss
"""The losses that divide by the weights of the targets."""

_CLASS_FUNCTIONS: dict[Any, type[ClassLoss]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
}
_SAME_SHAPE_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
"""Losses that would broadcast an output and a target of different shapes."""
_SHAPE_FIX = "Let the model give one number for each number of the target, in the same shape; or use another loss."
_TENSOR_ARGUMENTS = ("weight", "pos_weight")
_DEFAULT_IGNORE_INDEX = nn.CrossEntropyLoss().ignore_index


def build_loss(ref: Ref, *, base_dir: str) -> Any:
    """Instantiate a loss class; return a loss function, with its arguments bound. torch's own get tensors for lists."""
    target = import_ref(ref, base_dir=base_dir, default_modules=DEFAULT_MODULES["loss"])
    ref = Ref(name=ref.name, args=_with_tensors(target, ref.args))
    if inspect.isclass(target):
        made = build_ref(ref, base_dir=base_dir, default_modules=DEFAULT_MODULES["loss"])
        if is_torch_loss(made) and has_parameters(made):
            message = f"{target.__name__} has parameters of its own, and only those of the model are trained"
            raise error("SH402", message, where="loss", fix="Write a Task whose model contains the loss.")
        return made
    return functools.partial(target, **ref.args) if ref.args else target


def _with_tensors(target: Any, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with tensors for lists of weights if the code that takes them is torch's own."""
    code = target.__init__ if inspect.isclass(target) else target
    if not str(getattr(code, "__module__", "")).startswith("torch."):
        return args
    return {
        name: torch.tensor(value, dtype=torch.float32) if _is_list_of_numbers(name, value) else value
        for name, value in args.items()
    }


def _is_list_of_numbers(name: str, value: Any) -> bool:
    if name not in _TENSOR_ARGUMENTS or not isinstance(value, list):
        return False
    if value and all(isinstance(number, int | float) and not isinstance(number, bool) for number in value):
        return True
    raise error("SH205", f"'{name}' is not a list of numbers", where=f"loss.args.{name}", fix="Write [1.0, 2.0].")


def has_parameters(loss: Any) -> bool:
    """Whether the loss has parameters that would have to be trained."""
    return isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters())


def is_torch_loss(loss: Any) -> bool:
    """Whether it is a class of torch.nn itself, not one derived from it."""
    return type(loss).__module__.startswith("torch.nn.")


def is_mean_known(loss: Any) -> bool:
    """Whether it is known by what the loss divides: it is one of torch's own classes or functions."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    return is_torch_loss(loss) or getattr(function, "__module__", None) == functional.__name__


def class_loss_of(loss: Any) -> ClassLoss | None:
    """The class loss that this loss is, as a class or as a function of torch; None if it is another, or no mean."""
    function, args = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    found = (
        loss if is_torch_loss(loss) else next((k(**args) for f, k in _CLASS_FUNCTIONS.items() if f is function), None)
    )
    return found if isinstance(found, ClassLoss) and found.reduction == "mean" else None


def has_target_weights(loss: ClassLoss) -> bool:
    """Whether its arguments say that targets weigh differently."""
    return loss.weight is not None or loss.ignore_index != _DEFAULT_IGNORE_INDEX


def has_ignored_targets(loss: ClassLoss, target: Any) -> bool:
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_meta:
        return False
    return bool((target == loss.ignore_index).any())


def sum_and_weight(loss: ClassLoss, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all targets, and their weight. Their quotient is torch's mean."""
    if output.dtype.itemsize < torch.float32.itemsize:
        output = output.float()  # a sum of 16-bit numbers soon overflows
    weight = None if loss.weight is None else loss.weight.to(output.dtype)
    if isinstance(loss, nn.CrossEntropyLoss):
        total = functional.cross_entropy(
            output,
            target,
            weight=weight,
            ignore_index=loss.ignore_index,
            reduction="sum",
            label_smoothing=loss.label_smoothing,
        )
    else:
        total = functional.nll_loss(output, target, weight=weight, ignore_index=loss.ignore_index, reduction="sum")
    return total, _target_weight(loss, output, target)


def _target_weight(loss: ClassLoss, output: Tensor, target: Tensor) -> Tensor:
    """By what torch divides, in float64."""
    if target.is_floating_point():  # probabilities of the classes: class weights do not divide them
        classes = output.shape[min(output.dim() - 1, 1)]
        return torch.tensor(output.numel() / classes, dtype=torch.float64)
    return target_weights(loss, target).sum()


def target_weights(loss: ClassLoss, target: Tensor) -> Tensor:
    """The weight of each target, in float64: that of its class, or 1; 0 if it is ignored."""
    kept = target != loss.ignore_index
    if loss.weight is None:
        return kept.double()
    return torch.where(kept, loss.weight.double()[torch.where(kept, target, 0).long()], 0.0)


# ---- errors ----


def check_no_ignored_targets(loss: ClassLoss, target: Any) -> None:
    """SH421 if there are targets that the loss ignores although the job does not say so."""
    if not has_ignored_targets(loss, target):
        return
    name, ignored = type(loss).__name__, loss.ignore_index
    message = f"a target is {ignored}, which {name} ignores, so the lanes of a batch have different weights"
    fix = f"Write `loss: {{name: {name}, args: {{ignore_index: {ignored}}}}}`, or remove these targets."
    raise error("SH421", message, where="loss", fix=fix)


@contextlib.contextmanager
def explain_errors(loss: Any, output: Any, target: Any, *, model: nn.Module | None = None) -> Iterator[None]:
    """An error in one of torch's losses is about the output and the target: a known mistake gets its own error, others
    SH402, so that nobody takes it for a failure of the model.

    An error also if the loss would silently broadcast, or if it has one class to choose from.
    """
    known = _known_without_failure(loss, output, target)
    if known is not None:
        raise mistake_error(known, model)
    try:
        yield
    except Exception as failure:
        if is_out_of_memory(failure) or (isinstance(output, Tensor) and output.is_meta):
            raise
        text = describe_exception(failure)
        fix = _fix(loss, output, target)
        found = None if fix else recognise(loss_facts(loss, output, target, failure=text))
        if found and found.code != "SH715":  # that is about layers
            raise mistake_error(found, model) from failure
        message = f"{_call(loss, output, target)}: {text}"
        raise error("SH402", message, where="loss", fix=fix or _last_fix(loss)) from failure


def _known_without_failure(loss: Any, output: Any, target: Any) -> Mistake | None:
    """A mistake that shapes show and that torch would not report."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    broadcasts = isinstance(loss, _SAME_SHAPE_LOSSES) and output.shape != target.shape
    chooses_nothing = isinstance(loss, ClassLoss) and output.dim() == target.dim() == 1 and output.dim() == 1
    return recognise(loss_facts(loss, output, target)) if broadcasts or chooses_nothing else None


def look_at_first_batch(loss: Any, output: Any, target: Any, *, model: nn.Module) -> str:
    """What the user must know about a batch that torch's loss takes without an error; '' if nothing. Raises what makes
    training impossible."""
    found = recognise(loss_facts(loss, output, target))
    if found is None:
        return ""
    if found.fatal:
        raise mistake_error(found, model)
    return f"{found.code} {place_of(found, model)}: {found.message}. {found.fix}"


def _fix(loss: Any, output: Any, target: Any) -> str:
    """A fix that concerns the loss's own arguments; '' if there is none."""
    if isinstance(loss, nn.Module) and len(inspect.signature(loss.forward).parameters) > 2:
        return f"Write a Task: {type(loss).__name__} takes more than an output and a target."
    if output is None:
        return "`forward` returns nothing: let it end with `return`."
    if target is None:
        return "The data has no labels: name `target` in data.source; a Dataset of your own returns (input, label)."
    if isinstance(target, list | tuple) and any(isinstance(value, str) for value in target):
        return "The labels are texts: return the number of each class, such as names.index(label)."
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return "Let model and data give one tensor each, or write a Task, whose loss takes anything."
    outputs = output.shape[1 if isinstance(loss, ClassLoss) and output.dim() > 1 else -1] if output.dim() else 1
    for name in _TENSOR_ARGUMENTS:
        weights = getattr(loss, name, None)
        if weights is not None and len(weights) not in (1, outputs):
            return f"Give `loss.args.{name}` {outputs} numbers, as many as the model has outputs, not {len(weights)}."
    return ""


def _last_fix(loss: Any) -> str:
    if isinstance(loss, ClassLoss):
        return "The target must have the output's shape without its second dimension, which is that of the classes."
    return _SHAPE_FIX


def _call(loss: Any, output: Any, target: Any) -> str:
    return f"{type(loss).__name__} of an output {_describe(output)} and a target {_describe(target)}"


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
