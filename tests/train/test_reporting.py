"""What a worker reports of its steps, and which watchers see what."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError, error
from shoal.events import Event
from shoal.train import reporting
from shoal.train.reporting import Reporter, StepStats
from tests.train.fake_strategy import RecordingStream


class Watcher:
    def __init__(self, *, alone=False, answer=None):
        self.alone, self.answer, self.seen = alone, answer, []

    def watch(self, event):
        self.seen.append(event.kind)
        return self.answer


class Clock:
    def __init__(self, monkeypatch):
        self.now_s = 0.0
        monkeypatch.setattr(reporting.time, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch):
    """Rows come by the time that passes: here it passes when the test says so."""
    return Clock(monkeypatch)


def stats(*watchers, every_step=False):
    reporter = Reporter(RecordingStream(), watchers)
    return StepStats(reporter, every_step=every_step), reporter.stream


def rows(stream):
    return [(event.step, event["steps"]) for event in stream.of("step")]


def record(it, step, **fields):
    it.record_step(step, **({"loss": 1.0, "lr": 0.1, "samples": 10} | fields))


# ---- reporters ----


def test_watchers_see_what_is_reported():
    watcher = Watcher()
    reporter = Reporter(RecordingStream(), [watcher])
    reporter.report("joined", step=3, view=1)
    assert watcher.seen == ["joined"]
    assert [(event.kind, event.step, event["view"]) for event in reporter.stream.events] == [("joined", 3, 1)]


@pytest.mark.parametrize("leads", [True, False])
def test_what_all_know_is_reported_by_the_leader_and_seen_by_all(leads):
    everywhere, alone = Watcher(), Watcher(alone=True)
    reporter = Reporter(RecordingStream(), [everywhere, alone])
    reporter.is_leader = leads
    reporter.report_from_leader("evaluated", step=3)
    assert everywhere.seen == ["evaluated"]
    assert alone.seen == reporter.stream.kinds() == (["evaluated"] if leads else [])


def test_the_first_reason_to_stop_counts():
    reporter = Reporter(RecordingStream(), [Watcher(), Watcher(answer="first"), Watcher(answer="second")])
    reporter.report("joined")
    reporter.report("joined")
    assert reporter.stop_reason == "first"


def test_the_state_of_watchers_is_kept_by_their_place():
    class Counts(Watcher):
        def state(self):
            return len(self.seen)

        def load_state(self, state):
            self.seen = ["before"] * state

    one, other = (Reporter(RecordingStream(), [Watcher(), Counts()]) for _ in range(2))
    one.notify_watchers(Event("joined", time.time(), "worker-0", 1, {}))
    assert one.state() == [None, 1]
    other.load_state(one.state())
    assert other.watchers[1].seen == ["before"]


# ---- rows ----


def test_short_steps_share_a_row(clock):
    it, stream = stats()
    for step in range(1, 8):
        clock.now_s += 0.02
        record(it, step)
    assert rows(stream) == [(3, 3), (6, 3)]
    it.flush(7, loss=1.0, lr=0.1)
    assert rows(stream) == [(3, 3), (6, 3), (7, 1)]


def test_a_flush_without_steps_reports_nothing(clock):
    it, stream = stats()
    it.flush(0, loss=1.0, lr=0.1)
    assert stream.events == []


def test_long_steps_have_a_row_each(clock):
    it, stream = stats()
    for step in (1, 2):
        clock.now_s += 1.0
        record(it, step)
    assert rows(stream) == [(1, 1), (2, 1)]
    assert [event["wall_s"] for event in stream.of("step")] == [1.0, 1.0]


def test_a_row_has_everything_since_the_last(clock):
    it, stream = stats()
    it.add_time("compute_s", 9.0)  # before the worker has joined: start-up
    it.restart_clock()
    it.add_time("compute_s", 0.5)
    it.add_time("compute_s", 0.25)
    it.add_samples(7)
    it.add_bytes(100)
    it.add_bytes(10, 40)
    clock.now_s = 1.0
    record(it, 1, loss=0.5, lr=0.01)
    record(it, 2)
    it.flush(2, loss=0.25, lr=0.01)
    first, second = stream.of("step")
    assert (first["compute_s"], first["samples"], first["loss"], first["lr"]) == (0.75, 7, 0.5, 0.01)
    assert (first["bytes_sent"], first["bytes_plain"]) == (110, 140)
    assert (second["samples"], second["bytes_sent"]) == (0, 0)
    assert "compute_s" not in second.fields


def test_time_between_views_is_not_the_time_of_a_step(clock):
    it, stream = stats()
    clock.now_s = 100.0
    it.restart_clock()
    clock.now_s = 100.5
    record(it, 1)
    assert stream.of("step")[0]["wall_s"] == 0.5


def test_each_step_is_seen_by_watchers_that_ask_for_it(clock):
    for every_step, seen in ((True, ["step"] * 3), (False, [])):
        watcher = Watcher()
        it, _ = stats(watcher, every_step=every_step)
        for step in (1, 2, 3):
            record(it, step)
        assert watcher.seen == seen


def test_inner_steps_are_reported_and_the_commit_that_counts_them_ends_the_row(clock):
    it, stream = stats()
    clock.now_s = 1.0
    it.record_inner_step(1, loss=3.0, lr=0.1)
    it.record_inner_step(2, loss=2.0, lr=0.1, emit=False)
    it.record_inner_step(3, loss=2.0, lr=0.1)
    record(it, 4)
    found = stream.of("step")
    assert [(event.step, event.fields.get("inner", False)) for event in found] == [(1, True), (4, False)]
    assert [event["steps"] for event in found] == [1, 2]
    clock.now_s = 2.0
    record(it, 5)
    assert rows(stream)[-1] == (5, 1)


# ---- errors and properties ----


class Fails(Watcher):
    def __init__(self, failure):
        super().__init__()
        self.failure = failure

    def watch(self, event):
        raise self.failure


def test_a_watcher_that_fails_is_named():
    with pytest.raises(ShoalError, match="Fails: KeyError: 'loss'") as caught:
        Reporter(RecordingStream(), [Fails(KeyError("loss"))]).report("joined")
    assert caught.value.code == "SH410"
    assert caught.value.where.rpartition(":")[0] == __file__


def test_a_watchers_own_error_of_shoal_passes_unchanged():
    failure = error("SH409", "no such metric")
    with pytest.raises(ShoalError) as caught:
        Reporter(RecordingStream(), [Fails(failure)]).report("joined")
    assert caught.value is failure


def test_states_of_a_job_with_fewer_watchers_are_loaded():
    reporter = Reporter(RecordingStream(), [Watcher(), Watcher()])
    reporter.load_state([None])
    assert reporter.state() == [None, None]


@given(st.lists(st.tuples(st.floats(0.001, 0.2), st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_rows_together_have_every_step_sample_and_byte(taken):
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        it, stream = stats()
        for step, (seconds, samples, size_bytes) in enumerate(taken, 1):
            clock.now_s += seconds
            it.add_samples(samples)
            it.add_bytes(size_bytes, 2 * size_bytes)
            record(it, step)
        it.flush(len(taken), loss=1.0, lr=0.1)
    found = stream.of("step")
    assert sum(row["steps"] for row in found) == len(taken)
    assert sum(row["samples"] for row in found) == sum(samples for _, samples, _ in taken)
    assert sum(row["bytes_plain"] for row in found) == 2 * sum(row["bytes_sent"] for row in found)
    assert sum(row["wall_s"] for row in found) == pytest.approx(clock.now_s, abs=1e-4)
