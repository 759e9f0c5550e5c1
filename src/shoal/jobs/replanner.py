"""Compares the speed of a planned run with the prediction. If they differ, the run is planned again. A change that does
not affect the result is made; any other is only reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shoal.events import Event, EventWriter, RunState
from shoal.jobs.command_handler import CommandHandler
from shoal.jobs.coroutines import BackgroundCall
from shoal.jobs.plan_file import PlanFile
from shoal.plan.costs.calibration import CostInputs, ObservedTimes, predict_for_workers
from shoal.plan.costs.inputs import job_choice, read_cluster, read_link, read_measured, slowest_link
from shoal.plan.costs.model import RunChoice
from shoal.plan.costs.replan import WINDOW, Replan, cooldown_over, has_drifted, replan, typical_step_s
from shoal.plan.costs.serialise import candidate_fields, choice_fields, prediction_fields, round_significant
from shoal.plan.members import Member
from shoal.plan.membership_policy import MembershipPolicy
from shoal.spec.job import Job


class Replanner:
    """Belongs to the driver's thread. Call `observe` with every event, and `replan_if_needed` periodically.

    Planning may take a second, and runs in a thread of its own. Its result is used only if the view is still the same.
    """

    def __init__(
        self,
        job: Job,
        plan_file: PlanFile,
        membership: MembershipPolicy,
        commands: CommandHandler,
        stream: EventWriter,
        state: RunState,
    ) -> None:
        wanted, facts = plan_file.wanted, plan_file.facts
        planned = int(plan_file.told["choice"]["workers"])
        self._user_scaled = planned not in range(job.workers.least, job.workers.most + 1)  # on resume
        self._setting = CostInputs(read_measured(facts), read_cluster(facts, wanted), read_link(facts, wanted))
        self._assumed_link = self._setting.link
        self._job_choice = job_choice(job)
        self._bounds: dict[str, Any] = {"least": wanted.least, "most": wanted.most, "allow": job.plan.allow}
        self._membership, self._commands, self._stream = membership, commands, stream
        self._step_times = StepTimes(
            self._job_choice.every * self._job_choice.settle if self._job_choice.sync == "local" else 1
        )
        self._measured_step_s: dict[tuple[int, int], float] = {}
        self._expected = dict(plan_file.told["prediction"])
        self._workers_and_hosts = planned, 1
        self._view_number = 0
        self._workers_changed = False  # workers came or went, and no plan has been made for the new number
        self._cooldown = Cooldown(len(state.replans))
        self._pending: PendingReplan | None = None
        for told in state.replans:  # of earlier drivers
            self._restore(told)

    def _restore(self, replan: dict[str, Any]) -> None:
        after = replan["moves"] or replan["choice"]
        self._measured_step_s[_read_workers_and_hosts(replan["choice"])] = replan["truth"]["step_s"]
        self._expected, self._workers_and_hosts = dict(replan["expected"]), _read_workers_and_hosts(after)
        if replan["moves"] and self._workers_and_hosts[1] == 1 and not self._user_scaled:
            self._membership.wanted_workers = self._workers_and_hosts[0]

    def observe(self, event: Event, state: RunState) -> None:
        """Collect step times from the saver's events. A new view starts a new measurement."""
        if event.kind == "joined":
            self._step_times.clear()
            self._cooldown.restart(int(event.step or 0))
        elif event.kind in ("link_measured", "left", "worker_died"):
            self._setting = replace(self._setting, link=slowest_link(self._assumed_link, state.links.values()))
        elif event.kind == "step" and state.worker(event.who).is_saver:
            self._step_times.add(int(event.get("steps", 1)), float(event.get("wall_s", 0.0)))

    def replan_if_needed(self, step: int) -> None:
        """Compare the measured step time with the prediction. If they differ, start planning. Apply a finished plan."""
        self._reset_on_new_view(step)
        if self._pending is not None:
            if self._pending.call.done:
                self._act_on(self._pending, step)
            return
        true_s = self._step_times.typical
        if true_s is None or not self._cooldown.is_over(step) or self._membership.stop_reason:
            return
        truth, now = self._observe(true_s), self._current_choice()
        if truth is None or now is None:
            return
        self._update_expectation(now, truth)
        if not self._workers_changed and not has_drifted(self._expected["step_s"], true_s):
            return
        inputs = {"seen": dict(self._measured_step_s), **self._current_bounds()}
        call = BackgroundCall(partial(replan, now, self._setting, truth, **inputs))
        self._pending = PendingReplan(call, now, truth, self._view_number)

    @property
    def planning(self) -> bool:
        return self._pending is not None

    def _act_on(self, pending: PendingReplan, step: int) -> None:
        self._pending = None
        found, now, truth = pending.call.result(), pending.choice, pending.truth
        if pending.view_number != self._view_number or self._membership.stop_reason or now != self._current_choice():
            return  # the workers have changed since, so the plan does not apply
        self._measured_step_s[now.workers, now.hosts] = truth.step_s
        moves = found.move_to if not self._why_workers_fixed else None
        self._emit_replan(found, truth, step)
        self._expected = prediction_fields(moves or found.current)
        self._workers_changed = False
        self._cooldown = Cooldown(self._cooldown.replans + 1, step)
        self._step_times.clear()
        if moves:
            self._workers_and_hosts = moves.choice.workers, moves.choice.hosts
            self._apply_choice(moves.choice)

    def _reset_on_new_view(self, step: int) -> None:
        """Discard step times of an earlier view."""
        view = self._membership.view
        if view and view.number != self._view_number:
            self._view_number = view.number
            self._step_times.clear()
            self._cooldown.restart(step)

    def _current_bounds(self) -> dict[str, Any]:
        """Bounds for the planner. If a worker stands by because training is faster without it, more are not tried."""
        carrying = self._carrying_members()
        idle = len(carrying) < len(self._membership.members)
        return self._bounds | ({"most": sum(m.managed for m in carrying)} if idle else {})

    def _update_expectation(self, now: RunChoice, truth: ObservedTimes) -> None:
        """Predict the step time for the present number of workers, if that has changed."""
        if self._workers_and_hosts == (now.workers, now.hosts):
            return
        self._workers_and_hosts, self._workers_changed = (now.workers, now.hosts), True
        self._expected = prediction_fields(predict_for_workers(now, self._setting, truth.workers_per_host))

    def _emit_replan(self, found: Replan, truth: ObservedTimes, step: int) -> None:
        tied = self._why_workers_fixed if found.move_to else ""
        moves = None if tied else found.move_to
        self._stream.emit(
            "replan",
            step=step,
            choice=choice_fields(found.current),
            prediction=self._expected,
            truth={
                "step_s": round_significant(truth.step_s),
                "lane_s": [list(map(round_significant, there)) for there in truth.lane_s],
            },
            expected=prediction_fields(moves or found.current),
            moves=choice_fields(moves) if moves else None,
            best=candidate_fields(found.best) if found.best else None,
            reason=f"{found.why}; nothing is done: {tied}" if tied else found.why,
        )

    @property
    def _why_workers_fixed(self) -> str:
        """Why the number of workers must not be changed; '' if it may be."""
        if self._commands.user_scaled or self._user_scaled:
            return "a user chose the number of workers"
        return "the result depends on them" if self._job_choice.staleness else ""

    def _carrying_members(self) -> list[Member]:
        view = self._membership.view
        return (
            [self._membership.members[seat] for seat in view.carries if seat in self._membership.members]
            if view
            else []
        )

    def _current_choice(self) -> RunChoice | None:
        """How the run is run now. None while a worker is leaving, or is gone but still in the view."""
        view, carrying = self._membership.view, self._carrying_members()
        if not view or len(carrying) < len(view.carries) or any(m.leaving for m in self._membership.members.values()):
            return None
        hosts = len({m.address.host_id for m in carrying})
        return replace(self._job_choice, workers=len(carrying), hosts=hosts)

    def _observe(self, step_s: float) -> ObservedTimes | None:
        """The measured times. None until all workers have reported their lane times, or if none of them is the
        engine's."""
        by_host: dict[str, list[float]] = {}
        carrying = sorted(self._carrying_members(), key=lambda m: (not m.managed, m.lane_s or 0.0))
        if not carrying or not carrying[0].managed:
            return None
        for member in carrying:
            if not member.lane_s:
                return None
            by_host.setdefault(member.address.host_id, []).append(member.lane_s)
        return ObservedTimes(step_s, tuple(map(tuple, by_host.values())))

    def _apply_choice(self, choice: RunChoice) -> None:
        """Scale to the chosen number of workers. Remote workers all stay or all leave; of the engine's workers, the
        slowest leave first."""
        here = [m for m in self._carrying_members() if m.managed]
        away = [m for m in self._carrying_members() if not m.managed]
        wanted = choice.workers - (len(away) if choice.hosts > 1 else 0)
        slow = sorted(here, key=lambda m: -(m.lane_s or 0.0))[: max(len(here) - wanted, 0)]
        for member in [*slow, *(away if choice.hosts == 1 else [])]:
            self._membership.drain(member.seat, "planned", replace=False)
        if wanted > len(here):
            self._membership.scale(choice.workers)


