"""A worker's way through the views of a run: wait for one, come to hold what it starts from, meet the others, train."""

from __future__ import annotations

import fcntl
import time
from dataclasses import asdict
from pathlib import Path

from shoal.collectives.outcome import Discarded
from shoal.fleet.membership import Membership
from shoal.spec.view import View
from shoal.train.catch_up import CatchUp
from shoal.train.loop import Loop, LoopResult

POLL_S = 0.5


class ElasticLoop:
    """Belongs to the training thread, except for `halt` and `move`, which come from the one that hears the driver.

    `lock` is a file in the run's directory, None for a worker that cannot reach it and so never saves.
    """

    def __init__(self, loop: Loop, membership: Membership, *, seat: int, save_lock: Path | None) -> None:
        self.loop = loop
        self._save_lock = save_lock
        self.seat = seat
        self._membership = membership
        self._catch_up_stream = CatchUp(loop)
        self._new_seat: int | None = None
        self._view_number = 0
        self._link_measured = False

    def run(self) -> LoopResult:
        """Until the run is finished, or this worker has to leave."""
        loop = self.loop
        while True:
            view = self._wait_for_view()
            if isinstance(view, str):
                return self._leave_without_driver(view)
            self._view_number = view.number
            if self.seat in view.leave:
                loop.reporter.is_leader = view.saver == self.seat  # else others go on, and one of them saves
                if not loop.reporter.is_leader:
                    loop.sync.hand_over(lambda: self._membership.newer(self._view_number))
                return self._leave("asked to leave")
            if view.stop:
                loop.reporter.is_leader = view.saver == self.seat
                return self._leave(view.stop)
            if view.loads == self.seat:
                self._load_checkpoint()
            elif self.seat in view.followers:
                self._follow(view)
            elif self.seat in view.carries:
                outcome = self._enter_view(view) or loop.train()
                if isinstance(outcome, LoopResult):
                    return outcome
                if outcome:
                    loop.reporter.report("stopped", step=loop.step, view=view.number, why=outcome)

    def _leave(self, why: str) -> LoopResult:
        self._catch_up_stream.close()  # what is saved is the last commit
        return self.loop.leave(why)

    def _leave_without_driver(self, why: str) -> LoopResult:
        """No driver says who saves: those who can do so one after the other, if nobody has yet."""
        loop = self.loop
        if self._save_lock is None:
            loop.reporter.is_leader = False
            loop.sync.hand_over(lambda: False)
            return self._leave(why)
        if loop.sharded:
            return self._leave(why)
        with self._save_lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            newest = loop.store.latest()
            loop.reporter.is_leader = newest is None or newest.step < loop.step
            return self._leave(why)

    def _wait_for_view(self) -> View | str:
        """The next view, or why this worker gives up waiting for one."""
        loop = self.loop
        loop.flush()
        began = time.perf_counter()
        loop.activity.begin("waiting", loop.step)
        while True:
            if self._new_seat is not None:
                self.seat, self._new_seat = self._new_seat, None
                loop.has_state = loop.has_state and loop.sync.exact  # else the others may hold other bits by now
                loop.reporter.stream.who = f"worker-{self.seat}"
            view = self._membership.wait(
                self.seat, after=self._view_number, position=loop.position, saved=loop.is_saved, timeout_s=POLL_S
            )
            if view is not None:
                if self._view_number:
                    loop.stats.add_time("recovery_s", time.perf_counter() - began)
                return view
            if why := loop.leave_reason():
                return why

    def _enter_view(self, view: View) -> str:
        """Get the state if mine is older, and meet the others. '' or why that failed."""
        loop = self.loop
        if loop.sharded:
            return loop.sharded.enter(view, self.seat)
        began = time.perf_counter()
        if loop.position == view.position:
            self._catch_up_stream.close()
        elif why := self._catch_up(view):
            return why
        if view.source == self.seat:
            loop.peers.state_server.open(view.number, loop.state)
        try:
            if why := loop.sync.reconfigure(view, self.seat):
                return why
        finally:
            loop.peers.state_server.close()
        loop.adopt_view(view, self.seat)
        loop.stats.add_time("recovery_s", time.perf_counter() - began)
        return ""

    def _catch_up(self, view: View) -> str:
        """From the memory of the view's source: what is missing of what I follow, or the whole state."""
        if view.source in (None, self.seat):
            return "it stands at another place than it said"
        loop = self.loop
        began = time.perf_counter()
        followed = self._catch_up_stream.advance_to(view.position)
        if not followed:
            found = loop.peers.fetch_state(view, self.seat, max_bytes=loop.max_state_bytes)
            if isinstance(found, Discarded):
                return found.why
            loop.load_state(found)
        seconds = round(time.perf_counter() - began, 6)
        source = f"worker-{view.source}"
        loop.reporter.report("caught_up", step=loop.step, source=source, followed=followed, recovery_s=seconds)
        return ""

    def _follow(self, view: View) -> None:
        """Catch up with those who train, until there is a newer view, or nobody to follow."""
        loop = self.loop
        began = time.perf_counter()
        loop.activity.begin("following", loop.step)
        self._measure_link(view)
        if loop.sync.streams_updates and self._catch_up_stream.connect(view, self.seat):
            while not self._membership.newer(view.number) and not loop.leave_reason():
                caught_up = self._catch_up_stream.poll()
                if caught_up is None:
                    break
                if caught_up:  # say so, and go on following until there is a view
                    self._membership.wait(self.seat, after=view.number, position=loop.position, timeout_s=0)
        loop.stats.add_time("recovery_s", time.perf_counter() - began)

    def _measure_link(self, view: View) -> None:
        """A newcomer from elsewhere has a moment for it: the others train."""
        found = None if self._link_measured else self.loop.peers.measure_link(view, self.seat)
        if found is not None:
            self._link_measured = True
            self.loop.reporter.report("link_measured", peer=f"worker-{view.source}", **asdict(found))

    def _load_checkpoint(self) -> None:
        """From the newest valid checkpoint, if there is one; else the state is the job's start."""
        loop = self.loop
        began = time.perf_counter()
        loop.activity.begin("building", loop.step)
        found = loop.store.load_latest()
        if found is not None:
            manifest, state = found
            loop.load_state(state)
            seconds = round(time.perf_counter() - began, 6)
            loop.reporter.report("resumed", step=manifest.step, source="a checkpoint", recovery_s=seconds)
        loop.has_state = True

    def on_view(self, view: View) -> None:
        """A view that asks to stop now wakes whoever waits. Where members are not at the same step, one could wait for
        ever for another that has stopped at its own boundary: there every halt does."""
        if view.halt == "now" or (view.halt and not self.loop.sync.lockstep):
            self._abort(view.number - 1)

    def on_seat_changed(self, seat: int) -> None:
        """This worker was put out while nobody heard it, and may come back as another."""
        self._new_seat = seat
        self._abort(self._view_number)

    def _abort(self, view: int) -> None:
        self.loop.sync.abort(view)
        self.loop.peers.abort(view)
