"""Injects faults around any strategy: a worker pauses before a step, as a slow machine does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from shoal.collectives.outcome import Committed, Discarded
from shoal.spec.view import View
from shoal.strategies.base import Strategy
from shoal.strategies.context import StepContext
from shoal.strategies.delegating import DelegatingStrategy


class FaultInjection(DelegatingStrategy):
    """See Strategy. Pauses are a function of seat and step: a step that is tried again pauses again."""

    def __init__(self, inner: Strategy, context: StepContext, *, pause_probability: float, pause_s: float) -> None:
        super().__init__(inner)
        self._context = context
        self._pause_probability = pause_probability
        self._pause_s = pause_s
        self._seat = -1

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        step = self._context.progress.step
        if pauses_at(self._seat, step, probability=self._pause_probability):
            self._context.activity.begin("pause", step)
            time.sleep(self._pause_s)
        return super().run_step(must_halt)

    def enter(self, view: View, seat: int) -> Discarded | None:
        self._seat = seat
        return super().enter(view, seat)


def pauses_at(seat: int, step: int, *, probability: float) -> bool:
    """Does this worker pause before this step? Every try of a step gives the same answer."""
    return random.Random(f"{seat} {step}").random() < probability  # noqa: S311
