"""`loss: model`: a model that computes its loss itself, as those of Hugging Face do.

The batch is a dict, the model is called with its entries by name, and its answer has `loss` and `logits` (or `logits`
alone, without labels). Such models divide their loss by the labels that are not -100, so the mean of a lane is
multiplied by their number, and lanes add sums and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.batch import IGNORED_LABEL, Batch
from shoal.errors import error
from shoal.lanes.loss import Loss
from shoal.tasks.batch_facts import explain_model_errors
from shoal.tasks.task import Task


class OwnLossTask(Task):
    """The task of a job with `loss: model`."""

    explains_itself = True
    knows_divisor = True
    logits = True
    predicts_classes = True

    def __init__(self, model: nn.Module, metrics: Callable[[Any], Mapping[str, Any]]) -> None:
        self._model = model
        self._metrics = metrics

    def model(self) -> nn.Module:
        return self._model

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self._weighted(model, self._forward(model, batch), batch)

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        return aligned_logits(model, self._forward(model, batch), batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[Loss, Any]:
        output = self._forward(model, batch)
        return self._weighted(model, output, batch), aligned_logits(model, output, batch)

    def look_at(self, model: nn.Module, batch: Batch) -> str:
        """With one output, models of Hugging Face learn a number: labels that are classes are a mistake."""
        labels, logits = batch.target, field_of(self._forward(model, batch), "logits")
        if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or labels.is_floating_point():
            return ""
        if logits.dim() != labels.dim() + 1 or logits.shape[-1] != 1:
            return ""
        given = f"logits {list(logits.shape)} and labels {labels.dtype} {list(labels.shape)}"
        return (
            f"SH714 model: {given}: with one output it learns the class numbers as if they were quantities. Give it "
            "one output for each class (`num_labels`); for numbers give labels as floats."
        )

    def target(self, model: nn.Module, batch: Batch) -> Any:
        return batch.target[..., 1:] if predicts_next(model, batch.target) else batch.target

    def metrics(self, example: tuple[Any, Any] | None = None) -> Mapping[str, Any]:
        return self._metrics(example)

    def _forward(self, model: nn.Module, batch: Batch) -> Any:
        with explain_model_errors(model, batch):
            return model(**named_inputs(batch))

    def _weighted(self, model: nn.Module, output: Any, batch: Batch) -> Loss:
        if batch.weight is not None:
            message = "data.weight is set, and the model computes one loss for all samples"
            raise error("SH832", message, where="loss", fix="Write a Task that uses batch.weight, or name a loss.")
        mean = field_of(output, "loss")
        if not isinstance(mean, Tensor):
            names = ", ".join(named_inputs(batch))
            what = f"the model returns {type(output).__name__} without a loss; the batch has {names}"
            fix = (
                "Give the data a column `labels`, for language models by a DataCollatorForLanguageModeling as "
                "`collate` (`labels: input_ids` of `kind: huggingface`); or name a loss: `loss: CrossEntropyLoss`."
            )
            raise error("SH800", what, where="loss", fix=fix)
        weight = label_weight(model, output, batch)
        if weight == 0:  # the mean of no labels is no number
            return _first_tensor(output).float().nan_to_num().sum() * 0.0, torch.zeros((), dtype=torch.float64)
        return mean.float() * weight, torch.tensor(weight, dtype=torch.float64)


def named_inputs(batch: Batch) -> Mapping[str, Any]:
    """The batch by the names of the model's arguments. SH800 if it has none."""
    if _have_names(batch.inputs):
        names: Mapping[str, Any] = batch.inputs[0]
        return names
    fix = "Let the dataset return dicts such as {'input_ids': ..., 'labels': ...}, or use `kind: huggingface`."
    raise error(
        "SH800", "a model with its own loss is called by name, and the batch has no names", where="loss", fix=fix
    )


class NamedInputs(nn.Module):
    """A model that takes its inputs by name, as one that takes them in order: `names` of the batch, without labels. It
    returns the logits."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Any:
        return logits_of(self.model(**dict(zip(self.names, inputs, strict=True))))


class NamedOutputs(nn.Module):
    """The opposite: a model that takes its inputs in order and returns logits, as one with a loss. `own` is the user's
    model, whose loss it has where labels are classes. For other labels it has none."""

    def __init__(self, plain: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.loss_function, self.config = getattr(own, "loss_function", None), getattr(own, "config", None)

    def forward(self, **inputs: Any) -> dict[str, Any]:
        labels = inputs.pop("labels", inputs.pop("label", None))
        logits = self.plain(*inputs.values())
        if not _are_classes(labels, logits):
            return {"logits": logits}
        one, other = (logits[..., :-1, :], labels[..., 1:]) if predicts_next(self, labels) else (logits, labels)
        loss = F.cross_entropy(one.flatten(0, -2), other.flatten(), ignore_index=IGNORED_LABEL)
        return {"loss": loss, "logits": logits}


def _have_names(inputs: tuple[Any, ...]) -> bool:
    return len(inputs) == 1 and isinstance(inputs[0], Mapping)


def with_plain_inputs(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """Model and inputs as tensors in order."""
    if not _have_names(inputs):
        return model, inputs
    named = {name: value for name, value in inputs[0].items() if name not in ("labels", "label")}
    return NamedInputs(model, list(named)).eval(), tuple(named.values())


def logits_of(output: Any) -> Any:
    """The logits of a model's answer; the answer itself if it has none."""
    logits = None if isinstance(output, Tensor) else field_of(output, "logits")
    return output if logits is None else logits


def field_of(output: Any, name: str) -> Any:
    """A field of a model's answer, which is an object or a dict; None if it has none."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def aligned_logits(model: nn.Module, output: Any, batch: Batch) -> Any:
    """The logits that belong to the labels in their order. A causal model's position predicts the next token."""
    logits = field_of(output, "logits")
    if logits is None:
        raise error("SH800", f"the model returns {type(output).__name__} without logits", where="loss")
    return logits[..., :-1, :] if predicts_next(model, batch.target) else logits


def label_weight(model: nn.Module, output: Any, batch: Batch) -> int:
    """By what the model divides its loss: the labels that are not ignored if they are classes, else samples."""
    labels, logits = batch.target, field_of(output, "logits")
    if not _are_classes(labels, logits):
        return batch.size
    counted = labels[..., 1:] if predicts_next(model, labels) else labels
    return int((counted != IGNORED_LABEL).sum())


def _are_classes(labels: Any, logits: Any) -> bool:
    return (
        isinstance(labels, Tensor)
        and isinstance(logits, Tensor)
        and not labels.is_floating_point()
        and logits.dim() == labels.dim() + 1
        and logits.shape[-1] > 1
    )


def predicts_next(model: nn.Module, labels: Any) -> bool:
    """Whether the model compares position i with label i + 1, as the causal models of Hugging Face do."""
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return False
    own = getattr(getattr(model, "loss_function", None), "__name__", "")
    return own == "ForCausalLMLoss" and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _first_tensor(output: Any) -> Tensor:
    found = field_of(output, "logits")
    if isinstance(found, Tensor):
        return found
    first: Tensor = field_of(output, "loss")
    return first
