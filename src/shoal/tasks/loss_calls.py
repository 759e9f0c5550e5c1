"""Mistakes in a loss of the user's own: what it gives to torch's losses is known, as where a job names the loss."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.data.batch import Batch
from shoal.lanes.loss import Loss
from shoal.spec.resolve import calling_user_line
from shoal.tasks.batch_facts import LOSS_FUNCTIONS, call_facts, explain_model_errors, place_of
from shoal.tasks.mistakes import Mistake, recognise
from shoal.tasks.task import Task

Note = Callable[[str], object]
Phases = Iterator[tuple[Loss | None, str]]


class ExplainedLoss:
    """`loss` and `step` of a task. A known mistake in them is told with the shapes of the batch. The calls of the first
    batch are looked at: `note` gets what trains, but not as it should. Without `note` nothing is looked at."""

    def __init__(self, task: Task, note: Note | None) -> None:
        self._task, self._note = task, note

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        with explain_model_errors(model, batch):
            if self._note is None:
                return self._task.loss(model, batch)
            with LossCalls(model) as calls:
                found = self._task.loss(model, batch)
        self._tell(calls)
        return found

    def step(self, model: nn.Module, batch: Batch) -> Phases:
        calls = LossCalls(model)
        phases = self._task.step(model, batch)
        while True:
            with explain_model_errors(model, batch), calls if self._note else contextlib.nullcontext():
                phase = next(phases, None)
            if phase is None:
                self._tell(calls)
                return
            yield phase

    def _tell(self, calls: LossCalls) -> None:
        if self._note is not None and torch.is_grad_enabled():  # a rehearsal has no gradients
            for message in calls.notes:
                self._note(message)
            self._note = None


class LossCalls(TorchFunctionMode):
    """A block in which torch's losses are called. `notes` tell what trains, but not as it should."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = LOSS_FUNCTIONS.get(func)
        with warnings.catch_warnings():
            if name is not None:
                warnings.simplefilter("ignore")  # of shapes that differ: a note tells it, with the user's line
            result = func(*args, **(kwargs or {}))
        if name is not None and len(args) > 1 and _is_trained(result):
            self._look_at(name, args[0], args[1], (kwargs or {}).get("ignore_index"))
        return result

    def _look_at(self, name: str, output: Any, target: Any, ignored: int | None) -> None:
        found = recognise(call_facts(name, output, target, ignored=ignored))
        is_for_all = isinstance(target, Tensor) and target.numel() == 1  # one number that every output is compared with
        if found is not None and not is_for_all:
            self._notes[f"{found.code} {self._place(found)}: {found.message}. {found.fix}"] = None

    def _place(self, mistake: Mistake) -> str:
        line = calling_user_line()
        return place_of(mistake, self._model) if mistake.about == "output" or not line else line


def _is_trained(loss: Any) -> bool:
    """Other calls only measure."""
    return isinstance(loss, Tensor) and loss.requires_grad
