"""A worker's loop over the views of a run: wait for a view, load its starting state, connect to its members, train."""

from __future__ import annotations

import fcntl
import time
from dataclasses import asdict
from pathlib import Path

from shoal.collectives.outcome import Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.spec.private_file import open_lock_file
from shoal.spec.view import View
from shoal.train.loop import Loop, LoopResult

POLL_S = 0.5


class ElasticLoop:
    """Belongs to the training thread, except `on_view` and `on_seat_changed`: the control client's thread calls them.

    `save_lock` is a file in the run's directory. It is None for a worker that cannot reach the directory and so never
    saves.
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
        """Follow the views until the run is finished or this worker has to leave."""
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
        """Leave as the view says. The saver saves; another worker that is asked to leave hands over its state."""
        asked = self.seat in view.leave
        self._reporter.is_leader = view.saver == self.seat
        if asked and not self._reporter.is_leader:
            self._strategy.hand_over(lambda: self._membership.newer(self._view_number))
        return self._loop.leave("asked to leave" if asked else view.stop)

    def _leave_without_driver(self, why: str) -> LoopResult:
        """Leave without a driver that names a saver. Workers that can save take the lock one after the other, and save
        only if no checkpoint has their step yet."""
        if self._save_lock is None:
            self._reporter.is_leader = False
            self._strategy.hand_over(lambda: False)
            return self._loop.leave(why)
        with open_lock_file(self._save_lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            newest = self._loop.store.latest()
            self._reporter.is_leader = newest is None or newest.step < self._progress.step
            return self._loop.leave(why)

    # ---- views ----

    def _wait_for_view(self) -> View | LoopResult:
        """Wait for the next view. Returns a LoopResult if this worker has a reason to leave without one."""
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
        """Take a new seat after an eviction. Unless the strategy is exact, this worker's state no longer counts: its
        bits may differ from those of the other workers at the same position."""
        self.seat, self._new_seat = seat, None
        self._progress.has_state = self._progress.has_state and self._strategy.traits.exact
        self._reporter.stream.who = f"worker-{seat}"

    def _follow(self, view: View) -> None:
        """Catch up with the workers that train, until a newer view arrives or the stream ends."""
        began = time.perf_counter()
        self._progress.activity.begin("following", self._progress.step)
        self._measure_link(view)
        for caught_up in self._strategy.follow(view, self.seat):
            if self._membership.newer(view.number) or self._loop.leave_reason():
                break
            if caught_up:  # report it, and go on following until a newer view arrives
                self._membership.wait(self.seat, after=view.number, position=self._progress.position, timeout_s=0)
        self._progress.stats.add_time("recovery_s", time.perf_counter() - began)

    def _measure_link(self, view: View) -> None:
        """Measure the link to a source on another host, once. The other workers train meanwhile."""
        found = None if self._link_measured else self._peers.measure_link(view, self.seat)
        if found is not None:
            self._link_measured = True
            self._reporter.report("link_measured", peer=f"worker-{view.source}", **asdict(found))

    def _load_checkpoint(self) -> None:
        """Load the newest valid checkpoint. Without one, the state is the job's initial state."""
        began = time.perf_counter()
        self._progress.activity.begin("building", self._progress.step)
        step = self._strategy.restore()
        if step is not None:
            seconds = round(time.perf_counter() - began, 6)
            self._reporter.report("resumed", step=step, source="a checkpoint", recovery_s=seconds)

    # ---- from the control client's thread ----

    def on_view(self, view: View) -> None:
        """Wake the training thread if the view asks to stop now. Without lockstep, any halt wakes it: a member could
        wait forever for another one that has stopped at its own boundary."""
        if view.halt == "now" or (view.halt and not self._strategy.traits.lockstep):
            self._strategy.abort(view.number - 1)

    def on_seat_changed(self, seat: int) -> None:
        """Abort the present view. The driver evicted this worker while it was silent, and gives it another seat."""
        self._new_seat = seat
        self._strategy.abort(self._view_number)
