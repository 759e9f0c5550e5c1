"""A worker's way through views. The strategy is a fake; loop, elastic loop and membership are real."""

import threading
from types import SimpleNamespace

import pytest

from shoal.collectives.transport.bandwidth import LinkSpeed
from shoal.spec.view import View
from shoal.train import elastic
from shoal.train.elastic import ElasticLoop
from shoal.train.loop import LoopResult
from tests.train.fake_strategy import Bench

ALONE = {0: [0, 1, 2, 3]}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(elastic, "POLL_S", 0.01)


class Script:
    """A membership that hands out these views one after the other, and keeps what it was told."""

    def __init__(self, *views):
        self.views, self.told = list(views), []

    def wait(self, seat, *, after, position, saved=False, timeout_s=None):
        self.told.append((seat, after, position))
        if timeout_s == 0 or not self.views or not self.views[0].concerns(seat):
            return None
        return self.views.pop(0)

    def newer(self, number):
        return False


def elastic_loop(bench, *views, seat=0, save_lock=None, link=None):
    bench.loop.membership = Script(*views)
    peers = SimpleNamespace(measure_link=lambda view, seat: link)
    return ElasticLoop(bench.loop, peers=peers, seat=seat, save_lock=save_lock)


def test_one_view_to_the_end():
    bench = Bench(splits=())
    it = elastic_loop(bench, bench.view())
    assert it.run() == LoopResult(6, finished=True)
    assert bench.strategy.calls == ["enter", *["step", "save"] * 6, "finish"]
    assert it._membership.told == [(0, 0, 0)]


def test_the_job_begins_from_a_checkpoint_if_there_is_one():
    bench = Bench(splits=())
    bench.store.saved = 4
    it = elastic_loop(bench, View(number=1, loads=0), bench.view(number=2, position=8))
    assert it.run().finished
    assert bench.strategy.calls == ["restore", "enter", *["step", "save"] * 2, "finish"]
    assert it._membership.told == [(0, 0, 0), (0, 1, 8)]
    assert [(event.step, event["source"]) for event in bench.stream.of("resumed")] == [(4, "a checkpoint")]


def test_without_a_checkpoint_nothing_is_resumed():
    bench = Bench(splits=())
    elastic_loop(bench, View(number=1, loads=0), bench.view(number=2)).run()
    assert bench.strategy.calls[0] == "restore"
    assert bench.stream.of("resumed") == []


@pytest.mark.parametrize("verb", ["enter", "step"])
def test_after_a_discarded_step_it_says_where_it_stands_and_waits_for_a_view(verb):
    bench = Bench(splits=())
    bench.strategy.lost[verb] = "worker-1 is gone"
    it = elastic_loop(bench, bench.view(), bench.view(number=2, carries=ALONE))
    assert it.run().finished
    assert it._membership.told == [(0, 0, 0), (0, 1, 0)]
    (stopped,) = bench.stream.of("stopped")
    assert (stopped.step, stopped["view"], stopped["why"]) == (0, 1, "worker-1 is gone")


def test_an_agreed_stop_is_no_failure():
    bench = Bench(splits=())
    it = elastic_loop(bench, bench.view(), bench.view(number=2, position=2))
    halts = iter([True])
    it._membership.newer = lambda number: next(halts, False)
    assert it.run().finished
    assert it._membership.told == [(0, 0, 0), (0, 1, 2)]
    assert bench.stream.of("stopped") == []


# ---- leaving ----


def test_a_worker_that_leaves_while_others_go_on_hands_over_and_does_not_save():
    bench = Bench()
    it = elastic_loop(bench, View(number=3, leave=[0]))
    assert it.run() == LoopResult(0, finished=False, why="asked to leave")
    assert bench.strategy.calls == ["hand_over"]


def test_the_last_worker_saves_when_it_leaves():
    bench = Bench()
    elastic_loop(bench, View(number=3, leave=[0], saver=0)).run()
    assert bench.strategy.calls == ["save_alone"]


@pytest.mark.parametrize(("seat", "calls"), [(0, ["save_alone"]), (1, [])])
def test_a_stop_lets_one_worker_save(seat, calls):
    bench = Bench()
    it = elastic_loop(bench, View(number=3, stop="interrupted", saver=0), seat=seat)
    assert it.run() == LoopResult(0, finished=False, why="interrupted")
    assert bench.strategy.calls == calls


def test_without_a_driver_workers_save_one_after_the_other_if_nobody_has(tmp_path):
    first, second = Bench(), Bench()
    second.strategy.store = second.loop.store = first.store
    for bench in (first, second):
        bench.leave_reason = "no driver came back"
        bench.progress.step = bench.strategy.weight = 5
        assert not elastic_loop(bench, save_lock=tmp_path / "lock").run().finished
    assert (first.strategy.calls, second.strategy.calls) == (["save_alone"], [])
    assert first.store.saved == 5


def test_a_worker_from_elsewhere_never_saves():
    bench = Bench()
    bench.leave_reason = "terminated"
    assert elastic_loop(bench, save_lock=None).run().why == "terminated"
    assert bench.strategy.calls == ["hand_over"]


