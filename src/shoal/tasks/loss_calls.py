"""Mistakes in a loss of the user's own: what it gives to torch's losses is known, as where a job names the loss."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.data.batch import Batch
from shoal.lanes.loss import Loss
from shoal.spec.resolve import calling_user_line
from shoal.tasks.batch_facts import LOSS_FUNCTIONS, call_facts, explain_model_errors, place_of
from shoal.tasks.mistakes import Mistake, recognise
from shoal.tasks.task import Task


class ExplainedLoss:
    """`loss` and `step` of a task: a known mistake in them is told with the shapes of the batch."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        with explain_model_errors(model, batch):
            return self._task.loss(model, batch)

    def step(self, model: nn.Module, batch: Batch) -> Iterator[tuple[Loss | None, str]]:
        phases = self._task.step(model, batch)
        while True:
            with explain_model_errors(model, batch):
                phase = next(phases, None)
            if phase is None:
                return
            yield phase


def look_at_loss_calls(task: Task, model: nn.Module, batch: Batch) -> list[str]:
    """What the user must know about the calls of torch's losses that the task makes for this batch. What fails here is
    not told: the batch is not augmented, so the first step may do well; and a state that cannot be had is told where it
    is needed."""
    calls = LossCalls(model)
    with contextlib.suppress(Exception):
        state = copy.deepcopy(task.state())
        try:
            with calls:
                _ = list(task.step(model, batch)) if task.has_phases else task.loss(model, batch)
        finally:
            if state is not None:
                task.load_state(state)
    if task.carries:
        task.carry = {}
    return calls.notes


class LossCalls(TorchFunctionMode):
    """A block in which torch's losses are called. `notes` tell what trains, but not as it should."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.notes: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = LOSS_FUNCTIONS.get(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shapes that differ: a note tells it
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:  # another call only measures
            self._look_at(name, args[0], args[1], (kwargs or {}).get("ignore_index"))
        return result

    def _look_at(self, name: str, output: Any, target: Any, ignored: int | None) -> None:
        found = recognise(call_facts(name, output, target, ignored=ignored))
        is_for_all = isinstance(target, Tensor) and target.numel() == 1  # one number that every output is compared with
        if found is not None and not is_for_all:
            note = f"{found.code} {self._place(found)}: {found.message}. {found.fix}"
            self.notes += [] if note in self.notes else [note]

    def _place(self, mistake: Mistake) -> str:
        line = calling_user_line()
        return place_of(mistake, self._model) if mistake.about == "output" or not line else line
