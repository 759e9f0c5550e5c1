"""Rules of `alerts` and the forecast of memory: facts in, sentences out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.events import Event
from shoal.plan.alerts import AlertJudge
from shoal.plan.memory_forecast import MemoryWatch, growth_bytes_s
from shoal.plan.stragglers import slowest_worker
from shoal.spec.alerts.config import AlertConfig

GB = 10**9


def judge(*rules):
    return AlertJudge([AlertConfig(**rule) for rule in rules])


def texts(raised):
    return [one.text for one in raised]


def evaluated(step, split="validation", **metrics):
    return Event("evaluated", 1.0, "worker-0", step, {"split": split, "metrics": metrics})


def step(n, loss):
    return Event("step", 1.0, "worker-0", n, {"loss": loss})


def test_finished_and_failed_speak_at_the_end():
    one = judge({"when": "finished"}, {"when": "failed"})
    assert texts(one.end("finished", "", 1.0)) == ["the run has finished"]
    assert texts(one.end("failed", "no space", 2.0)) == ["the run failed: no space"]
    assert one.end("stopped", "", 3.0) == []


def test_nan_speaks_once_per_cooldown():
    one = judge({"when": "nan", "cooldown_s": 10})
    assert texts(one.observe(step(3, float("nan")), 0.0)) == ["the training loss is nan at step 3"]
    assert one.observe(step(4, float("inf")), 9.9) == []
    assert len(one.observe(step(5, float("inf")), 10.0)) == 1
    assert one.observe(step(6, 1.5), 100.0) == []
    assert len(one.observe(evaluated(6, accuracy=float("nan")), 100.0)) == 1  # about another number


def test_a_metric_above_or_below():
    one = judge({"when": "metric", "metric": "accuracy", "below": 0.5, "cooldown_s": 0},
                {"when": "metric", "metric": "test/loss", "above": 2, "cooldown_s": 0})  # fmt: skip
    assert one.observe(evaluated(1, accuracy=0.6, loss=9.0), 0.0) == []
    assert texts(one.observe(evaluated(2, accuracy=0.4), 1.0)) == ["accuracy is 0.4 at step 2, below 0.5"]
    assert texts(one.observe(evaluated(3, "test", loss=3.0), 1.0)) == ["test/loss is 3 at step 3, above 2"]


def test_stalled_counts_from_the_last_sign_of_life():
    one = judge({"when": "stalled", "after_s": 60})
    one.progress_s = 100.0
    assert one.look(159.0, work_s={}, free_bytes=None) == []
    one.observe(step(1, 1.0), 150.0)
    assert one.look(209.0, work_s={}, free_bytes=None) == []
    assert texts(one.look(210.0, work_s={}, free_bytes=None)) == ["no new step, evaluation or save for 60 s"]


def test_a_run_that_only_repeats_its_steps_is_stalled():
    one = judge({"when": "stalled", "after_s": 60})
    one.observe(step(9, 1.0), 10.0)
    for n, kind in enumerate(("worker_died", "view", "joined", "built", "resumed")):
        one.observe(Event(kind, 1.0, "driver", None, {}), 20.0 + n)
    one.observe(step(8, 1.0), 60.0)
    one.observe(step(9, 1.0), 65.0)
    assert len(one.look(70.0, work_s={}, free_bytes=None)) == 1
    one.observe(evaluated(9, accuracy=0.5), 71.0)
    assert one.progress_s == 71.0


def test_a_loss_that_ends_the_run_is_told_once():
    one = judge({"when": "nan"})
    failures = [
        Event("failed", 1.0, f"worker-{n}", None, {"code": code, "message": "the loss is inf at step 3"})
        for n, code in enumerate(("SH401", "SH403", "SH403"))
    ]
    assert [texts(one.observe(event, 1.0)) for event in failures] == [[], ["the loss is inf at step 3"], []]


def test_stragglers_and_disk():
    one = judge({"when": "straggler", "share": 0.4}, {"when": "disk", "free": "5 GB"})
    assert one.look(0.0, work_s={"worker-0": 1.0, "worker-1": 1.2}, free_bytes=6 * GB) == []
    told = texts(one.look(1.0, work_s={"worker-0": 1.0, "worker-1": 2.0}, free_bytes=4 * GB))
    assert told == [
        "worker-1 holds the others back: they need 50% less time for a step",
        "4.0 GB are free on the disk of the run",
    ]
    assert slowest_worker({"worker-0": 1.0}) is None


@pytest.mark.parametrize(
    "rule",
    [
        {"when": "never"},
        {"when": "metric", "metric": "loss"},
        {"when": "finished", "above": 1},
        {"when": "stalled", "free": "2 GB"},
        {"when": "disk", "free": "much"},
        {"when": "failed", "webhook": "ftp://x"},
        {"when": "failed", "webhook": "file:///etc/passwd"},
        {"when": "failed", "command": []},
        {"when": "failed", "cooldown_s": -1},
    ],
)
def test_rules_that_mean_nothing_are_refused(rule):
    with pytest.raises(ValidationError):
        AlertConfig(**rule)


def test_a_worker_is_named_before_its_memory_is_used_up():
    watch = MemoryWatch()
    told = [
        watch.observe("worker-1", 2.0 * n, rss_bytes=n * GB // 5, room_bytes=8 * GB - n * GB // 5) for n in range(30)
    ]
    first = next(n for n, one in enumerate(told) if one)
    assert told[first].startswith("worker-1 is about to run out of memory: it uses")
    left_s = (8 * GB - first * GB // 5) / (GB / 10)
    assert 50 < left_s <= 60  # about a minute before
    assert sum(map(bool, told)) == 1  # once
    assert watch.forget("worker-1") == "it used 5.8 GB and 2.2 GB were left"


def test_a_worker_with_hardly_any_room_is_named_at_once():
    watch = MemoryWatch()
    assert "40 MB are left" in watch.observe("worker-0", 0.0, rss_bytes=GB, room_bytes=40 * 10**6)
    assert watch.observe("worker-0", 2.0, rss_bytes=GB, room_bytes=4 * GB) == ""
    assert watch.observe("worker-0", 4.0, rss_bytes=GB, room_bytes=40 * 10**6)  # again after its danger was over


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9 * GB), st.integers(0, 9 * GB)), min_size=1, max_size=20))
def test_any_samples_are_judged(samples):
    watch, t = MemoryWatch(), 0.0
    for seconds, used, room in samples:
        t += seconds
        watch.observe("worker-0", t, rss_bytes=used, room_bytes=room)
    steady = [(2.0 * n, GB + n % 2, GB) for n in range(10)]
    assert growth_bytes_s(steady) == 0.0
