"""Checks exactness while a run trains: now and then every worker computes a lane of another worker again.

It does so with objects that are built from the job and loaded with the saved state, and all workers compare the bits. A
job that depends on anything else (a counter in the task, a generator of its own, the process) is found, and the
receipt says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from shoal.checkpoint.sha256 import weights_sha256
from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.data.datasets import DatasetSplit
from shoal.errors import describe_exception
from shoal.lanes.passes import MultiPassReplica
from shoal.lanes.replica import Replica
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.base import Metrics, Strategy
from shoal.strategies.context import StepContext
from shoal.strategies.delegating import DelegatingStrategy
from shoal.strategies.self_check.recompute import (
    MAX_NAMES,
    FreshObjects,
    Rebuild,
    Recomputed,
    Recorder,
    fingerprint,
    free_bytes,
    missing_memory,
    module_data,
    uses_compiler,
)
from shoal.strategies.self_check.recompute_passes import FreshPasses, PassRecorder
from shoal.strategies.self_check.verdict import CheckReport, Verdict, judge, steps_until_next

FIRST_STEPS = 2
"""Steps of a view before its first check. Objects need a history that new ones lack."""


@dataclass(frozen=True)
class CheckedJob:
    """What a check needs to know about a job. `lane_share(size, total)` is the weight of a lane. `next_commit(step)` is
    the step to which a commit leads. `updates_here`: the worker's own replica makes each update, once per commit.
    `evaluates_alone`: an evaluation touches the replica in no way but the user's."""

    replica: Replica
    group: ViewGroup
    rebuild: Rebuild
    steps: int
    share: float
    lane_share: Callable[[int, int], float]
    next_commit: Callable[[int], int]
    updates_here: bool
    evaluates_alone: bool


