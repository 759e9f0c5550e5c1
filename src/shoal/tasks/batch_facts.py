"""Reads from tensors and source code what recognising a mistake needs: facts of a batch, and the user's line."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.data.batch import Batch
from shoal.errors import ShoalError, describe_exception, error
from shoal.spec.resolve import is_user_file, is_users_failure, user_line
from shoal.tasks.mistakes import CLASS_LOSSES, BatchFacts, Mistake, TensorFacts, recognise

GIVEN = "the batch is "
"""How the note begins that an unknown failure of a model gets."""
LOSS_FUNCTIONS: Mapping[Any, str] = {
    functional.cross_entropy: "CrossEntropyLoss",
    functional.nll_loss: "NLLLoss",
    functional.binary_cross_entropy: "BCELoss",
    functional.binary_cross_entropy_with_logits: "BCEWithLogitsLoss",
    functional.mse_loss: "MSELoss",
    functional.l1_loss: "L1Loss",
    functional.smooth_l1_loss: "SmoothL1Loss",
    functional.huber_loss: "HuberLoss",
}
"""torch's losses as functions, which its classes call, and the names of their classes."""
_LOSS_OF_CODE = {function.__code__: name for function, name in LOSS_FUNCTIONS.items()}
_VIEWS = ("View", "Reshape", "Squeeze", "Unsqueeze", "Unsafe", "Transpose", "Permute", "ToCopy", "Alias")
_MAX_VIEWS = 8
_WORDS_BEFORE_NO_GRADIENT = ("argmax", "detach", "no_grad", "round", "item", "numpy", "data", "max")


def tensor_facts(value: Any, *, read: bool = True) -> TensorFacts | None:
    """The facts of a tensor, with the range of its values if `read`; None for other objects."""
    if not isinstance(value, Tensor):
        return None
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if not read or value.is_meta or not value.numel() or value.is_complex():
        return TensorFacts(dtype, shape)
    values = value.detach().to("cpu", torch.float64)
    whole = bool((values == values.floor()).all())
    one_hot = whole and values.dim() > 1 and shape[1] > 1 and _is_one_hot(values)
    return TensorFacts(dtype, shape, float(values.min()), float(values.max()), whole, one_hot)


def input_facts(batch: Batch) -> tuple[TensorFacts, ...]:
    """The facts of a batch's inputs: of whole numbers, which may be indices, with their range."""
    named = [
        entry
        for value in batch.inputs
        for entry in (value.items() if isinstance(value, Mapping) else [("", value)])
        if isinstance(entry[1], Tensor)
    ]
    facts = [(name, tensor_facts(value, read=not value.is_floating_point())) for name, value in named]
    return tuple(replace(one, name=str(name)) for name, one in facts if one is not None)


def _is_one_hot(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all()) and bool((values.sum(1) == 1).all())


def loss_facts(loss: Any, output: Any, target: Any, *, failure: str = "") -> BatchFacts:
    """The facts of a call of one of torch's losses with these tensors."""
    name = type(loss).__name__ if isinstance(loss, nn.Module) else ""
    facts = call_facts(name, output, target, ignored=getattr(loss, "ignore_index", None), failure=failure)
    has_gradient = not torch.is_grad_enabled() or not isinstance(output, Tensor) or output.requires_grad
    return replace(facts, has_gradient=has_gradient)


def call_facts(name: str, output: Any, target: Any, *, ignored: int | None = None, failure: str = "") -> BatchFacts:
    """The facts of a call of the loss with this name. Targets that the loss ignores do not count."""
    kept = target
    if ignored is not None and isinstance(target, Tensor) and not target.is_floating_point() and not target.is_meta:
        kept = target[target != ignored] if bool((target == ignored).any()) else target
    facts, shown = tensor_facts(kept), tensor_facts(target, read=False)
    if facts is not None and shown is not None:
        facts = TensorFacts(shown.dtype, shown.shape, facts.low, facts.high, facts.is_whole, facts.is_one_hot)
    return BatchFacts(
        loss=name,
        output=tensor_facts(output),
        target=facts,
        classes=_classes(name, output),
        last_op=last_operation(output),
        failure=failure,
    )


def _classes(loss: str, output: Any) -> int:
    if loss not in CLASS_LOSSES or not isinstance(output, Tensor) or not output.dim():
        return 0
    return output.shape[1] if output.dim() > 1 else 1


def last_operation(output: Any) -> str:
    """`softmax`, `sigmoid` or another operation of torch that made the output, apart from views; '' if unknown."""
    function = getattr(output, "grad_fn", None)
    for _ in range(_MAX_VIEWS):
        if function is None or not function.name().startswith(_VIEWS):
            break
        function = function.next_functions[0][0]
    return "" if function is None else re.sub(r"Backward\d*$", "", function.name()).lower()


# ---- errors ----


