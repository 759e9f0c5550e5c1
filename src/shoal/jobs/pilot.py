"""Beside a run that was planned: is it as expected? If not, a plan is made again; what has no effect on the result is
done, the rest is told."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from shoal.events import Event, Picture, Stream
from shoal.jobs.grants import Grants
from shoal.jobs.kept import Kept
from shoal.plan.costs.again import Again, again
from shoal.plan.costs.drift import moved, rested, window
from shoal.plan.costs.facts import Choice
from shoal.plan.costs.reading import own_choice, read_link, read_machine, read_measured
from shoal.plan.costs.telling import choice_told, prediction_told, rounded, row_told
from shoal.plan.costs.truth import Setting, Truth
from shoal.plan.crew import Crew, Member
from shoal.spec.job import Job


class Pilot:
    """Belongs to the thread that drives. `look` at every event, then `steer` now and then."""

    def __init__(self, job: Job, kept: Kept, crew: Crew, grants: Grants, stream: Stream, picture: Picture) -> None:
        wanted, facts = kept.wanted, kept.facts
        self._setting = Setting(read_measured(facts), read_machine(facts, wanted), read_link(facts, wanted))
        self._own = own_choice(job)
        self._allow = job.plan.allow
        self._least, self._most = wanted.least, wanted.most
        self._crew, self._grants, self._stream = crew, grants, stream
        self._period = self._own.every * self._own.settle
        self._taken: deque[float] = deque(maxlen=window(self._period))
        self._seen: dict[tuple[int, int], float] = {}
        self._expected = dict(kept.told["prediction"])
        self._looked_step = 0
        self._looks = 0
        self._steps, self._wall_s = 0, 0.0
        for told in picture.replans:  # by an earlier driver
            self._expected = dict(told["expected"])
            self._looks += 1
        if picture.replans and picture.replans[-1]["moves"]:
            crew.wanted = picture.replans[-1]["moves"]["workers"]

    def look(self, event: Event, picture: Picture) -> None:
        """Rows of the worker that saves tell how long steps take; a new view makes another thing of them."""
        if event.kind == "joined":
            self._forget()
            self._looked_step = max(self._looked_step, int(event.step or 0))
        elif event.kind == "step" and picture.worker(event.who).saves:
            self._steps += int(event.get("steps", 1))
            self._wall_s += float(event.get("wall_s", 0.0))
            if self._steps >= self._period:
                self._taken.append(self._wall_s / self._steps)
                self._steps, self._wall_s = 0, 0.0

    def steer(self, step: int) -> None:
        """Compare, and if things have moved away, plan again."""
        true_s = moved(self._expected["step_s"], list(self._taken), period=self._period)
        if true_s is None or not rested(step - self._looked_step, self._looks) or self._crew.stopping:
            return
        now, truth = self._now(), self._truth(true_s)
        if now is None or truth is None:
            return
        bounds: dict[str, Any] = {"least": self._least, "most": self._most, "allow": self._allow}
        found = again(now, self._setting, truth, seen=self._seen, **bounds)
        self._seen[now.workers, now.hosts] = true_s
        self._tell(found, truth, step)
        self._expected = prediction_told(found.moves or found.stays)
        self._looked_step, self._looks = step, self._looks + 1
        self._forget()
        if found.moves and self._free:
            self._move(found.moves.choice)

    def _tell(self, found: Again, truth: Truth, step: int) -> None:
        why = found.why if self._free or not found.moves else f"{found.why}; nothing is done: {self._tied}"
        moves = choice_told(found.moves) if found.moves and self._free else None
        self._stream.emit(
            "replan",
            step=step,
            choice=choice_told(found.stays),
            prediction=self._expected,
            truth={"step_s": rounded(truth.step_s), "lane_s": [list(map(rounded, there)) for there in truth.lane_s]},
            expected=prediction_told(found.moves or found.stays),
            moves=moves,
            best=row_told(found.best) if found.best else None,
            reason=why,
        )

    @property
    def _free(self) -> bool:
        return not self._tied

    @property
    def _tied(self) -> str:
        """Why the number of workers is not changed, or nothing."""
        if self._grants.scaled:
            return "a user chose the number of workers"
        return "the result depends on them" if self._own.staleness else ""

    def _forget(self) -> None:
        self._taken.clear()
        self._steps, self._wall_s = 0, 0.0

    def _carrying(self) -> list[Member]:
        view = self._crew.view
        return [self._crew.members[seat] for seat in view.carries if seat in self._crew.members] if view else []

    def _now(self) -> Choice | None:
        """None while somebody goes."""
        carrying = self._carrying()
        if not carrying or any(m.leaving for m in self._crew.members.values()):
            return None
        hosts = len({m.address.host_id for m in carrying})
        return replace(self._own, workers=len(carrying), hosts=hosts)

    def _truth(self, step_s: float) -> Truth | None:
        """None while somebody has not been measured."""
        by_host: dict[str, list[float]] = {}
        for member in sorted(self._carrying(), key=lambda m: (not m.local, m.lane_s or 0.0)):
            if member.lane_s is None:
                return None
            by_host.setdefault(member.address.host_id, []).append(member.lane_s)
        return Truth(step_s, tuple(map(tuple, by_host.values())))

    def _move(self, choice: Choice) -> None:
        """Others' workers all stay or all go; of ours the slowest go first."""
        here = [m for m in self._carrying() if m.local]
        away = [m for m in self._carrying() if not m.local]
        if choice.hosts == 1:
            for member in away:
                self._crew.leaves(member.seat, "planned", replace=False)
        wanted = choice.workers - (len(away) if choice.hosts > 1 else 0)
        slowest = sorted(here, key=lambda m: -(m.lane_s or 0.0))
        for member in slowest[: max(len(here) - wanted, 0)]:
            self._crew.leaves(member.seat, "planned", replace=False)
        if wanted > len(here):
            self._crew.scale(choice.workers)
