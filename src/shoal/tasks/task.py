"""Task: the user's side of training. A job that names a model, a loss and metrics gets a `PlainTask`; users who need
full control write their own `Task`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.batch import Batch
from shoal.errors import error
from shoal.lanes.loss import Loss
from shoal.tasks import losses
from shoal.tasks.batch_facts import explain_model_errors
from shoal.tasks.weighted_loss import weighted_loss


class Task:
    """What to train. Subclass it, override `model` and `loss`, and other methods as needed.

    `loss` returns the mean over the batch's samples, or a pair (sum, weight) if it divides by anything else: tokens,
    targets that are not ignored, weights of samples. Weights are summed over all lanes before they divide. Both methods
    must draw random numbers only from torch's, Python's or numpy's global generators: they are seeded per lane and
    step.
    """

    logits: bool | None = None
    """Whether predictions are logits, which classification metrics need as probabilities. None: decided by values. For
    `shoal predict`, one number for each sample is the answer to yes or no, unless this is None."""
    predicts_classes = False
    """Whether the last dimension of a prediction (the second one of a PlainTask) are scores of classes. `shoal predict`
    then names the class."""
    knows_divisor = False
    """Whether it is known by what `loss` divides, if it returns a mean."""
    has_untrained_parameters = False
    """Whether the loss has parameters that no optimizer gets."""
    explains_itself = False
    """Whether `loss` itself tells known mistakes, because the job names the loss."""
    carries = False
    """Whether lanes hand something to themselves at the next step, in `carry`."""
    carry: dict[str, Any]
    """What this lane left here at the step before: tensors, numbers, text, in dicts and lists. Empty at the first step
    of an epoch, and in evaluations. What `loss` leaves here, cut off from the graph, is there at the lane's next step,
    whichever worker computes it."""

    def model(self) -> nn.Module:
        raise NotImplementedError("a Task needs model()")

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Without a loss of its own, a task with phases is evaluated with the loss of its first phase."""
        if not self.has_phases:
            raise NotImplementedError("a Task needs loss()")
        return next(found for found, _ in self.step(model, batch) if found is not None)

    def step(self, model: nn.Module, batch: Batch) -> Iterator[tuple[Loss | None, str]]:
        """Instead of `loss`, for several optimizers: yields (loss, name of the optimizer) for each phase of a step.

        At a yield, the losses of all lanes are added, and that optimizer makes its update; then the next phase begins.
        Every batch has the same phases. A loss of None adds nothing.
        """
        raise NotImplementedError("a Task with phases needs step()")

    @property
    def has_phases(self) -> bool:
        return type(self).step is not Task.step

    def optimizers(self, model: nn.Module) -> Mapping[str, torch.optim.Optimizer]:
        """The optimizers of a task with phases, by name."""
        return {}

    def to(self, device: torch.device) -> nn.Module:
        """The model on its device; override it if the loss has tensors to move, too."""
        return self.model().to(device)

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        """The predictions that metrics compare with the target."""
        return model(*batch.inputs)

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[Loss, Any]:
        """Loss and predictions in evaluation; override it if one forward pass gives both."""
        return self.loss(model, batch), self.predict(model, batch)

    def target(self, model: nn.Module, batch: Batch) -> Any:
        """What metrics compare the predictions with."""
        return batch.target

    @property
    def needs_predictions(self) -> bool:
        """Whether an evaluation uses more than the loss: a model of parts may have no forward pass of its own."""
        return type(self).metrics is not Task.metrics or self.evaluates_in_one_pass

    @property
    def evaluates_in_one_pass(self) -> bool:
        """Whether `evaluate` calls the model once."""
        return type(self).evaluate is not Task.evaluate

    def look_at(self, model: nn.Module, batch: Batch) -> str:
        """What the user must know about the first batch; '' if nothing. Called once before training, with a forward
        pass that leaves no trace; raises what makes training impossible."""
        return ""

    def metrics(self, example: tuple[Any, Any] | None = None) -> Mapping[str, Any]:
        """torchmetrics objects by name. `example` is (prediction, target) of a batch, if available."""
        return {}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The task's own optimizer, or None for the job's."""
        return None

    def state(self) -> Any:
        """The task's own state, saved in checkpoints: tensors, numbers, text, in dicts and lists."""
        return None

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned."""


_LOSSES_ON_LOGITS = (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss, nn.SoftMarginLoss)


class PlainTask(Task):
    """`loss(model(*inputs), target)`: a plain PyTorch model needs no change.

    `mentions_ignored`: the job itself names the target that the loss ignores. `whole_batches`: a call of `loss` gets
    all samples of a step, so that any mean is that of the step.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        metrics: Any = None,
        *,
        mentions_ignored: bool = False,
        whole_batches: bool = True,
    ) -> None:
        self._model = model
        self._loss = loss
        self._metrics = metrics
        self._whole_batches = whole_batches
        self._is_torch_loss = self.explains_itself = losses.is_torch_loss(loss)
        self._class_loss = losses.class_loss_of(loss)
        self._is_weighted = self._class_loss is not None and (
            mentions_ignored or losses.has_target_weights(self._class_loss)
        )
        self._is_sum = self._is_torch_loss and loss.reduction == "sum"
        self.predicts_classes = self._class_loss is not None
        self.has_untrained_parameters = losses.has_parameters(loss)
        self.knows_divisor = losses.is_mean_known(loss)
        self.logits = True if isinstance(loss, _LOSSES_ON_LOGITS) else False if isinstance(loss, nn.BCELoss) else None

    def model(self) -> nn.Module:
        return self._model

    def to(self, device: torch.device) -> nn.Module:
        for loss in (self._loss, self._class_loss):
            if isinstance(loss, nn.Module):
                loss.to(device)
        return super().to(device)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        output, target = self._aligned(self._forward(model, batch), batch.target)
        if not (self._is_weighted or self._whole_batches or self._class_loss is None):
            losses.check_no_ignored_targets(self._class_loss, target)
        if batch.weight is not None:
            return weighted_loss(self._loss, output, target, batch.weight)
        return self._compute_loss(output, target)

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[Loss, Any]:
        output = self._forward(model, batch)
        aligned = self._aligned(output, batch.target)
        if batch.weight is not None:
            return weighted_loss(self._loss, *aligned, batch.weight), output
        return self._evaluation_loss(*aligned, batch.size), output

    def look_at(self, model: nn.Module, batch: Batch) -> str:
        if not self._is_torch_loss:
            return ""
        output, target = self._forward(model, batch), batch.target
        if self._class_loss is None or not isinstance(output, Tensor) or output.dim() > 2:
            output, target = self._aligned(output, target)
        return losses.look_at_first_batch(self._loss, output, target, model=model)

    def _forward(self, model: nn.Module, batch: Batch) -> Any:
        with explain_model_errors(model, batch):
            return model(*batch.inputs)

    def metrics(self, example: tuple[Any, Any] | None = None) -> Mapping[str, Any]:
        return self._metrics(example) if self._metrics else {}

    def _aligned(self, output: Any, target: Any) -> tuple[Any, Any]:
        """torch's own losses get aligned shapes; the user's loss gets the model's output unchanged. The target of
        MultiLabelMarginLoss has the output's shape and is whole numbers, so nothing is to be aligned."""
        as_it_is = not self._is_torch_loss or isinstance(self._loss, nn.MultiLabelMarginLoss)
        return (output, target) if as_it_is else align_shapes(output, target)

    def _evaluation_loss(self, output: Any, target: Any, size: int) -> Loss:
        """The loss of a chunk. Other chunks may have another number of ignored targets, so a chunk that has some gives
        its weight, in samples. A sum gives its number of samples."""
        class_loss = self._class_loss
        if class_loss is None or self._is_weighted or not losses.has_ignored_targets(class_loss, target):
            value = self._compute_loss(output, target)
            return (value, size) if isinstance(value, Tensor) and self._is_sum else value
        with losses.explain_errors(class_loss, output, target, model=self._model):
            total, weight = losses.sum_and_weight(class_loss, output, target)
        return total * (size / target.numel()), weight * (size / target.numel())

    def _compute_loss(self, output: Any, target: Any) -> Loss:
        if self._class_loss is not None and self._is_weighted:
            with losses.explain_errors(self._class_loss, output, target, model=self._model):
                return losses.sum_and_weight(self._class_loss, output, target)
        if not self._is_torch_loss:
            own: Loss = self._loss(output, target)
            return own
        with losses.explain_errors(self._loss, output, target, model=self._model):
            value: Tensor = self._loss(output, target)
        return value


