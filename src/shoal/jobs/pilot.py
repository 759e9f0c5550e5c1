"""Beside a run that was planned: is it as expected? If not, a plan is made again; what has no effect on the result is
done, the rest is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.events import Event, Picture, Stream
from shoal.jobs.grants import Grants
from shoal.jobs.kept import Kept
from shoal.plan.costs.again import Again, again
from shoal.plan.costs.drift import WINDOW, moved, rested, typical
from shoal.plan.costs.facts import Choice
from shoal.plan.costs.reading import own_choice, read_link, read_machine, read_measured, slowest
from shoal.plan.costs.telling import choice_told, prediction_told, rounded, row_told
from shoal.plan.costs.truth import Setting, Truth, expected
from shoal.plan.crew import Crew, Member
from shoal.spec.job import Job


class Pilot:
    """Belongs to the thread that drives. `look` at every event, then `steer` now and then."""

    def __init__(self, job: Job, kept: Kept, crew: Crew, grants: Grants, stream: Stream, picture: Picture) -> None:
        wanted, facts = kept.wanted, kept.facts
        planned = int(kept.told["choice"]["workers"])
        self._scaled = planned not in range(job.workers.least, job.workers.most + 1)  # by who resumed it
        self._setting = Setting(read_measured(facts), read_machine(facts, wanted), read_link(facts, wanted))
        self._assumed = self._setting.link
        self._own = own_choice(job)
        self._bounds: dict[str, Any] = {"least": wanted.least, "most": wanted.most, "allow": job.plan.allow}
        self._crew, self._grants, self._stream = crew, grants, stream
        self._taken = Taken(self._own.every * self._own.settle if self._own.sync == "local" else 1)
        self._seen: dict[tuple[int, int], float] = {}
        self._expected = dict(kept.told["prediction"])
        self._crowd = planned, 1
        self._view = 0
        self._new_crowd = False  # others came or went, and whether that is good was not looked at yet
        self._rest = Rest(len(picture.replans))
        for told in picture.replans:  # an earlier driver's
            self._take_up(told)

    def _take_up(self, told: dict[str, Any]) -> None:
        after = told["moves"] or told["choice"]
        self._seen[_crowd(told["choice"])] = told["truth"]["step_s"]
        self._expected, self._crowd = dict(told["expected"]), _crowd(after)
        if told["moves"] and self._crowd[1] == 1 and not self._scaled:
            self._crew.wanted = self._crowd[0]

    def look(self, event: Event, picture: Picture) -> None:
        """Rows of the worker that saves tell how long steps take; a new view makes another thing of them."""
        if event.kind == "joined":
            self._taken.forget()
            self._rest.begin(int(event.step or 0))
        elif event.kind in ("link_measured", "left", "worker_died"):
            self._setting = replace(self._setting, link=slowest(self._assumed, picture.links.values()))
        elif event.kind == "step" and picture.worker(event.who).saves:
            self._taken.add(int(event.get("steps", 1)), float(event.get("wall_s", 0.0)))

    def steer(self, step: int) -> None:
        """Compare, and if things have moved away, plan again."""
        self._follow(step)
        true_s = self._taken.typical
        if true_s is None or not self._rest.is_over(step) or self._crew.stopping:
            return
        truth, now = self._truth(true_s), self._now()
        if truth is None or now is None:
            return
        self._notice(now, truth)
        if not self._new_crowd and not moved(self._expected["step_s"], true_s):
            return
        found = again(now, self._setting, truth, seen=self._seen, **self._bounds_now())
        self._seen[now.workers, now.hosts] = true_s
        moves = found.moves if not self._tied else None
        self._tell(found, truth, step)
        self._expected = prediction_told(moves or found.stays)
        self._new_crowd = False
        self._rest = Rest(self._rest.looks + 1, step)
        self._taken.forget()
        if moves:
            self._crowd = moves.choice.workers, moves.choice.hosts
            self._move(moves.choice)

    def _follow(self, step: int) -> None:
        """What was seen in another view says nothing of this one."""
        view = self._crew.view
        if view and view.number != self._view:
            self._view = view.number
            self._taken.forget()
            self._rest.begin(step)

    def _bounds_now(self) -> dict[str, Any]:
        """Where somebody stands by, because all are faster without, one more would do so too."""
        carrying = self._carrying()
        idle = len(carrying) < len(self._crew.members)
        return self._bounds | ({"most": sum(m.local for m in carrying)} if idle else {})

    def _notice(self, now: Choice, truth: Truth) -> None:
        """Others came or went: something else is expected of those who are here now."""
        if self._crowd == (now.workers, now.hosts):
            return
        self._crowd, self._new_crowd = (now.workers, now.hosts), True
        self._expected = prediction_told(expected(now, self._setting, truth.numbers))

    def _tell(self, found: Again, truth: Truth, step: int) -> None:
        tied = self._tied if found.moves else ""
        moves = None if tied else found.moves
        self._stream.emit(
            "replan",
            step=step,
            choice=choice_told(found.stays),
            prediction=self._expected,
            truth={"step_s": rounded(truth.step_s), "lane_s": [list(map(rounded, there)) for there in truth.lane_s]},
            expected=prediction_told(moves or found.stays),
            moves=choice_told(moves) if moves else None,
            best=row_told(found.best) if found.best else None,
            reason=f"{found.why}; nothing is done: {tied}" if tied else found.why,
        )

    @property
    def _tied(self) -> str:
        """Why the number of workers is not changed, or nothing."""
        if self._grants.scaled or self._scaled:
            return "a user chose the number of workers"
        return "the result depends on them" if self._own.staleness else ""

    def _carrying(self) -> list[Member]:
        view = self._crew.view
        return [self._crew.members[seat] for seat in view.carries if seat in self._crew.members] if view else []

    def _now(self) -> Choice | None:
        """None while somebody goes, or is gone and the others do not know yet."""
        view, carrying = self._crew.view, self._carrying()
        if not view or len(carrying) < len(view.carries) or any(m.leaving for m in self._crew.members.values()):
            return None
        hosts = len({m.address.host_id for m in carrying})
        return replace(self._own, workers=len(carrying), hosts=hosts)

    def _truth(self, step_s: float) -> Truth | None:
        """None while somebody has not been measured, or nobody of ours is there."""
        by_host: dict[str, list[float]] = {}
        carrying = sorted(self._carrying(), key=lambda m: (not m.local, m.lane_s or 0.0))
        if not carrying or not carrying[0].local:
            return None
        for member in carrying:
            if not member.lane_s:
                return None
            by_host.setdefault(member.address.host_id, []).append(member.lane_s)
        return Truth(step_s, tuple(map(tuple, by_host.values())))

    def _move(self, choice: Choice) -> None:
        """Others' workers all stay or all go; of ours the slowest go first."""
        here = [m for m in self._carrying() if m.local]
        away = [m for m in self._carrying() if not m.local]
        wanted = choice.workers - (len(away) if choice.hosts > 1 else 0)
        slow = sorted(here, key=lambda m: -(m.lane_s or 0.0))[: max(len(here) - wanted, 0)]
        for member in [*slow, *(away if choice.hosts == 1 else [])]:
            self._crew.leaves(member.seat, "planned", replace=False)
        if wanted > len(here):
            self._crew.scale(choice.workers)


def _crowd(told: Mapping[str, Any]) -> tuple[int, int]:
    return int(told["workers"]), int(told["hosts"])


class Taken:
    """What steps took lately, in rows of at least `period` steps: who agrees now and then is slower then."""

    def __init__(self, period: int) -> None:
        self._period = period
        self._rows: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._steps, self._seconds = 0, 0.0

    def add(self, steps: int, seconds: float) -> None:
        self._steps += steps
        self._seconds += seconds
        if self._steps >= self._period:
            self._rows.append((self._steps, self._seconds))
            self._steps, self._seconds = 0, 0.0

    def forget(self) -> None:
        self._rows.clear()
        self._steps, self._seconds = 0, 0.0

    @property
    def typical(self) -> float | None:
        return typical(list(self._rows))


class Rest:
    """Since the last of so many looks, or the last view."""

    def __init__(self, looks: int, step: int = 0) -> None:
        self.looks = looks
        self.begin(step)

    def begin(self, step: int) -> None:
        self._step, self._since_s = step, time.monotonic()

    def is_over(self, step: int) -> bool:
        return rested(step - self._step, time.monotonic() - self._since_s, self.looks)
