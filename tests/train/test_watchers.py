"""What Shoal's own watchers remember and decide."""

import pytest

from shoal.events import Event
from shoal.spec.job import EarlyStoppingConfig, MonitorConfig
from shoal.train.watchers import BestMetric, EarlyStopping

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
