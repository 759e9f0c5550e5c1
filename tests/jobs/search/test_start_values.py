"""What a search tries first: a user's own values, those of runs, and the best of earlier searches."""

import pytest

from shoal.errors import ShoalError
from shoal.jobs import run_dir
from shoal.jobs.search import search_dir
from shoal.jobs.search.journal import Journal, StartedRow
from shoal.jobs.search.start_values import with_start_values
from shoal.jobs.search.table import Judge, SearchTable
from shoal.plan.search.make import make_search
from shoal.plan.search.trial import ShapeWanted, TrialShape
from tests.jobs.search.test_replay import continued, search_job


@pytest.fixture
def earlier(tmp_path):
    """A search whose three best trials were repeated with two other seeds."""
    job = search_job(repeat=3, budget="20 trials")
    rows = [StartedRow(job_sha256=job.sha256()), *continued(job, [])]
    paths = search_dir.create(job, tmp_path)
    journal = Journal(paths.journal)
    for row in rows:
        journal.append(row)
    journal.close()
    return Judge.of(job).ranked(SearchTable.of(rows))


def proposals(job, count):
    """The values of the first trials."""
    plan, found = make_search(job), []
    while len(found) < count:
        decision = plan.decide()
        if isinstance(decision, ShapeWanted):
            found.append(dict(decision.changes))
            plan.tell_shape(decision.trial, TrialShape(0, 0.0, {}, "not trained"))
    return found


def test_the_best_eight_of_an_earlier_search_come_first_each_once(earlier, tmp_path):
    job = with_start_values(search_job(start=["small-1"]), tmp_path)
    first = proposals(job, 9)
    best = []
    for trial in earlier:
        changes = {path: value for path, value in trial.changes.items() if path != "seed"}
        best += [] if changes in best else [changes]
    assert any("seed" in trial.changes for trial in earlier[:8])
    assert first[:8] == best[:8]
    assert first[8] not in best[:8]


def test_several_searches_take_turns_after_a_users_own_values(earlier, tmp_path):
    """What both found is tried once."""
    other = search_dir.create(search_job(seed=9), tmp_path)
    journal = Journal(other.journal)
    for row in continued(search_job(seed=9), []):
        journal.append(row)
    journal.close()
    own = {"optimizer.args.lr": 0.002}
    start = with_start_values(search_job(start=["small-1", own, "small-2", "small-1"]), tmp_path).search.start
    one, two = (with_start_values(search_job(start=[name]), tmp_path).search.start for name in ("small-1", "small-2"))
    assert one[0] != two[0]
    assert start[:5] == [own, one[0], two[0], one[1], two[1]]
    assert len(start) == 13
    assert all(values not in start[:i] for i, values in enumerate(start))


def test_values_outside_of_the_new_space_are_left_out(earlier, tmp_path):
    narrow = {"optimizer.args.lr": {"low": 1e-9, "high": 1e-8}, "batch_size": [16, 32]}
    job = with_start_values(search_job(start=["small-1"], space=narrow), tmp_path)
    assert sorted(values["batch_size"] for values in job.search.start) == [16, 32]
    assert all(set(values) == {"batch_size"} for values in job.search.start)
    with pytest.raises(ShoalError) as caught:
        with_start_values(search_job(start=["small-1"], space={"clip.norm": [1, 2]}), tmp_path)
    assert (caught.value.code, caught.value.where) == ("SH106", "search.start.0")


def test_own_values_and_runs_in_the_order_of_the_file(tmp_path):
    made = search_job(start=[{"batch_size": 32}, "small-1", {"optimizer.args.lr": 0.002}])
    run_dir.create(made.model_copy(update={"batch_size": 16, "search": None}), tmp_path)
    first = proposals(with_start_values(made, tmp_path), 3)
    assert [values["batch_size"] for values in first[:2]] == [32, 16]
    assert first[1]["optimizer.args.lr"] == made.optimizer.args["lr"]
    assert first[2]["optimizer.args.lr"] == 0.002
