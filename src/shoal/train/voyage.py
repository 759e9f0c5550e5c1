"""A worker's way through the views of a run: wait for one, come to hold what it starts from, meet the others, train."""

from __future__ import annotations

import fcntl
import time
from dataclasses import asdict
from pathlib import Path

from shoal.fleet.membership import Membership
from shoal.parallel.sync.base import Discarded
from shoal.spec.view import View
from shoal.train.following import Followed
from shoal.train.loop import Ending, Loop

LOOK_UP_S = 0.5


class Voyage:
    """Belongs to the training thread, except for `halt` and `move`, which come from the one that hears the driver.

    `lock` is a file in the run's directory, None for a worker that cannot reach it and so never saves.
    """

    def __init__(self, loop: Loop, membership: Membership, *, seat: int, lock: Path | None) -> None:
        self.loop = loop
        self._lock = lock
        self.seat = seat
        self._membership = membership
        self._following = Followed(loop)
        self._moved_to: int | None = None
        self._number = 0
        self._link_known = False

    def run(self) -> Ending:
        """Until the run is finished, or this worker has to leave."""
        loop = self.loop
        while True:
            view = self._wait()
            if isinstance(view, str):
                return self._leave_alone(view)
            self._number = view.number
            if self.seat in view.leave:
                loop.teller.leads = view.saver == self.seat  # else others go on, and one of them saves
                if not loop.teller.leads:
                    loop.sync.hand_over(lambda: self._membership.newer(self._number))
                return self._leave("asked to leave")
            if view.stop:
                loop.teller.leads = view.saver == self.seat
                return self._leave(view.stop)
            if view.loads == self.seat:
                self._load()
            elif self.seat in view.followers:
                self._follow(view)
            elif self.seat in view.carries:
                outcome = self._enter(view) or loop.train()
                if isinstance(outcome, Ending):
                    return outcome
                if outcome:
                    loop.teller.tell("stopped", step=loop.step, view=view.number, why=outcome)

    def _leave(self, why: str) -> Ending:
        self._following.close()  # what is saved is the last commit
        return self.loop.leave(why)

    def _leave_alone(self, why: str) -> Ending:
        """No driver says who saves: those who can do so one after the other, if nobody has yet."""
        loop = self.loop
        if self._lock is None:
            loop.teller.leads = False
            loop.sync.hand_over(lambda: False)
            return self._leave(why)
        if loop.shards:
            return self._leave(why)
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            newest = loop.store.latest()
            loop.teller.leads = newest is None or newest.step < loop.step
            return self._leave(why)

    def _wait(self) -> View | str:
        """The next view, or why this worker gives up waiting for one."""
        loop = self.loop
        loop.flush()
        began = time.perf_counter()
        loop.pulse.enter("waiting", loop.step)
        while True:
            if self._moved_to is not None:
                self.seat, self._moved_to = self._moved_to, None
                loop.holds = loop.holds and loop.sync.exact  # else the others may hold other bits by now
                loop.teller.stream.who = f"worker-{self.seat}"
            view = self._membership.wait(
                self.seat, after=self._number, position=loop.position, saved=loop.saved, timeout_s=LOOK_UP_S
            )
            if view is not None:
                if self._number:
                    loop.progress.spent("recovery_s", time.perf_counter() - began)
                return view
            if why := loop.asked_to_leave():
                return why

    def _enter(self, view: View) -> str:
        """Get the state if mine is older, and meet the others. '' or why that failed."""
        loop = self.loop
        if loop.shards:
            return loop.shards.enter(view, self.seat)
        began = time.perf_counter()
        if loop.position == view.position:
            self._following.close()
        elif why := self._catch_up(view):
            return why
        if view.source == self.seat:
            loop.peers.door.open(view.number, loop.state)
        try:
            if why := loop.sync.reconfigure(view, self.seat):
                return why
        finally:
            loop.peers.door.close()
        loop.take_up(view, self.seat)
        loop.progress.spent("recovery_s", time.perf_counter() - began)
        return ""

    def _catch_up(self, view: View) -> str:
        """From the memory of the view's source: what is missing of what I follow, or the whole state."""
        if view.source in (None, self.seat):
            return "it stands at another place than it said"
        loop = self.loop
        began = time.perf_counter()
        followed = self._following.reach(view.position)
        if not followed:
            found = loop.peers.fetch(view, self.seat, most_bytes=loop.most_bytes)
            if isinstance(found, Discarded):
                return found.why
            loop.load_state(found)
        seconds = round(time.perf_counter() - began, 6)
        source = f"worker-{view.source}"
        loop.teller.tell("caught_up", step=loop.step, source=source, followed=followed, recovery_s=seconds)
        return ""

    def _follow(self, view: View) -> None:
        """Catch up with those who train, until there is a newer view, or nobody to follow."""
        loop = self.loop
        began = time.perf_counter()
        loop.pulse.enter("following", loop.step)
        self._measure_link(view)
        if loop.sync.taps and self._following.begin(view, self.seat):
            while not self._membership.newer(view.number) and not loop.asked_to_leave():
                caught_up = self._following.advance()
                if caught_up is None:
                    break
                if caught_up:  # say so, and go on following until there is a view
                    self._membership.wait(self.seat, after=view.number, position=loop.position, timeout_s=0)
        loop.progress.spent("recovery_s", time.perf_counter() - began)

    def _measure_link(self, view: View) -> None:
        """A newcomer from elsewhere has a moment for it: the others train."""
        found = None if self._link_known else self.loop.peers.pace(view, self.seat)
        if found is not None:
            self._link_known = True
            self.loop.teller.tell("link_measured", peer=f"worker-{view.source}", **asdict(found))

    def _load(self) -> None:
        """From the newest valid checkpoint, if there is one; else the state is the job's start."""
        loop = self.loop
        began = time.perf_counter()
        loop.pulse.enter("building", loop.step)
        found = loop.store.load_latest()
        if found is not None:
            manifest, state = found
            loop.load_state(state)
            seconds = round(time.perf_counter() - began, 6)
            loop.teller.tell("resumed", step=manifest.step, source="a checkpoint", recovery_s=seconds)
        loop.holds = True

    def halt(self, view: View) -> None:
        """A view that asks to stop now wakes whoever waits. Where members are not at the same step, one could wait for
        ever for another that has stopped at its own boundary: there every halt does."""
        if view.halt == "now" or (view.halt and not self.loop.sync.together):
            self._abort(view.number - 1)

    def move(self, seat: int) -> None:
        """This worker was put out while nobody heard it, and may come back as another."""
        self._moved_to = seat
        self._abort(self._number)

    def _abort(self, view: int) -> None:
        self.loop.sync.abort(view)
        self.loop.peers.abort(view)