def align_shapes(output: Any, target: Any) -> tuple[Any, Any]:
    """Shapes as torch's losses and torchmetrics expect them, where only one interpretation makes sense.

    Output (n, 1) with target (n) would silently be broadcast to (n, n): it becomes (n). Classes in the last dimension,
    (n, t, c) with target (n, t), move to the second. An integer target with the output's shape is binary or a number:
    it gets the output's dtype.
    """
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return output, target
    if output.dim() == target.dim() + 1 and output.shape[:-1] == target.shape:
        if output.shape[-1] == 1:
            output = output.squeeze(-1)
        elif output.dim() > 2 and not target.is_floating_point():
            output = _move_classes_second(output, target)
    if output.shape == target.shape and output.is_floating_point() and not target.is_floating_point():
        target = target.to(output.dtype)
    return output, target


def _move_classes_second(output: Tensor, target: Tensor) -> Tensor:
    """(n, t, c) as (n, c, t). SH402 if c equals t: the two cannot be told apart, and a wrong guess would silently train
    something else."""
    if output.shape[2:] == target.shape[1:]:
        raise error(
            "SH402",
            f"the output is {list(output.shape)} beside a target of {list(target.shape)}: which of the two "
            f"{output.shape[-1]} counts classes?",
            fix="Use another number of classes (one more will do) or a sample of another length, or write a Task.",
        )
    return output.movedim(-1, 1)
