"""The worker's one loop: join a view, step, commit, evaluate, save, in the order in which it happens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.checkpoint.store import Store
from shoal.data.dealers import Dealer
from shoal.data.feed import Feed
from shoal.errors import ShoalError, error
from shoal.fleet.membership import Membership
from shoal.parallel.replica import LaneSum, Replica, add
from shoal.parallel.sync.base import Committed, Discarded, Sync
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View
from shoal.train.blame import translate
from shoal.train.evaluate import Evaluator
from shoal.train.task import Task
from shoal.train.telling import Progress, Teller
from shoal.train.watch import Best


@dataclass(frozen=True)
class Course:
    """How far the job goes and when it looks up."""

    steps: int
    evaluate_every: int
    lanes: int
    keep_best: bool = True


@dataclass(frozen=True)
class Ending:
    """Why the loop came back: `finished`, or left early because of `why`."""

    step: int
    finished: bool
    why: str = ""


class Loop:
    """Everything it uses is given to it; it owns the step number and nothing else."""

    def __init__(
        self,
        course: Course,
        *,
        seat: int,
        replica: Replica,
        dealer: Dealer,
        feed: Feed,
        sync: Sync,
        store: Store,
        membership: Membership,
        teller: Teller,
        progress: Progress,
        evaluator: Evaluator,
        parts: dict[str, Any],
        task: Task,
        best: Best,
        asked_to_leave: Callable[[], str],
    ) -> None:
        self.course = course
        self.seat = seat
        self.replica = replica
        self.dealer = dealer
        self.feed = feed
        self.sync = sync
        self.store = store
        self.membership = membership
        self.teller = teller
        self.progress = progress
        self.evaluator = evaluator
        self.parts = parts
        self.task = task
        self.best = best
        self.asked_to_leave = asked_to_leave
        self.step = 0
        self.loss = math.nan
        self.metrics: dict[str, float] = {}
        self.measured_at: int | None = None

    def run(self) -> Ending:
        """Until the last step is committed, a watcher stops the run, or this worker has to leave."""
        number = 0
        while True:
            view = self.membership.wait(self.seat, after=number, step=self.step)
            assert view is not None
            number = view.number
            if view.stop:
                return self._leave(view.stop)
            self._enter(view)
            why = self._train(view)
            if why:
                return self._leave(why)
            if self.step >= self.course.steps or self.teller.stop:
                return Ending(self.step, finished=True, why=self.teller.stop)

    def _enter(self, view: View) -> None:
        self.sync.reconfigure(view, self.seat)
        self.feed.carry(view.carries[self.seat], self.step)
        self.progress.restart()
        self.teller.tell("joined", step=self.step, view=view.number, lanes=view.carries[self.seat])

    def _train(self, view: View) -> str:
        """Steps until there is nothing to do or a newer view; returns why to leave, or ''."""
        lanes = sorted(view.carries[self.seat])
        while self.step < self.course.steps and not self.teller.stop:
            if self.membership.newer(view.number):
                return ""
            if why := self.asked_to_leave():
                return why
            outcome = self._one_step(lanes)
            if isinstance(outcome, Discarded):
                self.teller.tell("note", step=self.step, message=f"step discarded: {outcome.why}")
                return ""
            self._after(outcome)
        return ""

    def _one_step(self, lanes: list[int]) -> Committed | Discarded:
        clock = time.perf_counter
        sums: TreeSum[LaneSum] = TreeSum(self.course.lanes, add)
        total = self.dealer.total(self.step)
        self.replica.begin()
        for lane in lanes:
            t0 = clock()
            batch = self.feed.get(self.step, lane)
            t1 = clock()
            self.progress.spent("data_s", t1 - t0)
            sums.lane(lane, None if batch is None else self._lane(lane, batch, batch.size / total))
            self.progress.spent("compute_s", clock() - t1)
        t0 = clock()
        outcome = self._commit(sums)
        self.progress.spent("exchange_s" if outcome_sent(outcome) else "compute_s", clock() - t0)
        return outcome

    def _lane(self, lane: int, batch: Any, share: float) -> LaneSum:
        try:
            device = self.replica.device
            here = batch if device.type == "cpu" else batch.to(device)  # batches are made on the CPU
            return self.replica.forward_backward(self.step, lane, here, share=share)
        except ShoalError:
            raise
        except Exception as failure:
            raise translate(failure, "SH401", f"step {self.step}, lane {lane}") from failure

    def _commit(self, sums: TreeSum[LaneSum]) -> Committed | Discarded:
        try:
            return self.sync.commit(self.replica, self.step, sums)
        except ShoalError:
            raise
        except Exception as failure:
            raise translate(failure, "SH413", f"step {self.step}") from failure

    def _after(self, committed: Committed) -> None:
        """The step counts: look at it, evaluate, save. Evaluation first, so that a save holds its outcome."""
        samples = self.dealer.total(self.step)
        self.step += 1
        self.loss = float(committed.loss)
        if not math.isfinite(self.loss):
            raise error("SH403", f"the loss is {self.loss} at step {self.step}", where=f"worker-{self.seat}")
        lr = self.replica.lr
        self.progress.step(self.step, loss=self.loss, lr=lr, samples=samples, bytes_sent=committed.bytes_sent)
        if self.step % self.course.evaluate_every == 0 or self.step == self.course.steps:
            self.evaluate("validation")
        self.save()

    def save(self, *, force: bool = False) -> None:
        self.store.maybe_save(self.step, self.state, metric=self.best.at(self.step), force=force)

    def evaluate(self, name: str) -> None:
        if name not in self.parts:
            return
        self.progress.flush(self.step, loss=self.loss, lr=self.replica.lr)
        start = time.perf_counter()
        metrics = self.evaluator.measure(self.replica, self.parts[name])
        seconds = round(time.perf_counter() - start, 6)
        self.teller.tell("evaluated", step=self.step, part=name, metrics=metrics, evaluation_s=seconds)
        if name == "validation":
            self.metrics, self.measured_at = metrics, self.step
            self._learn_from(metrics)
        self.progress.restart()

    def _learn_from(self, metrics: dict[str, float]) -> None:
        if self.replica.waits_for_metric:
            self.replica.schedule.step(metrics[self.best.monitor.metric])
        if self.best.improved:
            self.teller.tell("best", step=self.step, metric=self.best.monitor.metric, value=self.best.value)
            if self.course.keep_best:
                self.save(force=True)

    def _leave(self, why: str) -> Ending:
        self.progress.flush(self.step, loss=self.loss, lr=self.replica.lr)
        self.save(force=True)
        self.store.wait()
        self.teller.tell("left", step=self.step, why=why)
        return Ending(self.step, finished=False, why=why)

    def state(self) -> dict[str, Any]:
        """What must survive: after loading it, training goes on as if nothing had happened."""
        loop = {
            "step": self.step,
            "stop": self.teller.stop,
            "metrics": self.metrics,
            "measured_at": self.measured_at,
            "task": self.task.state(),
            "watch": self.teller.state(),
            "sync": self.sync.state(),
        }
        return {**self.replica.state(), "loop": loop}

    def load_state(self, state: dict[str, Any]) -> None:
        self.replica.load_state(state)
        loop = state["loop"]
        self.task.load_state(loop["task"])
        self.teller.load_state(loop["watch"])
        self.teller.stop = loop["stop"]
        self.metrics, self.measured_at = loop["metrics"], loop["measured_at"]
        self.step = loop["step"]


def outcome_sent(outcome: Committed | Discarded) -> bool:
    return isinstance(outcome, Committed) and outcome.bytes_sent > 0
