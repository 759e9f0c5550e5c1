"""The learned speed of a job: exact where measured, optimistic where not."""

import numpy as np
import pytest

from shoal.plan.scheduling import MeasuredSpeed
from shoal.plan.scheduling.measured_speed import StepMeasurement, StepTimeModel, fit

TRUE = StepTimeModel(alpha_c=0.1, beta_c=0.02, alpha_r=0.05, beta_r=0.002, alpha_n=0.2, beta_n=0.004, gamma=2.0)


def measured(*sizes):
    """(nodes, workers, load) as the true model would take."""
    found = []
    for nodes, workers, load in sizes:
        step = float(TRUE.step_s(np.array(nodes), np.array(workers), np.array(load)))
        found.append(StepMeasurement(nodes, workers, load, step, step - float(TRUE.compute_s(np.array(load)))))
    return found


def test_a_model_is_found_again_from_what_it_predicts():
    sizes = [(1, k, m) for k in (1, 2, 4) for m in (4, 16, 32)] + [
        (n, 4 * n, m) for n in (2, 4, 8) for m in (4, 16, 32)
    ]
    found = fit(measured(*sizes))
    assert found.gamma == TRUE.gamma
    for name in ("alpha_c", "beta_c", "alpha_r", "beta_r", "alpha_n", "beta_n"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)


def test_what_was_never_measured_costs_nothing():
    found = fit(measured((1, 1, 8), (1, 1, 16)))
    one, many = (float(found.step_s(np.array(n), np.array(k), np.array(8))) for n, k in ((1, 1), (4, 16)))
    assert many == pytest.approx(one)


def test_an_exchange_between_nodes_is_at_least_that_within_one():
    found = fit(measured((1, 1, 8), (1, 1, 16), (1, 2, 8), (1, 4, 8)))
    assert found.alpha_n == pytest.approx(1.1 * found.alpha_r)
    assert found.beta_n == pytest.approx(1.1 * found.beta_r)


def test_measured_sizes_have_exactly_the_measured_speed():
    curve = MeasuredSpeed(8, {(1, 1): 0.8, (2, 1): 0.47, (4, 2): 0.41})
    speeds = curve.speeds(np.array([1, 2, 4]), np.array([1, 1, 2]))
    assert speeds.tolist() == [1 / 0.8, 1 / 0.47, 1 / 0.41]


def test_a_job_grows_to_twice_what_was_tried():
    curve = MeasuredSpeed(8)
    assert (curve.most, curve.measured) == (1, False)
    assert MeasuredSpeed(8, gang=4).most == 4
    assert curve.with_measurement(1, 1, 0.8).most == 2
    assert curve.with_measurement(1, 1, 0.8).with_measurement(2, 1, 0.5).most == 4


def test_lanes_limit_the_speed_that_is_hoped_for():
    speeds = MeasuredSpeed(8).speeds(np.array([1, 3, 8, 16]), np.array([1, 1, 2, 4]))
    assert speeds.tolist() == [1.0, 8 / 3, 8.0, 8.0]
