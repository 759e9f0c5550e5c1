"""Membership of a run: which workers are in, and the next view. Facts go in, actions come out. No I/O.

Rules that keep every run exact when workers die:
- a training view is decided only when every worker has stopped and reported its position (or is gone);
- it names the highest position that any worker holds, and the worker from which the others get it;
- a worker that stops without being asked has lost a peer: all workers stop, and a new view follows;
- a seat number is never used again, so an evicted worker cannot return under its old name;
- a worker that joined is believed what it can hold: a position only if it got a view that led to it, and never one
  beyond the end of the job. If views make no step because of it, it is evicted;
- if views make no step though all of their workers live, one of them is left out for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from shoal.events.schema import LANES_MOVE
from shoal.plan import lane_assignment
from shoal.plan.lane_balance import LaneBalance
from shoal.plan.members import (
    EvictWorker,
    HaltUrgency,
    LeftOutWorkers,
    Member,
    MembershipAction,
    PublishView,
    StartWorkers,
    worker_names,
)
from shoal.spec.view import Address, Attachment, View, is_evaluated, step_of

JOIN_WAIT_S = 5.0
"""Seconds that a ready worker waits for workers that are being started, so that they enter together."""

SHORTEST_VIEW_S = 0.2
"""Minimum seconds between views, unless a change is forced: the members may not have seen the last view yet."""

MAX_FRUITLESS_VIEWS = 2
"""Views without a step that a worker that joined may cause in a row before it is evicted, and after which one of the
engine's workers is left out."""

TAKEOVER_S = 5.0
"""Seconds that training workers get to reach a step boundary when another driver takes over."""

_URGENCY: Mapping[HaltUrgency, int] = {"": 0, "boundary": 1, "now": 2}


