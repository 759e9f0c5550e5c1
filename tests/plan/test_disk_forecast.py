"""When a disk will be full."""

import pytest

from shoal.plan.alerts import AlertJudge
from shoal.plan.disk_forecast import DiskForecast, duration, seconds_until_full
from shoal.spec.alerts.config import AlertConfig

GB = 10**9


def test_a_disk_that_fills_evenly_is_full_when_its_rate_says():
    samples = [(30.0 * n, 100 * GB - n * GB) for n in range(11)]
    assert seconds_until_full(samples) == pytest.approx(90 * 30)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(0.0, 5), (100.0, 4)],  # too few
        [(0.0, 9), (1.0, 8), (2.0, 7), (3.0, 6)],  # too close
        [(0.0, 5), (50.0, 5), (100.0, 5)],
        [(0.0, 5), (50.0, 6), (100.0, 7)],
    ],
)
def test_a_disk_that_does_not_fill_is_never_full(samples):
    assert seconds_until_full(samples) is None


def test_saves_and_deletions_of_old_ones_do_not_alarm():
    """A run that keeps two checkpoints takes and gives back the same."""
    samples = [(30.0 * n, 100 * GB - (n % 2) * GB) for n in range(120)]
    found = seconds_until_full(samples)
    assert found is None or found > 24 * 3600


def test_samples_are_thinned_and_the_last_hour_counts():
    forecast = DiskForecast()
    for n in range(7200):
        forecast.observe(float(n), 1000 * GB if n < 3600 else 1000 * GB - (n - 3600) * 10**7)
    assert forecast.full_in_s() == pytest.approx((1000 * GB - 3570 * 10**7) / 10**7, rel=0.01)


def test_a_rule_speaks_of_hours():
    judge = AlertJudge([AlertConfig(when="disk", hours=3)])
    look = {"work_s": {}, "free_bytes": 10**6}
    assert judge.look(0.0, **look, full_in_s=None) == []  # without `free`, no number of bytes is too few
    assert judge.look(1.0, **look, full_in_s=3 * 3600 + 1) == []
    (raised,) = judge.look(2.0, **look, full_in_s=2 * 3600 + 600)
    assert raised.text.endswith("it is full in 2 h 10 min")


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (90, "2 min"), (11_400, "3 h 10 min"), (3 * 86400, "3 days")]
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text
