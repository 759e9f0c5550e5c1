"""What Shoal's own watchers remember and decide."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.events import Event
from shoal.spec.job import EarlyStoppingConfig, MonitorConfig
from shoal.train.watchers import BestMetric, EarlyStopping, TensorBoard, monitored_value

NAN = float("nan")


def shown(watcher, *losses):
    """Evaluations at steps 10, 20, ...; returns what the watcher said to each."""
    return [
        watcher.watch(Event("evaluated", step=10 * n, fields={"split": "validation", "metrics": {"loss": loss}}))
        for n, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("losses", "stops_at"),
    [([3, 2, 1], None), ([3, 3, 3], 3), ([NAN, 3, 2, 1], None), ([3, NAN, 2], None), ([NAN, NAN], 2)],
)
def test_early_stop(losses, stops_at):
    said = shown(EarlyStopping(EarlyStoppingConfig(metric="loss", patience=2)), *losses)
    assert next((n for n, why in enumerate(said, 1) if why), None) == stops_at


def test_a_value_belongs_to_the_step_at_which_it_was_measured():
    best = BestMetric(MonitorConfig(metric="loss"))
    shown(best, 3, 1, 2)
    again = BestMetric(MonitorConfig(metric="loss"))
    again.load_state(best.state())
    assert (again.value, again.step) == (1, 20)
    assert [again.value_at(step) for step in (20, 29, 30)] == [None, None, 2]


@pytest.mark.parametrize(("mode", "best"), [("min", (1.0, 20)), ("max", (3.0, 10)), ("auto", (1.0, 20))])
def test_the_best_is_the_first_of_its_value_in_the_direction_of_the_metric(mode, best):
    it = BestMetric(MonitorConfig(metric="loss", mode=mode))
    shown(it, 3.0, 1.0, 3.0, 1.0)
    assert (it.value, it.step) == best
    assert not it.improved


@given(st.lists(st.floats(allow_infinity=True, allow_nan=True), min_size=1, max_size=20))
def test_the_best_is_the_smallest_finite_value(losses):
    it = BestMetric(MonitorConfig(metric="loss", mode="min"))
    shown(it, *losses)
    finite = [loss for loss in losses if abs(loss) < float("inf")]
    assert it.value == min(finite, default=None)
    assert it.step == (10 * (losses.index(it.value) + 1) if finite else None)


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 12), st.integers(1, 4))
def test_a_stop_is_the_same_after_a_crash(losses, cut, patience):
    spec = EarlyStoppingConfig(metric="loss", patience=patience)
    once, before, after = (EarlyStopping(spec) for _ in range(3))
    said = shown(before, *losses[:cut])
    after.load_state(before.state())
    assert said + shown(after, *losses[cut:]) == shown(once, *losses)


def test_small_improvements_do_not_count():
    said = shown(EarlyStopping(EarlyStoppingConfig(metric="loss", patience=2, min_delta=0.5)), 3.0, 2.75, 2.5)
    assert said == [None, None, "loss has not improved on 3 for 2 evaluations"]


def test_only_the_validation_split_is_monitored():
    monitor = MonitorConfig(metric="loss")
    for kind, split, value in (("evaluated", "validation", 2.0), ("evaluated", "test", None), ("finished", "", None)):
        assert monitored_value(monitor, Event(kind, fields={"split": split, "metrics": {"loss": 2}})) == value


def test_an_unknown_metric_is_refused_with_those_that_are_known():
    with pytest.raises(ShoalError, match="'f1'") as caught:
        shown(BestMetric(MonitorConfig(metric="f1")), 1.0)
    assert (caught.value.code, caught.value.fix) == ("SH409", "Use one of: loss.")


def test_tensorboard_has_every_step_once_although_a_worker_computes_some_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (range(1, 11), range(6, 14)):
        worker = TensorBoard(str(tmp_path))
        for step in steps:
            worker.watch(Event("step", step=step, fields={"loss": float(step), "lr": 0.1}))
            if step % 5 == 0:
                fields = {"split": "validation", "metrics": {"accuracy": step / 100}}
                worker.watch(Event("evaluated", step=step, fields=fields))
        worker.watch(Event("left", step=steps[-1]))  # a killed worker has written, too, what the next one hides
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [row.step for row in found.Scalars("train/loss")] == list(range(1, 14))
    assert [row.step for row in found.Scalars("validation/accuracy")] == [5, 10]


def test_tensorboard_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ShoalError, match="not installed") as caught:
        TensorBoard(str(tmp_path))
    assert (caught.value.code, caught.value.fix) == ("SH207", "pip install 'shoal[tensorboard]'")
