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

from shoal.checkpoint.digest import weights_sha256
from shoal.checkpoint.live import pack, unpack
from shoal.checkpoint.pieces import NAMES, PIECES, Assembled, Row, Saved, save, saved_in, whole_in
from shoal.checkpoint.raw import DTYPES
from shoal.errors import CheckpointError, error
from shoal.parallel.shard.grid import Grid, largest
from shoal.parallel.shard.memory import affordable, rooms
from shoal.parallel.shard.mirror import Looks, Mirror, Specs, specs_of
from shoal.parallel.shard.origin import Holding, Move, Origin, can_reach, moves, origin
from shoal.parallel.shard.replica import ShardedReplica
from shoal.parallel.sync.base import Committed, Discarded
from shoal.parallel.sync.grid import GridSync
from shoal.spec.shard import IN_PARTS, NoShard, PipelineShard
from shoal.spec.view import View
from shoal.train.turns import Turns
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.train.forming import Layout, Mould
    from shoal.train.loop import Loop

_HOLD, _SAVE, _LOOKS, _LOADED, _PART = 1 << 59, 1 << 58, 1 << 56, 1 << 55, 1 << 54  # labels that nobody else uses
MIRROR_OVER_UPDATE = 10
"""What must be free for a mirror, in parts of what it trains: values, a gradient, two averages and some room; and as
much again, since what the worker trains itself may not have all of that yet."""