@contextlib.contextmanager
def explain_model_errors(model: nn.Module, batch: Batch) -> Iterator[None]:
    """A known mistake in the block becomes its own error, with the shapes of the batch; others get them as a note."""
    try:
        yield
    except Exception as failure:
        if not is_users_failure(failure):
            raise
        inputs = input_facts(batch)
        known = known_failure(failure, inputs=inputs, model=model)
        if known is None:
            if inputs:
                failure.add_note(f"{GIVEN}{', '.join(one.with_range for one in inputs)}")
            raise
        raise known from failure


def known_failure(
    failure: BaseException, *, inputs: tuple[TensorFacts, ...] = (), model: nn.Module | None = None
) -> ShoalError | None:
    """The error for an exception of the model, or of a loss of the user's own, that is recognised by its text and by
    what torch's loss was given. It is at the user's line, or at the line of `model` that is to be changed."""
    forwards = [frame for frame, _ in traceback.walk_tb(failure.__traceback__) if frame.f_code.co_name == "forward"]
    is_call = not user_line(failure) and not forwards  # a library's forward that calls another is its own affair
    found = recognise(replace(_failed_call(failure), inputs=inputs, is_call=is_call))
    if found is None:
        return None
    places = [place_of(found, model)] if found.about == "output" and model is not None else []
    places += [_line(type(model).forward, 0)] if found.about == "forward" and model is not None else []
    where = next((one for one in (*places, user_line(failure)) if one not in ("", "model")), place_of(found, None))
    return error(found.code, found.message, where=where, fix=found.fix)


def _failed_call(failure: BaseException) -> BatchFacts:
    """What the failing call of one of torch's losses was given, if it was one."""
    text = describe_exception(failure)
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        if name := _LOSS_OF_CODE.get(frame.f_code):
            given = frame.f_locals
            output, target = given["input"], given["target"]
            if all(isinstance(value, Tensor) and value.device.type == "cpu" for value in (output, target)):
                return call_facts(name, output, target, ignored=given.get("ignore_index"), failure=text)
    return BatchFacts(failure=text)


def mistake_error(mistake: Mistake, model: nn.Module | None) -> ShoalError:
    """The error of a mistake. It is placed at the user's line if the model is what to look at."""
    return error(mistake.code, mistake.message, where=place_of(mistake, model), fix=mistake.fix)


def place_of(mistake: Mistake, model: nn.Module | None) -> str:
    fields = {"target": "data.source", "loss": "loss", "task": "task"}
    if mistake.about in fields or model is None:
        return fields.get(mistake.about, "model")
    words = {"SH716": _WORDS_BEFORE_NO_GRADIENT, "SH719": ("softmax", "sigmoid")}.get(mistake.code, ())
    return (
        _line_of_words(model, words)
        or _line_of_last_layer(model)
        or next((_line(type(m).forward, 0) for m in model.modules() if _line(type(m).forward, 0)), "model")
    )


def _line_of_words(model: nn.Module, words: Sequence[str]) -> str:
    """The line of a forward of the user that uses one of the words: where what it returns is made of it, otherwise the
    last one, in the order of the words; '' if none does."""
    pattern = re.compile(rf"\b(?:{'|'.join(words)})\b") if words else None
    for module in model.modules() if pattern else ():
        number = returned_from(textwrap.dedent("".join(_source(type(module).forward))), pattern)
        if number is not None:
            return _line(type(module).forward, number)
    for word in words:
        for module in model.modules():
            numbers = [n for n, line in enumerate(_source(type(module).forward)) if re.search(rf"\b{word}\b", line)]
            if numbers:
                return _line(type(module).forward, numbers[-1])
    return ""


def returned_from(source: str, pattern: re.Pattern[str] | None) -> int | None:
    """The line (from 0) of a function's source at which the value that it returns is made by a matching expression:
    the nearest one to the return, back through assigned names. None if there is none."""
    try:
        statements = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return) and node.value is not None
        ]
    except SyntaxError:
        return None
    wanted: set[str] | None = None  # until a return is found
    for node in sorted(statements, key=lambda one: one.lineno, reverse=True):
        if isinstance(node, ast.Return):
            wanted = wanted or set()
        elif wanted is None or not wanted & _names_in(node.targets if isinstance(node, ast.Assign) else [node.target]):
            continue
        assert node.value is not None
        if pattern is not None and pattern.search(ast.unparse(node.value)):
            return node.lineno - 1
        wanted |= _names_in([node.value])
    return None


def _names_in(nodes: Sequence[ast.expr]) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _line_of_last_layer(model: nn.Module) -> str:
    """The line of the user's class that makes the model's last layer with parameters; '' if it is not found."""
    named = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters(recurse=False))
    ]
    if not named:
        return ""
    first = re.escape(named[-1].partition(".")[0])
    made = type(model).__init__
    numbers = [n for n, line in enumerate(_source(made)) if re.search(rf"\bself\.{first}\s*(:.*)?=", line)]
    return _line(made, numbers[-1]) if numbers else ""


def _source(function: Any) -> list[str]:
    """The lines of a function of the user's own; none for those of libraries."""
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return []
    try:
        return inspect.getsourcelines(function)[0]
    except (OSError, TypeError):
        return []


def _line(function: Any, offset: int) -> str:
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno + offset}"
