"""The worker's one loop: step, commit, evaluate, save, in the order in which it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.checkpoint.store import CheckpointStore
from shoal.collectives.outcome import Discarded
from shoal.data.datasets import DatasetSplit
from shoal.fleet.membership import Membership
from shoal.spec.view import View
from shoal.strategies.base import FinalModel, Metrics, Strategy
from shoal.strategies.local_sgd.schedule import SyncSchedule
from shoal.train.progress import Progress


@dataclass(frozen=True)
class TrainSchedule:
    """How many steps the job takes, and when it evaluates. `sync_schedule` says which steps commit, by default all."""

    steps: int
    evaluate_every: int
    sync_schedule: SyncSchedule = field(default_factory=SyncSchedule)
    keep_best: bool = True

    def evaluation_due(self, step: int) -> bool:
        """Has a multiple of `evaluate_every` been reached since the commit before this step?"""
        return self.sync_schedule.crossed_multiple_of(step, self.evaluate_every)


@dataclass(frozen=True)
class LoopResult:
    """Why the loop returned: the run is `finished`, or this worker left early because of `why`."""

    step: int
    finished: bool
    why: str = ""


class Loop:
    """Decides when to step, evaluate, save and stop; the strategy knows how. Belongs to the training thread.

    `conclude` exports the model of a finished run and reports its end, on the leader. `leave_reason` returns why this
    worker must leave at the next boundary, or ''.
    """

    def __init__(
        self,
        schedule: TrainSchedule,
        *,
        strategy: Strategy,
        progress: Progress,
        splits: Mapping[str, DatasetSplit],
        store: CheckpointStore,
        membership: Membership,
        conclude: Callable[[FinalModel], None],
        leave_reason: Callable[[], str],
    ) -> None:
        self.schedule = schedule
        self.strategy = strategy
        self.progress = progress
        self.splits = splits
        self.store = store
        self.membership = membership
        self.conclude = conclude
        self.leave_reason = leave_reason
        self.at_boundary: Callable[[int], None] = lambda step: None  # called before each step
        self.evaluated: Callable[[], None] = lambda: None  # called by the leader when it has reported an evaluation
        self.watch: Callable[..., None] = lambda kind, step, **fields: None  # for attached watchers
        self._reporter = progress.reporter
        self._reporter.is_leader = False  # until a view names this worker as its saver
        self._view = 0
        self._pause_at: int | None = None
        self._reported_at: int | None = None  # the step of the last evaluation that this worker has reported
        self._seat = -1
        self._may_stop_alone = False

    # ---- steps ----

    def train(self, view: View, seat: int) -> LoopResult | Discarded | None:
        """Train in a view that the strategy has entered. Returns when the run is finished, when a member is lost
        (Discarded), or when all members stop for a newer view (None)."""
        self._adopt_view(view, seat)
        while True:
            if discarded := self._evaluate_if_due():
                return discarded
            if self.finished:
                return self._finish()
            if self._pause_due():
                return self._pause()
            if self._may_stop_alone and self._must_halt():
                return None
            self.at_boundary(self.progress.step)
            self.watch("before_step", self.progress.step)
            outcome = self.strategy.run_step(_never if self._may_stop_alone else self._must_halt)
            if isinstance(outcome, Discarded):
                return outcome
            if not self._evaluation_due():  # else it is saved after the evaluation
                self.strategy.save()
            if outcome.halt:
                return self.strategy.leave_view()

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.schedule.steps or bool(self._reporter.stop_reason)

    def _must_halt(self) -> bool:
        """Must the next boundary be the last of this view?"""
        return self.membership.newer(self._view) or bool(self.leave_reason())

    def _adopt_view(self, view: View, seat: int) -> None:
        """Switch to this view, and report `joined`."""
        progress, reporter = self.progress, self._reporter
        takes_lead = self._seat == seat and not reporter.is_leader and view.saver == seat
        self._view, self._seat, self._pause_at = view.number, seat, view.pause_at
        self._may_stop_alone = len(view.carries) == 1 or not self.strategy.traits.lockstep
        reporter.is_leader = view.saver == seat
        progress.stats.restart_clock()
        lanes = sorted(view.carries[seat])
        reporter.report("joined", step=progress.step, view=view.number, lanes=lanes, saves=reporter.is_leader)
        if takes_lead:
            self._report_evaluation_again()

    def _report_evaluation_again(self) -> None:
        """Report the last evaluation again, as the new leader: the previous one may have died before it did."""
        progress, stream, best = self.progress, self._reporter.stream, self.progress.best
        step = self._reported_at = progress.evaluated_at
        if step is None:
            return
        stream.emit("evaluated", step=step, split="validation", metrics=progress.metrics, again=True)
        if best.step == step:
            stream.emit("best", step=step, metric=best.monitor.metric, value=best.value, again=True)
            if self.schedule.keep_best and progress.evaluated:
                self.strategy.save_alone()

    # ---- the pause ----

    def _pause_due(self) -> bool:
        progress = self.progress
        return self._pause_at is not None and progress.step >= self._pause_at and progress.evaluated

    def _pause(self) -> Discarded | None:
        """Save, and stop with all members at this boundary: the driver lets the workers exit."""
        self.flush()
        self.strategy.save(force=True)
        return self.strategy.leave_view()

    # ---- evaluation ----

    def _evaluation_due(self) -> bool:
        """Must the validation split be evaluated before the next step? At most once: schedules use the result."""
        if "validation" not in self.splits or self.progress.evaluated:
            return False
        return self.schedule.evaluation_due(self.progress.step) or self.finished

    def _evaluate_if_due(self) -> Discarded | None:
        if not self._evaluation_due():
            return None
        metrics = self._evaluate("validation")
        if isinstance(metrics, Discarded):
            return metrics
        progress = self.progress
        progress.record_evaluation(metrics)
        self.strategy.adopt_metrics(metrics, progress.monitored_value)
        self.strategy.save(force=progress.best.improved and self.schedule.keep_best)
        return None

    def _evaluate(self, name: str) -> Metrics | Discarded:
        """Evaluate a split, together with all members."""
        self.flush()
        self.watch("before_evaluation", self.progress.step, split=name)
        began = time.perf_counter()
        metrics = self.strategy.evaluate(self.splits[name])
        if isinstance(metrics, Discarded):
            return metrics
        seconds = round(time.perf_counter() - began, 6)
        self._reported_at = self.progress.step if self._reporter.is_leader else self._reported_at
        self._reporter.report_from_leader(
            "evaluated", step=self.progress.step, split=name, metrics=metrics, evaluation_s=seconds
        )
        if self._reporter.is_leader:
            self.evaluated()
        self.progress.stats.restart_clock()
        return metrics

    # ---- the end ----

    def _finish(self) -> LoopResult | Discarded:
        """Evaluate the test split together. The leader concludes, and the others wait for it. May be repeated."""
        self.flush()
        if "test" in self.splits and isinstance(metrics := self._evaluate("test"), Discarded):
            return metrics
        if discarded := self.strategy.finish(self.conclude):
            return discarded
        return LoopResult(self.progress.step, finished=True, why=self._reporter.stop_reason)

    def leave(self, why: str) -> LoopResult:
        """Save if this worker is the leader, and report `left`."""
        self.flush()
        if self.progress.has_state:
            if self._reporter.is_leader:
                if self.progress.evaluated and self._reported_at != self.progress.step:
                    self._report_evaluation_again()
                self.strategy.save_alone()
            self.store.wait()
        self._reporter.report("left", step=self.progress.step, why=why)
        return LoopResult(self.progress.step, finished=False, why=why)

    def flush(self) -> None:
        """Report all steps so far."""
        self.progress.flush(self.strategy.lr)


def _never() -> bool:
    """`must_halt` of a worker that may stop alone: `train` has just checked, and checks again at the next boundary."""
    return False
