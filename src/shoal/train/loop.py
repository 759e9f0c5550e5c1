"""The worker's one loop: step, commit, evaluate, save, in the order in which it happens."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.checkpoint.sharded_files import PIECES_SECTION, open_pieces
from shoal.checkpoint.store import CheckpointStore
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.data.batch_loader import BatchLoader
from shoal.data.samplers import LaneSampler
from shoal.errors import ShoalError, error
from shoal.fleet.membership import Membership
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink, LaneSum, Replica
from shoal.net.errors import LinkError
from shoal.sharding.build_replica import ShardedReplicaBuilder
from shoal.sharding.local_state import load_unsharded, unsharded_state
from shoal.spec.view import View, position_of
from shoal.strategies.base import GradientSync
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import SyncSchedule
from shoal.strategies.local_sgd.step import LocalSgdStep
from shoal.strategies.replicated import OrderedAllReduceSync
from shoal.strategies.sharded import ShardedStrategy
from shoal.strategies.sharded_commit import ShardedSync
from shoal.tasks.evaluation import Evaluator
from shoal.tasks.task import Task
from shoal.tasks.user_errors import as_shoal_error
from shoal.train.activity import Activity
from shoal.train.reporting import Reporter, StepStats
from shoal.train.watchers import BestMetric

MAX_STATE_TO_MODEL_RATIO = 8
STATE_SPARE_BYTES = 1 << 28
GATHER_LABELS = ("validation", "test", "end")


@dataclass(frozen=True)
class TrainSchedule:
    """How far the job goes and when it looks up."""

    steps: int
    evaluate_every: int
    lanes: int
    sync_schedule: SyncSchedule = field(default_factory=SyncSchedule)
    fragments: int = 1
    keep_best: bool = True
    pause_probability: float = 0.0
    pause_s: float = 0.0

    def next_commit(self, step: int) -> int:
        """Where the next commit leads."""
        return self.sync_schedule.next_sync(step, steps=self.steps)

    def pauses_at(self, seat: int, step: int) -> bool:
        """Made on purpose, and alike whenever it is tried."""
        return self.pause_probability > 0 and _pause_draw(seat, step) < self.pause_probability


@dataclass(frozen=True)
class LoopResult:
    """Why the loop came back: `finished`, or left early because of `why`."""

    step: int
    finished: bool
    why: str = ""


class Loop:
    """Everything it uses is given to it; it owns the step number and nothing else.

    `holds` is false for a worker that came from elsewhere and has no state yet that counts. `conclude` measures,
    saves and exports at the end; `asked_to_leave` gives a reason to go at the next boundary, or ''.
    """

    def __init__(
        self,
        train_schedule: TrainSchedule,
        *,
        replica: Replica,
        sampler: LaneSampler,
        batches: BatchLoader,
        sync: GradientSync,
        peers: PeerServices,
        store: CheckpointStore,
        membership: Membership,
        reporter: Reporter,
        stats: StepStats,
        activity: Activity,
        evaluator: Evaluator,
        splits: dict[str, Any],
        task: Task,
        best: BestMetric,
        has_state: bool,
        on_finish: Callable[[Loop, str], None],
        leave_reason: Callable[[], str],
        replica_builder: ShardedReplicaBuilder | None = None,
    ) -> None:
        self.train_schedule = train_schedule
        self.replica = replica
        self.sampler = sampler
        self.batches = batches
        self.sync = sync
        self.peers = peers
        self.store = store
        self.membership = membership
        self.reporter = reporter
        self.stats = stats
        self.activity = activity
        self.evaluator = evaluator
        self.splits = splits
        self.task = task
        self.best = best
        self.has_state = has_state
        self.on_finish = on_finish
        self.leave_reason = leave_reason
        self.step = 0
        self.loss = math.nan
        self.metrics: dict[str, float] = {}
        self.evaluated_at: int | None = None
        self.view = View(number=1)
        self.seat = -1
        self.external_sha256 = ""
        self.lanes: list[int] = []
        self.local_sgd = None
        if isinstance(replica, LocalReplica) and isinstance(sync, OrderedAllReduceSync):
            self.local_sgd = LocalSgdStep(self, replica, sync)
        self.sharded = (
            ShardedStrategy(self, sync, replica_builder) if replica_builder and isinstance(sync, ShardedSync) else None
        )
        """Where this worker holds a part of the model; then there is no replica yet."""
        self.sync.on_total = peers.state_publisher.publish_total
        self.reporter.is_leader = False  # until a view says so

    # ---- steps ----

    @property
    def position(self) -> int | None:
        return position_of(self.step, evaluated=self.evaluated_at == self.step) if self.has_state else None

    @property
    def is_saved(self) -> bool:
        """Do others who read the newest checkpoint have all that this worker has?"""
        return self.sharded is not None and self.sharded.is_saved

    def adopt_view(self, view: View, seat: int) -> None:
        """From now on this view counts."""
        follows = self.seat == seat and not self.reporter.is_leader and view.saver == seat
        self.view, self.seat = view, seat
        self.lanes = sorted(view.carries[seat])
        self.step = self.sync.first_step(self.step, self.lanes)
        self.reporter.is_leader = view.saver == seat
        self.batches.set_lanes(self.lanes, self.step)
        self.stats.restart_clock()
        self.reporter.report(
            "joined", step=self.step, view=view.number, lanes=self.lanes, saves=self.reporter.is_leader
        )
        if follows:
            self._report_evaluation_again()

    def _report_evaluation_again(self) -> None:
        """Whoever led before may have died when all knew what was measured, and before it was told."""
        stream, step, best = self.reporter.stream, self.evaluated_at, self.best
        if step is not None:
            stream.emit("evaluated", step=step, part="validation", metrics=self.metrics, again=True)
            if best.step == step:
                stream.emit("best", step=step, metric=best.monitor.metric, value=best.value, again=True)
                if self.train_schedule.keep_best and step == self.step and not self.sharded:
                    self.save(force=True)

    def train(self) -> LoopResult | str:
        """Steps until there is nothing left to do, or a newer view; then why, or '' where it was agreed upon."""
        feeder = self.peers.state_publisher
        while True:
            if feeder.active:
                feeder.start_subscribers(self.state)
            outcome = self._evaluate_if_due()
            if isinstance(outcome, Discarded):
                return outcome.why
            if self.finished:
                return self._finish()
            if self.train_schedule.pauses_at(self.seat, self.step):
                self.activity.begin("pause", self.step)
                time.sleep(self.train_schedule.pause_s)
            halt = self._must_halt()
            if halt and (len(self.view.carries) == 1 or not self.sync.lockstep):
                return ""
            committed = self._run_step(halt)
            if isinstance(committed, Discarded):
                return committed.why
            self._record_and_save(committed)
            if committed.halt:
                return self.sharded.save_before_leaving() if self.sharded else ""

    def _must_halt(self) -> bool:
        """Must the next boundary be the last of this view?"""
        return self.membership.newer(self.view.number) or bool(self.leave_reason())

    @property
    def finished(self) -> bool:
        return self.step >= self.train_schedule.steps or bool(self.reporter.stop_reason)

    def _run_step(self, halt: bool) -> Committed | Discarded:
        clock = time.perf_counter
        sums = self.sync.begin_step()
        task_state = copy.deepcopy(self.task.state()) if len(self.view.carries) > 1 else None
        began = clock()
        self.replica.begin_step()
        try:
            if self.local_sgd:
                self.local_sgd.compute(sums)
                halt = halt or self._must_halt()  # that took a while
            elif self.sharded:
                self.sharded.compute.run_lanes(sums)
            else:
                self._compute(sums, halt)
        except LinkError as failure:  # rows of sparse tables could not be had, or fragments
            outcome: Committed | Discarded = Discarded(str(failure))
        else:
            t0 = clock()
            if not self.local_sgd and not self.sharded:
                self.activity.record_lane_time((t0 - began) / len(self.lanes))
            self.activity.begin("exchange", self.step)
            outcome = self._commit(sums, halt)
            self._record_times(outcome, clock() - t0)
        if isinstance(outcome, Discarded):
            self.replica.undo_step()
            if self.local_sgd:
                self.peers.state_publisher.drop_subscribers()  # fragments that were told do not count
            if task_state is not None:
                self.task.load_state(task_state)
        return outcome

    def _compute(self, sums: TreeSum[LaneSum], halt: bool) -> None:
        """My lanes, in order."""
        clock = time.perf_counter
        total = self.sampler.batch_samples(self.step)
        for lane in [lane for lane in self.lanes if self.sync.needs_lane(self.step, lane)]:
            t0 = clock()
            self.activity.begin("data", self.step)
            batch = self.batches.get(self.step, lane)
            self.activity.begin("compute", self.step)
            t1 = clock()
            self.stats.add_time("data_s", t1 - t0)
            if batch is not None:
                self.stats.add_samples(batch.size)
            sink = None
            if batch is not None and lane == self.lanes[-1]:
                sink = self.sync.gradient_sink(self.replica, self.step, sums, lane, halt=halt)
            share = self.sync.lane_weight(lane, batch.size if batch else 0, total)
            sums.push_lane(lane, None if batch is None else self._forward_backward(lane, batch, share, sink))
            self.stats.add_time("compute_s", clock() - t1)

    def _record_times(self, outcome: Committed | Discarded, seconds: float) -> None:
        if isinstance(outcome, Discarded):
            self.stats.add_time("recovery_s", seconds)
            return
        self.stats.add_time("waiting_s", outcome.waited_s)
        self.stats.add_time("exchange_s", outcome.exchange_s)
        self.stats.add_time("compute_s", seconds - outcome.waited_s - outcome.exchange_s)

    def _forward_backward(self, lane: int, batch: Any, share: float, sink: GradientSink | None) -> LaneSum:
        with self._wrap_user_errors(self.step, lane):
            return self.replica.forward_backward(self.step, lane, self._to_device(batch), share=share, sink=sink)

    def inner_step(self, step: int, lane: int, batch: Any) -> float:
        """A step that a lane makes by itself. Returns its loss."""
        assert isinstance(self.replica, LocalReplica)
        with self._wrap_user_errors(step, lane):
            loss = float(self.replica.inner_step(step, lane, self._to_device(batch), size=batch.size))
        if not math.isfinite(loss):
            raise error("SH403", f"the loss of lane {lane} is {loss} at step {step + 1}", where=f"worker-{self.seat}")
        return loss

    def _to_device(self, batch: Any) -> Any:
        """Batches are made on the CPU."""
        device = self.replica.device
        return batch if device.type == "cpu" else batch.to(device)

    @contextlib.contextmanager
    def _wrap_user_errors(self, step: int, lane: int) -> Iterator[None]:
        try:
            yield
        except (ShoalError, LinkError):
            raise
        except Exception as failure:
            raise as_shoal_error(failure, "SH401", f"step {step}, lane {lane}") from failure

    def _commit(self, sums: TreeSum[LaneSum], halt: bool) -> Committed | Discarded:
        try:
            return self.sync.commit(self.replica, self.step, sums, halt=halt)
        except ShoalError:
            raise
        except Exception as failure:
            raise as_shoal_error(failure, "SH413", f"step {self.step}") from failure

    def _record_and_save(self, committed: Committed) -> None:
        """The step counts: look at it and save. Where an evaluation is due, the save comes after it."""
        self.record_commit(committed)
        if not self._evaluation_due():
            self.save()

    def record_commit(self, committed: Committed) -> None:
        samples = self.advance_step(committed.loss)
        self.activity.begin("telling", self.step)
        lr = self.replica.lr
        self.stats.add_bytes(committed.bytes_sent, committed.bytes_plain)
        self.stats.record_step(self.step, loss=self.loss, lr=lr, samples=samples)

    def advance_step(self, loss: Tensor) -> int:
        """One commit more; returns how many samples it had."""
        after = self.train_schedule.next_commit(self.step)
        samples = sum(map(self.sampler.batch_samples, range(self.step, after)))
        self.step = after
        self.loss = float(loss)
        if not math.isfinite(self.loss):
            raise error("SH403", f"the loss is {self.loss} at step {self.step}", where=f"worker-{self.seat}")
        return samples

    def flush(self) -> None:
        """Tell all steps so far."""
        self.stats.flush(self.step, loss=self.loss, lr=self.replica.lr)

    def save(self, *, force: bool = False) -> None:
        """One worker saves for all; with shards, all do."""
        if self.sharded:
            self.sharded.save(force=force)
        elif self.reporter.is_leader:
            self.activity.begin("saving", self.step)
            with contextlib.suppress(LinkError):  # then the next step finds out, and a new view follows
                others = self.sync.blobs if self.replica.tables else None
                metric = self.best.value_at(self.step)
                self.store.maybe_save(
                    self.step, self._checkpoint_state, metric=metric, force=force, external_blobs=others
                )

    # ---- evaluation ----

    def _evaluation_due(self) -> bool:
        """Must the validation part be measured before the next step? Once and no more: schedules learn from it."""
        at_a_mark = self.train_schedule.sync_schedule.crossed_multiple_of(self.step, self.train_schedule.evaluate_every)
        return "validation" in self.splits and self.evaluated_at != self.step and (at_a_mark or self.finished)

    def _evaluate_if_due(self) -> Discarded | None:
        if not self._evaluation_due():
            return None
        metrics = self.evaluate("validation")
        if isinstance(metrics, Discarded):
            return metrics
        self.record_evaluation(metrics)
        self.peers.state_publisher.publish({"kind": "evaluated", "metrics": metrics})
        self.save()
        return None

    def evaluate(self, name: str) -> dict[str, float] | Discarded:
        """A part of the data, by all members together."""
        self.flush()
        began = time.perf_counter()
        self.activity.begin("exchange", self.step)
        if isinstance(outcome := self.sync.barrier(self.replica, 4 * self.step + 3), Discarded):
            return outcome
        try:
            metrics = self._evaluate_split(name)
        except LinkError as failure:
            metrics = Discarded(str(failure))
        if isinstance(metrics, Discarded):
            return metrics
        seconds = round(time.perf_counter() - began, 6)
        self.reporter.report_from_leader("evaluated", step=self.step, part=name, metrics=metrics, evaluation_s=seconds)
        self.stats.restart_clock()
        return metrics

    def _evaluate_split(self, name: str) -> dict[str, float] | Discarded:
        if self.sharded:
            return self.sharded.compute.evaluate(self.splits[name], GATHER_LABELS.index(name))
        return self.evaluator.evaluate_distributed(
            self.replica,
            self.splits[name],
            lanes=self.lanes,
            gather=lambda content: self._gather(name, content),
            is_aborted=self.sync.aborted,
            on_chunk=lambda: self.activity.begin("evaluation", self.step),
        )

    def _gather(self, name: str, content: bytes) -> dict[int, bytes] | Discarded:
        self.activity.begin("exchange", self.step)
        return self.sync.gather(4 * self.step + GATHER_LABELS.index(name), content)

    def record_evaluation(self, metrics: dict[str, float]) -> None:
        """What the validation part says at this step."""
        self.metrics, self.evaluated_at = metrics, self.step
        if self.replica.schedule_needs_metric:
            self.replica.schedule.step(metrics[self.best.monitor.metric])
        if self.best.improved:
            self.reporter.report_from_leader(
                "best", step=self.step, metric=self.best.monitor.metric, value=self.best.value
            )
            if self.train_schedule.keep_best:
                self.save(force=True)

    # ---- the end ----

    def _finish(self) -> LoopResult | str:
        """Measure the test part together; one concludes, and the others stay until it has. May be repeated."""
        self.flush()
        if "test" in self.splits and isinstance(outcome := self.evaluate("test"), Discarded):
            return outcome.why
        if isinstance(settled := self.sync.barrier(self.replica, 4 * self.step + 3), Discarded):
            return settled.why
        if self.sharded and (why := self.sharded.save(force=True)):
            return why
        if self.reporter.is_leader:
            self.activity.begin("export", self.step)
            if isinstance(completed := self.sync.pull_state(self.replica, self.step), Discarded):
                return completed.why
            if isinstance(sealed := self.sync.external_sha256(), Discarded):
                return sealed.why
            self.external_sha256 = sealed
            self.on_finish(self, self.reporter.stop_reason)
        ended = self._gather("end", b"")
        if isinstance(ended, Discarded) and not self.reporter.is_leader:
            return ended.why
        return LoopResult(self.step, finished=True, why=self.reporter.stop_reason)

    def leave(self, why: str) -> LoopResult:
        self.flush()
        if self.has_state:
            if not self.sharded:  # alone it cannot, and what could be saved was
                self.save(force=True)
            self.store.wait()
        self.reporter.report("left", step=self.step, why=why)
        return LoopResult(self.step, finished=False, why=why)

    # ---- state ----

    @property
    def max_state_bytes(self) -> int:
        """What a peer may send at once."""
        size: int = sum(t.numel() * t.element_size() for t in self.replica.model.state_dict().values())
        return MAX_STATE_TO_MODEL_RATIO * size + STATE_SPARE_BYTES

    def _checkpoint_state(self) -> dict[str, Any]:
        """For a checkpoint: with what only the members together have, or servers."""
        if isinstance(outcome := self.sync.pull_state(self.replica, self.step), Discarded):
            raise LinkError(outcome.why)
        state = self.state()
        return {**state, "loop": {**state["loop"], "sync": self.sync.state()}}

    def state(self) -> dict[str, Any]:
        """What must survive: after loading it, training goes on as if nothing had happened."""
        return {**self.replica.state(), "loop": self.loop_state()}

    def loop_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "stop": self.reporter.stop_reason,
            "metrics": self.metrics,
            "measured_at": self.evaluated_at,
            "task": self.task.state(),
            "watch": self.reporter.state(),
            "sync": None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Of one process, or of many that held the model together."""
        self.peers.state_publisher.drop_subscribers()
        if PIECES_SECTION in state:
            load_unsharded(self.replica, open_pieces(self.store.files, state))
            state = unsharded_state(self.replica, state)
        self.replica.load_state(state)
        self.load_loop_state(state["loop"])
        self.has_state = True

    def load_loop_state(self, loop: dict[str, Any]) -> None:
        self.task.load_state(loop["task"])
        self.reporter.load_state(loop["watch"])
        self.reporter.stop_reason = loop["stop"]
        self.metrics, self.evaluated_at = loop["metrics"], loop["measured_at"]
        self.step = loop["step"]
        if loop["sync"] is not None:
            self.sync.load_state(self.step, loop["sync"])


def _pause_draw(seat: int, step: int) -> float:
    return random.Random(f"{seat} {step}").random()  # noqa: S311
