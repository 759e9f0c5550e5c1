"""Membership of a run with a sharded model.

A view is a fixed layout: members in rows of `workers_per_replica`. Each row is a replica; each column holds the same
shard of every replica. A member that has a shard keeps its column, so that shards need not move. The members find out
together from which state they continue, because only they know whether all shards are available.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.plan import lane_assignment
from shoal.plan.members import HaltUrgency, Member, MembershipAction, PublishView, worker_names
from shoal.plan.membership_policy import SHORTEST_VIEW_S, MembershipPolicy
from shoal.spec.job import Job
from shoal.spec.view import View

SAVE_RETRY_S = 2.0
"""Seconds of training before the members try again to save for a leaving worker."""


def make_membership_policy(job: Job, *, wanted_workers: int) -> MembershipPolicy:
    if job.workers_per_replica == 1:
        return MembershipPolicy(lanes=job.lane_count, wanted_workers=wanted_workers, balance_lanes=job.elastic.balance)
    together = job.shard.kind != "fsdp"
    return ShardedMembershipPolicy(
        lanes=job.lane_count,
        wanted_workers=wanted_workers,
        balance_lanes=False,
        workers_per_replica=job.workers_per_replica,
        lanes_shared_in_replica=together,
    )


@dataclass
class ShardedMembershipPolicy(MembershipPolicy):
    """See MembershipPolicy. `lanes_shared_in_replica`: the members of a row work on the same lanes; otherwise each has
    its own lanes.

    Before members stop at a boundary they save together, so a leaving worker may exit at once. If saving failed, or
    they had to stop immediately, it stays for another view. Workers without the run directory are not used.
    """

    workers_per_replica: int = 2
    lanes_shared_in_replica: bool = True
    _positions_before: dict[int, int | None] = field(default_factory=dict)
    """Positions of the members before the view. Members may since have gone back to a checkpoint."""
    _columns: dict[int, int] = field(default_factory=dict)
    """By seat: the column whose shard it held when it last stopped, if that is certain. A member that the newest view
    left out keeps its shard."""

    def gone(self, seat: int, *, left_cleanly: bool = False) -> None:
        super().gone(seat, left_cleanly=left_cleanly)
        self.wanted_workers = max(self.wanted_workers, self.workers_per_replica)
        self._columns.pop(seat, None)

    def drain(self, seat: int, why: str, *, replace: bool) -> None:
        super().drain(seat, why, replace=replace)
        self.wanted_workers = max(self.wanted_workers, self.workers_per_replica)

    def scale(self, wanted_workers: int) -> list[int]:
        """Round down to full replicas, at least one."""
        return super().scale(max(wanted_workers - wanted_workers % self.workers_per_replica, self.workers_per_replica))

    def _releasable_seats(self) -> list[int]:
        return [m.seat for m in self.members.values() if m.leaving and m.stopped and not self._may_hold_only_copy(m)]

    def _may_hold_only_copy(self, member: Member) -> bool:
        """Whether its shard may exist nowhere else: neither in a checkpoint nor in its column of another replica, and
        nobody is known to be further."""
        if member.checkpointed or not member.position:
            return False
        newest = [m for m in self.members.values() if m.stopped and self._view_column(m.seat) is not None]
        if any((m.position or 0) > member.position for m in newest):  # others may have gone back to a checkpoint
            return False
        there = [m for m in self.members.values() if not m.leaving and m.position == member.position]
        column = self._columns.get(member.seat)
        return column is None or not any(self._keeps_shard(m, column) for m in there)

    def _keeps_shard(self, member: Member, column: int) -> bool:
        """Whether it holds the shard of this column: it has stopped, or it trains undisturbed in a view that leaves it
        the shard. A member that is to stop and has not may be dead."""
        trains = not self._halt_requested and self._view_column(member.seat) == column
        return self._columns.get(member.seat) == column and (member.stopped or trains)

    def _view_column(self, seat: int) -> int | None:
        place = self.view.places.get(seat) if self.view else None
        return None if place is None else place % self.workers_per_replica

    def stopped_at(
        self, seat: int, now_s: float, *, view: int, position: int | None, checkpointed: bool = False
    ) -> str:
        doubt = super().stopped_at(seat, now_s, view=view, position=position, checkpointed=checkpointed)
        column = self._view_column(seat)
        if not doubt and self.view and column is not None and view >= self.view.number:
            if (position or 0) > (self._positions_before.get(seat) or 0):
                self._columns[seat] = column
            elif self._columns.get(seat) != column:
                self._columns.pop(seat, None)  # without a step nobody knows whether it got the other shard
        return doubt

    def _halt_reason(self, now_s: float) -> tuple[HaltUrgency, str]:
        """Also halt for a leaving worker outside the view: it may leave once the members have made a step."""
        how, why = super()._halt_reason(now_s)
        entered = self._training_seats() and now_s - self._view_entered_s >= SHORTEST_VIEW_S
        if how or not entered or not self._can_continue():
            return how, why
        waiting = [m.seat for m in self.members.values() if m.leaving and m.stopped and self._may_hold_only_copy(m)]
        return ("boundary", f"{worker_names(waiting)} leaves") if waiting else ("", "")

    def _can_continue(self) -> bool:
        return self._replica_count(self._able_to_save(self._eligible_members())) > 0

    def _never_trained(self, stopped: Iterable[int]) -> bool:
        return any(self.members[seat].position == self._positions_before[seat] for seat in stopped)

    def _newcomers(self) -> list[Member]:
        """Waiting workers, as soon as they are enough for another replica."""
        if not self._training_seats() or self.view is None:
            return []
        able = self._able_to_save(self._eligible_members())
        if self._replica_count(able) <= len(self.view.carries) // self.workers_per_replica:
            return []
        return [m for m in able if m.stopped and m.seat not in self.view.carries]

    def _leave_one_out(self, present: Sequence[Member], now_s: float) -> None:
        """A replica needs all of its workers."""

    def _start_catch_up(self, newcomers: list[Member]) -> list[MembershipAction]:
        """Newcomers get their shards after the new view starts."""
        for member in newcomers:
            member.catch_up_attempted = True
        return []

    def _next_view(self, now_s: float) -> PublishView | None:
        standing = [m for _, m in sorted(self.members.items()) if m.stopped]
        if self._training_seats() or any(m.busy for m in self.members.values()):
            return None
        if self._coming() and all(m.position in (None, 0) for m in standing):
            return None  # workers that start at the same time enter together
        team = self._able_to_save([m for m in standing if not m.leaving or self._may_hold_only_copy(m)])
        rows = self._replica_count(team)
        if not rows:
            return None
        self._view_entered_s = now_s + (SAVE_RETRY_S if any(m.leaving for m in team) else 0.0)
        return self._enter_sharded_view(self._in_rank_order(team, rows), rows)

    def _nobody_comes(self) -> bool:
        return False  # a worker that leaves saves its shard by itself

    def _able_to_save(self, members: Sequence[Member]) -> list[Member]:
        return [m for m in members if m.can_save]

    def _replica_count(self, members: Sequence[Member]) -> int:
        """Number of replicas that the members can form, at most one per lane."""
        return min(len(members) // self.workers_per_replica, self.lanes)

    def _in_rank_order(self, team: Sequence[Member], replicas: int) -> list[Member]:
        """The team by rank: workers with the newest state keep their columns, the others fill the gaps."""
        columns: list[list[Member]] = [[] for _ in range(self.workers_per_replica)]
        spare: list[Member] = []
        for member in sorted(team, key=lambda m: (-(m.position or 0), m.seat)):
            column = self._columns.get(member.seat) if member.position else None
            fits = column is not None and len(columns[column]) < replicas
            (columns[column] if fits and column is not None else spare).append(member)
        # of equally new ones, those first whose shard is unknown: it may be the one that is missing
        spare.sort(key=lambda m: (-(m.position or 0), m.seat in self._columns))
        for row in range(replicas):
            for holders in columns:
                if len(holders) <= row:
                    holders.append(spare.pop(0))
        return [columns[part][row] for row in range(replicas) for part in range(self.workers_per_replica)]

    def _enter_sharded_view(self, members: Sequence[Member], replicas: int) -> PublishView:
        places = {member.seat: rank for rank, member in enumerate(members)}
        view = View(
            number=self.view_number + 1,
            carries=self._assign_lanes_to_ranks(places, replicas),
            addresses={m.seat: m.address for m in members},
            position=max((m.position or 0 for m in members), default=0),
            saver=min(members, key=lambda m: (self._is_not_saver(m), places[m.seat])).seat,
            places=places,
            pause_at=self.pause_at,
        )
        self.view, self._halt_requested, self._stalled, self._interrupted = view, "", False, False
        self._positions_before = {m.seat: m.position for m in members}
        for member in members:
            member.training, member.stopped, member.halt_sent, member.catch_up_attempted = True, False, "", False
        return self._publish(view, view.carries)

    def _assign_lanes_to_ranks(self, ranks: dict[int, int], replicas: int) -> lane_assignment.LaneAssignment:
        dealt = lane_assignment.assign_evenly(self.lanes, range(replicas))
        carries = {}
        for seat, rank in ranks.items():
            row, part = divmod(rank, self.workers_per_replica)
            carries[seat] = dealt[row] if self.lanes_shared_in_replica else dealt[row][part :: self.workers_per_replica]
        return carries
