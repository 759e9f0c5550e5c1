"""Several seeds per trial: the mean over them counts, with its standard error."""

import hashlib
import json
import math

import pytest

from shoal.errors import ErrorGroup
from shoal.jobs.search.journal import ToldRow, read_rows, rows_of
from shoal.jobs.search.receipt import read_winner
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.summary import read_search, trial_data
from shoal.jobs.search.table import mean_and_error
from shoal.spec.load import load_run_job
from shoal.spec.receipt import Receipt, metrics_mean_and_std, read_receipt_file
from shoal.spec.run_paths import RunPaths

RACE = {"policy": {"kind": "promote", "sampler": "random"}, "budget": "3 trials", "seeds": 3}


def test_the_mean_and_its_standard_error():
    rows = [{"accuracy": value} for value in (0.5, 0.7, 0.9)]
    means, errors = mean_and_error(rows)
    assert means == {"accuracy": pytest.approx(0.7)}
    assert errors == {"accuracy": pytest.approx(math.sqrt(0.04 / 3))}
    assert mean_and_error(rows[:1]) == ({"accuracy": 0.5}, {})
    assert mean_and_error([]) == ({}, {})


@pytest.mark.parametrize("values", [[1e200, -1e200], [1e308, 1e308], [1e308, -1e308]])
def test_values_of_models_that_diverged_have_a_mean_too(values):
    means, errors = mean_and_error([{"loss": value} for value in values])
    assert means == {"loss": values[0] if values[0] == values[1] else 0.0}
    assert errors["loss"] in (0.0, math.inf)


def test_the_mean_of_folds_that_diverged():
    for values, mean in (((1e308, 1e308), 1e308), ((math.inf, 1.0), math.inf), ((math.inf, -math.inf), math.nan)):
        rows = [fold_receipt(n, exact=True, accuracy={"accuracy": value}) for n, value in enumerate(values)]
        receipts = [Receipt.model_validate(row) for row in rows]
        found, _ = metrics_mean_and_std(receipts)["accuracy"]
        assert found == mean or (found != found and mean != mean)


def fold_receipt(number, *, exact, accuracy):
    zero = dict.fromkeys(("steps", "epochs", "samples_seen", "parameters", "workers", "lanes"), 0)
    sums = {"job_sha256": "", "weights_sha256": f"weights {number}", "state_sha256": ""}
    return {"run": f"fold-{number}", "exact": exact, "why": f"run {number}", **sums, **zero, "metrics": accuracy}


def test_a_winner_with_several_runs_has_their_mean_all_their_weights_and_the_worst_of_their_judgements(tmp_path):
    paths = SearchPaths(RunPaths.at(tmp_path))
    assert read_winner(paths, 3) is None is read_winner(paths, None)
    paths.trial(3).root.mkdir()
    found = []
    for last in (True, None, False):
        folds = [fold_receipt(0, exact=True, accuracy={}), fold_receipt(1, exact=last, accuracy={})]
        whole = {"run": "trial-3", "folds": folds, "metrics": {"accuracy": {"mean": 0.75, "std": 0.1}}}
        paths.trial(3).receipt.write_text(json.dumps(whole))
        found.append(read_winner(paths, 3))
    assert [one.exact for one in found] == [True, None, False]
    assert found[-1].why == "run 1"
    assert found[0].values == {"accuracy": 0.75}
    assert {one.weights_sha256 for one in found} == {hashlib.sha256(b"weights 0 weights 1").hexdigest()}


def test_the_runs_of_a_job_with_seeds_and_folds(make):
    data = make().dump()["data"] | {"split": {"kind": "stratified", "folds": 3}}
    job = make(data=data, seeds=2, seed=5, search={"policy": {"kind": "full", "sampler": "random"}})
    assert job.fold_count == 6
    runs = [job.fold(number) for number in range(6)]
    assert [(run.seed, run.data.split.fold, run.fold_count) for run in runs] == [
        (seed, fold, 1) for seed in (5, 6) for fold in (0, 1, 2)
    ]
    assert make(seeds=1).sha256() == make().sha256() != make(seeds=2).sha256()


def test_seeds_are_refused_where_they_cannot_be(make):
    for search in ({"seeds": 2, "repeat": 2}, {"seeds": 2, "policy": {"kind": "hyperband", "sampler": "random"}}):
        with pytest.raises(ErrorGroup):
            make(search=search)


@pytest.mark.long
def test_every_trial_is_trained_with_its_seeds_on_any_number_of_workers(search):
    found = [search(workers, search=RACE) for workers in (1, 2)]
    assert found[0].receipt.search_sha256 == found[1].receipt.search_sha256
    assert found[0].receipt.weights_sha256
    stored = read_search(found[0].paths)
    whole = [trial for trial in stored.table.trials.values() if trial.state == "complete"]
    assert whole
    for trial in whole:
        paths = found[0].paths.trial(trial.number)
        assert [load_run_job(paths.fold(n).job).seed for n in range(3)] == [0, 1, 2]
        values = [read_receipt_file(paths.fold(n).receipt).own.metrics["accuracy"] for n in range(3)]
        means, errors = mean_and_error([{"accuracy": value} for value in values])
        told = trial_data(stored, trial)
        assert told["values"] == means
        assert told["standard_errors"]["accuracy"] == errors["accuracy"]
        last = [row for row in rows_of(read_rows(found[0].paths.journal)[0], ToldRow) if row.error][-1]
        assert set(last.mean) >= {"accuracy"}
    assert len({value for trial in whole for value in (row["accuracy"] for row in trial.rows)}) > 1
