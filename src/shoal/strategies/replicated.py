"""Every worker holds a whole replica, and all agree on the sum of all lanes once per step: `sync: lanes`, `sync: ddp`.

Local SGD and the parameter server hold replicas in the same way, and differ in how they compute and agree.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shoal.checkpoint.export import EVALUATED_SECTION, export_model
from shoal.checkpoint.layout import LOOP, SYNC, is_sharded, whole_state
from shoal.checkpoint.sha256 import state_sha256, weights_sha256
from shoal.checkpoint.sharded_files import open_pieces
from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.checkpoint.state_tree import State
from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.state_stream import total_from_entry
from shoal.data.datasets import DatasetSplit
from shoal.lanes.carry import LaneCarry
from shoal.lanes.device_copy import DeviceCopies
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink, LaneSum, Replica
from shoal.net.errors import LinkError
from shoal.sharding.local_state import load_unsharded, unsharded_state
from shoal.spec.view import View
from shoal.strategies.base import FinalModel, GradientSync, HeldWeights, Metrics, Traits
from shoal.strategies.catch_up import CatchUp
from shoal.strategies.context import StepContext
from shoal.strategies.step import attempt_step
from shoal.tasks.user_errors import wrap_user_errors

MAX_STATE_TO_MODEL_RATIO = 8
STATE_SPARE_BYTES = 1 << 28


class ReplicatedStrategy:
    """See Strategy. `held` is what the sync updates: the replica itself, or a wrapper around it."""

    is_saved = False

    def __init__(
        self,
        context: StepContext,
        replica: Replica,
        *,
        group: ViewGroup,
        sync: GradientSync,
        held: HeldWeights | None = None,
        lockstep: bool = True,
    ) -> None:
        self.traits = Traits(exact=sync.exact, lockstep=lockstep)
        self._context = context
        self._progress = context.progress
        self._replica = replica
        self._held: HeldWeights = held or replica
        self._to_device = DeviceCopies(replica.device)  # batches are made on the CPU
        self._group = group
        self._sync = sync
        self._lanes: Sequence[int] = []
        self._alone = self._leads = False
        self._catch_up = CatchUp(
            context.peers, context.progress, apply=self._apply_entry, settle=self._drop_uncommitted
        )

    @property
    def lr(self) -> float:
        return self._replica.lr

    # ---- views ----

    def enter(self, view: View, seat: int) -> Discarded | None:
        context, progress = self._context, self._progress
        began = time.perf_counter()
        if progress.position == view.position:
            self._catch_up.close()
        elif discarded := self._fetch_missing(view, seat):
            return discarded
        if view.source == seat:
            context.peers.state_server.open(view.number, self._peer_state)
        try:
            if discarded := self._sync.reconfigure(view, seat):
                return discarded
        finally:
            context.peers.state_server.close()
        self._lanes = sorted(view.carries[seat])
        self._alone, self._leads = len(view.carries) == 1, view.saver == seat
        progress.step = self._first_step(progress.step)
        context.batches.set_lanes(self._lanes, progress.step)
        context.stats.add_time("recovery_s", time.perf_counter() - began)
        return None

    def _first_step(self, step: int) -> int:
        """The step at which this worker continues, in a view that was entered at `step`."""
        return step

    def _fetch_missing(self, view: View, seat: int) -> Discarded | None:
        """Get the missing state from the view's source: the rest of the followed stream, or the whole state."""
        if view.source in (None, seat):
            return Discarded("it stands at another place than it said")
        began = time.perf_counter()
        followed = self._catch_up.advance_to(view.position)
        if not followed:
            found = self._context.peers.fetch_state(view, seat, max_bytes=self._max_state_bytes)
            if isinstance(found, Discarded):
                return found
            self._load_state(found)
        seconds = round(time.perf_counter() - began, 6)
        source = f"worker-{view.source}"
        self._context.report(
            "caught_up", step=self._progress.step, source=source, followed=followed, recovery_s=seconds
        )
        return None

    def leave_view(self) -> Discarded | None:
        return None

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        self._sync.hand_over(given_up)

    # ---- following ----

    def follow(self, view: View, seat: int) -> Iterator[bool]:
        if self._catch_up.connect(view, seat, max_bytes=self._max_state_bytes):
            while (caught_up := self._catch_up.poll()) is not None:
                yield caught_up

    def _apply_entry(self, entry: Mapping[str, Any]) -> None:
        progress, kind = self._progress, entry["kind"]
        if kind == "state":
            if entry["state"][LOOP]["task"] is not None or "carry" in entry["state"]:
                raise LinkError("a task that remembers cannot be followed")
            self._load_state(entry["state"])
        elif kind == "step":
            if entry["step"] != progress.step:
                raise LinkError(f"step {entry['step']} after {progress.step}")
            total = total_from_entry(entry, self._replica.layout, self._replica.device)
            loss = self._held.apply(progress.step, total)
            progress.record_streamed_commit(loss, step=self._next_step(progress.step), lr=self.lr)
        elif kind == "evaluated":
            progress.record_streamed_evaluation(entry["metrics"])
            self._step_metric_schedule(progress.monitored_value)
        else:
            raise LinkError(f"an entry of the kind {kind!r}")

    def _drop_uncommitted(self) -> None:
        """Go back to the last commit. There is nothing to undo: every streamed total is a commit."""

    # ---- steps ----

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        publisher = self._context.peers.state_publisher
        if publisher.active:
            publisher.start_subscribers(self._peer_state)
        step, sums = self._progress.step, self._sync.begin_step()
        outcome = attempt_step(
            self._context,
            self._held,
            compute=lambda: self._compute(sums, must_halt),
            commit=lambda halt: self._sync.commit(self._held, step, sums, halt=halt),
            alone=self._alone,
        )
        if isinstance(outcome, Committed):
            self._progress.record_commit(outcome, step=self._next_step(step), lr=self.lr)
        return outcome

    def _next_step(self, step: int) -> int:
        """The step to which a commit leads that begins at `step`."""
        return step + 1

    def _compute(self, sums: TreeSum[LaneSum], must_halt: Callable[[], bool]) -> bool:
        """Compute the lanes of this worker, in order. Returns whether this worker must halt."""
        halt = must_halt()
        context, step, clock = self._context, self._progress.step, time.perf_counter
        activity, stats = context.activity, context.stats
        began = clock()
        total = context.sampler.batch_samples(step)
        for lane in self._lanes_to_compute(step):
            t0 = clock()
            activity.begin("data", step)
            batch = context.batches.get(step, lane)
            activity.begin("compute", step)
            t1 = clock()
            stats.add_time("data_s", t1 - t0)
            sink = None
            if batch is not None:
                stats.add_samples(batch.size)
                if lane == self._lanes[-1] and self._may_overlap:
                    sink = self._sync.gradient_sink(self._held, step, sums, lane, halt=halt)
            weight = self._lane_weight(lane, batch.size if batch else 0, total)
            sums.push_lane(lane, None if batch is None else self._forward_backward(lane, batch, weight, sink))
            stats.add_time("compute_s", clock() - t1)
        activity.record_lane_time((clock() - began) / len(self._lanes))
        if self._replica.carry:
            exchange_carry(self._replica.carry, self._group, step)
        return halt

    @property
    def _may_overlap(self) -> bool:
        """Gradients may leave during backward: not if an observer sees whole sums, or if what lanes carry leaves
        first."""
        return self._replica.observer is None and self._replica.carry is None

    def _lanes_to_compute(self, step: int) -> Sequence[int]:
        return self._lanes

    def _lane_weight(self, lane: int, size: int, total: int) -> float:
        """The weight of a lane's mean, for `size` of the step's `total` samples."""
        return size / total

    def _forward_backward(self, lane: int, batch: Any, weight: float, sink: GradientSink | None) -> LaneSum:
        step = self._progress.step
        with wrap_user_errors("SH401", f"step {step}, lane {lane}"):
            return self._replica.forward_backward(step, lane, self._to_device(batch), share=weight, sink=sink)

    # ---- evaluation ----

    def evaluate(self, split: DatasetSplit) -> Metrics | Discarded:
        context, step = self._context, self._progress.step
        context.activity.begin("exchange", step)
        if discarded := self._agree_on_weights():
            return discarded

        def gather(content: bytes) -> dict[int, bytes] | Discarded:
            context.activity.begin("exchange", step)
            return self._group.gather(Channel[split.name.upper()].label(step), content)

        try:
            with self._replica.evaluation_weights():
                return context.evaluator.evaluate_distributed(
                    self._replica,
                    split,
                    lanes=self._lanes,
                    gather=gather,
                    is_aborted=self._group.aborted,
                    on_chunk=lambda: context.activity.begin("evaluation", step),
                )
        except LinkError as failure:
            return Discarded(str(failure))

    def _agree_on_weights(self) -> Discarded | None:
        """Wait until all members have the same weights, before they evaluate together."""
        return None

    def adopt_metrics(self, metrics: Metrics, monitored: float | None) -> None:
        self._step_metric_schedule(monitored)
        self._context.peers.state_publisher.publish({"kind": "evaluated", "metrics": metrics})

    def _step_metric_schedule(self, monitored: float | None) -> None:
        if self._replica.schedule_needs_metric:
            self._replica.schedule.step(monitored)

    # ---- state ----

    def save(self, *, force: bool = False) -> None:
        if self._leads:
            self._save(force=force)

    def save_alone(self) -> None:
        self._catch_up.close()
        self._save(force=True)

    def _save(self, *, force: bool) -> None:
        context, step = self._context, self._progress.step
        context.activity.begin("saving", step)
        with contextlib.suppress(LinkError):  # the next step notices the lost member, and a new view follows
            context.store.maybe_save(
                step,
                self._checkpoint_state,
                metric=self._progress.monitored_value,
                force=force,
                external_blobs=self._external_blobs(),
            )

    def _external_blobs(self) -> Callable[[], Mapping[str, int]] | None:
        """Lists blobs that other processes wrote for the checkpoint, with sizes in bytes. None if they never do."""
        return None

    def state(self) -> State | None:
        return self._held.state()

    def _peer_state(self) -> State:
        """The state for another worker. After loading it, that worker continues as this one would."""
        return whole_state(self._held.state(), self._progress.state(), None)

    def _checkpoint_state(self) -> State:
        """The state with what other members or servers hold. LinkError if they cannot be reached."""
        if discarded := self._complete_replica():
            raise LinkError(discarded.why)
        state = whole_state(self._held.state(), self._progress.state(), self._sync.state())
        if self._replica.has_evaluation_weights:
            with self._replica.evaluation_weights():
                model = self._replica.model.state_dict()
                state[EVALUATED_SECTION] = {name: value.detach().clone() for name, value in model.items()}
        return state

    def _complete_replica(self) -> Discarded | None:
        """Fetch into the replica what is held elsewhere, so that it can be saved."""
        return None

    def restore(self) -> int | None:
        found = self._context.store.load_latest()
        self._progress.has_state = True
        if found is None:
            return None
        manifest, state = found
        self._load_state(state)
        return int(manifest.step)

    def _load_state(self, state: dict[str, Any]) -> None:
        """Load the state of one process, or of several that held shards of the model."""
        self._context.peers.state_publisher.drop_subscribers()
        if is_sharded(state):
            load_unsharded(self._replica, open_pieces(self._context.store.files, state))
            state = unsharded_state(self._replica, state)
        self._held.load_state(state)
        self._progress.load_state(state[LOOP])
        if state[LOOP][SYNC] is not None:
            self._sync.load_state(self._progress.step, state[LOOP][SYNC])
        self._progress.has_state = True

    @property
    def _max_state_bytes(self) -> int:
        """The most bytes that a peer may send at once."""
        size: int = sum(t.numel() * t.element_size() for t in self._replica.model.state_dict().values())
        return MAX_STATE_TO_MODEL_RATIO * size + STATE_SPARE_BYTES

    # ---- the end ----

    def finish(self, conclude: Callable[[FinalModel], None]) -> Discarded | None:
        step = self._progress.step
        if discarded := self._agree_on_weights():
            return discarded
        if self._leads:
            self._context.activity.begin("export", step)
            model = self._final_model()
            if isinstance(model, Discarded):
                return model
            conclude(model)
        self._context.activity.begin("exchange", step)
        ended = self._group.gather(Channel.END.label(step), b"")
        return ended if isinstance(ended, Discarded) and not self._leads else None

    def _final_model(self) -> FinalModel | Discarded:
        """Save the last commit. Returns its complete model."""
        self._save(force=True)
        replica = self._replica

        def export(target: Any, **options: Any) -> object:
            with replica.evaluation_weights():
                return export_model(target, replica.model, **options)

        with replica.evaluation_weights():
            weights = weights_sha256(replica.model.state_dict())
        return FinalModel(weights, state_sha256(self._held.state()), export)

    def abort(self, view: int) -> None:
        self._group.abort(view)
        self._context.peers.abort(view)

    def moved_bytes(self) -> int:
        return self._group.moved_bytes()

    def close(self) -> None:
        self._catch_up.close()
        self._sync.close()


def exchange_carry(carry: LaneCarry, group: ViewGroup, step: int) -> None:
    """Tell all members what this worker's lanes carry on, and learn it of theirs. LinkError if a member is lost."""
    found = group.gather(Channel.CARRY.label(step), pack_state(carry.new))
    if isinstance(found, Discarded):
        raise LinkError(found.why)
    for seat, content in found.items():
        carried = unpack_state(content)
        if not isinstance(carried, dict) or not all(
            type(lane) is int and isinstance(part, dict) for lane, part in carried.items()
        ):
            raise LinkError(f"worker-{seat} sent something that no lane carries")
        carry.add_peers(carried)