@dataclass
class MembershipPolicy:
    """Belongs to the thread that drives the run."""

    lanes: int
    wanted_workers: int = 1
    balance_lanes: bool = True
    balance: LaneBalance = field(default_factory=LaneBalance)
    view_number: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    view: View | None = None
    """The newest training view."""
    stop_reason: str = ""
    final_position: int | None = None
    """The position at the end of the job, once it is known."""
    pause_at: int | None = None
    """The step after whose evaluation the run pauses."""
    saved_step: int = 0
    """The step of the newest checkpoint when the driver started, if no worker of the engine outlived an earlier one. A
    worker that joined and was cut off may hold an older state."""
    waiting: frozenset[int] = frozenset()
    """Expected workers for which the cluster has no machine yet. That may take hours."""
    _final_saver: int | None = None
    _final_state_saved: bool = False
    _dismissed: bool = False
    _expected: set[int] = field(default_factory=set)
    _returning: set[int] = field(default_factory=set)
    """Expected workers that may hold state: they outlived an earlier driver."""
    _halt_requested: HaltUrgency = ""
    _halt_requested_at_s: float = 0.0
    _loading_seat: int | None = None
    _stalled: bool = False
    _interrupted: bool = False
    """Whether the newest training view is ending because of its members, not because the driver asked."""
    _suspect: int | None = None
    """The first worker that ended the newest training view: it may be the one that did not reach another."""
    _fruitless_views: int = 0
    _left_out: LeftOutWorkers = field(default_factory=LeftOutWorkers)
    _view_entered_s: float = -math.inf

    # ---- facts ----

    def expect(self, seat: int, *, returns: bool = False) -> None:
        """A worker will connect: the engine starts it, or it `returns`, because it outlived an earlier driver."""
        self._expected.add(seat)
        if returns:
            self._returning.add(seat)

    def arrived(
        self, seat: int, attachment: Attachment, *, address: Address, view: int = 0, training: bool = False
    ) -> None:
        """A worker took its seat, or reconnected. If it knows a view, it outlived an earlier driver or was evicted from
        another seat. It may then be training, whatever it reports, so it counts as training until it stops."""
        self.view_number = max(self.view_number, view)
        self._returning.discard(seat)
        if seat in self.members:
            return
        self.members[seat] = Member(
            seat,
            attachment.managed,
            attachment.can_save,
            address,
            training=training or view > 0,
            last_view_sent=view,
            may_hold_state=view > 0,
        )
        if not attachment.managed:
            self.wanted_workers += 1  # in addition to the workers that the engine starts
            return
        self._expected.add(seat)
        others = [m for m in self.members.values() if not m.leaving and m.seat != seat]
        others_can_save = any(m.can_save for m in others)
        if not view and len(others) >= self.wanted_workers and others_can_save:
            self.members[seat].leaving = "scaled down"  # while it was being started

    def stopped_at(
        self, seat: int, now_s: float, *, view: int, position: int | None, checkpointed: bool = False
    ) -> str:
        """The worker has stopped and waits for a view; `view` is the last that it adopted. Returns why it is not
        believed, or ''."""
        member = self.members.get(seat)
        if member is None or view < member.last_view_sent:
            return ""  # sent before it saw the last view
        if why := self._doubt(member, view, position):
            return why
        if self.view and view == self.view.number and member.training and not self._halt_requested:
            self._suspect = self._suspect if self._interrupted else seat
            self._interrupted = True
        if not member.stopped:
            member.ready_since_s = now_s
        member.training, member.stopped, member.position = False, True, position
        member.halt_sent, member.busy, member.checkpointed = "", False, checkpointed
        self._expected.discard(seat)
        if member.catch_up_attempted and self._left_out.failed_trial(seat, position):
            self._left_out.add(seat, now_s, position=position)
        return ""

    def _doubt(self, member: Member, view: int, position: int | None) -> str:
        """Why the worker cannot have stopped there; '' if it can."""
        if view > self.view_number:
            return f"it reports view {view}, and the newest is {self.view_number}"
        if position and not member.may_hold_state:
            return f"it claims position {position}, but had no view to get it from"
        if position and self.final_position is not None and position > self.final_position:
            return f"it claims position {position}, beyond the end of the job"
        return ""

    def gone(self, seat: int, *, left_cleanly: bool = False) -> None:
        """The worker's process ended, or it was evicted. `left_cleanly`: it left as requested."""
        self._final_state_saved = self._final_state_saved or (left_cleanly and seat == self._final_saver)
        member = self.members.pop(seat, None)
        self._expected.discard(seat)
        self._returning.discard(seat)
        self.balance.forget(seat)
        self._left_out.forget(seat)
        if member and not member.managed and not member.leaving:
            self.wanted_workers = max(self.wanted_workers - 1, 1)  # the engine did not start it, and cannot replace it

    def drain(self, seat: int, why: str, *, replace: bool) -> None:
        """Let the worker leave, at its own request or at the user's."""
        member = self.members.get(seat)
        if member and not member.leaving:
            member.leaving = why
            if not (replace and member.managed):
                self.wanted_workers = max(self.wanted_workers - 1, 1)

    def record_lane_time(self, seat: int, lane_s: float) -> None:
        if seat in self.members:
            self.members[seat].lane_s = lane_s

    def observe_lanes(self, seat: int, now_s: float, *, count: int, total_s: float) -> None:
        """The worker has computed `count` lanes in `total_s`, both since it started."""
        if seat in self.members:
            self.balance.observe(seat, now_s, count=count, total_s=total_s)

    @property
    def pause_reached(self) -> bool:
        """Whether a worker has stopped where the run pauses. The others stop there too, without being asked."""
        return self.pause_at is not None and any(
            m.stopped and is_evaluated(m.position) and step_of(m.position or 0) >= self.pause_at
            for m in self.members.values()
        )

    def exchange_stalled(self) -> None:
        """All workers wait for each other."""
        self._stalled = self._interrupted = True

    def scale(self, wanted_workers: int) -> list[int]:
        """Change the number of workers. Returns the seats that must leave: the newest, but never the saver."""
        self.wanted_workers = wanted_workers
        staying = [m for m in self.members.values() if not m.leaving]
        saver = self.view.saver if self.view else None
        spare = sorted((m for m in staying if m.seat != saver), key=lambda m: -m.seat)
        going = spare[: max(len(staying) - wanted_workers, 0)]
        for member in going:
            member.leaving = "scaled down"
        return [member.seat for member in going]

    # ---- decisions ----

    def decide(self, now_s: float) -> list[MembershipAction]:
        """The actions to take now. Call after every fact, and periodically."""
        if self.stop_reason:
            return self._shutdown_actions(now_s)
        found: list[MembershipAction] = []
        self._end_pauses(now_s)
        if missing := self._missing_workers():
            found.append(StartWorkers(missing))
        how, why = self._halt_reason(now_s)
        found += self._halt_actions(how, why, now_s)
        if evictions := self._judge_view(now_s):
            return [*found, *evictions]
        if (self._halt_requested or not self._training_seats()) and (following := self._next_view(now_s)):
            found.append(following)
        if not self._halt_requested and (hungry := [m for m in self._newcomers() if not m.catch_up_attempted]):
            found += self._start_catch_up(hungry)
        if away := self._releasable_seats():
            found.append(self._release(away))
        return found

    def _judge_view(self, now_s: float) -> list[MembershipAction]:
        """Once all members of an interrupted view have stopped: evict the workers that joined and caused one view too
        many without a step. If one of them was the source, it did not give its state; else any may be the cause. If all
        are the engine's, one of them is left out."""
        if self.view is None or not self._interrupted or self._training_seats():
            return []
        self._interrupted = False
        members = [self.members.get(seat) for seat in self.view.carries]
        present = [m for m in members if m is not None]
        if len(present) < len(members):
            return []  # a member is gone, which explains it
        if any((m.position or 0) > self.view.position for m in present):
            for member in present:
                member.fruitless_views = 0
                self._left_out.forget(member.seat)
            return []
        self._fruitless_views += 1
        joined = [m for m in present if not m.managed]
        if not joined and self._fruitless_views >= MAX_FRUITLESS_VIEWS:
            self._leave_one_out(present, now_s)
        source = [m for m in joined if m.seat == self.view.source]
        for member in source or joined:
            member.fruitless_views += 1
        why = f"{MAX_FRUITLESS_VIEWS} views in a row made no step " + ("from its state" if source else "with it")
        return [EvictWorker(m.seat, why) for m in joined if m.fruitless_views >= MAX_FRUITLESS_VIEWS]

    def _leave_one_out(self, present: Sequence[Member], now_s: float) -> None:
        """The one that stopped first, or any other; not the one that keeps the state. In the end one trains alone."""
        newest = [m for m in present if m.can_save and m.position == max(m.position or 0 for m in present)]
        keeper = min(newest, key=lambda m: (self._is_not_saver(m), m.seat), default=None)
        spare = [m for m in present if m is not keeper]
        if keeper and spare:
            chosen = max(spare, key=lambda m: (m.seat == self._suspect, m.seat))
            self._left_out.add(chosen.seat, now_s, position=chosen.position)
            chosen.catch_up_attempted = False

    def _end_pauses(self, now_s: float) -> None:
        """Also of all who are left out, if no other can go on."""
        others = [m for m in self.members.values() if m.seat not in self._left_out and not m.leaving]
        for seat in self._left_out.end_pauses(now_s, all_of_them=not any(m.can_save for m in others)):
            self.members[seat].catch_up_attempted = False

    def _halt_actions(self, how: HaltUrgency, why: str, now_s: float) -> list[MembershipAction]:
        """Halt all training workers that have not yet been asked with this urgency."""
        found: list[MembershipAction] = []
        self._halt_requested_at_s = self._halt_requested_at_s if self._halt_requested else now_s
        self._halt_requested = max(self._halt_requested, how, key=_URGENCY.__getitem__)
        if unasked := [
            s for s in self._training_seats() if _URGENCY[self.members[s].halt_sent] < _URGENCY[self._halt_requested]
        ]:
            found.append(self._halt(unasked, self._halt_requested, why))
        elif strays := self._stale_members():
            found.append(self._halt(strays, "now", f"{worker_names(strays)} trains in a view that is over"))
        return found

    def stop(self, why: str) -> None:
        """Stop the run: all workers halt at a boundary, one with the newest state saves it, then all exit."""
        self.stop_reason = why

    def dismiss(self, why: str) -> PublishView:
        """All workers exit immediately, without saving."""
        self.stop_reason, self._dismissed = why, True
        return self._publish(View(number=self.view_number + 1, stop=why), list(self.members), why)

    def _shutdown_actions(self, now_s: float) -> list[MembershipAction]:
        if self._dismissed or self._final_saver in self.members:
            return []
        if self._training_seats():
            how, why = self._halt_reason(now_s)
            return self._halt_actions("now" if how == "now" else "boundary", why or self.stop_reason, now_s)
        if self._returning:
            return []  # one of them may hold the newest state; those that do not return in time are gone
        standing = [m for _, m in sorted(self.members.items()) if m.stopped and m.can_save and m.position]
        if not standing or self._final_state_saved:
            return [self.dismiss(self.stop_reason)]
        last = max(standing, key=lambda m: (m.position or 0, not self._is_not_saver(m)))
        self._final_saver = last.seat
        return [self._publish(View(number=self.view_number + 1, stop=self.stop_reason, saver=last.seat), [last.seat])]

    def _releasable_seats(self) -> list[int]:
        """Leaving workers that have stopped and hold no state that only they have."""
        kept = max((m.position or 0 for m in self.members.values() if not m.leaving), default=0)
        leaving = [m for m in self.members.values() if m.leaving and m.stopped]
        others_train = bool(self._training_seats())  # a worker that catches up from them is not ahead of them
        return [m.seat for m in leaving if (m.position or 0) <= kept or (m.catch_up_attempted and others_train)]

    def _release(self, seats: list[int], *, saver: int | None = None) -> PublishView:
        for seat in seats:
            self.members[seat].stopped = False
        return self._publish(View(number=self.view_number + 1, leave=seats, saver=saver), seats)

    def _halt(self, seats: list[int], how: HaltUrgency, why: str) -> PublishView:
        for seat in seats:
            self.members[seat].halt_sent = how
        return self._publish(View(number=self.view_number + 1, halt=how), seats, why)

    def _stale_members(self) -> list[int]:
        """Workers that reconnected after the others had continued without them."""
        known = self.view.carries if self.view else self.members
        return [m.seat for m in self.members.values() if m.training and m.seat not in known and not m.halt_sent]

    def _publish(self, view: View, to: Iterable[int], why: str = "") -> PublishView:
        self.view_number = view.number
        to = sorted(to)
        for seat in to:
            member = self.members[seat]
            member.last_view_sent = view.number
            gets_state = seat in view.carries or seat in view.followers or seat == view.loads
            member.may_hold_state = member.may_hold_state or gets_state
        return PublishView(view, to, why)

    def _training_seats(self) -> list[int]:
        return [m.seat for m in self.members.values() if m.training]

    def _missing_workers(self) -> int:
        staying = {seat for seat, m in self.members.items() if not m.leaving} | self._expected
        can_save = any(m.can_save and not m.leaving for m in self.members.values()) or self._expected
        return max(self.wanted_workers - len(staying), 0 if can_save else 1, 0)

    def _halt_reason(self, now_s: float) -> tuple[HaltUrgency, str]:
        """Why training workers must stop, and how urgently."""
        training = self._training_seats()
        if not training:
            return "", ""
        if self.view is None:  # the peer they wait for may have died with the driver, or before they saw the last view
            late = self._halt_requested and now_s - self._halt_requested_at_s > TAKEOVER_S
            return "now" if late else "boundary", "another driver took over"
        lost = sorted(set(self.view.carries) - set(self.members))
        if lost:
            return "now", f"{worker_names(lost)} {'is' if len(lost) == 1 else 'are'} gone"
        stopped = [s for s in self.view.carries if self.members[s].stopped]
        if stopped and not self.pause_reached and (not self._halt_requested or self._never_trained(stopped)):
            return "now", f"{worker_names(stopped)} stopped"
        if self._stalled:
            return "now", "a link is cut"
        if now_s - self._view_entered_s < SHORTEST_VIEW_S:
            return "", ""
        leaving = [s for s in training if self.members[s].leaving]
        if leaving and (self._can_continue() or self._nobody_comes()):
            return "boundary", f"{worker_names(leaving)} leaves"
        new = [m for m in self._newcomers() if m.catch_up_attempted]
        if new and (not self._coming() or any(now_s - m.ready_since_s > JOIN_WAIT_S for m in new)):
            return "boundary", f"{worker_names(m.seat for m in new)} joins"
        if self._should_rebalance(now_s):
            return "boundary", LANES_MOVE
        return "", ""

    def _never_trained(self, stopped: Iterable[int]) -> bool:
        """Whether one of them never trained in this view: it saw the next view before it adopted this one, and others
        wait for it. A worker that stops at a boundary has made a step; a single worker need not."""
        assert self.view is not None
        return len(self.view.carries) > 1 and any(
            (self.members[seat].position or 0) <= self.view.position for seat in stopped
        )

    def _newcomers(self) -> list[Member]:
        """Workers that are ready while others train and would get lanes: there are enough lanes, and they are not so
        slow that the others are faster without them."""
        if not self._training_seats() or self.view is None or len(self.view.carries) >= self.lanes:
            return []
        new = [m for m in self._eligible_members() if m.stopped and m.seat not in self.view.carries]
        if not new:
            return []
        carries = self._assign_lanes(
            self._eligible_members(), [m for m in self._eligible_members() if m.seat == self.view.saver]
        )
        return [m for m in new if m.seat in carries]

    def _can_continue(self) -> bool:
        """Whether the others can continue without the leaving workers."""
        return any(m.can_save for m in self._eligible_members())

    def _coming(self) -> set[int]:
        """Expected workers that have a machine: they will be here soon."""
        return self._expected - self.waiting

    def _nobody_comes(self) -> bool:
        """Whether all workers leave, and the cluster has no machine for others: the state goes by checkpoint, because
        those that leave will be killed soon."""
        expected = self._expected - self.members.keys()
        return bool(expected) and expected <= self.waiting and all(m.leaving for m in self.members.values())

    def _start_catch_up(self, newcomers: list[Member]) -> list[MembershipAction]:
        """The newcomers catch up from a training worker, if possible not from the saver."""
        source = min(self._training_seats(), key=lambda seat: (not self._is_not_saver(self.members[seat]), seat))
        for member in newcomers:
            member.stopped, member.catch_up_attempted = False, True
        seats = [member.seat for member in newcomers]
        addresses = {source: self.members[source].address}
        return [
            self._publish(View(number=self.view_number + 1, followers=seats, source=source, addresses=addresses), seats)
        ]

    def _eligible_members(self) -> list[Member]:
        """Workers that may get lanes in the next view."""
        found = [m for _, m in sorted(self.members.items()) if (m.stopped or m.training) and not m.leaving]
        return [m for m in found if m.seat not in self._left_out]

    def _should_rebalance(self, now_s: float) -> bool:
        assert self.view is not None
        if not self.balance_lanes or self._halt_requested:
            return False
        needed = [seat for seat in self.view.carries if seat == self.view.saver]
        return self.balance.should_move(self.view.carries, now_s, needed=needed)

    def _next_view(self, now_s: float) -> PublishView | None:
        """The next training view, once all workers have stopped."""
        standing = [m for _, m in sorted(self.members.items()) if m.stopped]
        if self._training_seats() or not standing or any(m.busy for m in self.members.values()):
            return None
        if self._coming() and all(m.position in (None, 0) for m in standing):
            return None  # workers that start at the same time enter together
        best = max((m.position for m in standing if m.position is not None), default=None)
        team = [m for m in standing if not m.leaving and m.seat not in self._left_out]
        if not any(m.position == best for m in team):
            if best and ((team and self.lanes == 1) or self._nobody_comes()):
                return self._hand_over(best, standing)
            team = standing  # a leaving worker stays until another worker has its state
        savers = [m for m in team if m.can_save]
        if not savers:
            return None
        is_old = best is None or best == 0 or step_of(best) < self.saved_step
        if best is None or (is_old and self._loading_seat not in self.members):
            return self._load_checkpoint(min(savers, key=lambda m: (m.position or 0, m.seat)))
        self._view_entered_s = now_s
        self.balance.moved(now_s)
        return self._enter_view(team, savers, best)

    def _load_checkpoint(self, member: Member) -> PublishView:
        """No worker holds a newer state: continue from the newest checkpoint, or from the job's start."""
        self._loading_seat = member.seat
        member.stopped, member.busy = False, True
        return self._publish(View(number=self.view_number + 1, loads=member.seat), [member.seat])

    def _hand_over(self, best: int, standing: list[Member]) -> PublishView:
        """With one lane, a leaving worker and its successor cannot share the work. Or there is no successor yet. The
        state moves by checkpoint."""
        holder = next(m for m in standing if m.position == best)
        self._loading_seat, holder.busy = None, True
        return self._release([holder.seat], saver=holder.seat)

    def _enter_view(self, team: list[Member], savers: list[Member], best: int) -> PublishView:
        saver = min(savers, key=lambda m: (bool(m.leaving), self._is_not_saver(m), m.position != best, m.seat))
        holder = saver if saver.position == best else next(m for m in team if m.position == best)
        carries = self._assign_lanes(team, [saver, holder])
        behind = any(self.members[s].position != best for s in carries)
        view = View(
            number=self.view_number + 1,
            carries=carries,
            # including leaving workers: members may need state from them
            addresses={s: m.address for s, m in sorted(self.members.items())},
            position=best,
            source=holder.seat if behind else None,
            saver=saver.seat,
            pause_at=self.pause_at,
        )
        is_ahead = self.view is None or best > self.view.position
        self._fruitless_views = 0 if is_ahead else self._fruitless_views
        self.view, self._halt_requested, self._stalled = view, "", False
        self._interrupted, self._suspect, self.saved_step = False, None, 0
        for seat in carries:
            self._left_out.readmit(seat)
            member = self.members[seat]
            member.training, member.stopped, member.halt_sent, member.catch_up_attempted = True, False, "", False
        without = worker_names(self._left_out.seats)
        return self._publish(view, carries, f"no step was made with {without}" if without else "")

    def _assign_lanes(self, team: list[Member], needed: list[Member]) -> lane_assignment.LaneAssignment:
        """The lanes of each worker of the team; `needed` workers always get a lane."""
        paces = self.balance.paces if self.balance_lanes else {}
        chosen = _at_most_one_per_lane({m.seat: m for m in needed}, team, self.lanes, paces)
        times = {m.seat: paces.get(m.seat) for m in chosen}
        dealt = lane_assignment.assign_by_speed(self.lanes, times, needed=[m.seat for m in needed])
        return {seat: lanes for seat, lanes in dealt.items() if lanes}

    def _is_not_saver(self, member: Member) -> bool:
        """False, which sorts first, for the present saver."""
        return not (self.view and self.view.saver == member.seat)


def _at_most_one_per_lane(
    needed: dict[int, Member], team: Sequence[Member], lanes: int, paces: Mapping[int, float]
) -> list[Member]:
    """At most one worker per lane: the needed workers first, then the fastest."""
    others = (m for m in team if m.seat not in needed)
    rest = sorted(others, key=lambda m: (bool(m.leaving), paces.get(m.seat, 0.0), m.seat))
    return sorted([*needed.values(), *rest][: max(lanes, len(needed))], key=lambda m: m.seat)


@dataclass(frozen=True)
class RestartDecision:
    action: Literal["restart", "give up"]
    why: str


def decide_restart(*, restarts_left: int, ready: bool) -> RestartDecision:
    """What to do when no worker is left that holds the state. `ready`: the worker that died had been able to train."""
    if restarts_left > 0:
        return RestartDecision("restart", "from the newest checkpoint" if ready else "once more")
    return RestartDecision("give up", "no restarts left" + ("" if ready else ", and it died before it could train"))
