"""The crew of a run: who is in, and which view comes next. Facts go in, orders come out; nothing is done here.

Rules that keep every run exact, whatever dies:
- a training view is decided only from seats that stand still and have said where (or are gone);
- it names the highest position that anyone holds, and from whom those behind get it;
- whoever stops without being asked was left alone by a peer: everybody stops, and a new view follows;
- a seat number is never used again, so that a seat that was put out cannot come back under its old name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.plan import balance
from shoal.spec.view import Address, View

SETTLE_S, LONGEST_SETTLE_S = 1.0, 30.0
"""How long another assignment must have looked faster, all the time, before lanes are moved for speed alone. It
doubles with every move, so that noise does not move lanes to and fro; where much is to be gained it stays short."""
MUCH = 1.5
GATHER_S = 5.0
"""How long one that is ready waits for others that are being started, so that they enter together."""

BREATH_S = 0.2
"""A view is not changed sooner, unless it must be: its members may not have seen it yet."""

TAKE_OVER_S = 5.0
"""How long those who train may take to a boundary when another driver takes over."""

Halt = Literal["", "boundary", "now"]
_URGENCY: Mapping[Halt, int] = {"": 0, "boundary": 1, "now": 2}


@dataclass
class Member:
    """A seat as the driver knows it. `local`: it has the run's directory and may save.

    `position` is what it said when it last stood still; None: it holds nothing. `saved`: a checkpoint has all of that.
    `told` is the last view that was sent to it. A newcomer is `followed` when it caught up, or could not, while the
    others went on. For one that is `busy` loading or saving, the others wait.
    """

    seat: int
    local: bool
    address: Address
    training: bool = False
    standing: bool = False
    position: int | None = None
    saved: bool = False
    lane_s: float | None = None
    leaving: str = ""
    ready_s: float = 0.0
    told: int = 0
    asked: Halt = ""
    followed: bool = False
    busy: bool = False


@dataclass(frozen=True)
class Publish:
    """Tell these seats of a view."""

    view: View
    to: list[int]
    why: str = ""


@dataclass(frozen=True)
class Start:
    """So many more local workers are wanted."""

    number: int


Order = Publish | Start


@dataclass
class Crew:
    """Belongs to the thread that drives the run."""

    lanes: int
    wanted: int = 1
    balanced: bool = True
    number: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    view: View | None = None
    """The newest training view."""
    stopping: str = ""
    _last: int | None = None
    _saved: bool = False
    _dismissed: bool = False
    _expected: set[int] = field(default_factory=set)
    _asked: Halt = ""
    _asked_s: float = 0.0
    _loader: int | None = None
    _slow_since_s: float | None = None
    _settle_s: float = SETTLE_S
    _stuck: bool = False
    _entered_s: float = -math.inf

    # ---- facts ----

    def expect(self, seat: int) -> None:
        """This local seat is being filled, or its worker lives and will call."""
        self._expected.add(seat)

    def arrived(self, seat: int, *, local: bool, address: Address, view: int = 0, training: bool = False) -> None:
        """A worker took its seat, or called again. One that knows a view outlived an earlier driver, or was put out
        of another seat: it may have begun to train, whatever it says, and counts as training until it stands."""
        self.number = max(self.number, view)
        if seat in self.members:
            return
        self.members[seat] = Member(seat, local, address, training=training or view > 0, told=view)
        if not local:
            self.wanted += 1  # it came by itself, on top of those that we fill
            return
        self._expected.add(seat)
        others = [m for m in self.members.values() if not m.leaving and m.seat != seat]
        if not view and len(others) >= self.wanted and any(m.local for m in others):  # else nobody could save
            self.members[seat].leaving = "scaled down"  # while it was being started

    def stands(self, seat: int, now_s: float, *, view: int, position: int | None, saved: bool = False) -> None:
        """It waits for a view; `view` is the last that it took up."""
        member = self.members.get(seat)
        if member is None or view < member.told:
            return  # said before it saw the last view
        if not member.standing:
            member.ready_s = now_s
        member.training, member.standing, member.position = False, True, position
        member.asked, member.busy, member.saved = "", False, saved
        self._expected.discard(seat)

    def gone(self, seat: int, *, well: bool = False) -> None:
        """Its process ended, or it was put out. `well`: it left as it was asked to."""
        self._saved = self._saved or (well and seat == self._last)
        member = self.members.pop(seat, None)
        self._expected.discard(seat)
        if member and not member.local and not member.leaving:
            self.wanted = max(self.wanted - 1, 1)  # nobody here can fill its place

    def leaves(self, seat: int, why: str, *, replace: bool) -> None:
        """It asks to go, or is asked to."""
        member = self.members.get(seat)
        if member and not member.leaving:
            member.leaving = why
            if not (replace and member.local):
                self.wanted = max(self.wanted - 1, 1)

    def measured(self, seat: int, lane_s: float) -> None:
        if seat in self.members:
            self.members[seat].lane_s = lane_s

    def stuck(self) -> None:
        """Everybody waits for everybody."""
        self._stuck = True

    def scale(self, wanted: int) -> list[int]:
        """Another number of workers. The seats that have to go for it: the newest, but never the one that saves."""
        self.wanted = wanted
        staying = [m for m in self.members.values() if not m.leaving]
        saver = self.view.saver if self.view else None
        spare = sorted((m for m in staying if m.seat != saver), key=lambda m: -m.seat)
        going = spare[: max(len(staying) - wanted, 0)]
        for member in going:
            member.leaving = "scaled down"
        return [member.seat for member in going]

    # ---- decisions ----

    def orders(self, now_s: float) -> list[Order]:
        """What is to be done now. Called after every fact, and now and then."""
        if self.stopping:
            return self._winding_up(now_s)
        found: list[Order] = []
        if missing := self._missing():
            found.append(Start(missing))
        how, why = self._reason(now_s)
        found += self._halts(how, why, now_s)
        if (self._asked or not self._training()) and (following := self._following(now_s)):
            found.append(following)
        if not self._asked and (hungry := [m for m in self._newcomers() if not m.followed]):
            found += self._feed(hungry)
        if away := self._dispensable():
            found.append(self._send_away(away))
        return found

    def _halts(self, how: Halt, why: str, now_s: float) -> list[Order]:
        """To all who train and were not yet asked so urgently."""
        found: list[Order] = []
        self._asked_s = self._asked_s if self._asked else now_s
        self._asked = max(self._asked, how, key=_URGENCY.__getitem__)
        if unasked := [s for s in self._training() if _URGENCY[self.members[s].asked] < _URGENCY[self._asked]]:
            found.append(self._halt(unasked, self._asked, why))
        elif strays := self._strays():
            found.append(self._halt(strays, "now", f"{_names(strays)} trains in a view that is over"))
        return found

    def stop(self, why: str) -> None:
        """Everybody is to leave: all stop at a boundary, one that holds the newest state saves it, then all go."""
        self.stopping = why

    def dismiss(self, why: str) -> Publish:
        """Everybody leaves as things are."""
        self.stopping, self._dismissed = why, True
        return self._publish(View(number=self.number + 1, stop=why), list(self.members), why)

    def _winding_up(self, now_s: float) -> list[Order]:
        if self._dismissed or self._last in self.members:
            return []
        if self._training():
            how, why = self._reason(now_s)
            return self._halts("now" if how == "now" else "boundary", why or self.stopping, now_s)
        standing = [m for _, m in sorted(self.members.items()) if m.standing and m.local and m.position]
        if not standing or self._saved:
            return [self.dismiss(self.stopping)]
        last = max(standing, key=lambda m: (m.position or 0, not self._saves(m)))
        self._last = last.seat
        return [self._publish(View(number=self.number + 1, stop=self.stopping, saver=last.seat), [last.seat])]

    def _dispensable(self) -> list[int]:
        """Those who leave, stand still, and hold nothing that nobody else holds."""
        kept = max((m.position or 0 for m in self.members.values() if not m.leaving), default=0)
        leaving = [m for m in self.members.values() if m.leaving and m.standing]
        others_train = bool(self._training())  # and one that follows them is no further than they are
        return [m.seat for m in leaving if (m.position or 0) <= kept or (m.followed and others_train)]

    def _send_away(self, seats: list[int], *, saver: int | None = None) -> Publish:
        for seat in seats:
            self.members[seat].standing = False
        return self._publish(View(number=self.number + 1, leave=seats, saver=saver), seats)

    def _halt(self, seats: list[int], how: Halt, why: str) -> Publish:
        for seat in seats:
            self.members[seat].asked = how
        return self._publish(View(number=self.number + 1, halt=how), seats, why)

    def _strays(self) -> list[int]:
        """Those who called when the others had gone on without them."""
        known = self.view.carries if self.view else self.members
        return [m.seat for m in self.members.values() if m.training and m.seat not in known and not m.asked]

    def _publish(self, view: View, to: Iterable[int], why: str = "") -> Publish:
        self.number = view.number
        to = sorted(to)
        for seat in to:
            self.members[seat].told = view.number
        return Publish(view, to, why)

    def _training(self) -> list[int]:
        return [m.seat for m in self.members.values() if m.training]

    def _missing(self) -> int:
        staying = {seat for seat, m in self.members.items() if not m.leaving} | self._expected
        can_save = any(m.local and not m.leaving for m in self.members.values()) or self._expected
        return max(self.wanted - len(staying), 0 if can_save else 1, 0)

    def _reason(self, now_s: float) -> tuple[Halt, str]:
        """Why those who train have to stop."""
        training = self._training()
        if not training:
            return "", ""
        if self.view is None:  # what they wait for may have died with the driver, or before they saw the last view
            late = self._asked and now_s - self._asked_s > TAKE_OVER_S
            return "now" if late else "boundary", "another driver took over"
        lost = sorted(set(self.view.carries) - set(self.members))
        if lost:
            return "now", f"{_names(lost)} {'is' if len(lost) == 1 else 'are'} gone"
        stopped = [s for s in self.view.carries if self.members[s].standing]
        if stopped and (not self._asked or self._missed(stopped)):
            return "now", f"{_names(stopped)} stopped"
        if self._stuck:
            return "now", "a link is cut"
        if now_s - self._entered_s < BREATH_S:
            return "", ""
        leaving = [s for s in training if self.members[s].leaving]
        if leaving and self._enough():
            return "boundary", f"{_names(leaving)} leaves"
        new = [m for m in self._newcomers() if m.followed]
        if new and (not self._expected or any(now_s - m.ready_s > GATHER_S for m in new)):
            return "boundary", f"{_names(m.seat for m in new)} joins"
        if self._faster(now_s):
            return "boundary", "lanes move to faster workers"
        return "", ""

    def _missed(self, stopped: Iterable[int]) -> bool:
        """Did one of them never train in this view? It saw the next before it took up this one, and others wait for
        it. Who stops at a boundary has made a step; one that is alone need not."""
        assert self.view is not None
        return len(self.view.carries) > 1 and any(
            (self.members[seat].position or 0) <= self.view.position for seat in stopped
        )

    def _newcomers(self) -> list[Member]:
        """Those who are ready while others train, and would carry lanes: there are enough, and they are not so slow
        that the others are faster without them."""
        if not self._training() or self.view is None or len(self.view.carries) >= self.lanes:
            return []
        new = [m for m in self._fit() if m.standing and m.seat not in self.view.carries]
        if not new:
            return []
        carries = self._dealt(self._fit(), [m for m in self._fit() if m.seat == self.view.saver])
        return [m for m in new if m.seat in carries]

    def _enough(self) -> bool:
        """Could the others go on without those who leave?"""
        return any(m.local for m in self._fit())

    def _feed(self, newcomers: list[Member]) -> list[Order]:
        """They catch up from one that trains, if possible not from the one that saves."""
        source = min(self._training(), key=lambda seat: (not self._saves(self.members[seat]), seat))
        for member in newcomers:
            member.standing, member.followed = False, True
        seats = [member.seat for member in newcomers]
        addresses = {source: self.members[source].address}
        return [self._publish(View(number=self.number + 1, followers=seats, source=source, addresses=addresses), seats)]

    def _fit(self) -> list[Member]:
        """Those that may carry lanes from the next view on."""
        return [m for _, m in sorted(self.members.items()) if (m.standing or m.training) and not m.leaving]

    def _faster(self, now_s: float) -> bool:
        """Would others carry faster, and has it looked so for long enough?"""
        assert self.view is not None
        if not self.balanced:
            return False
        times = {seat: self.members[seat].lane_s for seat in self.view.carries}
        needed = [seat for seat in times if seat == self.view.saver]
        if None in times.values() or balance.worth_moving(self.view.carries, times, needed=needed) is None:
            self._slow_since_s = None
            return False
        if self._slow_since_s is None:
            self._slow_since_s = now_s
        much = balance.worth_moving(self.view.carries, times, gain=MUCH, needed=needed) is not None
        if now_s - self._slow_since_s < (SETTLE_S if much else self._settle_s):
            return False
        self._settle_s = min(2 * self._settle_s, LONGEST_SETTLE_S)
        return True

    def _following(self, now_s: float) -> Publish | None:
        """The next training view, once everybody stands."""
        standing = [m for _, m in sorted(self.members.items()) if m.standing]
        if self._training() or not standing or any(m.busy for m in self.members.values()):
            return None
        if self._expected and all(m.position in (None, 0) for m in standing):
            return None  # those that start at the same time begin together
        best = max((m.position for m in standing if m.position is not None), default=None)
        team = [m for m in standing if not m.leaving]
        if not any(m.position == best for m in team):
            if team and best and self.lanes == 1:
                return self._hand_over(best, standing)
            team = standing  # who leaves stays until somebody else has what it holds
        savers = [m for m in team if m.local]
        if not savers:
            return None
        if best is None or (best == 0 and self._loader not in self.members):
            return self._load(savers[0])
        self._entered_s = now_s
        return self._enter(team, savers, best)

    def _load(self, member: Member) -> Publish:
        """Nobody holds anything: the newest checkpoint counts, or the job's start."""
        self._loader = member.seat
        member.standing, member.busy = False, True
        return self._publish(View(number=self.number + 1, loads=member.seat), [member.seat])

    def _hand_over(self, best: int, standing: list[Member]) -> Publish:
        """One lane cannot be carried by one that leaves and one that learns from it: the state goes by checkpoint."""
        holder = next(m for m in standing if m.position == best)
        self._loader, holder.busy = None, True
        return self._send_away([holder.seat], saver=holder.seat)

    def _enter(self, team: list[Member], savers: list[Member], best: int) -> Publish:
        saver = min(savers, key=lambda m: (bool(m.leaving), self._saves(m), m.position != best, m.seat))
        holder = saver if saver.position == best else next(m for m in team if m.position == best)
        carries = self._dealt(team, [saver, holder])
        behind = any(self.members[s].position != best for s in carries)
        view = View(
            number=self.number + 1,
            carries=carries,
            # of all, those who leave too: they may know what members need
            addresses={s: m.address for s, m in sorted(self.members.items())},
            position=best,
            source=holder.seat if behind else None,
            saver=saver.seat,
        )
        self.view, self._asked, self._slow_since_s, self._stuck = view, "", None, False
        for seat in carries:
            member = self.members[seat]
            member.training, member.standing, member.asked, member.followed = True, False, "", False
        return self._publish(view, carries)

    def _dealt(self, team: list[Member], needed: list[Member]) -> balance.Carries:
        """Who of the team carries which lanes, those who are needed among them."""
        chosen = _first({m.seat: m for m in needed}, team, self.lanes)
        times = {m.seat: m.lane_s if self.balanced else None for m in chosen}
        dealt = balance.shares(self.lanes, times, needed=[m.seat for m in needed])
        return {seat: lanes for seat, lanes in dealt.items() if lanes}

    def _saves(self, member: Member) -> bool:
        """False (first) for the seat that saves already."""
        return not (self.view and self.view.saver == member.seat)


def _first(needed: dict[int, Member], team: Sequence[Member], lanes: int) -> list[Member]:
    """At most as many as there are lanes: those that are needed, then the fastest."""
    rest = sorted((m for m in team if m.seat not in needed), key=lambda m: (bool(m.leaving), m.lane_s or 0.0, m.seat))
    return sorted([*needed.values(), *rest][: max(lanes, len(needed))], key=lambda m: m.seat)


def _names(seats: Iterable[int]) -> str:
    return ", ".join(f"worker-{seat}" for seat in seats)