@dataclass(frozen=True)
class PendingReplan:
    """A plan in progress, with the choice, measured times and view that it is made for."""

    call: BackgroundCall[Replan]
    choice: RunChoice
    truth: ObservedTimes
    view_number: int


def _read_workers_and_hosts(choice: Mapping[str, Any]) -> tuple[int, int]:
    return int(choice["workers"]), int(choice["hosts"])


class StepTimes:
    """Recent step times, in samples of at least `steps_per_sample` steps: with local SGD only some steps synchronise,
    and these are slower."""

    def __init__(self, steps_per_sample: int) -> None:
        self._steps_per_sample = steps_per_sample
        self._samples: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._steps, self._seconds = 0, 0.0

    def add(self, steps: int, seconds: float) -> None:
        self._steps += steps
        self._seconds += seconds
        if self._steps >= self._steps_per_sample:
            self._samples.append((self._steps, self._seconds))
            self._steps, self._seconds = 0, 0.0

    def clear(self) -> None:
        self._samples.clear()
        self._steps, self._seconds = 0, 0.0

    @property
    def typical(self) -> float | None:
        return typical_step_s(list(self._samples))


class Cooldown:
    """The pause after a replan or a new view. It grows with the number of replans."""

    def __init__(self, replans: int, step: int = 0) -> None:
        self.replans = replans
        self.restart(step)

    def restart(self, step: int) -> None:
        self._step, self._since_s = step, time.monotonic()

    def is_over(self, step: int) -> bool:
        return cooldown_over(step - self._step, time.monotonic() - self._since_s, self.replans)
