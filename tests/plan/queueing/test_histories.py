"""Random histories of a queue: jobs, daemons that die, stale daemons, users who cancel and release."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.plan.queueing import order, transitions
from shoal.plan.queueing.entry import QueueEntry

SLOTS = 3
OPERATIONS = (
    "submit", "submit", "submit", "decide", "decide", "decide", "prove", "progress", "finish", "finish", "fail", "die",
    "stop", "kill daemon", "end daemon", "cancel", "release", "stale",
)  # fmt: skip


@dataclass
class World:
    """A queue as its file would hold it, and which daemon drives which run: the truth outside of the queue."""

    entries: dict[int, QueueEntry] = field(default_factory=dict)
    epoch: int = 1
    drivers: dict[str, int] = field(default_factory=dict)
    starts: dict[int, set[str]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    """Jobs whose run finished, once for each time."""
    poison: set[int] = field(default_factory=set)

    def put(self, entry: QueueEntry) -> None:
        self.entries[entry.id] = entry
        for follower in list(self.entries.values()):
            if entry.id in follower.after:
                new = transitions.follow_predecessors(follower, [self.entries[number] for number in follower.after])
                if new != follower:
                    self.put(new)

    def running(self) -> list[QueueEntry]:
        return [entry for entry in self.entries.values() if entry.state == "running"]

    def decide(self) -> None:
        for entry in order.runnable(self.entries):
            running, ready = self.running(), order.runnable(self.entries)
            if len(running) < SLOTS and order.may_start(entry, running=running, ready=ready):
                self.claim(entry)

    def claim(self, entry: QueueEntry) -> None:
        ready = order.runnable(self.entries)
        claimed = transitions.claim(entry, epoch=self.epoch, run=f"run-{entry.id}-{entry.attempts}")
        assert claimed.run not in self.drivers, "a run has two drivers"
        self.drivers[claimed.run] = self.epoch
        self.starts.setdefault(entry.id, set()).add(claimed.run)
        self.put(claimed)
        for number in order.overtaken_by(entry, ready, {one.id for one in ready}):
            if number != entry.id:
                other = self.entries[number]
                self.put(other.model_copy(update={"overtaken": other.overtaken + 1}))

    def end(self, entry: QueueEntry, new: QueueEntry) -> None:
        del self.drivers[entry.run]
        if new.state == "finished":
            self.finished.append(entry.id)
        self.put(new)

    def kill_daemon(self) -> None:
        self.epoch += 1
        self.drivers.clear()
        for entry in self.running():
            self.put(transitions.lose_driver(entry, new_epoch=self.epoch))

    def check(self, submitted: int) -> None:
        assert len(self.entries) == submitted, "a job was lost"
        assert all(len(runs) == 1 for runs in self.starts.values()), "a job was started in a second run"
        assert len(set(self.finished)) == len(self.finished), "a job finished twice"
        assert {entry.run for entry in self.running()} == set(self.drivers)
        for entry in self.entries.values():
            assert (entry.state == "running") == (entry.epoch > 0)
            assert entry.state in ("waiting", "finished", "running") or entry.reason, "it does not say why"
            if entry.attempts:
                before = [self.entries[number] for number in entry.after]
                assert all(one.state == "finished" for one in before), "it started before its predecessors finished"


def act(world: World, what: str, draw) -> None:
    running = world.running()
    if what == "submit":
        number = len(world.entries) + 1
        after = draw(st.sets(st.integers(1, number - 1), max_size=2)) if number > 1 else ()
        entry = QueueEntry(
            id=number, user=draw(st.sampled_from("ab")), priority=draw(st.integers(-1, 1)), after=sorted(after)
        )
        world.put(transitions.follow_predecessors(entry, [world.entries[one] for one in entry.after]))
    elif what == "decide":
        world.decide()
    elif what == "kill daemon":
        world.kill_daemon()
    elif what == "end daemon":
        for entry in running:
            world.end(entry, transitions.put_back(entry, epoch=world.epoch, why="ended"))
        world.epoch += 1
    elif what in ("cancel", "release") and world.entries:
        entry = world.entries[draw(st.integers(1, len(world.entries)))]
        change = transitions.request_cancel if what == "cancel" else transitions.release
        try:
            world.put(change(entry))
        except transitions.WrongStateError:
            assert entry.has_ended if what == "cancel" else entry.blocked_by or entry.state not in ("held", "failed")
    elif running:
        act_on(world, what, draw(st.sampled_from(running)))


def act_on(world: World, what: str, entry: QueueEntry) -> None:
    epoch = world.epoch
    if what in ("prove", "progress"):
        world.put(getattr(transitions, what)(entry, epoch=epoch))
    elif what == "finish":
        world.end(entry, transitions.finish(entry, epoch=epoch))
    elif what == "stale":
        for change in (transitions.finish, transitions.prove):
            try:
                change(entry, epoch=epoch - 1)
            except transitions.StaleEpochError:
                continue
            raise AssertionError("a daemon that was replaced changed an entry")
    else:
        change = {"fail": transitions.fail, "die": transitions.die, "stop": transitions.stop}[what]
        world.end(entry, change(entry, epoch=epoch, why=what))


def finish_everything(world: World) -> None:
    """No more faults: whatever may run does."""
    while True:
        world.decide()
        running = world.running()
        if not running:
            return
        for entry in running:
            end = transitions.put_back if entry.cancel_requested else transitions.finish
            world.end(entry, end(entry, epoch=world.epoch, **({"why": "x"} if entry.cancel_requested else {})))


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_no_history_loses_a_job_or_starts_one_twice(data):
    check_history(data)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@given(st.data())
def test_no_history_of_many_loses_a_job_or_starts_one_twice(data):
    check_history(data)


def check_history(data):
    world, submitted = World(), 0
    for what in data.draw(st.lists(st.sampled_from(OPERATIONS), max_size=40)):
        act(world, what, data.draw)
        submitted += what == "submit"
        world.check(submitted)
    finish_everything(world)
    world.check(submitted)
    left = {entry.state for entry in world.entries.values()}
    assert left <= {"finished", "failed", "cancelled", "held"}, "somebody waits for ever"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 3))
def test_jobs_that_kill_the_daemon_are_held_and_all_others_finish(poisonous, outlived):
    """A poisonous job kills the daemon in its first seconds. `outlived` ticks pass before an attempt is proven."""
    world = World()
    for number, bad in enumerate(poisonous, 1):
        world.put(QueueEntry(id=number))
        if bad:
            world.poison.add(number)
    ages: dict[int, int] = {}
    for _ in range(40 * len(poisonous)):
        world.decide()
        if any(entry.id in world.poison for entry in world.running()):
            world.kill_daemon()
            ages.clear()
            continue
        for entry in world.running():
            ages[entry.id] = ages.get(entry.id, 0) + 1
            if ages[entry.id] > outlived:
                proven = transitions.prove(entry, epoch=world.epoch)
                world.put(proven)
                world.end(proven, transitions.finish(proven, epoch=world.epoch))
    held = {entry.id for entry in world.entries.values() if entry.state == "held"}
    assert held == world.poison
    assert all(entry.attempts == transitions.MAX_EARLY_DEATHS for entry in world.entries.values() if entry.id in held)
    assert sorted(world.finished) == [n for n in world.entries if n not in world.poison]


def attempt(entry, *, outlives=True, steps=0, end=transitions.die):
    entry = transitions.claim(entry, epoch=1, run="run")
    entry = transitions.prove(entry, epoch=1) if outlives else entry
    entry = transitions.progress(entry, epoch=1) if steps else entry
    return end(entry, epoch=1, why="it died")


def test_a_job_that_dies_late_and_never_makes_a_step_waits_ever_longer_and_is_held():
    entry, pauses = QueueEntry(id=1), []
    while entry.state == "waiting":
        pauses.append(transitions.pause_s(entry))
        entry = attempt(entry)
    assert pauses == [0, 0, 0, 5, 10, 20, 40, 80, 160, 300]
    assert (entry.state, entry.attempts, entry.reason) == (
        "held",
        transitions.MAX_FRUITLESS,
        "10 attempts in a row made no new step; the last: it died",
    )


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=60))
def test_only_a_step_forgets_attempts_without_one(attempts):
    """Nothing that ended in good order counts."""
    entry, fruitless, early = QueueEntry(id=1), 0, 0
    for outlives, steps, in_order in attempts:
        entry = attempt(
            entry, outlives=outlives, steps=steps, end=transitions.put_back if in_order else transitions.die
        )
        fruitless = 0 if steps else fruitless + (not in_order)
        early = 0 if steps or outlives else early + (not in_order)
        is_held = fruitless == transitions.MAX_FRUITLESS or early == transitions.MAX_EARLY_DEATHS
        assert (entry.state, entry.fruitless) == ("held" if is_held else "waiting", fruitless)
        if is_held:
            entry, fruitless, early = transitions.release(entry), 0, 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=60, max_size=60))
def test_no_stream_of_urgent_jobs_starves_another(priorities):
    world = World()
    world.put(QueueEntry(id=1, priority=-5))
    world.put(QueueEntry(id=2, priority=-7))
    for number, priority in enumerate(priorities, 3):
        world.put(QueueEntry(id=number, priority=priority))
        ready = order.runnable(world.entries)
        world.claim(ready[0])
        entry = world.running()[0]
        world.end(entry, transitions.finish(entry, epoch=world.epoch))
    assert {1, 2} <= set(world.finished)


def test_a_user_with_many_jobs_does_not_keep_out_another():
    entries = {n: QueueEntry(id=n, user="many") for n in range(1, 1001)}
    entries[1001] = QueueEntry(id=1001, user="few")
    assert [entry.id for entry in order.runnable(entries)[:2]] == [1, 1001]
