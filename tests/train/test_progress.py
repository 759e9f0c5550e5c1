"""How far a worker is, besides its weights."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives.outcome import Committed
from shoal.errors import ShoalError
from tests.train.fake_strategy import Bench


class Remembers:
    """A watcher with a state of its own."""

    def __init__(self):
        self.losses = []

    def watch(self, event):
        if event.kind == "step":
            self.losses.append(event["loss"])

    def state(self):
        return list(self.losses)

    def load_state(self, state):
        self.losses = list(state)


def commit(progress, step, loss=1.0, **fields):
    progress.record_commit(Committed(torch.tensor(loss), **fields), step=step, lr=0.1)


def stream_commit(progress, step, loss=1.0):
    progress.record_streamed_commit(torch.tensor(loss), step=step, lr=0.1)


def test_a_position_grows_with_every_commit_and_every_evaluation():
    progress = Bench().progress
    seen = [progress.position]
    commit(progress, 1)
    seen.append(progress.position)
    progress.record_evaluation({"loss": 1.0})
    seen.append(progress.position)
    commit(progress, 2)
    seen.append(progress.position)
    assert seen == [0, 2, 3, 4]


def test_a_worker_that_holds_nothing_has_no_position():
    progress = Bench().progress
    progress.has_state = False
    assert progress.position is None


def test_samples_of_a_commit_are_those_of_all_its_steps():
    watcher = Remembers()
    bench, seen = Bench(watchers=[watcher]), []
    watcher.watch = lambda event: seen.append(event["samples"]) if event.kind == "step" else None
    commit(bench.progress, 1)
    commit(bench.progress, 5)
    assert seen == [10, 40]


def test_the_phase_of_a_heartbeat_follows_a_commit():
    bench = Bench()
    commit(bench.progress, 3)
    assert bench.activity.heartbeat()["phase"] == "telling"
    assert bench.activity.heartbeat()["step"] == 3


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_loss_must_be_a_number(loss, streamed):
    bench = Bench()
    bench.stream.who = "worker-3"
    record = stream_commit if streamed else commit
    with pytest.raises(ShoalError, match="at step 1") as caught:
        record(bench.progress, 1, loss)
    assert (caught.value.code, caught.value.where) == ("SH403", "worker-3")


def test_what_a_newcomer_follows_is_seen_by_its_watchers_and_reported_by_nobody():
    watcher = Remembers()
    bench = Bench(watchers=[watcher])
    stream_commit(bench.progress, 1, 0.5)
    bench.progress.record_streamed_evaluation({"loss": 0.25})
    bench.progress.flush(0.1)
    assert watcher.losses == [0.5]
    assert (bench.best.value, bench.best.step, bench.progress.monitored_value) == (0.25, 1, 0.25)
    assert bench.progress.evaluated
    assert bench.stream.events == []


def test_a_monitored_value_belongs_to_its_step():
    bench = Bench()
    bench.progress.record_streamed_evaluation({"loss": 0.25})
    assert bench.progress.monitored_value == 0.25
    commit(bench.progress, 1)
    assert bench.progress.monitored_value is None


def test_a_better_result_is_reported_by_the_leader_alone():
    for leads, kinds in ((True, ["best"]), (False, [])):
        bench = Bench()
        bench.reporter.is_leader = leads
        bench.progress.record_streamed_evaluation({"loss": 0.25})
        assert bench.stream.kinds() == kinds


def test_an_unknown_metric_is_an_error_that_names_those_there_are():
    bench = Bench()
    with pytest.raises(ShoalError, match="no metric is called 'loss'") as caught:
        bench.progress.record_streamed_evaluation({"accuracy": 0.5, "recall": 1.0})
    assert caught.value.code == "SH409"
    assert "accuracy, recall" in caught.value.fix


def test_what_is_saved_comes_back():
    bench = Bench(watchers=[Remembers()])
    commit(bench.progress, 1, 2.0)
    bench.progress.record_streamed_evaluation({"loss": 0.25})
    bench.reporter.stop_reason = "enough"
    saved = bench.progress.state()
    other = Bench(watchers=[Remembers()])
    other.progress.load_state(saved)
    assert other.progress.state() == saved
    assert other.progress.position == bench.progress.position == 3
    assert other.reporter.watchers[1].losses == [2.0]
    assert other.loop.finished


def test_the_section_of_a_checkpoint_keeps_its_names():
    """Checkpoints of earlier versions have them, and are resumed."""
    state = Bench().progress.state()
    assert list(state) == ["step", "stop", "metrics", "measured_at", "task", "watch", "sync"]
    assert state["sync"] is None
    json.dumps(state)


@given(st.lists(st.sampled_from(["commit", "streamed commit", "evaluation"]), max_size=12))
def test_a_worker_that_follows_arrives_where_the_others_are(acts):
    trains, follows = Bench(watchers=[Remembers()]), Bench(watchers=[Remembers()])
    for act in acts:
        for bench, streamed in ((trains, act == "streamed commit"), (follows, True)):
            if act == "evaluation":
                bench.progress.record_streamed_evaluation({"loss": 1.0 / (1 + bench.progress.step)})
            else:
                (stream_commit if streamed else commit)(bench.progress, bench.progress.step + 1, 0.5)
    assert follows.progress.state() == trains.progress.state()
    assert follows.progress.position == trains.progress.position
