"""Several workers hold one replica together: `shard: fsdp`, `tensor` and `pipeline`. Replicas agree once per step."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, distributed

from shoal.checkpoint.export import export_sharded_model
from shoal.checkpoint.layout import SharedSections, load_pieces, record_fields, sharded_state
from shoal.checkpoint.sha256 import weights_sha256
from shoal.checkpoint.sharded_files import (
    AssembledTensors,
    PieceRecord,
    SavedPieces,
    write_pieces,
)
from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.checkpoint.state_tree import State
from shoal.checkpoint.tensor_bytes import DTYPES
from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.data.datasets import DatasetSplit
from shoal.errors import CheckpointError, error
from shoal.net.errors import LinkError
from shoal.sharding.build_replica import ShardedReplicaBuilder, ShardLayout
from shoal.sharding.device_mesh import ShardMesh, all_reduce_max
from shoal.sharding.memory_limits import fits_in_memory, memory_headroom
from shoal.sharding.recovery import HeldShard, RecoveryPoint, ShardTransfer, can_reach, plan_transfers, recovery_point
from shoal.sharding.replica import ShardedReplica
from shoal.sharding.shard_backup import ShardBackup, ShardSpec, TensorSpecs, tensor_specs
from shoal.spec.sharding import INEXACT_MICROBATCHES, NoShardingConfig, PipelineParallelConfig
from shoal.spec.view import View
from shoal.strategies.base import FinalModel, Metrics, Traits
from shoal.strategies.context import StepContext
from shoal.strategies.sharded_commit import ShardedSync
from shoal.strategies.sharded_compute import ShardedCompute
from shoal.strategies.step import attempt_step

BACKUP_HEADROOM_FACTOR = 10
"""Free memory that a backup needs, as a multiple of its trainable parameters: values, a gradient, two moments and some
spare room. It is doubled, because the worker's own training may not have allocated all of that yet."""


