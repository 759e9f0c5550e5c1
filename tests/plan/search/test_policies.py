"""What policies decide: promotions, brackets, populations, folds, constraints, seeds, several metrics."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shoal.plan.search.ledger import TrialState
from shoal.plan.search.make import make_search
from shoal.plan.search.policies.base import Continue, Nothing
from shoal.plan.search.policies.folds import FoldRace, is_worse
from shoal.plan.search.rungs import rungs
from shoal.plan.search.space import Point
from shoal.plan.search.summary import summarise
from shoal.plan.search.trial import SearchEnd, ShapeWanted, Stretch, StretchResult, TrialShape
from tests.plan.search.simulated_search import UNITS, job_of, play, result_of, shape_of

LR = {"optimizer.args.lr": {"low": 1e-5, "high": 0.1}}


def test_rungs_end_with_the_training():
    assert rungs(51, first=1, factor=3) == [1, 3, 9, 27, 51]
    assert rungs(51, first=3, factor=3) == [3, 9, 27, 51]
    assert rungs(1, first=1, factor=3) == [1]
    assert len(rungs(10**6, first=1, factor=2)) == 6


def test_promotion_trains_few_trials_to_the_end_and_the_best_one_wins():
    plan, decisions, end = play(
        job_of({"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "60 trials"})
    )
    trials = plan.ledger.trials
    whole = [t for t in trials if t.status == "complete"]
    assert 1 <= len(whole) <= len(trials) / 4
    best = max((t for t in trials if t.status != "failed"), key=lambda t: plan.ledger.curve_at(t)[0])
    assert end.best == best.number
    assert best.status == "complete"
    for stretch in decisions:
        assert stretch.end in (1, 2, 4, UNITS)
        assert stretch.start in (0, 1, 2, 4)


def test_a_rung_lets_no_more_go_than_its_share_and_the_best_of_all():
    job = job_of({"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "32 trials"})
    gone = {}
    for first in (-1.0, 1.0):  # every trial is better than those before it; except the first one, in the second turn

        def rising(stretch, first=first):
            value = stretch.trial / 100 if stretch.trial else first
            return StretchResult(({"accuracy": value},) * (stretch.end - stretch.start))

        plan, decisions, _ = play(job, result=rising, shape=lambda changes: TrialShape(UNITS, 1.0))
        gone[first] = {d.trial for d in decisions if d.start == 1 and d.why != "winner"}
        assert len(plan.ledger.trials) == 32
    assert len(gone[1.0]) == 16
    assert len(gone[-1.0]) > 24


def test_failed_trials_are_recorded_and_never_trained_again():
    policy = {"kind": "hyperband", "sampler": "random", "brackets": 2}
    plan, decisions, end = play(job_of({"policy": policy, "budget": "80 trials"}), result=fail_late)
    failed = {t.number: t.failure for t in plan.ledger.trials if t.status == "failed"}
    assert set(failed.values()) == {"out of memory", "the loss is not finite"}
    assert end.best is not None
    assert end.best not in failed
    for number in failed:
        ends = [d.end for d in decisions if d.trial == number]
        assert ends == sorted(set(ends))
        assert all(end < 3 for end in ends[:-1])


def fail_late(stretch):
    """Good at first, then not finite: such trials are promoted, and fail on the way."""
    if stretch.changes["batch_size"] == 128 and stretch.end >= 3:
        return StretchResult((), "the loss is not finite")
    return result_of(stretch)


def test_early_stopping_of_a_trial_completes_it():
    def short(stretch):
        return StretchResult(result_of(stretch).rows[:2])

    plan, decisions, _ = play(
        job_of({"policy": {"kind": "full", "sampler": "random"}, "budget": "5 trials"}), result=short
    )
    assert {t.status for t in plan.ledger.trials if t.rows} == {"complete"}
    assert all(d.start == 0 for d in decisions)


def test_hyperband_begins_brackets_at_different_rungs():
    plan, _, _ = play(job_of({"policy": {"kind": "hyperband", "sampler": "random"}, "budget": "26 trials"}))
    first = {}
    for stretch in plan.stretches:
        first.setdefault(stretch.trial, stretch.end)
    counts = [list(first.values()).count(end) for end in (1, 3, UNITS)]
    assert counts[0] > counts[1] > counts[2] > 0


def test_a_population_copies_good_members_and_moves_their_values():
    search = {
        "space": LR,
        "policy": {"kind": "population", "size": 8, "every": 1, "resample": 0},
        "budget": "100 trials",
    }
    plan, decisions, end = play(job_of(search), shape=lambda changes: TrialShape(UNITS, 1.0), result=steady)
    copies = [d for d in decisions if d.copy_of]
    assert copies
    for stretch in copies:
        donor, unit = stretch.copy_of
        assert stretch.start == unit
        assert plan.ledger.trials[donor].reached >= unit
        change = stretch.changes["optimizer.args.lr"] / plan.ledger.trials[donor].point.changes["optimizer.args.lr"]
        assert math.isclose(abs(math.log(change)), math.log(1.25), rel_tol=1e-2)
    assert end.why == "the population is trained"
    assert plan.ledger.trials[end.best].status == "complete"


def steady(stretch):
    rate = math.log10(stretch.changes["optimizer.args.lr"])
    return StretchResult(tuple({"accuracy": u - (rate + 3) ** 2} for u in range(stretch.start, stretch.end)))


def numbered(stretch):
    """No two members are equally good."""
    return StretchResult(tuple({"accuracy": row["accuracy"] - stretch.trial / 1000} for row in steady(stretch).rows))


@pytest.mark.parametrize("slots", [4, 8])
def test_members_that_train_side_by_side_are_compared_with_each_other(slots):
    """All begin and end at the same virtual times. At every milestone but the last the worst one is replaced."""
    policy = {"kind": "population", "size": 4, "every": 1}
    search = {"space": LR, "policy": policy, "budget": "100 trials", "slots": slots}
    plan, decisions, _ = play(job_of(search), shape=lambda changes: TrialShape(UNITS, 1.0), result=numbered)
    copies = [d for d in decisions if d.copy_of]
    assert [d.start for d in copies] == list(range(1, UNITS))
    for copy in copies:
        there = [t for t in plan.ledger.trials if t.origin < copy.start <= t.reached]
        latest = {t.group: t for t in there}.values()
        values = {t.group: plan.ledger.curve_at(t, copy.start)[0] for t in latest}
        assert plan.ledger.trials[copy.trial].group == min(values, key=values.get)
        assert len(values) == 4
        assert plan.ledger.trials[copy.copy_of[0]].group == max(values, key=values.get)


def test_a_population_of_a_space_with_fewer_configurations_is_trained_to_its_end():
    search = {
        "space": {"optimizer.args.lr": [1e-4, 2e-4, 1e-3, 2e-3, 1e-2]},
        "policy": {"kind": "population", "size": 8, "every": 2},
        "budget": "60 trials",
    }
    plan, decisions, end = play(job_of(search), shape=lambda changes: TrialShape(UNITS, 1.0), result=steady)
    assert end.why == "the population is trained"
    assert len({t.group for t in plan.ledger.trials}) == 5
    assert any(d.copy_of for d in decisions)
    last = {t.group: t for t in plan.ledger.trials}.values()
    assert {t.status for t in last} == {"complete"}


def test_a_race_over_folds_stops_trials_that_are_clearly_worse():
    job = job_of({"space": LR, "policy": {"sampler": "random"}, "budget": "30 trials"}, data=KFOLD)

    def fold(stretch):
        quality = -((math.log10(stretch.changes["optimizer.args.lr"]) + 3) ** 2)
        noise = [0.0, 0.01, -0.01, 0.02, -0.02]
        return StretchResult(tuple({"accuracy": quality + noise[u]} for u in range(stretch.start, stretch.end)))

    plan, _, end = play(job, shape=lambda changes: TrialShape(5, 1.0), result=fold)
    trials = plan.ledger.trials
    stopped = [t for t in trials if t.status == "paused"]
    assert len(stopped) > 10
    assert all(2 <= t.reached < 5 for t in stopped)
    best = min(trials, key=lambda t: abs(math.log10(t.point.changes["optimizer.args.lr"]) + 3))
    assert end.best == best.number


KFOLD = {"source": {"kind": "npz", "path": "x.npz"}, "split": {"kind": "kfold", "folds": 5}}


def fold_ledger(*folds, metric="accuracy", **search):
    """A ledger with one trial for each list of fold values."""
    job = job_of({"space": LR, "metric": metric, "policy": {"sampler": "random"}, **search}, data=KFOLD)
    ledger = make_search(job).ledger
    for number, values in enumerate(folds):
        trial = TrialState(number, Point((0.5,), {}), TrialShape(5, 1.0), until=len(values))
        trial.rows = [{metric: value} for value in values]
        trial.status = "complete" if len(values) == 5 else "paused"
        ledger.trials.append(trial)
    return ledger


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 4), gap=st.sampled_from([-0.3, -0.1, 0.0, 0.1]))
def test_a_trial_is_worse_where_the_paired_test_of_scipy_says_so(metric, seed, count, gap):
    generator = np.random.default_rng(seed)
    hard = generator.normal(0, 1, 5)  # folds differ far more than trials: only a paired test sees it
    leader, trial = hard, (hard + gap + generator.normal(0, 0.1, 5))[:count]
    ledger = fold_ledger(trial.tolist(), leader.tolist(), metric=metric)
    alternative = "less" if metric == "accuracy" else "greater"
    expected = stats.ttest_rel(trial, leader[:count], alternative=alternative).pvalue < 0.1
    assert is_worse(ledger, ledger.trials[0], ledger.trials[1]) == expected


def test_a_trial_that_is_worse_by_the_same_on_every_fold_stops_and_one_that_is_better_goes_on():
    leader = [0.5, 0.625, 0.75, 0.875, 1.0]
    for gap, worse in ((-0.25, True), (0.0, False), (0.25, False)):
        ledger = fold_ledger([value + gap for value in leader[:3]], leader)
        assert is_worse(ledger, ledger.trials[0], ledger.trials[1]) is worse
    assert is_worse(fold_ledger([]), *fold_ledger([math.nan], leader).trials)
    assert not is_worse(fold_ledger([]), *fold_ledger([0.0], leader).trials)  # one fold says nothing


def test_a_trial_that_breaks_a_constraint_is_no_measure_for_others():
    ledger = fold_ledger([0.6, 0.6, 0.6], [0.9] * 5, constraints=["accuracy <= 0.7"])
    assert FoldRace().decide(ledger, may_begin=False) == Continue(0, 4, "not clearly worse than the best")
    ledger = fold_ledger([0.6, 0.6, 0.6], [0.9] * 5)
    assert isinstance(FoldRace().decide(ledger, may_begin=False), Nothing)


def test_a_fact_that_breaks_a_constraint_is_not_trained():
    search = {"constraints": ["parameters <= 70000"], "policy": {"sampler": "random"}, "budget": "20 trials"}
    plan, decisions, end = play(job_of(search))
    refused = {t.number for t in plan.ledger.trials if t.status == "refused"}
    assert refused
    assert not refused & {d.trial for d in decisions}
    assert plan.ledger.trials[end.best].point.changes["batch_size"] < 128


def test_a_metric_that_breaks_a_constraint_does_not_win():
    search = {"constraints": ["loss >= 0.2"], "policy": {"sampler": "random"}, "budget": "40 trials"}
    plan, _, end = play(job_of(search))
    assert plan.ledger.trials[end.best].rows[-1]["loss"] >= 0.2
    assert (
        max(plan.ledger.curve_at(t)[0] for t in plan.ledger.trials)
        > plan.ledger.curve_at(plan.ledger.trials[end.best])[0]
    )


def test_suggestions_come_first_and_seeds_last():
    search = {"start": [{"optimizer.args.lr": 0.001}, {"batch_size": 64}], "repeat": 3, "policy": {"sampler": "random"}}
    plan, decisions, end = play(job_of(search, seed=5))
    assert decisions[0].changes["optimizer.args.lr"] == 0.001
    assert decisions[1].changes["batch_size"] == 64
    repeats = [t for t in plan.ledger.trials if t.repeat_of is not None]
    few = min(3, sum(t.status == "complete" and t.repeat_of is None for t in plan.ledger.trials))
    assert sorted(t.point.changes["seed"] for t in repeats) == [6] * few + [7] * few
    assert end.best in {t.repeat_of for t in repeats}


def test_several_metrics_give_a_front():
    search = {"metric": ["accuracy", "parameters"], "policy": {"sampler": "nsga2"}, "budget": "40 trials"}
    plan, _, end = play(job_of(search))
    summary = summarise(plan)
    values = {t.number: t.values for t in summary.trials}
    for one, other in itertools.permutations(summary.front, 2):
        a, b = values[one], values[other]
        assert not (a["accuracy"] >= b["accuracy"] and a["parameters"] < b["parameters"])
    assert end.best == summary.front[0]
    assert summary.volume > 0


def test_the_summary_tells_history_ranking_and_importance():
    plan, _, end = play(job_of({"policy": {"sampler": "random"}, "budget": "60 trials"}))
    summary = summarise(plan)
    values = [improvement.value for improvement in summary.history]
    assert values == sorted(values)
    assert summary.best == summary.ranking[0] == end.best == summary.history[-1].trial
    assert next(iter(summary.importance)) == "optimizer.args.lr"
    assert math.isclose(sum(summary.importance.values()), 1)
    assert sum(summary.counts.values()) == len(summary.trials)


@pytest.mark.parametrize("budget", ["1 trial", "0.2 trainings", "3 trials"])
def test_a_tiny_budget_still_trains_a_winner(budget):
    plan, _, end = play(job_of({"budget": budget}), shape=lambda c: TrialShape(UNITS, shape_of(c).cost))
    assert end.best is None or plan.ledger.trials[end.best].status == "complete"


def test_a_search_in_which_nothing_can_be_trained_ends():
    plan, decisions, end = play(
        job_of({"budget": "2 hours"}), shape=lambda c: TrialShape(0, 0.0, {}, "it does not fit")
    )
    assert (decisions, end.best) == ([], None)
    assert (end.why, len(plan.ledger.trials)) == ("the first 30 trials all failed alike", 30)
    assert summarise(plan).best is None


@pytest.mark.parametrize(("sound", "trials"), [(None, 30), (5, 50)])
def test_a_search_whose_first_trials_all_fail_alike_ends(sound, trials):
    """One that works keeps the search going."""

    def result(stretch):
        return StretchResult(({"accuracy": 0.5},)) if stretch.trial == sound else StretchResult((), "boom")

    asked = {"budget": "50 trials", "policy": {"kind": "full", "sampler": "random"}, "slots": 1}
    plan, _, end = play(job_of(asked), result=result, shape=lambda changes: TrialShape(1, 1.0, {}))
    assert (end.best, len(plan.ledger.trials)) == (sound, trials)
    assert end.why == ("the first 30 trials all failed alike" if sound is None else "the number of trials is reached")


@pytest.mark.long
def test_a_search_in_which_every_proposal_breaks_a_constraint_ends():
    search = {"budget": "2 hours", "constraints": ["parameters <= 1"], "policy": {"sampler": "random"}}
    _, decisions, end = play(job_of(search), shape=lambda c: TrialShape(1, 1.0, {"parameters": 2.0}))
    assert (decisions, end.best) == ([], None)
    assert "could not be trained" in end.why


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_no_member_copies_a_state_from_before_the_earliest_copy(slots):
    """Such states may be deleted. Some trials fail on the way, so members begin again where these began."""
    search = {"space": LR, "policy": {"kind": "population", "size": 6, "every": 1}, "budget": "60 trials"}
    plan = make_search(job_of({**search, "slots": slots}))
    safe, copied = 0, []
    while not isinstance(decision := plan.decide(), SearchEnd):
        safe = max(safe, plan.policy.earliest_copy(plan.ledger))
        if isinstance(decision, ShapeWanted):
            plan.tell_shape(decision.trial, TrialShape(UNITS, 1.0 + decision.trial % 3))
        elif isinstance(decision, Stretch):
            if decision.copy_of:
                copied.append(decision.copy_of[1])
                assert decision.copy_of[1] >= safe
        else:
            stretch = plan.stretches[decision.number]
            failed = StretchResult((), "it failed") if stretch.number in (5, 12, 19, 26) else steady(stretch)
            plan.tell(decision.number, failed)
    assert copied
    assert plan.policy.earliest_copy(plan.ledger) > 0


def test_a_constraint_on_a_metric_that_is_not_a_number_is_broken_most():
    """Its trial comes last, after those that break it by a number."""
    ledger = fold_ledger([0.9] * 5, [0.8] * 5, [0.7] * 5, constraints=["loss <= 1"])
    for trial, loss in zip(ledger.trials, (math.nan, 5.0, 0.5), strict=True):
        trial.rows = [{**row, "loss": loss} for row in trial.rows]
    assert [trial.number for trial in ledger.ranking(ledger.trials)] == [2, 1, 0]


def test_with_folds_the_mean_must_keep_a_constraint():
    ledger = fold_ledger([0.9] * 5, [0.8] * 5, constraints=["loss <= 1"])
    for trial, losses in zip(ledger.trials, ([4, 0, 0, 0, 0], [4, 4, 4, 4, 0]), strict=True):
        trial.rows = [{**row, "loss": loss} for row, loss in zip(trial.rows, losses, strict=True)]
    assert [ledger.violation(trial) > 0 for trial in ledger.trials] == [False, True]


@pytest.mark.parametrize("size", [1e200, 1e308])
def test_folds_whose_values_are_huge_are_compared(size):
    leader = [size * part for part in (0.1, 0.2, 0.3, 0.4, 0.5)]
    for gap, worse in ((-0.25, True), (0.25, False)):
        ledger = fold_ledger([value + gap * size for value in leader[:3]], leader)
        assert is_worse(ledger, ledger.trials[0], ledger.trials[1]) is worse
        assert math.isfinite(ledger.curve_at(ledger.trials[1])[0])