# ---- catching up ----


def newcomer(**traits):
    bench = Bench(splits=(), **traits)
    bench.progress.has_state = False
    return bench


def test_a_newcomer_follows_and_says_when_it_has_everything():
    bench = newcomer()
    bench.strategy.entries = [2, 3]
    it = elastic_loop(bench, View(number=1, followers=[1], source=0), bench.view(number=2, position=6), seat=1)
    assert it.run().finished
    assert bench.strategy.calls[:2] == ["follow", "enter"]
    assert it._membership.told == [(1, 0, None), (1, 1, 6), (1, 1, 6)]


def test_a_newer_view_ends_the_following():
    bench = newcomer()
    bench.strategy.entries = [1, 2, 3, 4]
    it = elastic_loop(bench, View(number=1, followers=[1], source=0), View(number=2, leave=[1]), seat=1)
    it._membership.newer = lambda number: bench.progress.step >= 2
    it.run()
    assert bench.progress.step == 2


def test_a_link_is_measured_once():
    bench = newcomer()
    speed = LinkSpeed(latency_s=0.001, send_bytes_s=1e8, receive_bytes_s=1e8)
    follow = [View(number=number, followers=[1], source=0) for number in (1, 2)]
    elastic_loop(bench, *follow, View(number=3, leave=[1]), seat=1, link=speed).run()
    assert [event["peer"] for event in bench.stream.of("link_measured")] == ["worker-0"]


def test_a_newcomer_that_must_leave_stops_following(tmp_path):
    bench = newcomer()
    bench.strategy.entries = [1, 2, 3]
    bench.leave_reason = "terminated"
    it = elastic_loop(bench, View(number=1, followers=[1], source=0), seat=1, save_lock=tmp_path / "lock")
    assert it.run() == LoopResult(1, finished=False, why="terminated")
    assert bench.strategy.calls == ["follow", "save_alone"]
    assert bench.store.saved == 1


@pytest.mark.parametrize("saved", [5, 6])
def test_without_a_driver_an_older_checkpoint_is_replaced(tmp_path, saved):
    bench = Bench()
    bench.store.saved, bench.progress.step, bench.strategy.weight = saved, 6, 6
    bench.leave_reason = "no driver came back"
    elastic_loop(bench, save_lock=tmp_path / "lock").run()
    assert bench.strategy.calls == (["save_alone"] if saved < 6 else [])


# ---- from the control client's thread ----


@pytest.mark.parametrize(
    ("halt", "lockstep", "aborted"),
    [("now", True, [4]), ("boundary", True, []), ("boundary", False, [4]), ("", False, [])],
)
def test_which_views_wake_the_training_thread(halt, lockstep, aborted):
    bench = Bench(lockstep=lockstep)
    elastic_loop(bench).on_view(View(number=5, halt=halt, stop="" if halt else "x"))
    assert bench.strategy.aborted == aborted


@pytest.mark.parametrize("exact", [True, False])
def test_a_worker_that_was_put_out_comes_back_in_another_seat(exact):
    """With its state only where everybody must have the same bits."""
    bench = Bench(exact=exact)
    it = elastic_loop(bench, View(number=1, leave=[7]))
    it.on_seat_changed(7)
    assert it.run().why == "asked to leave"
    assert it._membership.told == [(7, 0, 0 if exact else None)]
    assert bench.stream.of("left")[0].who == "worker-7"
    assert bench.strategy.aborted == [0]


def test_two_workers_and_a_driver_go_through_growth_and_the_end():
    """In threads, with the membership that every other one is compared with."""
    benches = {0: Bench(steps=40, splits=()), 1: newcomer()}
    benches[1].loop.schedule = benches[0].loop.schedule
    shared, committed, results = benches[0].membership, threading.Event(), {}

    def run(seat):
        bench = benches[seat]
        bench.loop.membership = shared
        peers = SimpleNamespace(measure_link=lambda view, seat: None)
        results[seat] = ElasticLoop(bench.loop, peers=peers, seat=seat, save_lock=None).run()

    alone = benches[0].strategy

    def step_then_wait():
        if alone.weight == 10:
            committed.set()
            assert grown.wait(10)
        alone.lost["step"] = step_then_wait

    grown = threading.Event()
    alone.lost["step"] = step_then_wait
    threads = [threading.Thread(target=run, args=(seat,)) for seat in benches]
    shared.publish(benches[0].view(carries=ALONE))
    for thread in threads:
        thread.start()
    assert committed.wait(10)
    shared.publish(View(number=2, halt="boundary"))
    grown.set()
    shared.publish(View(number=3, carries={0: [0, 1], 1: [2, 3]}, saver=0, position=2 * 11))
    for thread in threads:
        thread.join(10)
    assert results == {0: LoopResult(40, finished=True), 1: LoopResult(40, finished=True)}
    assert benches[1].strategy.weight == 40
    assert benches[1].strategy.calls[0] == "enter"
