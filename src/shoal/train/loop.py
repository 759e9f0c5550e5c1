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

from shoal.checkpoint.pieces import PIECES, saved_in
from shoal.checkpoint.store import Store
from shoal.data.dealers import Dealer
from shoal.data.feed import Feed
from shoal.errors import ShoalError, error
from shoal.fleet.membership import Membership
from shoal.parallel.local.pace import Pace
from shoal.parallel.local.replica import LocalReplica
from shoal.parallel.peers import Peers
from shoal.parallel.replica import LaneSum, Replica, Taker
from shoal.parallel.shard.held import load_whole, whole_state
from shoal.parallel.sync.base import Committed, Discarded, Sync
from shoal.parallel.sync.grid import GridSync
from shoal.parallel.sync.lanes import LanesSync
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View, position_of
from shoal.train.blame import translate
from shoal.train.evaluate import Evaluator
from shoal.train.forming import Mould
from shoal.train.pulse import Pulse
from shoal.train.rounds import Rounds
from shoal.train.shards import Shards
from shoal.train.task import Task
from shoal.train.telling import Progress, Teller
from shoal.train.watch import Best
from shoal.wire.handshake import LinkError

STATE_OVER_MODEL = 8
STATE_SPARE_BYTES = 1 << 28
PARTS = ("validation", "test", "end")


@dataclass(frozen=True)
class Course:
    """How far the job goes and when it looks up."""

    steps: int
    evaluate_every: int
    lanes: int
    pace: Pace = field(default_factory=Pace)
    fragments: int = 1
    keep_best: bool = True
    pause_probability: float = 0.0
    pause_s: float = 0.0

    def after(self, step: int) -> int:
        """Where the next commit leads."""
        return self.pace.after(step, steps=self.steps)

    def pauses(self, seat: int, step: int) -> bool:
        """Made on purpose, and alike whenever it is tried."""
        return self.pause_probability > 0 and _chance(seat, step) < self.pause_probability


