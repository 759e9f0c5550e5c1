"""The virtual time of a training: a pure function of its job."""

import pytest

from shoal.jobs.search.shapes import STEP_OVERHEAD_FLOPS, shape_key, training_cost

FOUND = {"steps": 12, "flops_per_sample": 3e6}


@pytest.mark.parametrize(
    ("cost", "expected"),
    [("steps", 12.0), ("samples", 12.0 * 32), ("flops", 12 * (3e6 * 32 + STEP_OVERHEAD_FLOPS) / 1e9)],
)
def test_the_cost_of_a_training(cost, expected, make):
    assert training_cost(make(batch_size=32), FOUND, cost) == pytest.approx(expected, rel=1e-12)


def test_a_larger_batch_costs_more_per_step_except_in_steps(make):
    small, large = make(batch_size=16), make(batch_size=64)
    ratios = {c: training_cost(large, FOUND, c) / training_cost(small, FOUND, c) for c in ("steps", "samples", "flops")}
    assert ratios["steps"] == 1.0 < ratios["flops"] < ratios["samples"] == 4.0


def test_what_changes_neither_steps_nor_their_cost_has_the_same_shape(make):
    base = shape_key(make())
    assert shape_key(make(optimizer={"name": "SGD", "args": {"lr": 0.3}}, name="other")) == base
    assert shape_key(make(optimizer={"name": "Adam"})) != base  # its state takes memory
    assert shape_key(make(batch_size=25)) != base
