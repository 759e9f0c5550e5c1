"""The commit of `shard`: the members of a replica hold a model together, and replicas agree on the gradients.

Within a replica, torch moves activations, parameters and gradients as the model runs. Across replicas, members with the
same shard add up their gradients. A step commits in two phases: a member votes when it has everything that its update
needs, and updates when it has seen every vote. So if one member has updated, all others can, even if a death kept votes
from them. Members never hold shards of different steps.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, distributed

from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.torch_group import rendezvous
from shoal.errors import ShoalError
from shoal.lanes.lane_sum import LaneSum, add
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.gloo_sockets import GlooSockets
from shoal.sharding.replica import ShardedReplica
from shoal.sharding.shard_backup import ShardBackup
from shoal.spec.view import View

_VOTE_FORMAT = struct.Struct("<??")
POLL_S = 0.05


class VotedStep(NamedTuple):
    """A step that this member has voted for in a view without having seen all votes."""

    view: int
    step: int
    total: LaneSum


class ShardedSync:
    """Belongs to the training thread. `wants_save(step)` says before a commit whether this member wants that step
    saved; `save_requested` says after it whether any member did. `last_committed_view` is the view in which the last
    step was committed, also if this member got that step from another one."""

    def __init__(self, replica_size: int, group: ViewGroup) -> None:
        self.shard_mesh: ShardMesh | None = None
        self.voted_step: VotedStep | None = None
        self.last_committed_view = 0
        self.passes_per_step = 1
        self.save_requested = False
        self.backup: ShardBackup | None = None
        self.wants_save: Callable[[int], bool] = lambda step: False
        self._replica_size = replica_size
        self._view = 0
        self._group = group
        group.on_abort.append(self._shut_down_sockets)
        self._sockets: GlooSockets | None = None
        self._sent_bytes = 0

    # ---- views ----

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        self._leave()
        if discarded := self._group.enter(view, seat):
            return discarded
        try:
            with (
                rendezvous(self._group, view.places) as place,
                self.as_link_errors(),
                self._shutting_down_on_abort(),
            ):
                self.shard_mesh = ShardMesh(
                    place.connect(),
                    rank=place.rank,
                    world_size=place.size,
                    replica_size=self._replica_size,
                    own_host=place.own_host,
                    number=view.number,
                )
                self.shard_mesh.is_aborted = self._group.aborted
            self._freeze_sockets()
        except LinkError as failure:
            return self.discard(failure)
        self.passes_per_step, self._view = (
            _passes_per_step(view, self._replica_size, self.shard_mesh.replica_rank),
            view.number,
        )
        return None

    @contextlib.contextmanager
    def _shutting_down_on_abort(self) -> Iterator[None]:
        """Shut down all sockets on an abort, also those that are made after it: connections are made one by one."""
        wires, done = GlooSockets(), threading.Event()
        self._sockets = wires

        def watch() -> None:
            while not done.wait(POLL_S):
                if self._group.aborted():
                    wires.shut_down()

        watcher = threading.Thread(target=watch, name="shoal-grid", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _freeze_sockets(self) -> None:
        assert self._sockets is not None
        self._sockets.freeze()
        self._sent_bytes = self._sockets.sent_bytes()
        if self._group.broken:
            raise LinkError(self._group.broken)

    @contextlib.contextmanager
    def as_link_errors(self) -> Iterator[None]:
        """Wraps what may wait for other members: a lost member becomes a LinkError, and the others notice."""
        try:
            yield
        except ShoalError:
            raise
        except LinkError:
            self._shut_down_sockets()
            raise
        except RuntimeError as failure:
            text = str(failure)
            lost = isinstance(failure, distributed.DistError) or "gloo" in text or self._group.broken
            if not lost:
                raise
            self._shut_down_sockets()
            raise LinkError(self._group.broken or text.splitlines()[0]) from failure

    def discard(self, failure: LinkError) -> Discarded:
        """Turn a failure into Discarded, and end this view."""
        self._shut_down_sockets()
        return Discarded(self._group.broken) if self._group.broken else self._group.discard(failure)

    # ---- steps ----

    def begin_step(self) -> TreeSum[LaneSum]:
        """A tree over the passes of this replica."""
        return TreeSum(self.passes_per_step, add)

    def commit(
        self, replica: ShardedReplica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        if self._group.broken:
            return Discarded(self._group.broken)
        began = time.perf_counter()
        self.voted_step = None
        total = sums.total()
        assert total is not None
        try:
            with self.as_link_errors():
                replica.reduce_across_replicas(total)
                replica.scale_sum(total)
                if self.backup:
                    self.backup.exchange(total)
        except LinkError as failure:
            return self.discard(failure)
        agreed = time.perf_counter()
        self.voted_step = VotedStep(self._view, step, total)
        told = self._group.gather(Channel.VOTE.label(step), _VOTE_FORMAT.pack(halt, self.wants_save(step + 1)))
        if isinstance(told, Discarded):
            self._shut_down_sockets()
            return told
        try:
            said = [_VOTE_FORMAT.unpack(content) for content in told.values()]
        except struct.error:
            return self.discard(LinkError("a member says noise"))
        met = time.perf_counter()
        loss = self.commit_voted(replica)
        self.save_requested = any(saves for _, saves in said)
        halting = any(halts for halts, _ in said)
        return Committed(loss, self._newly_sent_bytes(), halting, waited_s=met - agreed, exchange_s=agreed - began)

    def commit_voted(self, replica: ShardedReplica) -> Tensor:
        """Commit the step that this member has voted for. Returns its loss."""
        assert self.voted_step is not None
        (self.last_committed_view, step, total), self.voted_step = self.voted_step, None
        if self.backup:
            self.backup.apply_update(replica.optimizer)
        return replica.apply_gradient(step, total)

    def _newly_sent_bytes(self) -> int:
        before, self._sent_bytes = self._sent_bytes, self._sockets.sent_bytes() if self._sockets else 0
        return max(self._sent_bytes - before, 0)

    def moved_bytes(self) -> int:
        wires = self._sockets
        return self._group.moved_bytes() + (wires.sent_bytes() if wires else 0)

    # ---- ends ----

    def _shut_down_sockets(self) -> None:
        wires = self._sockets
        if wires:
            wires.shut_down()

    def _leave(self) -> None:
        self._shut_down_sockets()
        self._sockets = None
        with contextlib.suppress(RuntimeError):
            if self.shard_mesh:
                self.shard_mesh.close()
            elif distributed.is_initialized():
                distributed.destroy_process_group()
        self.shard_mesh = None
        self._group.leave()

    def close(self) -> None:
        self._leave()


def _passes_per_step(view: View, replica_size: int, replica: int) -> int:
    """How often the members of a replica run the model in a step."""
    return max(len(view.carries[seat]) for seat, rank in view.places.items() if rank // replica_size == replica)
