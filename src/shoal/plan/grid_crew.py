"""The crew of a run whose workers hold the model together, so many to a replica.

A view is a fixed layout: members in rows of `ways`, each row a replica, each column the same part of all of them. Who
has a part keeps its column, so that parts stay where they are. What members go on from, they find out among
themselves: nobody else can know whether all parts are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.plan import balance
from shoal.plan.crew import Crew, Member, Order, Publish
from shoal.spec.job import Job
from shoal.spec.view import View

AGAIN_S = 2.0
"""How long members train before they try again to save for one that leaves."""


def crew_for(job: Job, *, wanted: int) -> Crew:
    if job.ways == 1:
        return Crew(lanes=job.lane_count, wanted=wanted, balanced=job.engine.balance)
    together = job.shard.kind != "fsdp"
    return GridCrew(lanes=job.lane_count, wanted=wanted, balanced=False, ways=job.ways, together=together)


@dataclass
class GridCrew(Crew):
    """See Crew. `together`: the members of a row work on the same lanes, and else each has lanes of its own.

    Before members stop at a boundary they save together: then whoever leaves may go at once. Where that failed, or they
    had to stop at once, it stays for another view. Those who cannot reach the run's directory stand by.
    """

    ways: int = 2
    together: bool = True
    _before: dict[int, int | None] = field(default_factory=dict)
    """Where members of the view stood before it. They may have gone back, to a checkpoint, and not only on."""

    def gone(self, seat: int, *, well: bool = False) -> None:
        super().gone(seat, well=well)
        self.wanted = max(self.wanted, self.ways)

    def leaves(self, seat: int, why: str, *, replace: bool) -> None:
        super().leaves(seat, why, replace=replace)
        self.wanted = max(self.wanted, self.ways)

    def scale(self, wanted: int) -> list[int]:
        """To whole replicas."""
        return super().scale(max(wanted - wanted % self.ways, self.ways))

    def _dispensable(self) -> list[int]:
        return [m.seat for m in self.members.values() if m.leaving and m.standing and not self._needed(m)]

    def _needed(self, member: Member) -> bool:
        """Does it hold what may be nowhere else: not in a checkpoint, and not in its column of another replica?"""
        places = self.view.places if self.view else {member.seat: 0}
        if member.saved or not member.position or member.seat not in places:
            return False
        there = [m for m in self.members.values() if m.standing and not m.leaving and m.position == member.position]
        part = places[member.seat] % self.ways
        return not any(places[m.seat] % self.ways == part for m in there if m.seat in places)

    def _enough(self) -> bool:
        return self._rows(self._able(self._fit())) > 0

    def _missed(self, stopped: Iterable[int]) -> bool:
        return any(self.members[seat].position == self._before[seat] for seat in stopped)

    def _newcomers(self) -> list[Member]:
        """Those who wait, as soon as they make another replica."""
        if not self._training() or self.view is None:
            return []
        able = self._able(self._fit())
        if self._rows(able) <= len(self.view.carries) // self.ways:
            return []
        return [m for m in able if m.standing and m.seat not in self.view.carries]

    def _feed(self, newcomers: list[Member]) -> list[Order]:
        """Parts come when the new view is there."""
        for member in newcomers:
            member.followed = True
        return []

    def _following(self, now_s: float) -> Publish | None:
        standing = [m for _, m in sorted(self.members.items()) if m.standing]
        if self._training() or any(m.busy for m in self.members.values()):
            return None
        if self._expected and all(m.position in (None, 0) for m in standing):
            return None  # those that start at the same time begin together
        team = self._able([m for m in standing if not m.leaving or self._needed(m)])
        rows = self._rows(team)
        if not rows:
            return None
        self._entered_s = now_s + (AGAIN_S if any(m.leaving for m in team) else 0.0)
        return self._meet(self._placed(team, rows), rows)

    def _able(self, members: Sequence[Member]) -> list[Member]:
        return [m for m in members if m.local]

    def _rows(self, members: Sequence[Member]) -> int:
        """How many replicas they make. One without a lane would be of no use."""
        return min(len(members) // self.ways, self.lanes)

    def _placed(self, team: Sequence[Member], rows: int) -> list[Member]:
        """By rank: those with the newest state stay in their columns, the others go where one is missing."""
        columns: list[list[Member]] = [[] for _ in range(self.ways)]
        spare: list[Member] = []
        for member in sorted(team, key=lambda m: (-(m.position or 0), m.seat)):
            place = self.view.places.get(member.seat) if self.view and member.position else None
            fits = place is not None and len(columns[place % self.ways]) < rows
            (columns[place % self.ways] if fits and place is not None else spare).append(member)
        for row in range(rows):
            for column in columns:
                if len(column) <= row:
                    column.append(spare.pop(0))
        return [columns[part][row] for row in range(rows) for part in range(self.ways)]

    def _meet(self, members: Sequence[Member], rows: int) -> Publish:
        places = {member.seat: rank for rank, member in enumerate(members)}
        view = View(
            number=self.number + 1,
            carries=self._carried(places, rows),
            addresses={m.seat: m.address for m in members},
            position=max((m.position or 0 for m in members), default=0),
            saver=min(members, key=lambda m: (self._saves(m), places[m.seat])).seat,
            places=places,
        )
        self.view, self._asked, self._stuck = view, "", False
        self._before = {m.seat: m.position for m in members}
        for member in members:
            member.training, member.standing, member.asked, member.followed = True, False, "", False
        return self._publish(view, view.carries)

    def _carried(self, places: dict[int, int], rows: int) -> balance.Carries:
        dealt = balance.equal(self.lanes, range(rows))
        carries = {}
        for seat, rank in places.items():
            row, part = divmod(rank, self.ways)
            carries[seat] = dealt[row] if self.together else dealt[row][part :: self.ways]
        return carries