class Shards:
    """Belongs to the training thread."""

    def __init__(self, loop: Loop, sync: GridSync, mould: Mould) -> None:
        self._loop = loop
        self._sync = sync
        self._mould = mould
        self.turns = Turns(loop, sync, mould)
        self._saved: tuple[int, float | None] | None = None
        self._in_checkpoint: int | None = None
        self._rows: list[Row] = []
        self._blobs: dict[str, int] = {}
        self._beginning = copy.deepcopy(loop.state_of_loop())
        sync.wants_save = lambda step: loop.teller.leads and loop.store.due(step)

    # ---- entering a view ----

    def enter(self, view: View, seat: int) -> str:
        """Meet the others, find out what we go on from, and come to hold a part of it. '' or why that failed."""
        if why := self._sync.reconfigure(view, seat):
            return why
        began = time.perf_counter()
        try:
            with self._sync.talking():
                self._take_over(view, seat, began)
                self._loop.holds, self._sync.pending = True, None
                self._keep_a_copy(view)
        except LinkError as failure:
            return self._sync.discard(failure).why
        self._saved = None
        self._loop.take_up(view, seat)
        return ""

    def _take_over(self, view: View, seat: int, began: float) -> None:
        told = self._ask_all(_HOLD + view.number, self._holding(view, seat))
        brought = {view.places[other]: content for other, content in told.items()}
        holdings = {rank: Holding(**content["holding"]) for rank, content in brought.items()}
        saved = next(content["saved"] for content in brought.values() if content["saves"])
        found = origin(holdings, ways=self._mould.job.ways, saved=max(saved, default=None))
        if found.sources:
            self._from_memory(view.places[seat], found, holdings, brought)
            self._tell("caught_up", view, seat, began, step=found.step, source="the memory of workers")
            return
        step = self._in_checkpoint = self._from_checkpoints(saved, view, seat)
        self._sync.counted = view.number
        redone = found.lost + found.step - (step or 0)
        if step is not None:
            self._tell("resumed", view, seat, began, step=step, source="a checkpoint", redone=redone)
            return
        self._from_the_start()
        if redone:
            self._tell("resumed", view, seat, began, step=0, source="the beginning", redone=redone)

    def _tell(self, kind: str, view: View, seat: int, began: float, **fields: Any) -> None:
        if view.saver == seat:
            seconds = round(time.perf_counter() - began, 6)
            self._loop.teller.stream.emit(kind, recovery_s=seconds, **fields)

    def _holding(self, view: View, seat: int) -> dict[str, Any]:
        """What I bring, as everybody is told."""
        loop, replica, pending = self._loop, self._loop.replica, self._sync.pending
        row: dict[str, Any] = {"saves": view.saver == seat, "saved": [], "holding": {}}
        if view.saver == seat:
            row["saved"] = [manifest.step for manifest in loop.store.candidates()]
        if loop.holds and isinstance(replica, ShardedReplica):
            row["holding"] = {
                "step": loop.step,
                "part": replica.cut.grid.seat,
                "ways": replica.cut.grid.ways,
                "view": self._sync.counted,
                "pending": pending.view if pending and pending.step == loop.step else None,
                "evaluated": loop.measured_at == loop.step,
                "mirrors": self._sync.mirror.part if self._sync.mirror else None,
            }
            specs = {str(part): specs_of(tensors) for part, tensors in self._kept().items()}
            row |= {"common": self._common(), "specs": specs}
        return row

    def _kept(self) -> dict[int, dict[str, Tensor]]:
        """Parts in my memory: my own, and my neighbour's if I keep a copy of it."""
        mirror, own = self._sync.mirror, self._replica.cut.grid.seat
        return ({mirror.part: mirror.everything()} if mirror else {}) | {own: self._replica.everything()}

    def _common(self) -> dict[str, Any]:
        """What all members have alike."""
        replica = self._replica
        return {**replica.state(), "layout": self._mould.layout(replica.cut), "loop": self._loop.state_of_loop()}

    def _ask_all(self, label: int, content: Any) -> dict[int, Any]:
        told = self._sync.gather(label, pack(content))
        if isinstance(told, Discarded):
            raise LinkError(told.why)
        return {seat: unpack(one) for seat, one in told.items()}

    # ---- what it goes on from ----

    def _from_memory(
        self, rank: int, found: Origin, holdings: Mapping[int, Holding], brought: Mapping[int, Mapping[str, Any]]
    ) -> None:
        common = brought[found.teller]["common"]
        if not can_reach(holdings[rank], found.step, found.view):
            self._sync.mirror = None  # of an older step
        elif holdings[rank].step != found.step:
            self._catch_up()
        kept = self._kept() if self._loop.holds else {}
        replica = self._form(common["layout"])
        coming: dict[str, Tensor] | None = None
        for move in moves(found, holdings, ways=self._mould.job.ways):
            specs = brought[move.source]["specs"][str(move.part)]
            if move.source == move.target == rank:
                coming = kept[move.part]
            elif move.source == rank:
                _send(kept[move.part], specs, move)
            elif move.target == rank:
                coming = _receive(specs, move, replica.cut.grid)
        replica.take_everything(kept[rank % self._mould.job.ways] if coming is None else coming)
        self._loop.replica, self._sync.counted = replica, found.view
        self._load_common(common)

    def _catch_up(self) -> None:
        """The step that I voted for counted elsewhere: so it counts here."""
        self._loop.counted(Committed(self._sync.advance(self._replica)))

    def _from_checkpoints(self, steps: Sequence[int], view: View, seat: int) -> int | None:
        """The first of these of which everybody can read its part; None if there is none."""
        for number, step in enumerate(steps):
            why = ""
            try:
                self._from_checkpoint(step)
            except CheckpointError as problem:
                why = f"{problem.where}: {problem.message}"
            told = self._ask_all(_LOADED + (view.number << 16) + number, why)
            problems = list(filter(None, told.values()))
            if not problems:
                return step
            if view.saver == seat:
                self._loop.store.pass_over(step, problems[0])
        return None

    def _from_checkpoint(self, step: int) -> None:
        """Whoever wrote it, in whatever layout. Nobody reads more than its part, or one tensor at a time."""
        self._let_go()
        store = self._loop.store
        loop = store.load(step, section="loop")[1]
        schedule = store.load(step, section="schedule")[1]
        layout, settings = store.load(step, section="layout")[1], store.load(step, section="settings")[1]
        replica = self._form(layout)
        manifest, rows = store.load(step, section=PIECES)
        if rows is not None:
            saved = saved_in(store.files, {PIECES: rows})
        else:
            settings = _without_params(store.load(step, section="optimizer/param_groups")[1])
            names = _names_in_a_whole(replica.recipe.order)
            saved = whole_in(store.files, manifest, rename=names)
        replica.load_pieces(saved)
        self._loop.replica = replica
        self._load_common({"settings": settings, "schedule": schedule, "loop": loop})

    def _from_the_start(self) -> None:
        self._let_go()
        replica = self._form(None)
        facts = self._mould.start(replica)
        if facts and replica.cut.grid.row == replica.cut.grid.seat == 0:
            path = self._mould.job.init_from.path if self._mould.job.init_from else ""
            self._loop.teller.tell("note", message=f"weights from {path}: {facts['loaded']} tensors", **facts)
        self._loop.replica = replica
        self._loop.load_loop(copy.deepcopy(self._beginning))

    def _keep_a_copy(self, view: View) -> None:
        """Of a neighbour's part, if nobody else has it, and everybody has room for that. Until it is there the old one
        stays: who has just got its part from that may die."""
        replica, shard, old = self._replica, self._mould.job.shard, self._sync.mirror
        grid = replica.cut.grid
        if grid.replicas > 1 or isinstance(shard, NoShard) or shard.mirror is False:
            self._sync.mirror = None
            return
        old = old if old and old.part == (grid.seat + 1) % grid.ways else None
        mine = {"looks": asdict(Looks.of(replica)), "rooms": rooms(), "has": old is not None}
        told = self._ask_all(_LOOKS + view.number, mine)
        looks = {view.places[seat]: Looks(**content["looks"]) for seat, content in told.items()}
        others = {seat: looks[(rank + 1) % grid.ways] for seat, rank in view.places.items() if not told[seat]["has"]}
        needs = {seat: MIRROR_OVER_UPDATE * other.update_bytes for seat, other in others.items()}
        hosts = {seat: address.host_id for seat, address in view.addresses.items()}
        free = {seat: content["rooms"] for seat, content in told.items()}
        if shard.mirror is None and not affordable(needs, free, hosts):
            self._sync.mirror = None
            return
        self._sync.mirror = Mirror(replica, looks[(grid.seat + 1) % grid.ways], replica.recipe.another, old)

    def _let_go(self) -> None:
        """Of what will not be needed, before new memory is."""
        self._loop.holds, self._sync.mirror = False, None
        if isinstance(self._loop.replica, ShardedReplica):
            self._loop.replica = self._mould.nothing

    def _form(self, layout: Layout | None) -> ShardedReplica:
        grid = self._sync.grid
        assert grid is not None
        self._loop.pulse.enter("building", self._loop.step)
        replica = self._mould.form(grid, layout, self._sync.talking)
        why = self._why_other(replica)
        if grid.row == grid.seat == 0:
            facts = {**self._mould.layout(replica.cut), "replicas": grid.replicas}
            every = list(replica.cut.model.parameters())
            facts["parameters"] = sum(p.numel() for p in every)
            facts["trainable"] = sum(p.numel() for p in every if p.requires_grad)
            self._loop.teller.stream.emit("layout", **facts, why=why)
            if why and not (layout and self._mould.is_like(layout)):
                self._loop.teller.tell("note", message=f"{why}. `shard.microbatches: 1` has that of one process")
            if replica.why_whole:
                message = f"every worker made the whole model before it was cut: {replica.why_whole}"
                self._loop.teller.tell("note", message=message)
        return replica

    def _why_other(self, replica: ShardedReplica) -> str:
        """Why the result is another than that of one process, and not only added in another order; or ''."""
        shard = self._mould.job.shard
        if not isinstance(shard, PipelineShard) or shard.microbatches == 1:
            return ""
        moves = largest(float(bool(replica.moving.names)), replica.cut.grid.shard_group)
        return IN_PARTS if moves else ""

    def _load_common(self, common: Mapping[str, Any]) -> None:
        self._replica.load_state(dict(common))
        self._loop.load_loop(common["loop"])

    @property
    def _replica(self) -> ShardedReplica:
        assert isinstance(self._loop.replica, ShardedReplica)
        return self._loop.replica

    # ---- saving ----

    def save(self, *, force: bool = False) -> str:
        """All members at once, if it is time: each writes what it answers for, and one says what there is. '', or why
        it failed for want of a member: the next step finds that out too, and a new view follows."""
        loop, metric = self._loop, self._loop.best.at(self._loop.step)
        done = self._saved is not None and self._saved[0] == loop.step and metric in (None, self._saved[1])
        if done or not (force or self._sync.saves):
            return ""
        self._saved, self._sync.saves = (loop.step, metric), False
        loop.pulse.enter("saving", loop.step)
        try:
            if loop.teller.leads:
                self._rows = []
                loop.store.save_with(loop.step, self._together, metric=metric, others=lambda: self._blobs)
            else:
                self._write()
        except LinkError as failure:
            return str(failure)
        return ""

    @property
    def saved(self) -> bool:
        """Is all that this worker has in a checkpoint, as far as it knows?"""
        return self._loop.holds and self._in_checkpoint == self._loop.step

    def part(self) -> str:
        """Before members part at a boundary all save, and stay until that is done: so that who leaves takes nothing
        along that others do not have. If it failed, the driver hears of that. '', or why not all are there."""
        loop = self._loop
        if why := self.save(force=True):
            return why
        loop.pulse.enter("saving", loop.step)
        failed = ""
        if loop.teller.leads:
            try:
                loop.store.wait()
            except CheckpointError as problem:
                failed = problem.message
        try:
            told = self._ask_all(_PART + loop.step, failed)
        except LinkError as failure:
            return str(failure)
        self._in_checkpoint = None if any(told.values()) else loop.step
        return ""

    def _together(self) -> dict[str, Any]:
        """The state, of which others have written their parts."""
        told = self._write()
        for content in told.values():
            if content["why"]:
                raise error("SH503", content["why"], where=self._loop.store.files.where)
        self._rows = [Row.from_description(row) for content in told.values() for row in content["rows"]]
        self._blobs = {blob: size for content in told.values() for blob, size in content["blobs"].items()}
        rows = [_plain(row) for row in self._rows]
        return {**self._common(), "model": None, PIECES: rows, NAMES: self._replica.names()}

    def _write(self) -> dict[int, Any]:
        """My part, when the one who leads keeps others from sweeping it away; what all have written."""
        label = _SAVE + 2 * self._loop.step
        self._ask_all(label, {})
        rows: list[Row] = []
        blobs: dict[str, int] = {}
        why = ""
        try:
            if self._replica.cut.grid.row == 0:
                rows, blobs = save(self._loop.store.files, self._replica.pieces())
        except OSError as problem:
            why = str(problem)
        content = {"rows": [_plain(row) for row in rows], "blobs": blobs, "why": why}
        return self._ask_all(label + 1, content)

    # ---- the end ----

    def weights(self) -> Assembled:
        """Of the last save, whole, tensor by tensor."""
        names = {name: f"/model/{first}" for name, first in self._replica.names().items()}
        return Assembled(Saved(self._loop.store.files, self._rows), names)

    def state_sha256(self) -> str:
        """Of all that was saved last; the same in every layout."""
        saved = Saved(self._loop.store.files, self._rows)
        settings = json.dumps(self._replica.state(), sort_keys=True, default=str)
        tensors = weights_sha256(Assembled(saved, {name: name for name in saved.names()}))
        return weights_sha256({f"{tensors} {settings}": torch.empty(0)})


def _plain(row: Row) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in row.describe().items()}


def _send(tensors: Mapping[str, Tensor], specs: Specs, move: Move) -> None:
    for name in sorted(specs):
        if tensors[name].numel():
            distributed.send(tensors[name].contiguous(), move.target)


def _receive(specs: Specs, move: Move, grid: Grid) -> dict[str, Tensor]:
    found = {}
    for name in sorted(specs):
        code, shape = specs[name]
        found[name] = torch.empty(shape, dtype=DTYPES[code])
        if found[name].numel():
            grid.receive(found[name], move.source)
    return found


# ---- what a single process has written ----


def _without_params(groups: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _names_in_a_whole(order: list[str]) -> Any:
    """There, an optimizer's state goes by numbers."""

    def rename(name: str) -> str:
        head, _, rest = name.removeprefix("/optimizer/state/").partition("/")
        if not name.startswith("/optimizer/state/") or not head.isdigit() or int(head) >= len(order):
            return name
        return f"/optimizer/{order[int(head)]}/{rest}"

    return rename
