"""The time that a run still takes, from step times that a run had."""

import itertools
import json
from pathlib import Path

import pytest

from shoal.events.state_parts import KEPT_PACE_S, Pace

RECORDED = json.loads((Path(__file__).parent / "recorded_steps.json").read_text())


def told(rows, steps, pace=None, workers=1):
    """(time, seconds that are left) after each row that has an answer."""
    pace = pace or Pace()
    found = []
    for t, step in rows:
        pace.add(step, t, workers=workers)
        if (left := pace.seconds_for(steps - step)) is not None:
            found.append((t, left))
    return found


def largest_jump(answers):
    """By which share of itself the time that is left changes at once, besides the time that passes."""
    pairs = itertools.pairwise(answers)
    return max(abs(after - (before - (later - t))) / max(before, 1.0) for (t, before), (later, after) in pairs)


def test_recorded_steps_give_no_jumps():
    answers = told(RECORDED["rows"], RECORDED["steps"])
    assert len(answers) > 50
    assert largest_jump(answers) < 0.12
    rows = RECORDED["rows"]
    last_row = [
        (t, (RECORDED["steps"] - step) * (t - before) / (step - done))
        for (before, done), (t, step) in itertools.pairwise(rows)
    ]
    assert largest_jump(last_row) > 1.0  # the last row alone would say anything


def test_the_answer_comes_true():
    end = RECORDED["rows"][-1][0]
    answers = told(RECORDED["rows"], RECORDED["steps"])
    for t, left in answers[len(answers) // 4 :]:
        assert left == pytest.approx(end - t, rel=0.35, abs=0.6)


def test_evaluations_count_and_hardly_move_it():
    """A step a second, and 10 seconds of evaluation every 100 steps, for an hour."""
    rows = [(step + 10.0 * (step // 100), step) for step in range(1, 3601)]
    answers = told(rows, 3600)[600:-300]
    assert largest_jump(answers) < 0.08
    assert all(left == pytest.approx(rows[-1][0] - t, rel=0.1) for t, left in answers)


def test_a_new_number_of_workers_is_learnt_soon():
    pace = Pace()
    told([(float(t), t) for t in range(1000)], 2000, pace)
    assert pace.seconds_for(1000) == pytest.approx(1000)
    told([(999 + 0.5 * n, 999 + n) for n in range(1, 41)], 2000, pace, workers=2)
    assert pace.seconds_for(1000) == pytest.approx(500, rel=KEPT_PACE_S / 20)


def test_what_is_no_step_is_not_counted():
    pace = Pace()
    told([(float(t), t) for t in range(10)], 100, pace)
    before = pace.seconds_for(100)
    pace.interrupt()
    told([(500.0, 9), (501.0, 10)], 100, pace)
    assert pace.seconds_for(100) == pytest.approx(before)


def test_nothing_is_said_too_early():
    pace = Pace()
    assert pace.seconds_for(10) is None
    assert told([(0.0, 1), (0.1, 2), (0.5, 3)], 10, pace) == []
    assert told([(1.2, 4)], 10, pace)