class SelfCheck(DelegatingStrategy):
    """See Strategy. All members of a view check the same steps. `lockstep` strategies only: a check is a gather."""

    def __init__(self, inner: Strategy, context: StepContext, job: CheckedJob) -> None:
        super().__init__(inner)
        self._context = context
        self._job = job
        self._at_start = module_data(context.task, job.replica)
        self._view: View | None = None
        self._seat = -1
        self._next_check = 0
        self._settled = False  # there is a reason why this view needs no further check
        self._first_timed = 0
        self._all_checks_s = self._trained_s = self._timed_s = 0.0
        self._told_of_evaluation = False

    def enter(self, view: View, seat: int) -> Discarded | None:
        discarded = super().enter(view, seat)
        if discarded is None:
            self._view, self._seat = view, seat
            step = self._context.progress.step
            self._first_timed = self._job.next_commit(step)
            self._next_check, self._settled = step + FIRST_STEPS, False
            self._timed_s = 0.0
        return discarded

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        step = self._context.progress.step
        is_last = self._job.next_commit(step) >= self._job.steps  # the longest history
        if self._settled or (step < self._next_check and not is_last):
            began = time.perf_counter()
            outcome = super().run_step(must_halt)
            self._count_time(step, time.perf_counter() - began)
            return outcome
        return self._checked_step(step, must_halt)

    def _count_time(self, step: int, seconds: float) -> None:
        self._trained_s += seconds
        if step >= self._first_timed:  # a view's first step takes longer
            self._timed_s += seconds

    # ---- a checked step ----

    def _checked_step(self, step: int, must_halt: Callable[[], bool]) -> Committed | Discarded:
        clock = time.perf_counter
        began = clock()
        self._context.activity.begin("checking", step)
        fresh = self._build_fresh(step)
        recorder = self._make_recorder(step)
        prepared = clock()
        with recorder.watching():
            outcome = super().run_step(must_halt)
        committed = clock()
        if isinstance(outcome, Committed):
            self._context.activity.begin("checking", step)
            report = self._compare(step, fresh, recorder)
            check_s = clock() - committed + prepared - began
            self._conclude(step, fresh, report, check_s)
            if isinstance(fresh, FreshObjects):
                fresh.release()
            self._all_checks_s += clock() - committed + prepared - began
            self._trained_s += committed - prepared
        return outcome

    def _make_recorder(self, step: int) -> Recorder:
        assert self._view is not None
        lane, replica = self._lane_of(self._seat, step), self._job.replica
        if isinstance(replica, MultiPassReplica):
            room = free_bytes(replica.device, workers=len(self._view.carries)) // 2
            return PassRecorder(lane, replica=replica, room_bytes=room)
        return Recorder(step, lane, replica=replica, keep_total=self._job.updates_here)

    def _lane_of(self, seat: int, step: int) -> int:
        """The lane of a worker that is checked at this step."""
        assert self._view is not None
        lanes = sorted(self._view.carries[seat])
        return lanes[step % len(lanes)]

    def _build_fresh(self, step: int) -> FreshObjects | str:
        """New objects with the present state, or why there are none. The user's code may fail in any way here, and the
        run goes on."""
        assert self._view is not None
        try:
            if uses_compiler():
                return "the model uses torch.compile"
            if why := missing_memory(self._job.replica, workers=len(self._view.carries)):
                return why
            task, replica, rebuild = self._context.task, self._job.replica, self._job.rebuild
            if isinstance(replica, MultiPassReplica):
                return FreshPasses(rebuild, task, replica, at_start=self._at_start, step=step)
            return FreshObjects(rebuild, task, replica, at_start=self._at_start, step=step)
        except Exception as failure:
            return f"the objects of the job cannot be built again ({describe_exception(failure)})"

    def _compare(self, step: int, fresh: FreshObjects | str, recorder: Recorder) -> CheckReport:
        """Compute a lane of the next worker again."""
        assert self._view is not None
        seats = sorted(self._view.carries)
        lane = self._lane_of(seats[(seats.index(self._seat) + 1) % len(seats)], step)
        found, failure = Recomputed(), recorder.failure or (fresh if isinstance(fresh, str) else "")
        if isinstance(fresh, FreshObjects) and not failure:
            try:
                batch = self._context.batches.get(step, lane)
                size = 0 if batch is None else batch.size
                share = self._job.lane_share(size, self._context.sampler.batch_samples(step))
                found = fresh.compute_again(lane, batch, share, recorder)
            except Exception as problem:
                failure = f"the step cannot be computed again ({describe_exception(problem)})"
        return CheckReport(
            self._lane_of(self._seat, step),
            lane_sum=recorder.lane_sum,
            batch=recorder.batch,
            checked_lane=lane,
            checked_sums=found.sums,
            checked_batch=found.batch,
            weights=weights_sha256(self._job.replica.model.state_dict()),
            update_differs=found.update_differs,
            failure=failure,
        )

    def _conclude(self, step: int, fresh: FreshObjects | str, report: CheckReport, check_s: float) -> None:
        """Compare with the other workers, report the verdict, and choose the next step to check."""
        timed = max(step - self._first_timed, 0)
        times = {
            "check_s": check_s,
            "all_checks_s": self._all_checks_s + check_s,
            "trained_s": self._trained_s,
            "step_s": self._timed_s / timed if timed else self._trained_s,
        }
        self._context.activity.begin("exchange", step)
        packed = CheckReport(**{**vars(report), **times}).pack()
        gathered = self._job.group.gather(Channel.SELF_CHECK.label(step), packed)
        if isinstance(gathered, Discarded):
            return  # the next step notices the lost member
        try:
            reports = {seat: CheckReport.unpack(content) for seat, content in gathered.items()}
        except LinkError as failure:
            self._job.group.discard(failure)
            return
        verdict = judge(step, reports)
        self._settled = bool(verdict.why or verdict.failure)
        self._next_check = step + steps_until_next(reports, share=self._job.share)
        if self._leads:
            self._report(step, verdict, fresh, check_s)

    def _report(self, step: int, verdict: Verdict, fresh: FreshObjects | str, check_s: float) -> None:
        hidden = _names_of_hidden_state(fresh) if verdict.why and isinstance(fresh, FreshObjects) else []
        self._context.report(
            "self_checked",
            step=step,
            lanes=verdict.lanes,
            why=verdict.why,
            objects=hidden,
            failure=verdict.failure,
            checking_s=round(check_s, 6),
        )

    @property
    def _leads(self) -> bool:
        return self._view is not None and self._view.saver == self._seat

    # ---- evaluation ----

    def evaluate(self, split: DatasetSplit) -> Metrics | Discarded:
        """Also look whether the evaluation changes parameters or buffers: a worker that joins later does not evaluate,
        and would go on with others."""
        if not self._job.evaluates_alone:
            return super().evaluate(split)
        before = self._fingerprints()
        outcome = super().evaluate(split)
        changed = [name for name, found in self._fingerprints().items() if found != before[name]]
        if changed and self._leads and not self._told_of_evaluation:
            self._told_of_evaluation = True
            step = self._context.progress.step
            why = f"the evaluation at step {step} changes {', '.join(changed[:MAX_NAMES])}"
            self._context.report("self_checked", step=step, lanes=0, why=why)
        return outcome

    def _fingerprints(self) -> Mapping[str, int]:
        """A number for each tensor that a checkpoint holds."""
        held = self._job.replica.model.state_dict().items()
        return {f"model.{name}": fingerprint(value) for name, value in held if isinstance(value, Tensor)}


def _names_of_hidden_state(fresh: FreshObjects) -> list[str]:
    """What differs, or nothing if objects of the user cannot be compared: their code may fail in any way here."""
    try:
        return fresh.hidden_state()
    except Exception:
        return []
