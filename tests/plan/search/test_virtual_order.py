"""One search, whatever the workers do: the same decisions for any number of workers, any order, any crash."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.plan.search.make import make_search
from shoal.plan.search.trial import SearchEnd, ShapeWanted, Stretch, StretchResult, TrialShape, Wait
from tests.plan.search.simulated_search import job_of, play, played_digest, replay, result_of, seeded, shape_of

NUMBERS = {"optimizer.args.lr": {"low": 1e-5, "high": 0.1}, "clip.norm": {"low": 0.1, "high": 10.0}}
POPULATION = {"space": {"optimizer.args.lr": {"low": 1e-5, "high": 0.1}}, "budget": "200 trials"}
KINDS = {
    "full": {"policy": {"kind": "full", "sampler": "random"}},
    "promote": {"policy": {"kind": "promote", "sampler": "random", "first": 1}},
    "promote with gp": {"policy": {"kind": "promote", "sampler": "gp"}, "budget": "14 trials", "repeat": 2},
    "hyperband": {"policy": {"kind": "hyperband", "sampler": "tpe"}},
    "population": {**POPULATION, "policy": {"kind": "population", "size": 6, "every": 2}},
    "population in lockstep": {**POPULATION, "policy": {"kind": "population", "size": 6, "every": 1}, "slots": 6},
    "cmaes": {"space": NUMBERS, "policy": {"kind": "full", "sampler": "cmaes"}},
    "several metrics": {"policy": {"sampler": "nsga2"}, "metric": ["accuracy", "parameters"], "budget": "30 trials"},
    "trainings": {"policy": {"kind": "promote", "sampler": "sobol"}, "budget": "6 trainings"},
}


@pytest.fixture(scope="module")
def undisturbed():
    return {name: played_digest(job_of(search)) for name, search in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(workers=st.integers(1, 16), order=st.integers(0, 2**32), cuts=st.lists(st.integers(1, 40), max_size=3))
def test_decisions_do_not_depend_on_workers_order_or_crashes(kind, undisturbed, workers, order, cuts):
    job = job_of(KINDS[kind])
    assert played_digest(job, workers=workers, chance=seeded(order), cuts=cuts) == undisturbed[kind]


@pytest.mark.parametrize("kind", ["promote", "population"])
def test_a_search_cut_at_every_decision_goes_on_as_before(kind, undisturbed):
    job = job_of(KINDS[kind])
    _, decisions, _ = play(job)
    assert played_digest(job, cuts=range(1, len(decisions))) == undisturbed[kind]


def test_another_seed_searches_elsewhere(undisturbed):
    assert played_digest(job_of(KINDS["promote"], seed=1)) != undisturbed["promote"]
    assert played_digest(job_of({**KINDS["promote"], "slots": 3})) != undisturbed["promote"]


def test_a_shorter_search_is_a_prefix_of_a_longer_one():
    policy = {"policy": {"kind": "promote", "sampler": "random"}}
    _, short, _ = play(job_of({**policy, "budget": "4 trainings"}))
    _, longer, _ = play(job_of({**policy, "budget": "12 trainings"}))
    common = [s for s in short if s.why != "winner"]
    assert common == longer[: len(common)]


def test_the_same_question_is_answered_alike_until_it_is_acted_upon():
    plan = make_search(job_of(KINDS["promote"]))
    wanted = plan.decide()
    assert isinstance(wanted, ShapeWanted)
    assert plan.decide() == wanted
    plan.tell_shape(wanted.trial, shape_of(wanted.changes))
    plan.tell_shape(wanted.trial, shape_of(wanted.changes))
    while not isinstance(decision := plan.decide(), Wait):
        if isinstance(decision, ShapeWanted):
            plan.tell_shape(decision.trial, shape_of(decision.changes))
    assert plan.decide() == decision


def test_in_order_of_the_clock_results_count_when_they_come():
    job = job_of({**KINDS["promote"], "order": "clock", "budget": "60 trials"})
    found = {played_digest(job, workers=4, chance=seeded(order)) for order in range(6)}
    assert len(found) > 1
    assert played_digest(job, workers=4, chance=seeded(1)) == played_digest(job, workers=4, chance=seeded(1))


def test_slots_are_never_used_twice_at_a_virtual_time():
    _, decisions, _ = play(job_of(KINDS["hyperband"]))
    for slot in range(4):
        times = sorted((d.begins, d.ends) for d in decisions if d.slot == slot)
        assert all(before[1] <= after[0] for before, after in pairwise(times))


def test_closing_ends_what_is_under_way_and_trains_the_winner():
    job = job_of({**KINDS["promote"], "budget": "2 hours"})
    plan, begun = make_search(job), []
    while not isinstance(decision := plan.decide(), SearchEnd):
        if isinstance(decision, ShapeWanted):
            plan.tell_shape(decision.trial, shape_of(decision.changes))
        elif isinstance(decision, Stretch):
            begun.append(decision)
            if len(begun) == 30:
                plan.close("2 hours are over")
        else:
            plan.tell(decision.number, result_of(begun[decision.number]))
    assert decision.why == "2 hours are over"
    assert plan.ledger.trials[decision.best].status == "complete"
    assert all(s.why == "winner" for s in begun[30:])


def test_a_replayed_plan_knows_what_the_first_one_knew():
    job = job_of(KINDS["promote"])
    plan, _, end = play(job)
    again = make_search(job)
    shapes, told = [t.shape for t in plan.ledger.trials], [result_of(s) for s in plan.stretches]
    while not isinstance(decision := again.decide(), SearchEnd):
        if isinstance(decision, ShapeWanted):
            again.tell_shape(decision.trial + 1, TrialShape(0, 0.0, {}, "nobody asked for it"))
            again.tell_shape(decision.trial, shapes[decision.trial])
        elif isinstance(decision, Stretch):
            again.tell(decision.number, told[decision.number])  # told at once, counted in its turn
            again.tell(decision.number, StretchResult((), "told again"))
    assert decision == end
    assert again.stretches == plan.stretches
    assert replay(job, []).stretches == []
