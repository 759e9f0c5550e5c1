"""A worker's way through the views of a run: wait for one, come to hold what it starts from, meet the others, train."""

from __future__ import annotations

import fcntl
import time
from dataclasses import asdict
from pathlib import Path

from shoal.collectives.outcome import Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.spec.view import View
from shoal.train.loop import Loop, LoopResult

POLL_S = 0.5


class ElasticLoop:
    """Belongs to the training thread, but for `on_view` and `on_seat_changed`: the control client's thread calls them.

    `save_lock` is a file in the run's directory, None for a worker that cannot reach it and so never saves.
    """

    def __init__(self, loop: Loop, *, peers: PeerServices, seat: int, save_lock: Path | None) -> None:
        self._loop = loop
        self._strategy = loop.strategy
        self._progress = loop.progress
        self._reporter = loop.progress.reporter
        self._membership = loop.membership
        self._peers = peers
        self._save_lock = save_lock
        self.seat = seat
        self._new_seat: int | None = None
        self._view_number = 0
        self._link_measured = False

    def run(self) -> LoopResult:
        """Until the run is finished, or this worker has to leave."""
        while True:
            view = self._wait_for_view()
            if isinstance(view, LoopResult):
                return view
            self._view_number = view.number
            if self.seat in view.leave or view.stop:
                return self._leave(view)
            if view.loads == self.seat:
                self._load_checkpoint()
            elif self.seat in view.followers:
                self._follow(view)
            elif self.seat in view.carries:
                outcome = self._strategy.enter(view, self.seat) or self._loop.train(view, self.seat)
                if isinstance(outcome, LoopResult):
                    return outcome
                if isinstance(outcome, Discarded):
                    self._reporter.report("stopped", step=self._progress.step, view=view.number, why=outcome.why)

    # ---- leaving ----

    def _leave(self, view: View) -> LoopResult:
        """The view says who saves; if others go on, they get what only this worker holds."""
        asked = self.seat in view.leave
        self._reporter.is_leader = view.saver == self.seat
        if asked and not self._reporter.is_leader:
            self._strategy.hand_over(lambda: self._membership.newer(self._view_number))
        return self._loop.leave("asked to leave" if asked else view.stop)

    def _leave_without_driver(self, why: str) -> LoopResult:
        """No driver says who saves: workers that can do so one after the other, if nobody has yet."""
        if self._save_lock is None:
            self._reporter.is_leader = False
            self._strategy.hand_over(lambda: False)
            return self._loop.leave(why)
        with self._save_lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            newest = self._loop.store.latest()
            self._reporter.is_leader = newest is None or newest.step < self._progress.step
            return self._loop.leave(why)

    # ---- views ----

    def _wait_for_view(self) -> View | LoopResult:
        """The next view, or the end if there is a reason to leave without one."""
        self._loop.flush()
        began = time.perf_counter()
        self._progress.activity.begin("waiting", self._progress.step)
        while True:
            if self._new_seat is not None:
                self._adopt_new_seat(self._new_seat)
            view = self._membership.wait(
                self.seat,
                after=self._view_number,
                position=self._progress.position,
                saved=self._strategy.is_saved,
                timeout_s=POLL_S,
            )
            if view is not None:
                if self._view_number:
                    self._progress.stats.add_time("recovery_s", time.perf_counter() - began)
                return view
            if why := self._loop.leave_reason():
                return self._leave_without_driver(why)

    def _adopt_new_seat(self, seat: int) -> None:
        """Where workers may have other bits at the same position, those of a worker that was put out do not count."""
        self.seat, self._new_seat = seat, None
        self._progress.has_state = self._progress.has_state and self._strategy.traits.exact
        self._reporter.stream.who = f"worker-{seat}"

    def _follow(self, view: View) -> None:
        """Catch up with workers that train, until there is a newer view, or nobody to follow."""
        began = time.perf_counter()
        self._progress.activity.begin("following", self._progress.step)
        self._measure_link(view)
        for caught_up in self._strategy.follow(view, self.seat):
            if self._membership.newer(view.number) or self._loop.leave_reason():
                break
            if caught_up:  # say so, and go on following until there is a view
                self._membership.wait(self.seat, after=view.number, position=self._progress.position, timeout_s=0)
        self._progress.stats.add_time("recovery_s", time.perf_counter() - began)

    def _measure_link(self, view: View) -> None:
        """A newcomer from elsewhere has a moment for it: the others train."""
        found = None if self._link_measured else self._peers.measure_link(view, self.seat)
        if found is not None:
            self._link_measured = True
            self._reporter.report("link_measured", peer=f"worker-{view.source}", **asdict(found))

    def _load_checkpoint(self) -> None:
        """From the newest valid checkpoint, if there is one; else the state is the job's start."""
        began = time.perf_counter()
        self._progress.activity.begin("building", self._progress.step)
        step = self._strategy.restore()
        if step is not None:
            seconds = round(time.perf_counter() - began, 6)
            self._reporter.report("resumed", step=step, source="a checkpoint", recovery_s=seconds)

    # ---- from the control client's thread ----

    def on_view(self, view: View) -> None:
        """A view that asks to stop now wakes the training thread. Where members are not at the same step, one could
        wait for ever for another that has stopped at its own boundary: there every halt does."""
        if view.halt == "now" or (view.halt and not self._strategy.traits.lockstep):
            self._strategy.abort(view.number - 1)

    def on_seat_changed(self, seat: int) -> None:
        """This worker was put out while nobody heard it, and may come back in another seat."""
        self._new_seat = seat
        self._strategy.abort(self._view_number)