class ShardedStrategy:
    """See Strategy. There is no replica before the first view. Members that enter a view agree on the state to continue
    from, in memory or in a checkpoint, and each loads its shard. A save takes all members."""

    traits = Traits(exact=False, lockstep=True)

    def __init__(
        self, context: StepContext, builder: ShardedReplicaBuilder, *, group: ViewGroup, sync: ShardedSync
    ) -> None:
        self._context = context
        self._progress = context.progress
        self._builder = builder
        self._group = group
        self._sync = sync
        self._compute = ShardedCompute(context, group, sync, example=builder.example)
        self._held: ShardedReplica | None = None
        self._view = View(number=1)
        self._lanes: Sequence[int] = []
        self._leads = False
        self._last_save: tuple[int, float | None] | None = None
        self._checkpointed_step: int | None = None
        self._piece_records: list[PieceRecord] = []
        self._blobs: dict[str, int] = {}
        self._initial_progress = copy.deepcopy(context.progress.state())
        context.progress.has_state = False
        sync.wants_save = lambda step: self._leads and context.store.is_due(step)

    @property
    def _replica(self) -> ShardedReplica:
        assert self._held is not None, "a member holds its part from its first view on"
        return self._held

    @property
    def lr(self) -> float:
        return self._held.lr if self._held else math.nan

    # ---- entering a view ----

    def enter(self, view: View, seat: int) -> Discarded | None:
        """Connect to the other members, agree on the state to continue from, and load this member's shard."""
        if discarded := self._sync.reconfigure(view, seat):
            return discarded
        began = time.perf_counter()
        try:
            with self._sync.as_link_errors():
                self._restore_together(view, seat, began)
                gc.collect()  # the last view's model with its groups is a cycle of references
                self._progress.has_state, self._sync.voted_step = True, None
                self._make_backup(view)
        except LinkError as failure:
            return self._sync.discard(failure)
        self._last_save = None
        self._view, self._lanes, self._leads = view, sorted(view.carries[seat]), view.saver == seat
        self._context.batches.set_lanes(self._lanes, self._progress.step)
        return None

    def restore(self) -> int | None:
        """Does nothing: members restore together in `enter`."""
        return None

    def follow(self, view: View, seat: int) -> Iterator[bool]:
        """There is nothing to follow: a shard comes from the memory of other members, in `enter`."""
        yield from ()

    def _restore_together(self, view: View, seat: int, began: float) -> None:
        answers = self._gather(Channel.HELD_SHARDS, view.number, self._describe_held(view, seat))
        by_rank = {view.places[other]: content for other, content in answers.items()}
        with _content_of_members():
            held_shards = {rank: HeldShard(**content["holding"]) for rank, content in by_rank.items()}
            saved = next(content["saved"] for content in by_rank.values() if content["saves"])
        point = recovery_point(
            held_shards, replica_size=self._builder.job.workers_per_replica, checkpoint_step=max(saved, default=None)
        )
        if point.sources:
            self._restore_from_memory(view.places[seat], point, held_shards, by_rank)
            kind, lost = ("resumed", {"redone": point.lost_steps}) if point.lost_steps else ("caught_up", {})
            self._report_recovery(kind, view, seat, began, step=point.step, source="the memory of workers", **lost)
            return
        step = self._checkpointed_step = self._restore_from_checkpoints(saved, view, seat)
        self._sync.last_committed_view = view.number
        redone = point.lost_steps + point.step - (step or 0)
        if step is not None:
            self._report_recovery("resumed", view, seat, began, step=step, source="a checkpoint", redone=redone)
            return
        self._initialise()
        if redone:
            self._report_recovery("resumed", view, seat, began, step=0, source="the beginning", redone=redone)

    def _report_recovery(self, kind: str, view: View, seat: int, began: float, **fields: Any) -> None:
        if view.saver == seat:
            seconds = round(time.perf_counter() - began, 6)
            self._context.report(kind, recovery_s=seconds, **fields)

    def _describe_held(self, view: View, seat: int) -> dict[str, Any]:
        """What this member holds, for all other members to see."""
        progress, replica, pending = self._progress, self._held, self._sync.voted_step
        row: dict[str, Any] = {"saves": view.saver == seat, "saved": [], "holding": {}}
        if view.saver == seat:
            row["saved"] = [manifest.step for manifest in self._context.store.intact_manifests()]
        if progress.has_state and replica:
            row["holding"] = {
                "step": progress.step,
                "part": replica.sharded_model.mesh.shard_rank,
                "ways": replica.sharded_model.mesh.replica_size,
                "view": self._sync.last_committed_view,
                "pending": pending.view if pending and pending.step == progress.step else None,
                "evaluated": progress.evaluated,
                "mirrors": self._sync.backup.shard_rank if self._sync.backup else None,
            }
            specs = {str(part): tensor_specs(tensors) for part, tensors in self._shards_in_memory().items()}
            row |= {"common": self._shared_state(), "specs": specs}
        return row

    def _shards_in_memory(self) -> dict[int, dict[str, Tensor]]:
        """The shards in this worker's memory: its own, and the backup of its neighbour's, if any."""
        mirror, own = self._sync.backup, self._replica.sharded_model.mesh.shard_rank
        return ({mirror.shard_rank: mirror.all_tensors()} if mirror else {}) | {own: self._replica.all_tensors()}

    def _shared_state(self) -> dict[str, Any]:
        """The state that is the same on all members."""
        replica = self._replica
        return {
            **replica.state(),
            "layout": self._builder.layout_of(replica.sharded_model),
            "loop": self._progress.state(),
        }

    def _gather(self, channel: Channel, number: int, content: Any) -> dict[int, Any]:
        told = self._group.gather(channel.label(number), pack_state(content))
        if isinstance(told, Discarded):
            raise LinkError(told.why)
        return {seat: unpack_state(one) for seat, one in told.items()}

    # ---- the state to continue from ----

    def _restore_from_memory(
        self,
        rank: int,
        point: RecoveryPoint,
        held_shards: Mapping[int, HeldShard],
        by_rank: Mapping[int, Mapping[str, Any]],
    ) -> None:
        common = by_rank[point.metadata_rank]["common"]
        if not can_reach(held_shards[rank], point.step, point.view):
            self._sync.backup = None  # it is of an older step
        elif held_shards[rank].step != point.step:
            self._apply_pending_step()
        kept = self._shards_in_memory() if self._progress.has_state else {}
        replica = self._build_replica(common["layout"])
        coming: dict[str, Tensor] | None = None
        for move in plan_transfers(point, held_shards, replica_size=self._builder.job.workers_per_replica):
            specs = by_rank[move.source_rank]["specs"][str(move.shard_rank)]
            if move.source_rank == move.target_rank == rank:
                coming = kept[move.shard_rank]
            elif move.source_rank == rank:
                _send_shard(kept[move.shard_rank], specs, move)
            elif move.target_rank == rank:
                coming = _receive_shard(specs, move, replica.sharded_model.mesh)
        replica.load_all_tensors(kept[rank % self._builder.job.workers_per_replica] if coming is None else coming)
        self._held, self._sync.last_committed_view = replica, point.view
        self._load_shared_state(common)

    def _apply_pending_step(self) -> None:
        """Commit the step that this member voted for, because another member has committed it."""
        loss = self._sync.commit_voted(self._replica)
        self._progress.record_commit(Committed(loss), step=self._progress.step + 1, lr=self.lr)

    def _restore_from_checkpoints(self, steps: Sequence[int], view: View, seat: int) -> int | None:
        """Load the first of these checkpoints that all members can read. Returns its step, or None if there is none."""
        for number, step in enumerate(steps):
            why = ""
            try:
                self._restore_from_checkpoint(step)
            except CheckpointError as problem:
                why = f"{problem.where}: {problem.message}"
            told = self._gather(Channel.CHECKPOINT_READ, (view.number << 16) + number, why)
            problems = list(filter(None, told.values()))
            if not problems:
                return step
            if view.saver == seat:
                self._context.store.mark_damaged(step, problems[0])
        return None

    def _restore_from_checkpoint(self, step: int) -> None:
        """Load a checkpoint of any layout. No member reads more than its own shard, or one tensor at a time."""
        self._release()
        shared = SharedSections.load(self._context.store, step)
        replica = self._build_replica(shared.layout)
        pieces, settings = load_pieces(self._context.store, step, param_order=replica.optimizer_factory.param_order)
        replica.load_pieces(pieces)
        self._held = replica
        self._load_shared_state({"settings": settings, "schedule": shared.schedule, "loop": shared.loop})

    def _initialise(self) -> None:
        self._release()
        replica = self._build_replica(None)
        facts = self._builder.load_initial_weights(replica)
        if facts and replica.sharded_model.mesh.replica_rank == replica.sharded_model.mesh.shard_rank == 0:
            self._context.report("weights_loaded", **facts)
        self._held = replica
        self._progress.load_state(copy.deepcopy(self._initial_progress))

    def _make_backup(self, view: View) -> None:
        """Keep a live backup of the next rank's shard, if no other replica has it and all ranks have enough free
        memory. Keep the previous backup until the new one is complete, because the rank that was just restored from it
        may die again."""
        replica, shard, old = self._replica, self._builder.job.shard, self._sync.backup
        mesh = replica.sharded_model.mesh
        if mesh.replicas > 1 or isinstance(shard, NoShardingConfig) or shard.mirror is False:
            self._sync.backup = None
            return
        old = old if old and old.shard_rank == (mesh.shard_rank + 1) % mesh.replica_size else None
        mine = {"looks": asdict(ShardSpec.of(replica)), "rooms": memory_headroom(), "has": old is not None}
        told = self._gather(Channel.SHARD_SPECS, view.number, mine)
        with _content_of_members():
            looks = {view.places[seat]: ShardSpec(**content["looks"]) for seat, content in told.items()}
        others = {
            seat: looks[(rank + 1) % mesh.replica_size] for seat, rank in view.places.items() if not told[seat]["has"]
        }
        needs = {seat: BACKUP_HEADROOM_FACTOR * other.trainable_bytes for seat, other in others.items()}
        hosts = {seat: address.host_id for seat, address in view.addresses.items()}
        free = {seat: content["rooms"] for seat, content in told.items()}
        if shard.mirror is None and not fits_in_memory(needs, free, hosts):
            self._sync.backup = None
            return
        self._sync.backup = ShardBackup(
            replica, looks[(mesh.shard_rank + 1) % mesh.replica_size], replica.optimizer_factory.make_another, old
        )

    def _release(self) -> None:
        """Free the replica and the backup before new memory is allocated."""
        self._progress.has_state, self._sync.backup, self._held = False, None, None
        gc.collect()  # the replica is a cycle of references

    def _build_replica(self, layout: ShardLayout | None) -> ShardedReplica:
        mesh = self._sync.shard_mesh
        assert mesh is not None
        self._context.activity.begin("building", self._progress.step)
        replica = self._builder.build(mesh, layout, self._sync.as_link_errors)
        why = self._why_not_exact(replica)
        if mesh.replica_rank == mesh.shard_rank == 0:
            facts = {**self._builder.layout_of(replica.sharded_model), "replicas": mesh.replicas}
            every = list(replica.sharded_model.model.parameters())
            facts["parameters"] = sum(p.numel() for p in every)
            facts["trainable"] = sum(p.numel() for p in every if p.requires_grad)
            self._context.report("layout", **facts, why=why)
            if why and not (layout and self._builder.matches(layout)):
                self._context.report("note", message=f"{why}. `shard.microbatches: 1` has that of one process")
            if replica.why_not_deferred:
                message = f"every worker made the whole model before it was cut: {replica.why_not_deferred}"
                self._context.report("note", message=message)
        return replica

    def _why_not_exact(self, replica: ShardedReplica) -> str:
        """Why the result differs from that of one process by more than the order of additions; or ''."""
        shard = self._builder.job.shard
        if not isinstance(shard, PipelineParallelConfig) or shard.microbatches == 1:
            return ""
        moves = all_reduce_max(float(bool(replica.moving_buffers.names)), replica.sharded_model.mesh.shard_group)
        return INEXACT_MICROBATCHES if moves else ""

    def _load_shared_state(self, shared: Mapping[str, Any]) -> None:
        self._replica.load_state(dict(shared))
        self._progress.load_state(shared["loop"])

    # ---- steps ----

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        step, sums, replica = self._progress.step, self._sync.begin_step(), self._replica
        outcome = attempt_step(
            self._context,
            replica,
            compute=lambda: self._compute.run_lanes(replica, self._lanes, sums, must_halt),
            commit=lambda halt: self._sync.commit(replica, step, sums, halt=halt),
            alone=False,
        )
        if isinstance(outcome, Committed):
            self._progress.record_commit(outcome, step=step + 1, lr=self.lr)
        return outcome

    def evaluate(self, split: DatasetSplit) -> Metrics | Discarded:
        try:
            return self._compute.evaluate(self._replica, split, self._view, self._lanes)
        except LinkError as failure:
            return Discarded(str(failure))

    def adopt_metrics(self, metrics: Metrics, monitored: float | None) -> None:
        if self._replica.schedule_needs_metric:
            self._replica.schedule.step(monitored)

    # ---- saving ----

    def save(self, *, force: bool = False) -> None:
        self._save_together(force=force)

    def save_alone(self) -> None:
        """Does nothing: a save takes all members."""

    def _save_together(self, *, force: bool) -> Discarded | None:
        """Save with all members, if it is time: each writes its own pieces, and the leader writes the manifest.
        Discarded if a member is lost: the next step notices that too, and a new view follows."""
        context, step, metric = self._context, self._progress.step, self._progress.monitored_value
        done = self._last_save is not None and self._last_save[0] == step and metric in (None, self._last_save[1])
        if done or not (force or self._sync.save_requested):
            return None
        self._last_save, self._sync.save_requested = (step, metric), False
        context.activity.begin("saving", step)
        try:
            if self._leads:
                self._piece_records = []
                context.store.save_sharded(step, self._gather_state, metric=metric, external_blobs=lambda: self._blobs)
            else:
                self._write_own_pieces()
        except LinkError as failure:
            return Discarded(str(failure))
        return None

    @property
    def is_saved(self) -> bool:
        return self._progress.has_state and self._checkpointed_step == self._progress.step

    def leave_view(self) -> Discarded | None:
        """Save before members leave at a boundary, and wait until the save is complete: then the others have everything
        that a leaving member holds. If the save failed, `is_saved` shows it to the driver."""
        step = self._progress.step
        if discarded := self._save_together(force=True):
            return discarded
        self._context.activity.begin("saving", step)
        failed = ""
        if self._leads:
            try:
                self._context.store.wait()
            except CheckpointError as problem:
                failed = problem.message
        try:
            told = self._gather(Channel.LEAVE_VIEW, step, failed)
        except LinkError as failure:
            return Discarded(str(failure))
        self._checkpointed_step = None if any(told.values()) else step
        return None

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Does nothing: the state was saved, and neighbours may have a backup."""

    def state(self) -> State | None:
        return None

    def _gather_state(self) -> State:
        """The checkpoint's state, after all members have written their pieces."""
        told = self._write_own_pieces()
        for content in told.values():
            if content["why"]:
                raise error("SH503", content["why"], where=self._context.store.files.where)
        self._piece_records = [PieceRecord.from_dict(row) for content in told.values() for row in content["rows"]]
        self._blobs = {blob: size for content in told.values() for blob, size in content["blobs"].items()}
        return sharded_state(self._shared_state(), self._piece_records, self._replica.state_dict_names())

    def _write_own_pieces(self) -> dict[int, Any]:
        """Write this member's pieces, once the leader protects them from the sweep. Returns what each member wrote."""
        step = self._progress.step
        self._gather(Channel.SAVE_BEGIN, step, {})
        rows: list[PieceRecord] = []
        blobs: dict[str, int] = {}
        why = ""
        try:
            if self._replica.sharded_model.mesh.replica_rank == 0:
                rows, blobs = write_pieces(self._context.store.files, self._replica.pieces())
        except OSError as problem:
            why = str(problem)
        content = {"rows": [record_fields(row) for row in rows], "blobs": blobs, "why": why}
        return self._gather(Channel.SAVE_PIECES, step, content)

    # ---- the end ----

    def finish(self, conclude: Callable[[FinalModel], None]) -> Discarded | None:
        step = self._progress.step
        if discarded := self._save_together(force=True):
            return discarded
        if self._leads:
            self._context.activity.begin("export", step)
            self._context.store.wait()  # what is exported is what was saved
            conclude(self._final_model())
        self._context.activity.begin("exchange", step)
        ended = self._group.gather(Channel.END.label(step), b"")
        return ended if isinstance(ended, Discarded) and not self._leads else None

    def _final_model(self) -> FinalModel:
        """The whole model of the last save, assembled tensor by tensor."""
        names = {name: f"/model/{first}" for name, first in self._replica.state_dict_names().items()}
        weights = AssembledTensors(SavedPieces(self._context.store.files, self._piece_records), names)

        def export(target: str, *, example_inputs: object, **options: Any) -> None:
            export_sharded_model(target, weights, **options)

        return FinalModel(weights_sha256(weights), self._state_sha256(), export)

    def _state_sha256(self) -> str:
        """The digest of the whole last save; the same in every layout."""
        saved = SavedPieces(self._context.store.files, self._piece_records)
        settings = json.dumps(self._replica.state(), sort_keys=True, default=str)
        tensors = weights_sha256(AssembledTensors(saved, {name: name for name in saved.names()}))
        return weights_sha256({f"{tensors} {settings}": torch.empty(0)})

    def abort(self, view: int) -> None:
        self._group.abort(view)
        self._context.peers.abort(view)

    def moved_bytes(self) -> int:
        return self._sync.moved_bytes()

    def close(self) -> None:
        self._sync.close()


def _send_shard(tensors: Mapping[str, Tensor], specs: TensorSpecs, transfer: ShardTransfer) -> None:
    for name in sorted(specs):
        if tensors[name].numel():
            distributed.send(tensors[name].contiguous(), transfer.target_rank)


def _receive_shard(specs: TensorSpecs, transfer: ShardTransfer, mesh: ShardMesh) -> dict[str, Tensor]:
    found = {}
    for name in sorted(specs):
        code, shape = specs[name]
        found[name] = torch.empty(shape, dtype=DTYPES[code])
        if found[name].numel():
            mesh.receive(found[name], transfer.source_rank)
    return found


@contextlib.contextmanager
def _content_of_members() -> Iterator[None]:
    """LinkError if what other members sent has not the form that it must have."""
    try:
        yield
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as failure:
        raise LinkError(f"a member sent something that cannot be used: {failure!r:.200}") from failure
