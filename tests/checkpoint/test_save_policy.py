from __future__ import annotations

import pytest

from shoal.checkpoint.save_policy import TIME_BUDGET, SaveTiming, decide_save


def at(**changes) -> SaveTiming:
    return SaveTiming(**{"step": 50, "last_step": 40, "elapsed_s": 100.0, "since_s": 10.0, **changes})


@pytest.mark.parametrize(
    ("every", "moment", "decision"),
    [
        (("never", 0), at(), "wait"),
        (("steps", 10), at(), "save"),
        (("steps", 10), at(step=49), "wait"),
        (("steps", 10), at(step=51, last_step=49), "save"),
        (("steps", 10), at(step=51, last_step=50), "wait"),
        (("steps", 10), at(busy=True), "skip"),
        (("steps", 0.5), at(step=51, last_step=50), "save"),
        (("seconds", 10), at(), "save"),
        (("seconds", 11), at(), "wait"),
        (("seconds", 10), at(busy=True), "skip"),
        (("auto", 0), at(elapsed_s=1.9, since_s=1.9), "wait"),
        (("auto", 0), at(elapsed_s=2.0, since_s=2.0), "save"),
        (("auto", 0), at(elapsed_s=2.0, since_s=2.0, busy=True), "wait"),
        (("auto", 0), at(cost_s=1.0, spent_s=2.0), "save"),
        (("auto", 0), at(cost_s=1.1, spent_s=2.0), "wait"),
        (("auto", 0), at(cost_s=1.0, spent_s=2.1), "wait"),
        (("auto", 0), at(cost_s=0.001, spent_s=0.001, since_s=9.9), "wait"),
        (("auto", 0), at(cost_s=0.001, spent_s=0.001, since_s=10.0), "save"),
        (("steps", 1000), at(failed=True, since_s=9.9), "wait"),
        (("steps", 1000), at(failed=True, since_s=10.0), "save"),
        (("steps", 1000), at(failed=True, since_s=10.0, busy=True), "wait"),
        (("steps", 10), at(failed=True, since_s=0.0), "save"),
        (("auto", 0), at(failed=True, cost_s=1.0, spent_s=9.0), "save"),
        (("auto", 0), at(failed=True, cost_s=1.1, spent_s=9.0), "wait"),
        (("never", 0), at(failed=True), "wait"),
    ],
)
def test_when_to_save(every, moment, decision):
    assert decide_save(every, moment) == decision


@pytest.mark.parametrize("cost_s", [0.001, 0.05, 0.7, 20.0])
def test_auto_stays_within_its_budget(cost_s):
    """After the first save, which cannot know what it costs, the total is never above the budget."""
    spent_s, last_s, cost, saves = 0.0, 0.0, None, 0
    for tick in range(1, 40_000):
        now_s = tick * 0.1
        moment = SaveTiming(tick, 0, now_s, now_s - last_s, cost, spent_s)
        if decide_save(("auto", 0), moment) == "save":
            spent_s, last_s, cost, saves = spent_s + cost_s, now_s, cost_s, saves + 1
            assert saves == 1 or spent_s <= TIME_BUDGET * now_s
    assert saves >= min(4000 * TIME_BUDGET / cost_s, 4000 / 10.2) - 1
