"""A journal is continued from any of its rows, by the same decisions. No run is needed for that."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.jobs.search.journal import DecidedRow, EndedRow, ShapeRow, ToldRow
from shoal.jobs.search.receipt import decisions_sha256
from shoal.jobs.search.replay import check_again, replay
from shoal.plan.search.make import make_search
from shoal.plan.search.trial import SearchEnd, ShapeWanted, Stretch
from shoal.spec.load import make_job
from tests.jobs.search.conftest import SMALL

PROMOTE = {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "6 trainings", "slots": 3}


def search_job(**search):
    return make_job(SMALL | {"search": SMALL["search"] | PROMOTE | search}, base_dir="tests/fixtures")


def continued(job, rows, *, take=min, facts=lambda changes: {}):
    """The rows of the whole search. `take` chooses which of the stretches without a result is told next; `facts` are
    those of a trial with these changes."""
    rows = list(rows)
    plan = make_search(job)
    undone = replay(plan, rows)
    shapes = {row.trial: row for row in rows if isinstance(row, ShapeRow)}
    while True:
        decision = plan.decide()
        if isinstance(decision, ShapeWanted):
            known = shapes.get(decision.trial)
            changes = dict(decision.changes)
            row = known or ShapeRow(trial=decision.trial, changes=changes, units=9, cost=9.0, facts=facts(changes))
            rows += [] if known else [row]
            plan.tell_shape(row.trial, row.shape)
        elif isinstance(decision, Stretch):
            rows.append(DecidedRow.of(decision))
            undone[decision.number] = decision
        elif isinstance(decision, SearchEnd):
            return [*rows, EndedRow(best=decision.best, why=decision.why)]
        else:
            stretch = undone.pop(take(undone))
            lr = stretch.changes["optimizer.args.lr"]
            values = [{"accuracy": unit - abs(lr - 0.01) * 20} for unit in range(stretch.start, stretch.end)]
            rows.append(ToldRow(number=stretch.number, rows=values))
            plan.tell(stretch.number, rows[-1].result)


WHOLE = continued(search_job(), [])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.sampled_from([min, max]))
def test_any_prefix_leads_to_the_same_search(length, take):
    again = continued(search_job(), WHOLE[:length], take=take)
    assert decisions_sha256(again) == decisions_sha256(WHOLE)
    assert again[-1] == WHOLE[-1]


def test_a_search_that_would_propose_the_same_has_no_differences():
    assert not any(check_again(make_search(search_job()), WHOLE))


def test_other_values_in_the_journal_count_and_are_told():
    changed = {"batch_size": 16, "optimizer.args.lr": 0.0123}
    number = next(row.trial for row in reversed(WHOLE) if isinstance(row, ShapeRow))
    rows = [
        row.model_copy(update={"changes": changed}) if getattr(row, "trial", None) == number else row for row in WHOLE
    ]
    told = [row for row in rows if not isinstance(row, EndedRow)]
    assert not replay(make_search(search_job()), told)
    differences = [row for row in check_again(make_search(search_job()), told) if row is not None]
    assert [row.trial for row in differences] == [number]
    assert differences[0].proposed != changed


def test_another_decision_is_an_error():
    rows = [row.model_copy(update={"end": 7}) if isinstance(row, DecidedRow) else row for row in WHOLE]
    with pytest.raises(ShoalError) as caught:
        replay(make_search(search_job()), rows)
    assert caught.value.code == "SH630"
