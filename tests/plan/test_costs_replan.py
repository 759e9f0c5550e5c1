"""When a run has moved away from its plan, and what is made of that."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.costs.calibration import CostInputs, ObservedTimes, calibrate
from shoal.plan.costs.model import HostResources, RunChoice
from shoal.plan.costs.predict import predict
from shoal.plan.costs.replan import (
    COOLDOWN_STEPS,
    DRIFT_FACTOR,
    FEWEST_ROWS,
    LONG_S,
    MAX_DOUBLINGS,
    MOVE_GAIN,
    WINDOW,
    cooldown_over,
    has_drifted,
    replan,
    typical_step_s,
)
from tests.plan.cost_model_cases import FAST_LINK, GB, LARGE_MODEL, SLOW_LINK, TINY_MODEL, machine

HERE = CostInputs(LARGE_MODEL, machine(), FAST_LINK)
TWO = RunChoice(workers=2)
LANE_S = LARGE_MODEL.times[1].lane_s


def step_s(choice, setting=HERE):
    return predict(choice, setting.measured, setting.cluster, setting.link).step_s


def as_planned(choice, setting=HERE, *, times=1.0):
    """What would be seen, if everything took so many times as long."""
    return ObservedTimes(times * step_s(choice, setting), ((times * LANE_S,) * choice.workers,))


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        ([], None),
        ([(1, 0.1)] * (WINDOW - 1), None),
        ([(1, 0.1)] * WINDOW, 0.1),
        ([(4, 0.1)] * WINDOW, 0.025),
        ([(1, 0.1)] * 50 + [(1, 0.2)] * WINDOW, 0.2),
        ([(1, 0.1)] * (WINDOW // 2 + 1) + [(1, 50.0)] * (WINDOW // 2 - 1), 0.1),
        ([(2, LONG_S)] * (FEWEST_ROWS - 1), None),
        ([(2, LONG_S)] * FEWEST_ROWS, LONG_S / 2),
        ([(0, 0.1)] * WINDOW, None),
    ],
)
def test_what_a_step_takes(taken, found):
    assert typical_step_s(taken) == pytest.approx(found)


@pytest.mark.parametrize(
    ("true_s", "far"), [(1.0, False), (DRIFT_FACTOR, False), (2.0, True), (1 / DRIFT_FACTOR, False), (0.5, True)]
)
def test_what_has_moved(true_s, far):
    assert has_drifted(1.0, true_s) == far


def test_rests_grow():
    assert [
        cooldown_over(COOLDOWN_STEPS, 0, 0),
        cooldown_over(COOLDOWN_STEPS, 0, 1),
        cooldown_over(2 * COOLDOWN_STEPS, 0, 1),
    ] == [True, False, True]
    assert [cooldown_over(1, LONG_S, 0), cooldown_over(1, LONG_S, 1), cooldown_over(1, 2 * LONG_S, 1)] == [
        True,
        False,
        True,
    ]
    assert cooldown_over(COOLDOWN_STEPS << MAX_DOUBLINGS, 0, 1000)


@pytest.mark.parametrize("choice", [RunChoice(), TWO, RunChoice(workers=4), RunChoice(workers=4, codec="int8")])
@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_facts_that_are_put_right_predict_what_was_seen(choice, times):
    truth = as_planned(choice, times=times)
    found = step_s(choice, calibrate(choice, HERE, truth))
    assert found == pytest.approx(truth.step_s, rel=0.05)


@given(step=st.floats(0.05, 4.0), lanes=st.lists(st.floats(0.01, 0.02), min_size=2, max_size=4))
def test_a_step_that_is_longer_than_its_lanes_is_believed(step, lanes):
    choice, truth = RunChoice(workers=len(lanes)), ObservedTimes(step, (tuple(sorted(lanes)),))
    found = calibrate(choice, HERE, truth)
    lanes_alone = replace(found, cluster=replace(found.cluster, round_s=0.1 * HERE.cluster.round_s))
    assert step_s(choice, found) == pytest.approx(max(step, step_s(choice, lanes_alone)), rel=0.01)


def test_a_slow_worker_is_known_by_its_lanes():
    truth = ObservedTimes(0.3, ((LANE_S, 4 * LANE_S),))
    found = calibrate(TWO, HERE, truth)
    assert found.cluster.hosts[0].each == pytest.approx((1.0, 0.25))
    assert found.measured.times[1].lane_s == pytest.approx(LANE_S)


def test_a_link_that_is_slower_than_was_thought():
    there = replace(HERE, cluster=machine(HostResources(1, 16 * GB), HostResources(1, 16 * GB)))
    choice = RunChoice(workers=2, hosts=2)
    true_s = step_s(choice, replace(there, link=SLOW_LINK))
    found = calibrate(choice, there, ObservedTimes(true_s, ((LANE_S,), (LANE_S,))))
    assert found.link.send_bytes_s < there.link.send_bytes_s / 10
    assert step_s(choice, found) == pytest.approx(true_s, rel=0.01)
    assert found.cluster.hosts[1].brought == 1


CASES = [
    ("all as planned", RunChoice(workers=4), as_planned(RunChoice(workers=4)), {}, None),
    (
        "all slower, and more workers do not help",
        RunChoice(workers=4),
        as_planned(RunChoice(workers=4), times=5),
        {},
        None,
    ),
    ("more would be faster", RunChoice(), as_planned(RunChoice()), {}, 4),
    ("more would be faster, and may not be", RunChoice(), as_planned(RunChoice()), {"most": 2}, 2),
    ("more were tried", RunChoice(), as_planned(RunChoice()), {"seen": {(4, 1): 1.0, (3, 1): 1.0}}, 2),
    ("the exchange takes long", TWO, ObservedTimes(1.0, ((LANE_S, LANE_S),)), {}, 1),
    (
        "the exchange takes long, and one was tried",
        TWO,
        ObservedTimes(1.0, ((LANE_S, LANE_S),)),
        {"seen": {(1, 1): 1.1}},
        None,
    ),
    (
        "the exchange takes long, and the job wants two",
        TWO,
        ObservedTimes(1.0, ((LANE_S, LANE_S),)),
        {"least": 2},
        None,
    ),
    ("fewer are left than the job wants", RunChoice(), as_planned(RunChoice()), {"least": 2, "most": 2}, 2),
    (
        "fewer are left than the job wants, and no others may be",
        RunChoice(),
        as_planned(RunChoice()),
        {"least": 2, "most": 1},
        None,
    ),
    ("a slow worker that still helps", TWO, ObservedTimes(0.22, ((LANE_S, 4 * LANE_S),)), {"most": 2}, None),
]


@pytest.mark.parametrize(("now", "truth", "facts", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_is_done(now, truth, facts, wanted):
    found = replan(now, HERE, truth, **({"most": 4} | facts))
    assert (found.move_to.choice.workers if found.move_to else None) == wanted
    assert found.current.choice == now
    assert found.current.step_s == pytest.approx(truth.step_s)
    assert found.why
    if found.move_to:
        assert found.move_to.step_s * MOVE_GAIN < truth.step_s
        assert replace(found.move_to.choice, workers=now.workers) == now, "nothing else changes"


def test_a_host_that_is_brought_over_a_slow_link_is_let_go():
    there = replace(HERE, cluster=machine(HostResources(1, 16 * GB)))
    now = RunChoice(workers=2, hosts=2)
    found = replan(now, there, ObservedTimes(2.0, ((LANE_S,), (LANE_S,))), most=1)
    assert found.move_to.choice == RunChoice()
    assert replan(now, there, ObservedTimes(0.13, ((LANE_S,), (LANE_S,))), most=1).move_to is None


def test_what_needs_a_new_run_is_told():
    found = replan(TWO, HERE, ObservedTimes(1.0, ((LANE_S, LANE_S),)), least=2, most=2, allow=["local"])
    assert found.move_to is None
    assert found.best.prediction.choice.sync == "local"
    assert "a new run would take 2 workers (local, every 128)" in found.why


def test_tiny_models_too():
    there = replace(HERE, measured=TINY_MODEL)
    lane_s = TINY_MODEL.times[1].lane_s
    assert replan(TWO, there, ObservedTimes(0.005, ((lane_s, lane_s),)), most=2).move_to.choice == RunChoice()
