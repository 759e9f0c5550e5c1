"""When a run has moved away from its plan, and what is made of that."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.costs import drift
from shoal.plan.costs.again import MOVE, again
from shoal.plan.costs.drift import FEW, LONG_S, OFF, REST_STEPS, WINDOW, moved, rested, typical
from shoal.plan.costs.facts import Choice, Host
from shoal.plan.costs.predict import predict
from shoal.plan.costs.truth import Setting, Truth, corrected
from tests.plan.costs_cases import FAST, GB, LARGE, SLOW, TINY, machine

HERE = Setting(LARGE, machine(), FAST)
TWO = Choice(workers=2)
LANE_S = LARGE.times[1].lane_s


def step_s(choice, setting=HERE):
    return predict(choice, setting.measured, setting.machine, setting.link).step_s


def as_planned(choice, setting=HERE, *, times=1.0):
    """What would be seen, if everything took so many times as long."""
    return Truth(times * step_s(choice, setting), ((times * LANE_S,) * choice.workers,))


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        ([], None),
        ([(1, 0.1)] * (WINDOW - 1), None),
        ([(1, 0.1)] * WINDOW, 0.1),
        ([(4, 0.1)] * WINDOW, 0.025),
        ([(1, 0.1)] * 50 + [(1, 0.2)] * WINDOW, 0.2),
        ([(1, 0.1)] * (WINDOW // 2 + 1) + [(1, 50.0)] * (WINDOW // 2 - 1), 0.1),
        ([(2, LONG_S)] * (FEW - 1), None),
        ([(2, LONG_S)] * FEW, LONG_S / 2),
        ([(0, 0.1)] * WINDOW, None),
    ],
)
def test_what_a_step_takes(taken, found):
    assert typical(taken) == pytest.approx(found)


@pytest.mark.parametrize(("true_s", "far"), [(1.0, False), (OFF, False), (2.0, True), (1 / OFF, False), (0.5, True)])
def test_what_has_moved(true_s, far):
    assert moved(1.0, true_s) == far


def test_rests_grow():
    assert [rested(REST_STEPS, 0, 0), rested(REST_STEPS, 0, 1), rested(2 * REST_STEPS, 0, 1)] == [True, False, True]
    assert [rested(1, LONG_S, 0), rested(1, LONG_S, 1), rested(1, 2 * LONG_S, 1)] == [True, False, True]
    assert rested(REST_STEPS << drift.MOST_DOUBLINGS, 0, 1000)


@pytest.mark.parametrize("choice", [Choice(), TWO, Choice(workers=4), Choice(workers=4, codec="int8")])
@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_facts_that_are_put_right_predict_what_was_seen(choice, times):
    truth = as_planned(choice, times=times)
    found = step_s(choice, corrected(choice, HERE, truth))
    assert found == pytest.approx(truth.step_s, rel=0.05)


@given(step=st.floats(0.05, 4.0), lanes=st.lists(st.floats(0.01, 0.02), min_size=2, max_size=4))
def test_a_step_that_is_longer_than_its_lanes_is_believed(step, lanes):
    choice, truth = Choice(workers=len(lanes)), Truth(step, (tuple(sorted(lanes)),))
    found = corrected(choice, HERE, truth)
    lanes_alone = replace(found, machine=replace(found.machine, round_s=0.1 * HERE.machine.round_s))
    assert step_s(choice, found) == pytest.approx(max(step, step_s(choice, lanes_alone)), rel=0.01)


def test_a_slow_worker_is_known_by_its_lanes():
    truth = Truth(0.3, ((LANE_S, 4 * LANE_S),))
    found = corrected(TWO, HERE, truth)
    assert found.machine.hosts[0].each == pytest.approx((1.0, 0.25))
    assert found.measured.times[1].lane_s == pytest.approx(LANE_S)


def test_a_link_that_is_slower_than_was_thought():
    there = replace(HERE, machine=machine(Host(1, 16 * GB), Host(1, 16 * GB)))
    choice = Choice(workers=2, hosts=2)
    true_s = step_s(choice, replace(there, link=SLOW))
    found = corrected(choice, there, Truth(true_s, ((LANE_S,), (LANE_S,))))
    assert found.link.send_bytes_s < there.link.send_bytes_s / 10
    assert step_s(choice, found) == pytest.approx(true_s, rel=0.01)
    assert found.machine.hosts[1].brought == 1


CASES = [
    ("all as planned", Choice(workers=4), as_planned(Choice(workers=4)), {}, None),
    ("all slower, and more workers do not help", Choice(workers=4), as_planned(Choice(workers=4), times=5), {}, None),
    ("more would be faster", Choice(), as_planned(Choice()), {}, 4),
    ("more would be faster, and may not be", Choice(), as_planned(Choice()), {"most": 2}, 2),
    ("more were tried", Choice(), as_planned(Choice()), {"seen": {(4, 1): 1.0, (3, 1): 1.0}}, 2),
    ("the exchange takes long", TWO, Truth(1.0, ((LANE_S, LANE_S),)), {}, 1),
    ("the exchange takes long, and one was tried", TWO, Truth(1.0, ((LANE_S, LANE_S),)), {"seen": {(1, 1): 1.1}}, None),
    ("the exchange takes long, and the job wants two", TWO, Truth(1.0, ((LANE_S, LANE_S),)), {"least": 2}, None),
    ("fewer are left than the job wants", Choice(), as_planned(Choice()), {"least": 2, "most": 2}, 2),
    (
        "fewer are left than the job wants, and no others may be",
        Choice(),
        as_planned(Choice()),
        {"least": 2, "most": 1},
        None,
    ),
    ("a slow worker that still helps", TWO, Truth(0.22, ((LANE_S, 4 * LANE_S),)), {"most": 2}, None),
]


@pytest.mark.parametrize(("now", "truth", "facts", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_is_done(now, truth, facts, wanted):
    found = again(now, HERE, truth, **({"most": 4} | facts))
    assert (found.moves.choice.workers if found.moves else None) == wanted
    assert found.stays.choice == now
    assert found.stays.step_s == pytest.approx(truth.step_s)
    assert found.why
    if found.moves:
        assert found.moves.step_s * MOVE < truth.step_s
        assert replace(found.moves.choice, workers=now.workers) == now, "nothing else changes"


def test_a_host_that_is_brought_over_a_slow_link_is_let_go():
    there = replace(HERE, machine=machine(Host(1, 16 * GB)))
    now = Choice(workers=2, hosts=2)
    found = again(now, there, Truth(2.0, ((LANE_S,), (LANE_S,))), most=1)
    assert found.moves.choice == Choice()
    assert again(now, there, Truth(0.13, ((LANE_S,), (LANE_S,))), most=1).moves is None


def test_what_needs_a_new_run_is_told():
    found = again(TWO, HERE, Truth(1.0, ((LANE_S, LANE_S),)), least=2, most=2, allow=["local"])
    assert found.moves is None
    assert found.best.prediction.choice.sync == "local"
    assert "a new run would take 2 workers (local, every 128)" in found.why


def test_tiny_models_too():
    there = replace(HERE, measured=TINY)
    lane_s = TINY.times[1].lane_s
    assert again(TWO, there, Truth(0.005, ((lane_s, lane_s),)), most=2).moves.choice == Choice()