@dataclass(frozen=True)
class Ending:
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
        course: Course,
        *,
        replica: Replica,
        dealer: Dealer,
        feed: Feed,
        sync: Sync,
        peers: Peers,
        store: Store,
        membership: Membership,
        teller: Teller,
        progress: Progress,
        pulse: Pulse,
        evaluator: Evaluator,
        parts: dict[str, Any],
        task: Task,
        best: Best,
        holds: bool,
        conclude: Callable[[Loop, str], None],
        asked_to_leave: Callable[[], str],
        mould: Mould | None = None,
    ) -> None:
        self.course = course
        self.replica = replica
        self.dealer = dealer
        self.feed = feed
        self.sync = sync
        self.peers = peers
        self.store = store
        self.membership = membership
        self.teller = teller
        self.progress = progress
        self.pulse = pulse
        self.evaluator = evaluator
        self.parts = parts
        self.task = task
        self.best = best
        self.holds = holds
        self.conclude = conclude
        self.asked_to_leave = asked_to_leave
        self.step = 0
        self.loss = math.nan
        self.metrics: dict[str, float] = {}
        self.measured_at: int | None = None
        self.view = View(number=1)
        self.seat = -1
        self.sealed = ""
        self.lanes: list[int] = []
        self.rounds = None
        if isinstance(replica, LocalReplica) and isinstance(sync, LanesSync):
            self.rounds = Rounds(self, replica, sync)
        self.shards = Shards(self, sync, mould) if mould and isinstance(sync, GridSync) else None
        """Where this worker holds a part of the model; then there is no replica yet."""
        self.sync.tap = peers.feeder.total
        self.teller.leads = False  # until a view says so

    # ---- steps ----

    @property
    def position(self) -> int | None:
        return position_of(self.step, evaluated=self.measured_at == self.step) if self.holds else None

    @property
    def saved(self) -> bool:
        """Do others who read the newest checkpoint have all that this worker has?"""
        return self.shards is not None and self.shards.saved

    def take_up(self, view: View, seat: int) -> None:
        """From now on this view counts."""
        follows = self.seat == seat and not self.teller.leads and view.saver == seat
        self.view, self.seat = view, seat
        self.lanes = sorted(view.carries[seat])
        self.step = self.sync.first_step(self.step, self.lanes)
        self.teller.leads = view.saver == seat
        self.feed.carry(self.lanes, self.step)
        self.progress.restart()
        self.teller.tell("joined", step=self.step, view=view.number, lanes=self.lanes, saves=self.teller.leads)
        if follows:
            self._repeat()

    def _repeat(self) -> None:
        """Whoever led before may have died when all knew what was measured, and before it was told."""
        stream, step, best = self.teller.stream, self.measured_at, self.best
        if step is not None:
            stream.emit("evaluated", step=step, part="validation", metrics=self.metrics, again=True)
            if best.step == step:
                stream.emit("best", step=step, metric=best.monitor.metric, value=best.value, again=True)
                if self.course.keep_best and step == self.step and not self.shards:
                    self.save(force=True)

    def train(self) -> Ending | str:
        """Steps until there is nothing left to do, or a newer view; then why, or '' where it was agreed upon."""
        feeder = self.peers.feeder
        while True:
            if feeder.active:
                feeder.begin(self.state)
            outcome = self._evaluate_if_due()
            if isinstance(outcome, Discarded):
                return outcome.why
            if self.over:
                return self._finale()
            if self.course.pauses(self.seat, self.step):
                self.pulse.enter("pause", self.step)
                time.sleep(self.course.pause_s)
            halt = self._halts()
            if halt and (len(self.view.carries) == 1 or not self.sync.together):
                return ""
            committed = self._one_step(halt)
            if isinstance(committed, Discarded):
                return committed.why
            self._after(committed)
            if committed.halt:
                return self.shards.part() if self.shards else ""

    def _halts(self) -> bool:
        """Must the next boundary be the last of this view?"""
        return self.membership.newer(self.view.number) or bool(self.asked_to_leave())

    @property
    def over(self) -> bool:
        return self.step >= self.course.steps or bool(self.teller.stop)

    def _one_step(self, halt: bool) -> Committed | Discarded:
        clock = time.perf_counter
        sums = self.sync.sums()
        remembered = copy.deepcopy(self.task.state()) if len(self.view.carries) > 1 else None
        began = clock()
        self.replica.begin()
        try:
            if self.rounds:
                self.rounds.compute(sums)
                halt = halt or self._halts()  # that took a while
            elif self.shards:
                self.shards.turns.compute(sums)
            else:
                self._compute(sums, halt)
        except LinkError as failure:  # rows of sparse tables could not be had, or fragments
            outcome: Committed | Discarded = Discarded(str(failure))
        else:
            t0 = clock()
            if not self.rounds and not self.shards:
                self.pulse.lane_took((t0 - began) / len(self.lanes))
            self.pulse.enter("exchange", self.step)
            outcome = self._commit(sums, halt)
            self._account(outcome, clock() - t0)
        if isinstance(outcome, Discarded):
            self.replica.undo()
            if self.rounds:
                self.peers.feeder.reset()  # fragments that were told do not count
            if remembered is not None:
                self.task.load_state(remembered)
        return outcome

    def _compute(self, sums: TreeSum[LaneSum], halt: bool) -> None:
        """My lanes, in order."""
        clock = time.perf_counter
        total = self.dealer.total(self.step)
        for lane in [lane for lane in self.lanes if self.sync.wants(self.step, lane)]:
            t0 = clock()
            self.pulse.enter("data", self.step)
            batch = self.feed.get(self.step, lane)
            self.pulse.enter("compute", self.step)
            t1 = clock()
            self.progress.spent("data_s", t1 - t0)
            if batch is not None:
                self.progress.computed(batch.size)
            taker = None
            if batch is not None and lane == self.lanes[-1]:
                taker = self.sync.ahead(self.replica, self.step, sums, lane, halt=halt)
            share = self.sync.share(lane, batch.size if batch else 0, total)
            sums.lane(lane, None if batch is None else self._lane(lane, batch, share, taker))
            self.progress.spent("compute_s", clock() - t1)

    def _account(self, outcome: Committed | Discarded, seconds: float) -> None:
        if isinstance(outcome, Discarded):
            self.progress.spent("recovery_s", seconds)
            return
        self.progress.spent("waiting_s", outcome.waited_s)
        self.progress.spent("exchange_s", outcome.exchange_s)
        self.progress.spent("compute_s", seconds - outcome.waited_s - outcome.exchange_s)

    def _lane(self, lane: int, batch: Any, share: float, taker: Taker | None) -> LaneSum:
        with self._blaming(self.step, lane):
            return self.replica.forward_backward(self.step, lane, self._here(batch), share=share, taker=taker)

    def inner(self, step: int, lane: int, batch: Any) -> float:
        """A step that a lane makes by itself. Returns its loss."""
        assert isinstance(self.replica, LocalReplica)
        with self._blaming(step, lane):
            loss = float(self.replica.train(step, lane, self._here(batch), size=batch.size))
        if not math.isfinite(loss):
            raise error("SH403", f"the loss of lane {lane} is {loss} at step {step + 1}", where=f"worker-{self.seat}")
        return loss

    def _here(self, batch: Any) -> Any:
        """Batches are made on the CPU."""
        device = self.replica.device
        return batch if device.type == "cpu" else batch.to(device)

    @contextlib.contextmanager
    def _blaming(self, step: int, lane: int) -> Iterator[None]:
        try:
            yield
        except (ShoalError, LinkError):
            raise
        except Exception as failure:
            raise translate(failure, "SH401", f"step {step}, lane {lane}") from failure

    def _commit(self, sums: TreeSum[LaneSum], halt: bool) -> Committed | Discarded:
        try:
            return self.sync.commit(self.replica, self.step, sums, halt=halt)
        except ShoalError:
            raise
        except Exception as failure:
            raise translate(failure, "SH413", f"step {self.step}") from failure

    def _after(self, committed: Committed) -> None:
        """The step counts: look at it and save. Where an evaluation is due, the save comes after it."""
        self.counted(committed)
        if not self._due():
            self.save()

    def counted(self, committed: Committed) -> None:
        samples = self.count(committed.loss)
        self.pulse.enter("telling", self.step)
        lr = self.replica.lr
        self.progress.sent(committed.bytes_sent, committed.bytes_plain)
        self.progress.step(self.step, loss=self.loss, lr=lr, samples=samples)

    def count(self, loss: Tensor) -> int:
        """One commit more; returns how many samples it had."""
        after = self.course.after(self.step)
        samples = sum(map(self.dealer.total, range(self.step, after)))
        self.step = after
        self.loss = float(loss)
        if not math.isfinite(self.loss):
            raise error("SH403", f"the loss is {self.loss} at step {self.step}", where=f"worker-{self.seat}")
        return samples

    def flush(self) -> None:
        """Tell all steps so far."""
        self.progress.flush(self.step, loss=self.loss, lr=self.replica.lr)

    def save(self, *, force: bool = False) -> None:
        """One worker saves for all; with shards, all do."""
        if self.shards:
            self.shards.save(force=force)
        elif self.teller.leads:
            self.pulse.enter("saving", self.step)
            with contextlib.suppress(LinkError):  # then the next step finds out, and a new view follows
                others = self.sync.blobs if self.replica.tables else None
                metric = self.best.at(self.step)
                self.store.maybe_save(self.step, self._whole_state, metric=metric, force=force, others=others)

    # ---- evaluation ----

    def _due(self) -> bool:
        """Must the validation part be measured before the next step? Once and no more: schedules learn from it."""
        at_a_mark = self.course.pace.crosses(self.step, self.course.evaluate_every)
        return "validation" in self.parts and self.measured_at != self.step and (at_a_mark or self.over)

    def _evaluate_if_due(self) -> Discarded | None:
        if not self._due():
            return None
        metrics = self.evaluate("validation")
        if isinstance(metrics, Discarded):
            return metrics
        self.learn_from(metrics)
        self.peers.feeder.note({"kind": "evaluated", "metrics": metrics})
        self.save()
        return None

    def evaluate(self, name: str) -> dict[str, float] | Discarded:
        """A part of the data, by all members together."""
        self.flush()
        began = time.perf_counter()
        self.pulse.enter("exchange", self.step)
        if isinstance(outcome := self.sync.settle(self.replica, 4 * self.step + 3), Discarded):
            return outcome
        try:
            metrics = self._measured(name)
        except LinkError as failure:
            metrics = Discarded(str(failure))
        if isinstance(metrics, Discarded):
            return metrics
        seconds = round(time.perf_counter() - began, 6)
        self.teller.tell_once("evaluated", step=self.step, part=name, metrics=metrics, evaluation_s=seconds)
        self.progress.restart()
        return metrics

    def _measured(self, name: str) -> dict[str, float] | Discarded:
        if self.shards:
            return self.shards.turns.evaluate(self.parts[name], PARTS.index(name))
        return self.evaluator.share(
            self.replica,
            self.parts[name],
            lanes=self.lanes,
            gather=lambda content: self._gather(name, content),
            given_up=self.sync.aborted,
            each=lambda: self.pulse.enter("evaluation", self.step),
        )

    def _gather(self, name: str, content: bytes) -> dict[int, bytes] | Discarded:
        self.pulse.enter("exchange", self.step)
        return self.sync.gather(4 * self.step + PARTS.index(name), content)

    def learn_from(self, metrics: dict[str, float]) -> None:
        """What the validation part says at this step."""
        self.metrics, self.measured_at = metrics, self.step
        if self.replica.waits_for_metric:
            self.replica.schedule.step(metrics[self.best.monitor.metric])
        if self.best.improved:
            self.teller.tell_once("best", step=self.step, metric=self.best.monitor.metric, value=self.best.value)
            if self.course.keep_best:
                self.save(force=True)

    # ---- the end ----

    def _finale(self) -> Ending | str:
        """Measure the test part together; one concludes, and the others stay until it has. May be repeated."""
        self.flush()
        if "test" in self.parts and isinstance(outcome := self.evaluate("test"), Discarded):
            return outcome.why
        if isinstance(settled := self.sync.settle(self.replica, 4 * self.step + 3), Discarded):
            return settled.why
        if self.shards and (why := self.shards.save(force=True)):
            return why
        if self.teller.leads:
            self.pulse.enter("export", self.step)
            if isinstance(completed := self.sync.complete(self.replica, self.step), Discarded):
                return completed.why
            if isinstance(sealed := self.sync.seal(), Discarded):
                return sealed.why
            self.sealed = sealed
            self.conclude(self, self.teller.stop)
        ended = self._gather("end", b"")
        if isinstance(ended, Discarded) and not self.teller.leads:
            return ended.why
        return Ending(self.step, finished=True, why=self.teller.stop)

    def leave(self, why: str) -> Ending:
        self.flush()
        if self.holds:
            if not self.shards:  # alone it cannot, and what could be saved was
                self.save(force=True)
            self.store.wait()
        self.teller.tell("left", step=self.step, why=why)
        return Ending(self.step, finished=False, why=why)

    # ---- state ----

    @property
    def most_bytes(self) -> int:
        """What a peer may send at once."""
        size: int = sum(t.numel() * t.element_size() for t in self.replica.model.state_dict().values())
        return STATE_OVER_MODEL * size + STATE_SPARE_BYTES

    def _whole_state(self) -> dict[str, Any]:
        """For a checkpoint: with what only the members together have, or servers."""
        if isinstance(outcome := self.sync.complete(self.replica, self.step), Discarded):
            raise LinkError(outcome.why)
        state = self.state()
        return {**state, "loop": {**state["loop"], "sync": self.sync.state()}}

    def state(self) -> dict[str, Any]:
        """What must survive: after loading it, training goes on as if nothing had happened."""
        return {**self.replica.state(), "loop": self.state_of_loop()}

    def state_of_loop(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "stop": self.teller.stop,
            "metrics": self.metrics,
            "measured_at": self.measured_at,
            "task": self.task.state(),
            "watch": self.teller.state(),
            "sync": None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Of one process, or of many that held the model together."""
        self.peers.feeder.reset()
        if PIECES in state:
            load_whole(self.replica, saved_in(self.store.files, state))
            state = whole_state(self.replica, state)
        self.replica.load_state(state)
        self.load_loop(state["loop"])
        self.holds = True

    def load_loop(self, loop: dict[str, Any]) -> None:
        self.task.load_state(loop["task"])
        self.teller.load_state(loop["watch"])
        self.teller.stop = loop["stop"]
        self.metrics, self.measured_at = loop["metrics"], loop["measured_at"]
        self.step = loop["step"]
        if loop["sync"] is not None:
            self.sync.load_state(self.step, loop["sync"])


def _chance(seat: int, step: int) -> float:
    return random.Random(f"{seat} {step}").random()  # noqa: S311
