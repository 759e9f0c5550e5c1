"""Bounds of paired differences, and times in turns."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shoal.compression.measure import Z, drop_of, measure_in_turns, upper_bound_of_flips, upper_bound_of_mean
from shoal.spec.compression.measured import Ratio


@given(st.integers(1, 100_000))
def test_no_change_still_has_a_bound(samples):
    assert upper_bound_of_flips(0, 0, samples) == pytest.approx(Z**2 / (samples + Z**2), rel=1e-6)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(101, 5000))
def test_the_bound_is_above_the_drop_and_grows_with_what_is_lost(lost, won, samples):
    bound = upper_bound_of_flips(lost, won, samples)
    assert (lost - won) / samples < bound <= 1
    assert upper_bound_of_flips(lost + 1, won, samples) > bound


def test_the_bound_holds_in_at_least_19_of_20_experiments_or_nearly():
    """400 samples, 2 % lost and 1 % won in truth: the bound must cover 1 % about 95 times of 100."""
    draw = random.Random(0)
    covered = 0
    for _ in range(1000):
        flips = [draw.random() for _ in range(400)]
        lost, won = sum(f < 0.02 for f in flips), sum(0.02 <= f < 0.03 for f in flips)
        covered += upper_bound_of_flips(lost, won, 400) >= 0.01
    assert covered >= 930


def test_flips_and_means():
    parent, model = [1.0] * 90 + [0.0] * 10, [1.0] * 88 + [0.0] * 12
    drop, bound, least = drop_of(parent, model, sign=1)
    assert drop == pytest.approx(0.02)
    assert bound > drop > 0
    assert least == upper_bound_of_flips(0, 0, 100)
    assert drop_of(model, parent, sign=1)[0] == pytest.approx(-0.02)
    losses, worse = [0.5, 1.0, 1.5] * 10, [0.55, 1.1, 1.65] * 10
    drop, bound, least = drop_of(losses, worse, sign=-1)
    assert drop == pytest.approx(0.1)
    assert bound > 0.1
    assert least == 0


@pytest.mark.parametrize("samples", [1, 2, 5, 29])
@pytest.mark.parametrize("sign", [1, -1])
def test_few_losses_or_shares_have_no_bound(samples, sign):
    """Not even if none of them changed: two values that are equal by chance would prove everything."""
    values = [0.5 + 0.01 * n for n in range(samples)]
    drop, bound, least = drop_of(values, values, sign=sign)
    assert (drop, bound, least) == (0.0, math.inf, math.inf)


@pytest.mark.parametrize("samples", [30, 31, 100, 5000])
def test_the_bound_of_a_mean_is_that_of_students_distribution(samples):
    draw = random.Random(samples)
    values = [draw.gauss(0.1, 1.0) for _ in range(samples)]
    wanted = stats.ttest_1samp(values, 0.0, alternative="less").confidence_interval(0.95).high
    assert upper_bound_of_mean(values) == pytest.approx(wanted, rel=1e-9)


def test_models_run_in_turns():
    """What slows the machine down for a while slows both down."""
    turns = []
    models = {name: lambda name=name: turns.append(name) for name in ("first", "second")}
    measure_in_turns(models, {1: ()}, rounds=5)
    changes = [name for i, name in enumerate(turns) if i == 0 or turns[i - 1] != name]
    assert changes[-10:] == ["first", "second"] * 5


def test_times_are_ratios_to_the_first():
    calls = {"first": 0, "second": 0}

    def model(name, work):
        def run(*inputs):
            calls[name] += 1
            return sum(range(work))

        return run

    found = measure_in_turns({n: model(n, 2000) for n in calls}, {1: (), 8: ()}, rounds=3)
    assert [one.name for one in found] == ["first", "second"]
    assert found[0].ratios[1].median == 1.0
    assert set(found[1].seconds) == {1, 8}
    assert found[1].ratios[8].low <= found[1].ratios[8].median <= found[1].ratios[8].high
    assert all(calls.values())
    assert found[1].eager == {}


def test_times_are_ratios_to_the_parent_in_torch_too():
    works = {"base": 4000, "eager": 100, "made": 100}
    models = {name: lambda work=work: sum(range(work)) for name, work in works.items()}
    base, eager, made = measure_in_turns(models, {1: ()}, rounds=3)
    assert eager.eager[1] == Ratio(median=1.0, low=1.0, high=1.0)
    assert set(base.eager) == set(made.eager) == {1}
    assert made.eager[1].low <= made.eager[1].median <= made.eager[1].high
