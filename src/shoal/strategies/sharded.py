"""A worker of a run whose model is spread over several: how it enters views, saves with the others, and ends."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from shoal.checkpoint.sha256 import weights_sha256
from shoal.checkpoint.sharded_files import (
    NAMES_SECTION,
    PIECES_SECTION,
    AssembledTensors,
    PieceRecord,
    SavedPieces,
    open_full_tensors,
    open_pieces,
    write_pieces,
)
from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.checkpoint.tensor_bytes import DTYPES
from shoal.collectives.outcome import Committed, Discarded
from shoal.errors import CheckpointError, error
from shoal.net.errors import LinkError
from shoal.sharding.device_mesh import ShardMesh, all_reduce_max
from shoal.sharding.memory_limits import fits_in_memory, memory_headroom
from shoal.sharding.recovery import HeldShard, RecoveryPoint, ShardTransfer, can_reach, plan_transfers, recovery_point
from shoal.sharding.replica import ShardedReplica
from shoal.sharding.shard_backup import ShardBackup, ShardSpec, TensorSpecs, tensor_specs
from shoal.spec.sharding import INEXACT_MICROBATCHES, NoShardingConfig, PipelineParallelConfig
from shoal.spec.view import View
from shoal.strategies.sharded_commit import ShardedSync
from shoal.strategies.sharded_compute import ShardedCompute

if TYPE_CHECKING:
    from shoal.sharding.build_replica import ShardedReplicaBuilder, ShardLayout
    from shoal.train.loop import Loop

_LABEL_HELD, _LABEL_SAVE, _LABEL_SPECS, _LABEL_LOADED, _LABEL_LEAVING = (
    1 << 59,
    1 << 58,
    1 << 56,
    1 << 55,
    1 << 54,
)  # labels that nobody else uses
BACKUP_HEADROOM_FACTOR = 10
"""What must be free for a mirror, in parts of what it trains: values, a gradient, two averages and some room; and as
much again, since what the worker trains itself may not have all of that yet."""


class ShardedStrategy:
    """Belongs to the training thread."""

    def __init__(self, loop: Loop, sync: ShardedSync, replica_builder: ShardedReplicaBuilder) -> None:
        self._loop = loop
        self._sync = sync
        self._builder = replica_builder
        self.compute = ShardedCompute(loop, sync, replica_builder)
        self._last_save: tuple[int, float | None] | None = None
        self._checkpointed_step: int | None = None
        self._piece_records: list[PieceRecord] = []
        self._blobs: dict[str, int] = {}
        self._initial_loop_state = copy.deepcopy(loop.loop_state())
        sync.wants_save = lambda step: loop.reporter.is_leader and loop.store.is_due(step)

    # ---- entering a view ----

    def enter(self, view: View, seat: int) -> str:
        """Meet the others, find out what we go on from, and come to hold a part of it. '' or why that failed."""
        if why := self._sync.reconfigure(view, seat):
            return why
        began = time.perf_counter()
        try:
            with self._sync.as_link_errors():
                self._restore(view, seat, began)
                self._loop.has_state, self._sync.voted_step = True, None
                self._make_backup(view)
        except LinkError as failure:
            return self._sync.discard(failure).why
        self._last_save = None
        self._loop.adopt_view(view, seat)
        return ""

    def _restore(self, view: View, seat: int, began: float) -> None:
        answers = self._gather(_LABEL_HELD + view.number, self._describe_held(view, seat))
        by_rank = {view.places[other]: content for other, content in answers.items()}
        held_shards = {rank: HeldShard(**content["holding"]) for rank, content in by_rank.items()}
        saved = next(content["saved"] for content in by_rank.values() if content["saves"])
        point = recovery_point(
            held_shards, replica_size=self._builder.job.workers_per_replica, checkpoint_step=max(saved, default=None)
        )
        if point.sources:
            self._restore_from_memory(view.places[seat], point, held_shards, by_rank)
            self._report_recovery("caught_up", view, seat, began, step=point.step, source="the memory of workers")
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
            self._loop.reporter.stream.emit(kind, recovery_s=seconds, **fields)

    def _describe_held(self, view: View, seat: int) -> dict[str, Any]:
        """What I bring, as everybody is told."""
        loop, replica, pending = self._loop, self._loop.replica, self._sync.voted_step
        row: dict[str, Any] = {"saves": view.saver == seat, "saved": [], "holding": {}}
        if view.saver == seat:
            row["saved"] = [manifest.step for manifest in loop.store.intact_manifests()]
        if loop.has_state and isinstance(replica, ShardedReplica):
            row["holding"] = {
                "step": loop.step,
                "part": replica.sharded_model.mesh.shard_rank,
                "ways": replica.sharded_model.mesh.replica_size,
                "view": self._sync.last_committed_view,
                "pending": pending.view if pending and pending.step == loop.step else None,
                "evaluated": loop.evaluated_at == loop.step,
                "mirrors": self._sync.backup.shard_rank if self._sync.backup else None,
            }
            specs = {str(part): tensor_specs(tensors) for part, tensors in self._shards_in_memory().items()}
            row |= {"common": self._shared_state(), "specs": specs}
        return row

    def _shards_in_memory(self) -> dict[int, dict[str, Tensor]]:
        """Parts in my memory: my own, and my neighbour's if I keep a copy of it."""
        mirror, own = self._sync.backup, self._replica.sharded_model.mesh.shard_rank
        return ({mirror.shard_rank: mirror.all_tensors()} if mirror else {}) | {own: self._replica.all_tensors()}

    def _shared_state(self) -> dict[str, Any]:
        """What all members have alike."""
        replica = self._replica
        return {
            **replica.state(),
            "layout": self._builder.layout_of(replica.sharded_model),
            "loop": self._loop.loop_state(),
        }

    def _gather(self, label: int, content: Any) -> dict[int, Any]:
        told = self._sync.gather(label, pack_state(content))
        if isinstance(told, Discarded):
            raise LinkError(told.why)
        return {seat: unpack_state(one) for seat, one in told.items()}

    # ---- what it goes on from ----

    def _restore_from_memory(
        self,
        rank: int,
        point: RecoveryPoint,
        held_shards: Mapping[int, HeldShard],
        by_rank: Mapping[int, Mapping[str, Any]],
    ) -> None:
        common = by_rank[point.metadata_rank]["common"]
        if not can_reach(held_shards[rank], point.step, point.view):
            self._sync.backup = None  # of an older step
        elif held_shards[rank].step != point.step:
            self._apply_pending_step()
        kept = self._shards_in_memory() if self._loop.has_state else {}
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
        self._loop.replica, self._sync.last_committed_view = replica, point.view
        self._load_shared_state(common)

    def _apply_pending_step(self) -> None:
        """The step that I voted for counted elsewhere: so it counts here."""
        self._loop.record_commit(Committed(self._sync.commit_voted(self._replica)))

    def _restore_from_checkpoints(self, steps: Sequence[int], view: View, seat: int) -> int | None:
        """The first of these of which everybody can read its part; None if there is none."""
        for number, step in enumerate(steps):
            why = ""
            try:
                self._restore_from_checkpoint(step)
            except CheckpointError as problem:
                why = f"{problem.where}: {problem.message}"
            told = self._gather(_LABEL_LOADED + (view.number << 16) + number, why)
            problems = list(filter(None, told.values()))
            if not problems:
                return step
            if view.saver == seat:
                self._loop.store.mark_damaged(step, problems[0])
        return None

    def _restore_from_checkpoint(self, step: int) -> None:
        """Whoever wrote it, in whatever layout. Nobody reads more than its part, or one tensor at a time."""
        self._release()
        store = self._loop.store
        loop = store.load(step, section="loop")[1]
        schedule = store.load(step, section="schedule")[1]
        layout, settings = store.load(step, section="layout")[1], store.load(step, section="settings")[1]
        replica = self._build_replica(layout)
        manifest, rows = store.load(step, section=PIECES_SECTION)
        if rows is not None:
            saved = open_pieces(store.files, {PIECES_SECTION: rows})
        else:
            settings = _without_params(store.load(step, section="optimizer/param_groups")[1])
            names = _unsharded_names(replica.optimizer_factory.param_order)
            saved = open_full_tensors(store.files, manifest, rename=names)
        replica.load_pieces(saved)
        self._loop.replica = replica
        self._load_shared_state({"settings": settings, "schedule": schedule, "loop": loop})

    def _initialise(self) -> None:
        self._release()
        replica = self._build_replica(None)
        facts = self._builder.load_initial_weights(replica)
        if facts and replica.sharded_model.mesh.replica_rank == replica.sharded_model.mesh.shard_rank == 0:
            path = self._builder.job.init_from.path if self._builder.job.init_from else ""
            self._loop.reporter.report("note", message=f"weights from {path}: {facts['loaded']} tensors", **facts)
        self._loop.replica = replica
        self._loop.load_loop_state(copy.deepcopy(self._initial_loop_state))

    def _make_backup(self, view: View) -> None:
        """Of a neighbour's part, if nobody else has it, and everybody has room for that. Until it is there the old one
        stays: who has just got its part from that may die."""
        replica, shard, old = self._replica, self._builder.job.shard, self._sync.backup
        mesh = replica.sharded_model.mesh
        if mesh.replicas > 1 or isinstance(shard, NoShardingConfig) or shard.mirror is False:
            self._sync.backup = None
            return
        old = old if old and old.shard_rank == (mesh.shard_rank + 1) % mesh.replica_size else None
        mine = {"looks": asdict(ShardSpec.of(replica)), "rooms": memory_headroom(), "has": old is not None}
        told = self._gather(_LABEL_SPECS + view.number, mine)
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
        """Of what will not be needed, before new memory is."""
        self._loop.has_state, self._sync.backup = False, None
        if isinstance(self._loop.replica, ShardedReplica):
            self._loop.replica = self._builder.placeholder

    def _build_replica(self, layout: ShardLayout | None) -> ShardedReplica:
        mesh = self._sync.shard_mesh
        assert mesh is not None
        self._loop.activity.begin("building", self._loop.step)
        replica = self._builder.build(mesh, layout, self._sync.as_link_errors)
        why = self._why_not_exact(replica)
        if mesh.replica_rank == mesh.shard_rank == 0:
            facts = {**self._builder.layout_of(replica.sharded_model), "replicas": mesh.replicas}
            every = list(replica.sharded_model.model.parameters())
            facts["parameters"] = sum(p.numel() for p in every)
            facts["trainable"] = sum(p.numel() for p in every if p.requires_grad)
            self._loop.reporter.stream.emit("layout", **facts, why=why)
            if why and not (layout and self._builder.matches(layout)):
                self._loop.reporter.report("note", message=f"{why}. `shard.microbatches: 1` has that of one process")
            if replica.why_not_deferred:
                message = f"every worker made the whole model before it was cut: {replica.why_not_deferred}"
                self._loop.reporter.report("note", message=message)
        return replica

    def _why_not_exact(self, replica: ShardedReplica) -> str:
        """Why the result is another than that of one process, and not only added in another order; or ''."""
        shard = self._builder.job.shard
        if not isinstance(shard, PipelineParallelConfig) or shard.microbatches == 1:
            return ""
        moves = all_reduce_max(float(bool(replica.moving_buffers.names)), replica.sharded_model.mesh.shard_group)
        return INEXACT_MICROBATCHES if moves else ""

    def _load_shared_state(self, shared: Mapping[str, Any]) -> None:
        self._replica.load_state(dict(shared))
        self._loop.load_loop_state(shared["loop"])

    @property
    def _replica(self) -> ShardedReplica:
        assert isinstance(self._loop.replica, ShardedReplica)
        return self._loop.replica

    # ---- saving ----

    def save(self, *, force: bool = False) -> str:
        """All members at once, if it is time: each writes what it answers for, and one says what there is. '', or why
        it failed for want of a member: the next step finds that out too, and a new view follows."""
        loop, metric = self._loop, self._loop.best.value_at(self._loop.step)
        done = self._last_save is not None and self._last_save[0] == loop.step and metric in (None, self._last_save[1])
        if done or not (force or self._sync.save_requested):
            return ""
        self._last_save, self._sync.save_requested = (loop.step, metric), False
        loop.activity.begin("saving", loop.step)
        try:
            if loop.reporter.is_leader:
                self._piece_records = []
                loop.store.save_sharded(
                    loop.step, self._gather_state, metric=metric, external_blobs=lambda: self._blobs
                )
            else:
                self._write_own_pieces()
        except LinkError as failure:
            return str(failure)
        return ""

    @property
    def is_saved(self) -> bool:
        """Is all that this worker has in a checkpoint, as far as it knows?"""
        return self._loop.has_state and self._checkpointed_step == self._loop.step

    def save_before_leaving(self) -> str:
        """Before members part at a boundary all save, and stay until that is done: so that who leaves takes nothing
        along that others do not have. If it failed, the driver hears of that. '', or why not all are there."""
        loop = self._loop
        if why := self.save(force=True):
            return why
        loop.activity.begin("saving", loop.step)
        failed = ""
        if loop.reporter.is_leader:
            try:
                loop.store.wait()
            except CheckpointError as problem:
                failed = problem.message
        try:
            told = self._gather(_LABEL_LEAVING + loop.step, failed)
        except LinkError as failure:
            return str(failure)
        self._checkpointed_step = None if any(told.values()) else loop.step
        return ""

    def _gather_state(self) -> dict[str, Any]:
        """The state, of which others have written their parts."""
        told = self._write_own_pieces()
        for content in told.values():
            if content["why"]:
                raise error("SH503", content["why"], where=self._loop.store.files.where)
        self._piece_records = [PieceRecord.from_dict(row) for content in told.values() for row in content["rows"]]
        self._blobs = {blob: size for content in told.values() for blob, size in content["blobs"].items()}
        rows = [_record_fields(row) for row in self._piece_records]
        return {
            **self._shared_state(),
            "model": None,
            PIECES_SECTION: rows,
            NAMES_SECTION: self._replica.state_dict_names(),
        }

    def _write_own_pieces(self) -> dict[int, Any]:
        """My part, when the one who leads keeps others from sweeping it away; what all have written."""
        label = _LABEL_SAVE + 2 * self._loop.step
        self._gather(label, {})
        rows: list[PieceRecord] = []
        blobs: dict[str, int] = {}
        why = ""
        try:
            if self._replica.sharded_model.mesh.replica_rank == 0:
                rows, blobs = write_pieces(self._loop.store.files, self._replica.pieces())
        except OSError as problem:
            why = str(problem)
        content = {"rows": [_record_fields(row) for row in rows], "blobs": blobs, "why": why}
        return self._gather(label + 1, content)

    # ---- the end ----

    def weights(self) -> AssembledTensors:
        """Of the last save, whole, tensor by tensor."""
        names = {name: f"/model/{first}" for name, first in self._replica.state_dict_names().items()}
        return AssembledTensors(SavedPieces(self._loop.store.files, self._piece_records), names)

    def state_sha256(self) -> str:
        """Of all that was saved last; the same in every layout."""
        saved = SavedPieces(self._loop.store.files, self._piece_records)
        settings = json.dumps(self._replica.state(), sort_keys=True, default=str)
        tensors = weights_sha256(AssembledTensors(saved, {name: name for name in saved.names()}))
        return weights_sha256({f"{tensors} {settings}": torch.empty(0)})


def _record_fields(row: PieceRecord) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in row.to_dict().items()}


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


# ---- what a single process has written ----


def _without_params(groups: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _unsharded_names(param_order: list[str]) -> Any:
    """There, an optimizer's state goes by numbers."""

    def rename(name: str) -> str:
        head, _, rest = name.removeprefix("/optimizer/state/").partition("/")
        if not name.startswith("/optimizer/state/") or not head.isdigit() or int(head) >= len(param_order):
            return name
        return f"/optimizer/{param_order[int(head)]}/{rest}"

    return rename
