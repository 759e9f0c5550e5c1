"""Bins lose no extreme, whatever the range, the zoom and the order of appends."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.storage.pyramid import Series

FLOATS = st.floats(width=64, allow_nan=True, allow_infinity=True)
MOVES = st.lists(st.tuples(st.integers(1, 5), FLOATS), max_size=120)


def finite(values):
    return [value for value in values if math.isfinite(value)]


def check(series, points, *, first, last, at_most):
    """The bins of a range against the points in it."""
    found = series.bins(first=first, last=last, at_most=at_most)
    wanted = [(step, value) for step, value in points if first <= step <= last]
    assert found.count.sum() == len(wanted)
    assert len(found.count) <= at_most + 1
    at = 0
    for n, size in enumerate(found.count):
        inside = wanted[at : at + size]
        at += size
        assert (found.first[n], found.steps[n]) == (inside[0][0], inside[-1][0])
        values = finite(value for _, value in inside)
        assert found.not_finite[n] == len(inside) - len(values)
        if values:
            assert (found.least[n], found.most[n], found.last[n]) == (min(values), max(values), values[-1])
        else:
            assert np.isnan([found.least[n], found.most[n], found.last[n]]).all()


@settings(max_examples=150)
@given(MOVES, st.integers(0, 300), st.integers(0, 300), st.integers(1, 40), st.lists(st.integers(1, 60), max_size=4))
def test_no_extreme_is_lost_at_any_zoom(moves, one, other, at_most, rewinds):
    series, points, step = Series(), [], 0
    for n, (ahead, value) in enumerate(moves):
        step += ahead
        if rewinds and n % 30 == 29:  # a resumed run makes steps again
            step = max(step - rewinds.pop(), 1)
            points = [point for point in points if point[0] < step]
        series.add(step, float(n), value)
        points.append((step, value))
        if n % 17 == 0:  # blocks are made on the way
            check(series, points, first=0, last=10**9, at_most=3)
    check(series, points, first=min(one, other), last=max(one, other), at_most=at_most)
    check(series, points, first=0, last=10**9, at_most=at_most)


def test_no_extreme_is_lost_in_bins_of_many_blocks():
    draws = np.random.default_rng(0)
    values = draws.normal(size=5000)
    values[draws.random(5000) < 0.02] = math.nan
    values[1024:1152] = math.inf  # whole blocks without a finite value
    points = [(3 * n + 1, float(value)) for n, value in enumerate(values)]
    series = Series()
    for step, value in points:
        series.add(step, 0.0, value)
        if step == 7000:
            check(series, points[: len(series)], first=0, last=10**9, at_most=5)
    for at_most in (1, 2, 3, 5, 10, 19, 40):
        for first, last in [(0, 10**9), (100, 14_000), (3000, 3600), (*sorted(draws.integers(0, 15_000, 2)),)]:
            check(series, points, first=first, last=last, at_most=at_most)


def test_old_buckets_never_change_while_a_series_grows():
    series = Series()
    for step in range(1000):
        series.add(step, 0.0, math.sin(step))
    before = series.bins(first=0, last=10**9, at_most=600)
    for step in range(1000, 1100):
        series.add(step, 0.0, math.sin(step))
    after = series.bins(first=0, last=10**9, at_most=600)
    whole = before.count == before.count[0]
    assert np.array_equal(before.most[whole], after.most[: whole.sum()])


def test_an_empty_series_has_no_buckets():
    assert len(Series().bins(first=0, last=10, at_most=5).steps) == 0


@pytest.mark.parametrize("bad", [[], [7], range(0, 200_000, 3)], ids=["finite", "one NaN", "many"])
def test_the_first_look_at_a_long_series_takes_little_memory(bad):
    """Less than the series itself: a run of a million steps has several."""
    points = 200_000
    series = Series()
    series.start_t = 1.7e9
    series.steps.extend(range(1, points + 1))
    series.times.extend([1.0] * points)
    values = [0.5] * points
    for n in bad:
        values[n] = math.nan
    series.values.extend(values)
    tracemalloc.start()
    try:
        found = series.bins(first=0, last=points, at_most=500)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert int(found.not_finite.sum()) == len(bad)
    assert peak_bytes < (11 if len(bad) else 4) * points + (3 * 8 * len(bad))
