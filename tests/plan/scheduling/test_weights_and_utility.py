"""What a job's remaining work and its elasticity count for in a division."""

import numpy as np
import pytest

from shoal.plan.scheduling.division import ELASTICITY_SHARE, _utility
from shoal.plan.scheduling.weights import Standing, Weighting


def weights_of(remaining_s, **weighting):
    count = len(remaining_s)
    zeros, ones = np.zeros(count), np.ones(count, np.int64)
    standing = Standing(np.array(remaining_s), zeros, zeros, zeros, 0 * ones, ones)
    return Weighting(**weighting).weights(standing)


def test_the_longest_jobs_never_count_less_than_a_share_of_the_mean():
    jobs = np.arange(1.0, 21.0)
    weights = weights_of(jobs)
    assert (np.diff(weights) <= 0).all(), "less work left counts more"
    assert weights.min() == pytest.approx(0.4 / 20)
    assert weights_of(jobs, least=0.0).min() < 0.1 / 20


def test_jobs_of_unknown_size_have_the_mean_weight():
    assert weights_of([np.nan] * 4) == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("elasticity", [0.25, 0.5, 1.0])
def test_a_slot_gains_by_the_elasticity_of_the_speed_there(elasticity):
    slots = np.array([[1, 2, 4, 8]])
    found = _utility(elasticity * np.log(slots), slots)
    assert found[0] == pytest.approx(elasticity / (1 - ELASTICITY_SHARE * elasticity) * np.log(slots[0]))


def test_an_elasticity_above_one_counts_as_one_and_a_slower_size_gains_nothing():
    slots = np.array([[1, 2, 4]])
    faster = _utility(2 * np.log(slots), slots)
    assert faster[0, 2] == pytest.approx(2 * np.log(4) / (1 - ELASTICITY_SHARE))
    slower = _utility(np.log([[2.0, 1.0, 0.5]]), slots)
    assert slower[0, 0] == 0.0
    assert (slower[0, 1:] <= 0.0).all()
