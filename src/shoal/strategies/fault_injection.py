"""Injects faults around any strategy: a worker pauses before a step, as a slow machine does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from shoal.checkpoint.state_tree import State
from shoal.collectives.outcome import Committed, Discarded
from shoal.data.datasets import DatasetSplit
from shoal.spec.view import View
from shoal.strategies.base import FinalModel, Metrics, Strategy, Traits
from shoal.strategies.context import StepContext


class FaultInjection:
    """See Strategy. Pauses are a function of seat and step: a step that is tried again pauses again."""

    def __init__(self, inner: Strategy, context: StepContext, *, pause_probability: float, pause_s: float) -> None:
        self._inner = inner
        self._context = context
        self._pause_probability = pause_probability
        self._pause_s = pause_s
        self._seat = -1

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        step = self._context.progress.step
        if pauses_at(self._seat, step, probability=self._pause_probability):
            self._context.activity.begin("pause", step)
            time.sleep(self._pause_s)
        return self._inner.run_step(must_halt)

    def enter(self, view: View, seat: int) -> Discarded | None:
        self._seat = seat
        return self._inner.enter(view, seat)

    # ---- passed through ----

    @property
    def traits(self) -> Traits:
        return self._inner.traits

    @property
    def lr(self) -> float:
        return self._inner.lr

    @property
    def is_saved(self) -> bool:
        return self._inner.is_saved

    def follow(self, view: View, seat: int) -> Iterator[bool]:
        return self._inner.follow(view, seat)

    def leave_view(self) -> Discarded | None:
        return self._inner.leave_view()

    def evaluate(self, split: DatasetSplit) -> Metrics | Discarded:
        return self._inner.evaluate(split)

    def adopt_metrics(self, metrics: Metrics, monitored: float | None) -> None:
        self._inner.adopt_metrics(metrics, monitored)

    def save(self, *, force: bool = False) -> None:
        self._inner.save(force=force)

    def save_alone(self) -> None:
        self._inner.save_alone()

    def restore(self) -> int | None:
        return self._inner.restore()

    def finish(self, conclude: Callable[[FinalModel], None]) -> Discarded | None:
        return self._inner.finish(conclude)

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        self._inner.hand_over(given_up)

    def state(self) -> State | None:
        return self._inner.state()

    def abort(self, view: int) -> None:
        self._inner.abort(view)

    def moved_bytes(self) -> int:
        return self._inner.moved_bytes()

    def close(self) -> None:
        self._inner.close()


def pauses_at(seat: int, step: int, *, probability: float) -> bool:
    """Does this worker pause before this step? Every try of a step gives the same answer."""
    return random.Random(f"{seat} {step}").random() < probability  # noqa: S311
